// The kernel that writes new keys into a cache: its GPU form, run by simt, against the CPU's loop;
// and its behaviour for rows beyond the cache, which the CPU rejects.
#include <cstring>
#include <random>
#include <vector>

#include "arch/threads.hpp"
#include "check.hpp"
#include "cutlass_attn.hpp"
#include "serving/append_kernel.hpp"
#include "simt/engine.hpp"

using namespace cutlass_attn;
using serving::AppendKernel;
using serving::AppendParams;

namespace {

constexpr int kBatch = 3, kNew = 2, kHeadsQ = 4, kHeadsKv = 2, kPage = 4, kPages = 7;
constexpr int kColumns = 2;  // of the block table
constexpr float kUntouched = 1e6f;

std::vector<float> normal(size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw;
  std::vector<float> x(size);
  for (float& value : x) value = draw(random);
  return x;
}

// Rows of all heads are adjacent.
Operand rows_of(std::vector<float>& x, int rows, int heads, int dim) {
  return {x.data(), int64_t(rows) * heads * dim, dim, int64_t(heads) * dim, DType::kFloat32};
}

// A decoding step with every option.
struct Step {
  int dim, dim_v;
  std::vector<float> k, v, q, k_cache, v_cache, q_rotated, cos, sin;
  std::vector<int32_t> table = {4, 1, 0, 6, 5, 2}, before = {3, 0, 6}, after;
  std::vector<int64_t> slots = {5, -1, 27, 0, 8, 13};
  float scales[2] = {2.0f, 0.5f};

  Step(int dim, int dim_v)
      : dim(dim),
        dim_v(dim_v),
        k(normal(size_t(kBatch * kNew * kHeadsKv * dim), 1)),
        v(normal(size_t(kBatch * kNew * kHeadsKv * dim_v), 2)),
        q(normal(size_t(kBatch * kNew * kHeadsQ * dim), 3)),
        k_cache(size_t(kPages * kPage * kHeadsKv * dim), kUntouched),
        v_cache(size_t(kPages * kPage * kHeadsKv * dim_v), kUntouched),
        q_rotated(q.size(), kUntouched),
        cos(normal(size_t(kColumns * kPage * dim / 2), 4)),
        sin(normal(cos.size(), 5)),
        after(kBatch, -7) {}

  AppendProblem problem(bool by_slots, bool rotates) {
    AppendProblem p;
    p.k = rows_of(k, kNew, kHeadsKv, dim), p.v = rows_of(v, kNew, kHeadsKv, dim_v);
    p.k_cache = rows_of(k_cache, kPage, kHeadsKv, dim);
    p.v_cache = rows_of(v_cache, kPage, kHeadsKv, dim_v);
    p.kv = {table.data(), kColumns, kPage, kPages};
    p.cache_rows = kColumns * kPage;
    p.batch = kBatch, p.seqlen = kNew, p.num_heads_kv = kHeadsKv;
    p.head_dim = dim, p.head_dim_v = dim_v;
    if (by_slots) {
      p.slot_mapping = slots.data();
      p.v_cache.scale = scales, p.v_cache.scale_head_stride = 1;
      return p;
    }
    p.cache_seqlens = before.data();
    p.seqlens_after = after.data();
    if (rotates) {
      int const half = dim / 4;
      p.rotary = {cos.data(),       sin.data(), dim / 2,     dim / 2,
                  kColumns * kPage, 2 * half,   dim % 8 == 0};
      p.q = rows_of(q, kNew, kHeadsQ, dim), p.q_rotated = rows_of(q_rotated, kNew, kHeadsQ, dim);
      p.num_heads_q = kHeadsQ, p.seqlen_q = kNew;
    }
    return p;
  }
};

template <class Stored = float>
void run_kernel(AppendProblem const& p, bool is_aligned) {
  AppendParams const params{p, is_aligned};
  Launch const launch = AppendKernel<float, Stored>::launch(params);
  Status const status =
      simt::run_grid({launch.blocks, launch.threads, launch.smem_bytes}, {}, [&](char*) {
        AppendKernel<float, Stored>::run(params, arch::Threads::block(), arch::Threads::thread());
      });
  CHECK_EQ(status.message, "");
}

void compare(bool by_slots, bool rotates, int dim, int dim_v, bool is_aligned) {
  Step gpu(dim, dim_v), cpu(dim, dim_v);
  run_kernel(gpu.problem(by_slots, rotates), is_aligned);
  CHECK_EQ(append_kv(cpu.problem(by_slots, rotates), {}).message, "");
  CHECK(gpu.k_cache == cpu.k_cache);
  CHECK(gpu.v_cache == cpu.v_cache);
  CHECK(gpu.q_rotated == cpu.q_rotated);
  CHECK(gpu.after == cpu.after);
}

int64_t touched(std::vector<float> const& x) {
  int64_t count = 0;
  for (float value : x) count += value != kUntouched;
  return count;
}

}  // namespace

TEST(the_kernel_equals_the_loop) {
  for (bool const rotates : {false, true}) {
    compare(false, rotates, 16, 8, true);
    compare(false, rotates, 6, 5, false);
  }
  compare(true, false, 16, 8, true);
  compare(true, false, 7, 5, false);
}

// An 8-bit cache, in the memory of a 32-bit one.
TEST(the_kernel_equals_the_loop_in_8_bits) {
  for (bool const by_slots : {false, true}) {
    Step gpu(16, 8), cpu(16, 8);
    AppendProblem problems[] = {gpu.problem(by_slots, !by_slots), cpu.problem(by_slots, !by_slots)};
    for (AppendProblem& p : problems) p.k_cache.dtype = p.v_cache.dtype = DType::kFloat8E4M3;
    run_kernel<E4M3>(problems[0], true);
    CHECK_EQ(append_kv(problems[1], {}).message, "");
    auto const same = [](std::vector<float> const& a, std::vector<float> const& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    CHECK(same(gpu.k_cache, cpu.k_cache) && same(gpu.v_cache, cpu.v_cache));
    CHECK(!same(gpu.k_cache, Step(16, 8).k_cache));
    // Slot 5 has the first row of K, which has no scale.
    auto const* const stored = reinterpret_cast<E4M3 const*>(gpu.k_cache.data());
    for (int i = 0; by_slots && i < kHeadsKv * 16; ++i) {
      CHECK_EQ(int(stored[5 * kHeadsKv * 16 + i].bits), int(to_e4m3(gpu.k[size_t(i)]).bits));
    }
  }
}

// Tokens, of which 16 threads share the groups of columns.
TEST(the_kernel_equals_the_loop_on_tokens) {
  for (DType const dtype : {DType::kDsMla, DType::kDsMlaV4}) {
    TokenFormat const format = format_of(dtype);
    std::vector<float> k = normal(size_t(kBatch * kNew * format.columns), 6);
    std::vector<uint8_t> caches[2];
    Step step(16, 8);
    for (int i = 0; i < 2; ++i) {
      caches[i].assign(size_t(kPages * kPage * format.token_bytes), 0x5a);
      AppendProblem p = step.problem(true, false);
      p.k = rows_of(k, kNew, 1, format.columns);
      p.v = p.v_cache = {};
      p.k_cache = {caches[i].data(), int64_t(kPage) * format.token_bytes, 0, format.row_bytes,
                   dtype};
      p.num_heads_kv = 1;
      p.head_dim = format.columns;
      if (i == 0) {
        run_kernel<serving::Tokens>(p, false);
      } else {
        CHECK_EQ(append_kv(p, {}).message, "");
      }
    }
    CHECK(caches[0] == caches[1]);
    CHECK(caches[0] != std::vector<uint8_t>(caches[0].size(), 0x5a));
  }
}

TEST(rows_go_where_they_are_due) {
  Step step(16, 8);
  run_kernel(step.problem(false, false), true);
  CHECK(step.after == (std::vector<int32_t>{5, 2, 8}));
  // Entry 0 has 3 keys: the new ones are row 3 of page 4 and row 0 of page 1.
  int const row = kHeadsKv * 16;
  for (int i = 0; i < row; ++i) {
    CHECK_EQ(step.k_cache[size_t((4 * kPage + 3) * row + i)], step.k[size_t(i)]);
    CHECK_EQ(step.k_cache[size_t(1 * kPage * row + i)], step.k[size_t(row + i)]);
  }
  CHECK_EQ(touched(step.k_cache), int64_t(step.k.size()));
  CHECK_EQ(touched(step.v_cache), int64_t(step.v.size()));
}

// A GPU finds such rows too late to report them.
TEST(what_lies_beyond_the_cache_is_skipped) {
  Step step(16, 8);
  step.before = {7, -1, 8};  // room for one of two; invalid length; no room
  step.table[1] = kPages;    // page of the first entry
  AppendProblem const p = step.problem(false, true);
  run_kernel(p, true);
  CHECK_EQ(touched(step.k_cache), 0);
  CHECK_EQ(step.after[0], 8);
  CHECK_EQ(step.after[2], 8);
  CHECK_EQ(append_kv(p, {}).message,
           "cache_seqlens[0] is 7 and there are 2 new keys, but block_table covers 8 keys");
  step.slots = {28, 1 << 30, int64_t(1) << 40, -1, -5, 3};
  AppendProblem const by_slots = step.problem(true, false);
  run_kernel(by_slots, true);
  CHECK_EQ(touched(step.k_cache), kHeadsKv * 16);
  CHECK_EQ(append_kv(by_slots, {}).message,
           "slot_mapping[0] is 28, allowed: a negative number to skip the row, or a slot of the 28 "
           "of the cache");
}

TEST(bad_requests) {
  Step step(16, 8);
  auto const message = [&](auto const& change) {
    AppendProblem p = step.problem(false, true);
    change(p);
    return append_kv(p, {}).message;
  };
  using P = AppendProblem;
  CHECK_EQ(message([](P& p) { p.head_dim = 577; }), "head_dim is 577, allowed: 1 to 576");
  CHECK_EQ(message([](P& p) { p.rotary.dim = 17; }), "rotary.dim is 17, allowed: 0 to 16");
  CHECK_EQ(message([](P& p) { p.rotary.dim = 7; }), "rotary.dim is 7, allowed: an even number");
  CHECK_EQ(message([](P& p) { p.rotary.positions = 7; }),
           "rotary.positions is 7, allowed: 8 to 2147483647");
  CHECK_EQ(message([](P& p) { p.rotary.positions = p.cache_rows = p.seqlen = 0; }),
           "rotary.positions is 0, allowed: 1 to 2147483647");
  CHECK_EQ(message([](P& p) { p.rotary.dim = 0; }),
           "q is set, but rotary.dim is 0: q would not be rotated");
  CHECK_EQ(message([](P& p) { p.v.dtype = DType::kFloat16; }),
           "v is float16, allowed: float32 like k");
  CHECK_EQ(message([](P& p) { p.v_cache.dtype = DType::kFloat8E4M3; }),
           "v_cache is float8_e4m3fn, allowed: float32 like k, or float8_e4m3fn for both caches");
  CHECK_EQ(message([](P& p) { p.cache_seqlens = nullptr; }),
           "neither slot_mapping nor cache_seqlens is set");
  CHECK_EQ(message([&](P& p) { p.slot_mapping = step.slots.data(); }),
           "slot_mapping and cache_seqlens are both set; allowed: one");
  CHECK_EQ(message([&](P& p) { p.slot_mapping = step.slots.data(), p.cache_seqlens = nullptr; }),
           "slot_mapping tells no positions: rotary, q and seqlens_after need cache_seqlens");
  CHECK_EQ(message([](P& p) { p.batch = 0; }), "");
}

int main(int argc, char** argv) { return check::run(argc, argv); }
