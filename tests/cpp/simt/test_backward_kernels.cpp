// Every compiled backward kernel of the GPU on the CPU: gradients equal those of the CPU's own
// kernel, and are bitwise equal in every order of threads and blocks. tests/call/test_backward.py
// compares them to fp64.
#include <cmath>
#include <string>
#include <vector>

#include "check.hpp"
#include "core/math.hpp"
#include "cpu/backward.hpp"
#include "cpu/element.hpp"
#include "runtime/dispatch.hpp"
#include "simt/engine.hpp"

using namespace cutlass_attn;

namespace {

simt::Schedule const schedules[] = {
    {0, simt::FiberOrder::kForward, 0}, {1, simt::FiberOrder::kReverse, 0},
    {1, simt::FiberOrder::kForward, 0}, {1, simt::FiberOrder::kRandom, 1},
    {3, simt::FiberOrder::kRandom, 2},
};

struct Shape {
  int batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v;
  bool causal;
};

// A call with every option, in one dtype.
class Call {
 public:
  Problem p;
  Gradients grad;

  Call(Shape const& s, DType dtype) : dtype_(dtype) {
    p.batch = s.batch, p.num_heads_q = s.heads, p.num_heads_kv = s.heads_kv;
    p.seq_q.seqlen = s.seqlen_q, p.seq_k.seqlen = s.seqlen_k;
    p.head_dim = s.head_dim, p.head_dim_v = s.head_dim_v;
    p.q = operand(s.heads, s.seqlen_q, s.head_dim);
    p.k = operand(s.heads_kv, s.seqlen_k, s.head_dim);
    p.v = operand(s.heads_kv, s.seqlen_k, s.head_dim_v);
    p.o = operand(s.heads, s.seqlen_q, s.head_dim_v);
    grad.o = operand(s.heads, s.seqlen_q, s.head_dim_v);
    grad.q = operand(s.heads, s.seqlen_q, s.head_dim);
    grad.k = operand(s.heads_kv, s.seqlen_k, s.head_dim);
    grad.v = operand(s.heads_kv, s.seqlen_k, s.head_dim_v);
    p.softmax_lse = numbers(s.batch * s.heads * s.seqlen_q);
    grad.softmax_lse = numbers(s.batch * s.heads * s.seqlen_q);
    p.logits.bias = {numbers(s.heads * s.seqlen_k), 0, s.seqlen_k, 0, 1};
    p.logits.bias_dtype = DType::kFloat32;
    p.logits.sinks = numbers(s.heads);
    p.logits.softmax_scale = 0.2f;
    p.logits.softcap = 4.0f;
    p.mask.causal = s.causal;
    grad.bias = {numbers(s.heads * s.seqlen_k), 0, s.seqlen_k, 0, 1};
    grad.sinks = numbers(s.heads);
    p.dropout = {0.25f, state_};
    p.grad = &grad;
    LaunchOptions options;
    options.kernel = "cpu";
    CHECK(attention_forward(p, options).ok());
  }

  // All outputs of a backward pass, as fp32.
  std::vector<float> outputs() const {
    std::vector<float> all;
    auto const add = [&](Operand const& t) {
      auto const count = size_t(t.batch_stride) * size_t(p.batch);
      for (size_t i = 0; i < count; ++i) all.push_back(load(t.data, i));
    };
    add(grad.q), add(grad.k), add(grad.v);
    auto const* const bias = static_cast<float const*>(grad.bias.data);
    all.insert(all.end(), bias, bias + p.num_heads_q * p.seq_k.seqlen);
    all.insert(all.end(), grad.sinks, grad.sinks + p.num_heads_q);
    return all;
  }

 private:
  DType dtype_;
  uint64_t state_[2] = {12345, 67};
  std::vector<std::vector<float>> memory_;
  uint32_t drawn_ = 1;

  float draw() {
    drawn_ = drawn_ * 1664525u + 1013904223u;
    return float(drawn_ >> 8) / float(1 << 23) - 1.0f;
  }

  float* numbers(int count) {
    memory_.emplace_back(size_t(count));
    for (float& x : memory_.back()) x = draw();
    return memory_.back().data();
  }

  Operand operand(int heads, int rows, int columns) {
    int const count = p.batch * heads * rows * columns;
    float* const data = numbers(count);
    for (int i = 0; i < count; ++i) {  // in place: the new element is no larger than the old one
      float const x = data[i];
      if (dtype_ == DType::kFloat16) {
        cpu::from_float(x, reinterpret_cast<cpu::Float16*>(data)[i]);
      } else if (dtype_ == DType::kBFloat16) {
        cpu::from_float(x, reinterpret_cast<cpu::BFloat16*>(data)[i]);
      }
    }
    return {data, int64_t(heads) * rows * columns, int64_t(rows) * columns, columns, dtype_};
  }

  float load(void const* data, size_t i) const {
    if (dtype_ == DType::kFloat16) return cpu::to_float(static_cast<cpu::Float16 const*>(data)[i]);
    if (dtype_ == DType::kBFloat16) {
      return cpu::to_float(static_cast<cpu::BFloat16 const*>(data)[i]);
    }
    return static_cast<float const*>(data)[i];
  }
};

void run(Variant const& variant, Shape const& shape) {
  Call call(shape, variant.info.dtype);
  if (!why_not(variant, call.p, device_info(Device::kCpu)).empty()) return;
  CHECK(cpu::attention_backward(call.p, {}).ok());
  std::vector<float> const due = call.outputs();
  float largest = 0.0f;
  for (float x : due) largest = std::fmax(largest, std::fabs(x));
  float const unit = variant.info.dtype == DType::kFloat32   ? 1e-5f
                     : variant.info.dtype == DType::kFloat16 ? 2e-3f
                                                             : 2e-2f;
  KernelArguments const& arguments = variant.kernel->arguments;
  auto const bytes = size_t(arguments.workspace_bytes(call.p, {}, variant.unit->facts));
  // Other kernels add dQ to memory in block order.
  bool const is_deterministic = variant.kernel->options & option::deterministic;
  std::vector<float> first;
  for (simt::Schedule const& schedule : schedules) {
    simt::launch_schedule() = schedule;
    std::vector<char> workspace(bytes, char(0xff));
    RunOptions options;
    options.num_threads = schedule.num_threads;
    options.workspace = {workspace.data(), int64_t(bytes)};
    Status const status = launch(arguments, *variant.unit, call.p, {}, options);
    std::string error = status.message;
    std::vector<float> const actual = call.outputs();
    for (size_t i = 0; error.empty() && i < due.size(); ++i) {
      if (std::fabs(actual[i] - due[i]) <= unit * largest) continue;
      error = std::to_string(actual[i]) + " where " + std::to_string(due[i]) + " is due, at " +
              std::to_string(i);
    }
    if (first.empty()) first = actual;
    if (error.empty() && actual != first && is_deterministic) {
      error = "results depend on the schedule";
    }
    if (!error.empty()) check::fail(__FILE__, __LINE__, variant.info.key + ": " + error);
  }
}

void run_all(bool is_scalar) {
  int variants = 0;
  for (Variant const& variant : registry()) {
    VariantInfo const& info = variant.info;
    if (info.op != Op::kBackward || !variant.is_simt || !info.compiled) continue;
    if ((info.kernel == "scalar/backward-simt") != is_scalar) continue;
    ++variants;
    run(variant, {2, 4, 2, 37, 70, 40, 72, true});
    run(variant, {1, 2, 2, 40, 9, 72, 24, true});
    run(variant, {1, 1, 1, 3, 33, 264, 17, false});
    run(variant, {1, 4, 1, 150, 130, 64, 64, true});
  }
  CHECK(variants > 0);
}
TEST(scalar) { run_all(true); }
TEST(sm80) { run_all(false); }

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
