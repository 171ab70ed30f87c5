// The public interface with the real table of variants, on the CPU.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "check.hpp"
#include "cutlass_attn.hpp"
#include "prequantize.hpp"
#include "runtime/device.hpp"

using namespace cutlass_attn;

namespace {

struct Call {
  std::vector<float> q, k, v, o, lse;
  Problem p;

  explicit Call(int seqlen_q, int seqlen_k, int head_dim = 16)
      : q(size_t(seqlen_q) * head_dim, 0.5f),
        k(size_t(seqlen_k) * head_dim, 1.0f),
        v(k.size(), 3.0f),
        o(q.size(), -1.0f),
        lse(size_t(seqlen_q), -1.0f) {
    p.q = {q.data(), 0, 0, head_dim};
    p.k = {k.data(), 0, 0, head_dim};
    p.v = {v.data(), 0, 0, head_dim};
    p.o = {o.data(), 0, 0, head_dim};
    p.softmax_lse = lse.data();
    p.set_dtype(DType::kFloat32);
    p.batch = p.num_heads_q = p.num_heads_kv = 1;
    p.seq_q.seqlen = seqlen_q;
    p.seq_k.seqlen = seqlen_k;
    p.head_dim = p.head_dim_v = head_dim;
  }
};

LaunchOptions with(std::string const& kernel, Device device = Device::kCpu) {
  LaunchOptions options;
  options.kernel = kernel;
  options.device = device;
  return options;
}

Explanation explained(Problem const& p, std::string const& kernel) {
  Explanation result;
  CHECK(explain(p, Op::kForward, device_info(Device::kCpu), kernel, result).ok());
  return result;
}

}  // namespace

TEST(equal_keys_average_their_values) {
  Call call(3, 4);
  CHECK_EQ(attention_forward(call.p, {}).message, "");
  for (float o : call.o) CHECK_NEAR(o, 3, 1e-6);
  for (float lse : call.lse) CHECK_NEAR(lse, 8 + std::log(4.0), 1e-5);
}

TEST(no_keys_give_zero) {
  Call call(3, 0);
  CHECK_EQ(attention_forward(call.p, {}).message, "");
  for (float o : call.o) CHECK_EQ(o, 0.0f);
  for (float lse : call.lse) CHECK_EQ(lse, -INFINITY);
}

TEST(no_rows_are_no_work) {
  for (bool no_batch : {false, true}) {
    Call call(3, 4);
    (no_batch ? call.p.batch : call.p.seq_q.seqlen) = 0;
    CHECK_EQ(attention_forward(call.p, {}).message, "");
    CHECK_EQ(call.o[0], -1.0f);
  }
  Call call(3, 4);
  call.p.num_heads_q = call.p.num_heads_kv = 0;
  CHECK_EQ(attention_forward(call.p, {}).message, "");
  CHECK(!attention_forward(call.p, with("no such kernel")).ok());
}

TEST(bad_calls_are_refused_before_anything_runs) {
  Call call(3, 4);
  call.p.head_dim = 600;
  CHECK_EQ(attention_forward(call.p, {}).message, "head_dim is 600, allowed: 1 to 576");
  call.p.head_dim = 16;
  CHECK(attention_forward(call.p, with("warp/9")).code == StatusCode::kInvalidArgument);
  // explain() and plan() reject what attention_forward() rejects.
  call.p.q.dtype = DType(7);
  Explanation explanation;
  Plan planned;
  DeviceInfo const cpu = device_info(Device::kCpu);
  char const* const message =
      "q's dtype is 7, allowed: 0 (float16), 1 (bfloat16), 2 (float32), 3 (float64)";
  CHECK_EQ(explain(call.p, Op::kForward, cpu, "auto", explanation).message, message);
  CHECK_EQ(plan(call.p, Op::kForward, cpu, "auto", planned).message, message);
  CHECK_EQ(attention_forward(call.p, {}).message, message);
  CHECK(explanation.verdicts.empty() && planned.num_steps == 0);
  CHECK(run(planned, call.p, {}).code == StatusCode::kInvalidArgument);
  planned.num_steps = Plan::kMaxSteps + 1;
  CHECK(run(planned, call.p, {}).code == StatusCode::kInvalidArgument);
  CHECK_EQ(call.o[0], -1.0f);
}

// A kernel whose blocks share keys, in fp16. v is 3.
struct SplitCall : Call {
  static constexpr char const* kKernel = "sm80/decode-simt";

  SplitCall() : Call(2, 600, 64) {
    p.set_dtype(DType::kFloat16);
    p.num_splits = 3;
    fill(q, 0x3800), fill(k, 0x3c00), fill(v, 0x4200);
  }
  static void fill(std::vector<float>& x, uint16_t bits) {
    std::vector<uint16_t> const halves(2 * x.size(), bits);
    std::memcpy(x.data(), halves.data(), x.size() * sizeof(float));
  }
  bool is_right() const {
    std::vector<uint16_t> halves(2 * 64);
    std::memcpy(halves.data(), o.data(), 2 * halves.size());
    for (uint16_t bits : halves) {
      if (bits != 0x4200) return false;
    }
    return true;
  }
};

TEST(a_workspace_comes_from_the_caller_or_the_host) {
  if (build_info().simt != "all") return;
  SplitCall own;
  CHECK_EQ(attention_forward(own.p, with(SplitCall::kKernel)).message, "");
  CHECK(own.is_right());

  SplitCall given;
  Plan planned;
  CHECK(plan(given.p, Op::kForward, device_info(Device::kCpu), SplitCall::kKernel, planned).ok());
  CHECK(planned.workspace_bytes > 0);
  std::vector<char> memory;
  LaunchOptions options = with(SplitCall::kKernel);
  int asked = 0;
  options.allocate = [&](int64_t bytes) -> Workspace {
    ++asked;
    CHECK_EQ(bytes, planned.workspace_bytes);
    memory.assign(size_t(bytes) + 256, char(0x7f));
    auto const address = reinterpret_cast<uintptr_t>(memory.data());
    return {memory.data() + (256 - address % 256), bytes};
  };
  CHECK(attention_forward(given.p, options).ok());  // CHECK_EQ would call it twice
  CHECK_EQ(asked, 1);
  CHECK(given.is_right());

  // A given workspace is used first; run() requires it.
  options.workspace = options.allocate(planned.workspace_bytes);
  SplitCall brought;
  CHECK(attention_forward(brought.p, options).ok());
  CHECK_EQ(asked, 2);
  CHECK(brought.is_right());
  options.workspace.bytes -= 1;
  CHECK_EQ(run(planned, brought.p, options).message,
           "workspace has " + std::to_string(planned.workspace_bytes - 1) +
               " bytes, the plan needs " + std::to_string(planned.workspace_bytes));

  // Also at an address that vectors can be read from.
  for (int64_t const shift : {4, 8, 16}) {
    memory.assign(size_t(planned.workspace_bytes) + 512, 0);
    auto const address = reinterpret_cast<uintptr_t>(memory.data());
    options.workspace = {memory.data() + (256 - address % 256) + shift, planned.workspace_bytes};
    auto const given = reinterpret_cast<uintptr_t>(options.workspace.data);
    std::string const message = "workspace's address is " + std::to_string(given) +
                                ", allowed: multiples of " + std::to_string(kWorkspaceAlignment);
    CHECK_EQ(run(planned, brought.p, options).message, shift % 16 == 0 ? "" : message);
  }
}

TEST(k_and_v_are_rounded_once_for_many_calls) {
  if (build_info().simt != "all") return;
  SplitCall call;
  call.p.num_splits = 0;
  CHECK_EQ(prequantize(call.p, {}).message, "quantize is None, so there is nothing to keep");
  call.p.quantize = Quantize::kInt8;
  LaunchOptions options = with("sm80/int8-simt");
  CHECK_EQ(attention_forward(call.p, options).message, "");
  std::vector<float> const due = call.o;

  std::fill(call.o.begin(), call.o.end(), -1.0f);
  std::string const refusal = prequantize(call.p, options).message;
  CHECK_EQ(refusal.substr(0, 38), "workspace has 0 bytes, the plan needs ");
  CHECK_EQ(attention_prequantized(call.p, options).message, refusal);
  std::vector<char> memory;
  options.allocate = [&](int64_t bytes) -> Workspace {
    memory.resize(size_t(bytes));
    return {memory.data(), bytes};
  };
  CHECK_EQ(prequantize(call.p, options).message, "");
  CHECK_EQ(attention_prequantized(call.p, options).message, refusal);  // allocates nothing
  CHECK(!memory.empty());
  for (float o : call.o) CHECK_EQ(o, -1.0f);

  SplitCall::fill(call.k, 0);
  SplitCall::fill(call.v, 0);
  options.workspace = {memory.data(), int64_t(memory.size())};
  std::vector<char> const kept = memory;
  CHECK_EQ(attention_prequantized(call.p, options).message, "");
  CHECK(call.o == due && memory == kept);
  CHECK_EQ(attention_forward(call.p, options).message, "");
  CHECK(call.o != due);
  // Only calls that round, and look at q, can predict heads with too large an error.
  call.p.max_error = 0.5f;
  for (auto* half : {&prequantize, &attention_prequantized}) {
    CHECK_EQ(half(call.p, options).message,
             "max_error is 0.5, but K and V are prequantized; allowed: 0");
  }
  call.p.max_error = 0.0f;
  // A kernel that keeps nothing rounds in each call.
  memory.clear();
  options = with("cpu/int8");
  CHECK_EQ(prequantize(call.p, options).message, "");
  CHECK_EQ(attention_prequantized(call.p, options).message, "");
  // 16 bits: half of the memory.
  for (size_t i = 0; i < call.o.size() / 2; ++i) CHECK_EQ(call.o[i], 0.0f);
}

TEST(what_is_no_op_and_no_device_is_refused) {
  Call call(3, 4);
  Explanation explanation;
  Plan planned;
  DeviceInfo device = device_info(Device::kCpu);
  CHECK_EQ(explain(call.p, Op(1000), device, "auto", explanation).message,
           "op is 1000, allowed: 0 (forward), 1 (backward)");
  CHECK_EQ(plan(call.p, Op(-1), device, "auto", planned).message,
           "op is -1, allowed: 0 (forward), 1 (backward)");
  char const* const message = "device is 1000000, allowed: 0 (CPU), 1 (CUDA)";
  device.device = Device(1000000);
  CHECK_EQ(explain(call.p, Op::kForward, device, "auto", explanation).message, message);
  CHECK_EQ(plan(call.p, Op::kForward, device, "auto", planned).message, message);
  LaunchOptions options;
  options.device = Device(1000000);
  CHECK_EQ(attention_forward(call.p, options).message, message);
}

TEST(the_table_names_every_variant_once) {
  std::set<std::string> keys;
  for (VariantInfo const& info : variants()) {
    CHECK(keys.insert(info.key).second);
    CHECK_EQ(info.key.compare(0, info.kernel.size() + 1, info.kernel + "/"), 0);
  }
  for (char const* key : {"cpu/f16", "cpu/bf16", "cpu/f32"}) CHECK(keys.count(key) == 1);
}

TEST(explain_agrees_with_what_runs) {
  Call call(3, 4);
  for (std::string const kernel : {"auto", "cpu", "cpu/f32", "cpu/f16"}) {
    int chosen = 0;
    Explanation const explanation = explained(call.p, kernel);
    std::vector<Verdict> const& verdicts = explanation.verdicts;
    CHECK_EQ(explanation.plan.num_steps, kernel == "cpu/f16" ? 0 : 1);
    if (kernel != "cpu/f16") CHECK_EQ(key_of(*explanation.plan.steps[0]), "cpu/f32");
    std::vector<VariantInfo> const all = variants();
    CHECK_EQ(int64_t(verdicts.size()),
             std::count_if(all.begin(), all.end(),
                           [](VariantInfo const& info) { return info.op == Op::kForward; }));
    for (Verdict const& verdict : verdicts) {
      if (verdict.chosen) {
        ++chosen;
        CHECK_EQ(verdict.key, "cpu/f32");
        CHECK_EQ(verdict.reason, "");
      } else {
        CHECK(verdict.reason != "");
      }
    }
    CHECK_EQ(chosen, kernel == "cpu/f16" ? 0 : 1);
    CHECK_EQ(attention_forward(call.p, with(kernel)).ok(), chosen == 1);
  }
}

TEST(explain_tells_what_was_not_asked_for) {
  Call call(3, 4);
  for (Verdict const& verdict : explained(call.p, "scalar/tiled-simt").verdicts) {
    if (verdict.key == "cpu/f32") {
      CHECK_EQ(verdict.reason, "not asked for: kernel is \"scalar/tiled-simt\"");
    }
  }
  for (Verdict const& verdict : explained(call.p, "auto").verdicts) {
    if (verdict.key == "scalar/tiled-simt/f32/d256") {
      CHECK(verdict.reason.find("runs only when asked for by name") != std::string::npos);
    }
  }
}

TEST(a_gpu_is_there_or_it_says_why_not) {
  DeviceInfo const info = device_info(Device::kCuda);
  CHECK(info.unavailable.empty() == (info.compute_capability >= 50));
  DeviceInfo const none = device_info(Device::kCuda, 1000);
  CHECK(none.unavailable != "");
  Call call(3, 4);
  LaunchOptions options = with("auto", Device::kCuda);
  options.device_index = 1000;
  Status const status = attention_forward(call.p, options);
  CHECK(status.code == StatusCode::kDeviceError);
  CHECK_EQ(status.message, "no kernel can run on a CUDA device: " + none.unavailable);
  CHECK(!DeviceGuard(1000).status().ok());
}

TEST(build_info_is_filled) {
  BuildInfo const info = build_info();
  CHECK(info.version != "");
  CHECK(info.tier == "core" || info.tier == "full");
  CHECK(info.compiler.find("++") != std::string::npos ||
        info.compiler.find("clang") != std::string::npos);
  CHECK_EQ(info.cuda.empty(), info.architectures.empty());
}

int main(int argc, char** argv) { return check::run(argc, argv); }
