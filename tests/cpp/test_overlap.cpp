// check(): outputs must not overlap; overlap of strided operands, against brute force.
#include <random>
#include <set>
#include <vector>

#include "check.hpp"
#include "check_call.hpp"
#include "cutlass_attn.hpp"
#include "runtime/overlap.hpp"

using namespace cutlass_attn;

namespace {

using P = Problem;

}  // namespace

TEST(outputs_need_memory_of_their_own) {
  CHECK_EQ(
      message([](P& p) { p.o.row_stride = 7; }),
      "the rows of out (strides 160, 40, 7) overlap each other; an output needs memory of its own "
      "for every row");
  CHECK_EQ(
      message([](P& p) { p.o.head_stride = 0; }),
      "the rows of out (strides 160, 0, 8) overlap each other; an output needs memory of its own "
      "for every row");
  CHECK_EQ(message([](P& p) { p.o.data = p.q.data; }),
           "out overlaps q; the output needs memory that no input uses");
  CHECK_EQ(message([](P& p) { p.k.data = static_cast<float*>(p.o.data) + 319; }),
           "out overlaps k; the output needs memory that no input uses");
  CHECK_EQ(message([](P& p) { p.v = {static_cast<float*>(p.o.data) + 100, 0, 0, 0, p.v.dtype}; }),
           "out overlaps v; the output needs memory that no input uses");
  CHECK_EQ(message([](P& p) { p.softmax_lse = static_cast<float*>(p.q.data) + 7; }),
           "softmax_lse overlaps q; it needs memory that no other operand uses");
  CHECK_EQ(message([](P& p) { p.softmax_lse = static_cast<float*>(p.o.data) + 319; }),
           "softmax_lse overlaps out; it needs memory that no other operand uses");
  CHECK_EQ(message([](P& p) { p.max_logits = static_cast<float*>(p.k.data) + 7; }),
           "max_logits overlaps k; it needs memory that no other operand uses");
  CHECK_EQ(message([](P& p) { p.max_logits = p.softmax_lse + 1; }),
           "max_logits overlaps softmax_lse; it needs memory that no other operand uses");
  // Inputs may share memory and repeat themselves.
  CHECK_EQ(message([](P& p) { p.k = p.v = {p.k.data, 0, 0, 0, p.k.dtype}; }), "");
}

TEST(slices_of_one_buffer_do_not_overlap) {
  // (batch, seqlen, {q, k, v, o}, head, head_dim), as one packed projection would be.
  std::vector<float> packed(2 * 7 * 4 * 4 * 8);
  Call call;
  call.p.seq_q.seqlen = 7;
  call.p.num_heads_kv = 4;
  Operand* const operands[] = {&call.p.q, &call.p.k, &call.p.v, &call.p.o};
  for (int i = 0; i < 4; ++i) *operands[i] = {packed.data() + i * 32, 7 * 128, 8, 128};
  call.p.set_dtype(DType::kFloat32);
  call.p.softmax_lse = nullptr;
  CHECK_EQ(cutlass_attn::check(call.p).message, "");
  call.p.o.data = packed.data() + 3 * 32 - 1;
  CHECK_EQ(cutlass_attn::check(call.p).message,
           "out overlaps v; the output needs memory that no input uses");
}

namespace {

std::vector<int64_t> bytes_of(StridedRows const& r) {
  std::vector<int64_t> bytes;
  for (int64_t i = 0; i < r.counts[0]; ++i) {
    for (int64_t j = 0; j < r.counts[1]; ++j) {
      for (int64_t k = 0; k < r.counts[2]; ++k) {
        for (int64_t l = 0; l < r.counts[3]; ++l) {
          int64_t const row =
              r.address + i * r.strides[0] + j * r.strides[1] + k * r.strides[2] + l * r.strides[3];
          for (int64_t n = 0; n < r.row_bytes; ++n) bytes.push_back(row + n);
        }
      }
    }
  }
  return bytes;
}

}  // namespace

TEST(overlap_is_exact) {
  std::mt19937 random(1);
  auto const draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  auto const rows = [&] {
    int const reach = draw(0, 1) ? 8 : 40;
    StridedRows r{draw(0, 60), {}, {}, draw(1, 4)};
    for (int d = 0; d < StridedRows::kDims; ++d) {
      r.strides[d] = draw(-reach, reach);
      r.counts[d] = draw(0, 12) == 0 ? 0 : draw(1, d == 3 ? 2 : 4);
    }
    return r;
  };
  int self = 0, both = 0;
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i) {
    StridedRows const a = rows(), b = rows();
    std::vector<int64_t> const in_a = bytes_of(a), in_b = bytes_of(b);
    std::set<int64_t> const distinct(in_a.begin(), in_a.end());
    bool const repeats = distinct.size() != in_a.size();
    bool shares = false;
    for (int64_t byte : in_b) shares |= distinct.count(byte) != 0;
    CHECK_EQ(overlaps_itself(a), repeats);
    CHECK_EQ(overlap(a, b), shares);
    self += repeats;
    both += shares;
  }
  // Both answers occur often.
  CHECK(self > kDraws / 10 && self < kDraws * 9 / 10);
  CHECK(both > kDraws / 10 && both < kDraws * 9 / 10);
}

TEST(overlap_of_huge_operands_is_quick) {
  int64_t const rows = int64_t(1) << 30, row = 512;
  StridedRows const packed{0, {rows * row * 16, row, row * 16, 0}, {4, 8, rows, 1}, row};
  StridedRows other = packed;
  other.address = row * 8;
  CHECK(!overlaps_itself(packed));
  CHECK(!overlap(packed, other));
  --other.address;
  CHECK(overlap(packed, other));
}

int main(int argc, char** argv) { return check::run(argc, argv); }
