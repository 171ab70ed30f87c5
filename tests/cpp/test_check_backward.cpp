// check() of a backward pass: which calls it rejects, and with which words; and dispatch by op.
#include <string>
#include <vector>

#include "check.hpp"
#include "cutlass_attn.hpp"

using namespace cutlass_attn;

namespace {

// A valid backward pass with its own memory.
struct Call {
  static constexpr int kBatch = 2, kHeads = 4, kHeadsKv = 2, kSeqlenQ = 5, kSeqlenK = 7, kDim = 8;
  std::vector<float> q, k, v, o, lse, grad_o, grad_lse, grad_q, grad_k, grad_v;
  float bias[kSeqlenQ * kSeqlenK] = {}, grad_bias[kSeqlenQ * kSeqlenK];
  float sinks[kHeads] = {}, grad_sinks[kHeads];
  Problem p;
  Gradients grad;

  Call()
      : q(kBatch * kHeads * kSeqlenQ * kDim),
        k(kBatch * kHeadsKv * kSeqlenK * kDim),
        v(k),
        o(q),
        lse(kBatch * kHeads * kSeqlenQ),
        grad_o(q),
        grad_lse(lse),
        grad_q(q),
        grad_k(k),
        grad_v(k) {
    auto const queries = [](std::vector<float>& x) -> Operand {
      return {x.data(), kHeads * kSeqlenQ * kDim, kSeqlenQ * kDim, kDim, DType::kFloat32};
    };
    auto const keys = [](std::vector<float>& x) -> Operand {
      return {x.data(), kHeadsKv * kSeqlenK * kDim, kSeqlenK * kDim, kDim, DType::kFloat32};
    };
    p.q = queries(q), p.k = keys(k), p.v = keys(v), p.o = queries(o);
    p.softmax_lse = lse.data();
    p.batch = kBatch;
    p.num_heads_q = kHeads;
    p.num_heads_kv = kHeadsKv;
    p.seq_q.seqlen = kSeqlenQ;
    p.seq_k.seqlen = kSeqlenK;
    p.head_dim = p.head_dim_v = kDim;
    p.logits.bias = {bias, 0, 0, kSeqlenK, 1};
    p.logits.bias_dtype = DType::kFloat32;
    p.logits.sinks = sinks;
    grad.o = queries(grad_o);
    grad.softmax_lse = grad_lse.data();
    grad.q = queries(grad_q), grad.k = keys(grad_k), grad.v = keys(grad_v);
    grad.bias = {grad_bias, 0, 0, kSeqlenK, 1};
    grad.sinks = grad_sinks;
    p.grad = &grad;
  }
};

// The error message after a change to a valid call; "" if the call is still valid.
template <class Change>
std::string message(Change const& change) {
  Call call;
  change(call);
  Status const status = cutlass_attn::check(call.p, Op::kBackward);
  if (!status.ok()) CHECK(status.code == StatusCode::kInvalidArgument);
  return status.message;
}

using C = Call;

}  // namespace

TEST(valid_calls_pass) {
  CHECK_EQ(message([](C&) {}), "");
  CHECK_EQ(message([](C& c) { c.grad.softmax_lse = nullptr; }), "");
  CHECK_EQ(message([](C& c) { c.grad.q.data = nullptr; }), "");
  CHECK_EQ(message([](C& c) { c.grad.bias.data = nullptr; }), "");
  CHECK_EQ(message([](C& c) { c.grad.bias = {c.grad_bias, 0, 0, 0, 1}; }), "");
  CHECK_EQ(message([](C& c) { c.grad.o = c.p.o; }), "");
  CHECK_EQ(message([](C& c) { c.grad.o.row_stride = c.grad.o.head_stride = 0; }), "");
}

TEST(what_a_backward_pass_needs) {
  CHECK_EQ(message([](C& c) { c.p.grad = nullptr; }),
           "grad is null, allowed: the address of a backward pass's gradients");
  CHECK_EQ(message([](C& c) { c.grad.o.data = nullptr; }),
           "grad_out is null, but it has 2 x 4 x 5 rows");
  CHECK_EQ(message([](C& c) { c.p.o.data = nullptr; }), "out is null, but it has 2 x 4 x 5 rows");
  CHECK_EQ(message([](C& c) { c.p.softmax_lse = nullptr; }),
           "softmax_lse is null, but it has 2 x 4 x 5 rows");
  CHECK_EQ(message([](C& c) { c.p.logits.bias.data = nullptr; }),
           "grad_bias is wanted, but the call has no bias");
  CHECK_EQ(message([](C& c) { c.p.logits.sinks = nullptr; }),
           "grad_sinks is wanted, but the call has no sinks");
}

TEST(dtypes_are_those_of_q) {
  CHECK_EQ(message([](C& c) { c.grad.o.dtype = DType::kFloat16; }),
           "grad_out is float16, allowed: float32 like q");
  CHECK_EQ(message([](C& c) { c.grad.q.dtype = DType::kBFloat16; }),
           "grad_q is bfloat16, allowed: float32 like q");
  CHECK_EQ(message([](C& c) { c.grad.k.dtype = DType::kFloat64; }),
           "grad_k is float64, allowed: float32 like q");
  CHECK_EQ(message([](C& c) { c.grad.v.dtype = DType(9); }),
           "grad_v's dtype is 9, allowed: 0 (float16), 1 (bfloat16), 2 (float32), 3 (float64)");
  CHECK_EQ(message([](C& c) { c.grad.v = {nullptr, 0, 0, 0, DType(9)}; }), "");
}

TEST(no_pages_and_no_scales) {
  static int32_t table[2];
  static float scale = 2.0f;
  CHECK_EQ(message([](C& c) { c.p.kv = {table, 1, 7, 2}; }),
           "block_table is set; allowed in a backward pass: keys without pages");
  CHECK_EQ(message([](C& c) { c.p.k.scale = &scale; }),
           "an operand has a scale; allowed in a backward pass: none");
}

TEST(outputs_share_no_memory) {
  char const* const rest = "; it needs memory that no other operand uses";
  CHECK_EQ(message([](C& c) { c.grad.q.data = c.q.data(); }),
           std::string("grad_q overlaps q") + rest);
  CHECK_EQ(message([](C& c) { c.grad.k.data = c.v.data(); }),
           std::string("grad_k overlaps v") + rest);
  CHECK_EQ(message([](C& c) { c.grad.v.data = c.grad_k.data(); }),
           std::string("grad_v overlaps grad_k") + rest);
  CHECK_EQ(message([](C& c) { c.grad.q.data = c.grad_o.data(); }),
           std::string("grad_q overlaps grad_out") + rest);
  CHECK_EQ(message([](C& c) { c.grad.q.data = c.o.data(); }),
           std::string("grad_q overlaps out") + rest);
  CHECK_EQ(message([](C& c) { c.grad.bias.data = c.bias; }),
           std::string("grad_bias overlaps bias") + rest);
  CHECK_EQ(message([](C& c) { c.grad.sinks = c.lse.data(); }),
           std::string("grad_sinks overlaps softmax_lse") + rest);
  CHECK_EQ(message([](C& c) { c.grad.sinks = c.grad_lse.data(); }),
           std::string("grad_sinks overlaps grad_softmax_lse") + rest);
  CHECK_EQ(message([](C& c) { c.grad.k.head_stride = 0; }),
           "the rows of grad_k (strides 112, 0, 8) overlap each other; an output needs memory of "
           "its own for every row");
  CHECK_EQ(message([](C& c) { c.grad.bias = {c.grad_bias, 0, 1, 7, 1}; }),
           "the rows of grad_bias (strides 0, 1, 7, 1) overlap each other; an output needs memory "
           "of its own for every row");
}

// With float64 operands, numbers besides them have 8 bytes each.
TEST(numbers_of_float64) {
  auto const change = [](C& c) {
    c.p.set_dtype(DType::kFloat64);
    for (Operand* t : {&c.grad.o, &c.grad.q, &c.grad.k, &c.grad.v}) t->dtype = DType::kFloat64;
    // Rows half as long, in the same amount of memory.
    c.p.head_dim = c.p.head_dim_v = 4;
    for (Operand* t :
         {&c.p.q, &c.p.k, &c.p.v, &c.p.o, &c.grad.o, &c.grad.q, &c.grad.k, &c.grad.v}) {
      t->batch_stride /= 2, t->head_stride /= 2, t->row_stride /= 2;
    }
    c.p.num_heads_q = c.p.num_heads_kv = 2;
    c.p.logits.sinks = c.grad.sinks = nullptr;
    c.p.logits.bias.data = c.grad.bias.data = nullptr;
    c.p.batch = 1;
    c.grad.softmax_lse = nullptr;
  };
  static double memory[64];  // the 10 numbers of the LSE, then the gradient of q
  auto const place = [&](C& c, int bytes) {
    change(c);
    c.p.softmax_lse = reinterpret_cast<float*>(memory);
    c.grad.q.data = reinterpret_cast<char*>(memory) + bytes;
  };
  CHECK_EQ(message([&](C& c) { place(c, 80); }), "");
  CHECK_EQ(message([&](C& c) { place(c, 72); }),
           "grad_q overlaps softmax_lse; it needs memory that no other operand uses");
  CHECK_EQ(message([&](C& c) { place(c, 84); }),
           "grad_q's address is not a multiple of the 8 bytes of an element");
}

TEST(plans_are_of_one_op) {
  Call call;
  DeviceInfo const cpu = device_info(Device::kCpu);
  Plan chosen;
  CHECK(plan(call.p, Op::kBackward, cpu, "auto", chosen).ok());
  CHECK_EQ(key_of(*chosen.steps[0]), "cpu/backward/f32");
  Status const status = plan(call.p, Op::kBackward, cpu, "cpu", chosen);
  CHECK(!status.ok());
  CHECK(status.message.find("kernel is \"cpu\", allowed: \"auto\"") == 0);
  CHECK(status.message.find("\"cpu/backward\"") != std::string::npos);
  Explanation explanation;
  CHECK(explain(call.p, Op::kBackward, cpu, "auto", explanation).ok());
  for (Verdict const& verdict : explanation.verdicts) {
    CHECK(verdict.key.find("/backward") != std::string::npos);
  }
}

TEST(a_backward_pass_runs) {
  Call call;
  for (size_t i = 0; i < call.grad_o.size(); ++i) call.grad_o[i] = float(i % 3) - 1.0f;
  for (float& x : call.grad_sinks) x = -1.0f;
  CHECK(attention_backward(call.p, {}).ok());
  // Q and K are zero, and with an LSE of 0 all weights are 1, so dV is the sum of dO over queries
  // and the two heads of a KV head.
  for (int d = 0; d < Call::kDim; ++d) {
    float sum = 0.0f;
    for (int row = 0; row < 2 * Call::kSeqlenQ; ++row) sum += call.grad_o[row * Call::kDim + d];
    CHECK_EQ(call.grad_v[d], sum);
  }
  for (float x : call.grad_q) CHECK_EQ(x, 0.0f);
  for (float x : call.grad_sinks) CHECK_EQ(x, 0.0f);
}

int main(int argc, char** argv) { return check::run(argc, argv); }
