// The wgmma forward kernel on the engine: right against fp64, in every order of its threads and for
// any number of tiles per block; and the engine's reports of misuse of wgmma, TMA and mbarriers.
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "simt/async.hpp"
#include "simt/sm90_case.hpp"

using namespace cutlass_attn;
using attention_case::Case;
using attention_case::SolvedCase;
using cutlass::bfloat16_t;
using cutlass::half_t;
using sm90_case::check_case;

namespace {

// Sizes relative to tiles of 128 rows, in warpgroups of 64, and of 64 to 128 keys.
std::vector<Case> cases(int head_dim, int head_dim_v = 0) {
  std::vector<Case> list(15);
  list[0].name = "whole tiles", list[0].seqlen_q = 128, list[0].seqlen_k = 256;
  list[1].name = "ragged, grouped heads", list[1].seqlen_q = 200, list[1].seqlen_k = 333;
  list[1].num_heads_q = 4, list[1].num_heads_kv = 2;
  list[2].name = "causal", list[2].seqlen_q = 270, list[2].seqlen_k = 400, list[2].causal = true;
  list[3].name = "rows without keys", list[3].seqlen_q = 300, list[3].seqlen_k = 100;
  list[3].causal = true;
  list[4].name = "window, warpgroups of other keys than each other", list[4].seqlen_q = 330;
  list[4].seqlen_k = 700, list[4].window_left = 150, list[4].window_right = 30;
  list[5].name = "packed heads", list[5].seqlen_q = 5, list[5].seqlen_k = 200;
  list[5].num_heads_q = 8, list[5].num_heads_kv = 2, list[5].sinks = true;
  list[6].name = "large scores", list[6].seqlen_q = 128, list[6].seqlen_k = 512;
  list[6].magnitude = 40;
  list[7].name = "no warpgroup for the last rows", list[7].seqlen_q = 132, list[7].seqlen_k = 900;
  list[7].window_left = 300, list[7].window_right = 0;
  list[8].name = "several tiles of a block", list[8].seqlen_q = 260, list[8].seqlen_k = 260;
  list[8].batch = 2, list[8].num_heads_q = list[8].num_heads_kv = 2, list[8].causal = true;
  list[9].name = "chunks, several in a tile of rows", list[9].seqlen_q = 300;
  list[9].seqlen_k = 500, list[9].attention_chunk = 70, list[9].causal = true;
  list[10].name = "chunks, several tiles of keys each, softcap", list[10].seqlen_q = 270;
  list[10].seqlen_k = 700, list[10].attention_chunk = 300, list[10].softcap = 3;
  list[11].name = "warpgroups without rows, more tiles of keys than buffers";
  list[11].seqlen_q = 256, list[11].seqlen_k = 1000;
  list[12].name = "ALiBi, causal, grouped heads", list[12].seqlen_q = 200, list[12].causal = true;
  list[12].seqlen_k = 333, list[12].num_heads_q = 4, list[12].num_heads_kv = 2;
  list[12].alibi = "h";
  list[13].name = "ALiBi on both sides, slopes per batch, packed heads, sinks";
  list[13].seqlen_q = 21, list[13].seqlen_k = 300, list[13].batch = 2;
  list[13].num_heads_q = 8, list[13].num_heads_kv = 2, list[13].alibi = "bh";
  list[13].sinks = true;
  list[14].name = "ALiBi, softcap, chunks, from another diagonal", list[14].seqlen_q = 270;
  list[14].seqlen_k = 500, list[14].alibi = "h", list[14].softcap = 3;
  list[14].attention_chunk = 300, list[14].diagonal_shift = -40, list[14].magnitude = 40;
  return sm90_case::with_head_dims(list, head_dim, head_dim_v);
}

template <class Kernel>
void check_cases(DType dtype, int head_dim, int head_dim_v = 0) {
  int runs = 0;
  for (Case const& what : cases(head_dim, head_dim_v)) check_case<Kernel>(what, dtype, runs);
  CHECK_EQ(runs, int(cases(head_dim).size()));
}

TEST(dropout) {
  using Wide = sm90::Forward<bfloat16_t, TileShape<128, 128, 128, 128, 8>, with::Dropout>;
  int runs = 0;
  for (Case what : attention_case::few_dropout_cases(128)) {
    what.layout = attention_case::Layout::kTransposed;
    sm90_case::check_case<Wide>(what, DType::kBFloat16, runs);
  }
  CHECK_EQ(runs, 3);
}
TEST(head_dim_64) {
  check_cases<sm90::Forward<half_t, TileShape<64, 64, 192, 128, 12>>>(DType::kFloat16, 64);
}
TEST(head_dim_64_two_warpgroups) {
  check_cases<sm90::Forward<half_t, TileShape<64, 64, 128, 128, 8>>>(DType::kFloat16, 64);
}
TEST(head_dim_128) {
  check_cases<sm90::Forward<bfloat16_t, TileShape<128, 128, 128, 128, 8>>>(DType::kBFloat16, 128);
}
TEST(head_dim_256) {
  check_cases<sm90::Forward<half_t, TileShape<256, 256, 128, 64, 8>>>(DType::kFloat16, 256);
}
// V has another head dim than Q and K, and both are less than the tile's.
TEST(head_dims_192_128) {
  check_cases<sm90::Forward<half_t, TileShape<192, 128, 128, 128, 8>>>(DType::kFloat16, 168, 120);
}
TEST(library_cases) {
  int runs = 0;
  for (Case const& what : attention_case::few_cases(128)) {
    check_case<sm90::Forward<half_t, TileShape<128, 128, 128, 128, 8>>>(what, DType::kFloat16,
                                                                        runs);
  }
  CHECK(runs >= 3);
}

// With a bias. Batch entries, heads or queries may share entries.
std::vector<Case> bias_cases(int head_dim) {
  std::vector<Case> list(11);
  list[0].name = "bias of every logit", list[0].bias = "bhqk", list[0].seqlen_q = 200;
  list[0].seqlen_k = 328, list[0].batch = 2, list[0].num_heads_q = list[0].num_heads_kv = 2;
  list[1].name = "bias that batch entries share", list[1].bias = "hqk", list[1].seqlen_q = 260;
  list[1].seqlen_k = 264, list[1].batch = 3, list[1].num_heads_q = list[1].num_heads_kv = 2;
  list[1].causal = true;
  list[2].name = "bias that heads share, grouped heads", list[2].bias = "bqk";
  list[2].seqlen_q = 130, list[2].seqlen_k = 136, list[2].batch = 2, list[2].num_heads_q = 4;
  list[2].num_heads_kv = 2, list[2].window_left = 50, list[2].window_right = 9;
  list[3].name = "bias that queries share", list[3].bias = "bk", list[3].seqlen_q = 70;
  list[3].seqlen_k = 400, list[3].batch = 2, list[3].sinks = true;
  list[4].name = "bias, packed heads", list[4].bias = "bhqk", list[4].seqlen_q = 5;
  list[4].seqlen_k = 208, list[4].num_heads_q = 8, list[4].num_heads_kv = 2, list[4].batch = 2;
  list[5].name = "bias that packed heads share", list[5].bias = "qk", list[5].seqlen_q = 7;
  list[5].seqlen_k = 160, list[5].num_heads_q = 4, list[5].causal = true;
  list[6].name = "bias, large scores", list[6].bias = "qk", list[6].seqlen_q = 128;
  list[6].seqlen_k = 512, list[6].magnitude = 40;
  list[7].name = "bias, rows without keys", list[7].bias = "hqk", list[7].seqlen_q = 300;
  list[7].seqlen_k = 104, list[7].causal = true;
  list[8].name = "bias, negative scale", list[8].bias = "qk", list[8].seqlen_q = 100;
  list[8].seqlen_k = 296, list[8].softmax_scale = -0.3f;
  list[9].name = "bias of heads that queries share, packed heads", list[9].bias = "hk";
  list[9].seqlen_q = 6, list[9].seqlen_k = 152, list[9].num_heads_q = 4;
  list[10].name = "bias that queries and packed heads share", list[10].bias = "bk";
  list[10].seqlen_q = 40, list[10].seqlen_k = 280, list[10].num_heads_q = 4, list[10].batch = 2;
  list[10].causal = true;
  for (Case& what : list) {
    what.head_dim = head_dim, what.layout = attention_case::Layout::kContiguous;
  }
  return list;
}
template <class Element, int kHeadDim, int kBlockM, int kBlockN, int kWarps>
void check_bias(DType dtype, int head_dim) {
  using Kernel =
      sm90::Forward<Element, TileShape<kHeadDim, kHeadDim, kBlockM, kBlockN, kWarps>, with::Bias>;
  int runs = 0;
  for (Case const& what : bias_cases(head_dim)) check_case<Kernel>(what, dtype, runs);
  CHECK_EQ(runs, int(bias_cases(head_dim).size()));
}
TEST(bias_of_64) { check_bias<half_t, 64, 128, 128, 8>(DType::kFloat16, 64); }
TEST(bias_of_128) { check_bias<bfloat16_t, 128, 128, 128, 8>(DType::kBFloat16, 120); }
TEST(bias_of_256) { check_bias<half_t, 256, 128, 64, 8>(DType::kFloat16, 256); }

// Sequences of different lengths, one without queries, one without keys; some with NaN after the
// last key.
std::vector<Case> sequences(int head_dim, int head_dim_v = 0) {
  std::vector<Case> list;
  int const lengths[][2] = {{200, 333}, {1, 130}, {70, 0},   {129, 128},
                            {33, 450},  {0, 60},  {140, 140}};
  for (auto const& [queries, keys] : lengths) {
    Case what;
    what.name = "sequences of their own lengths", what.seqlen_q = queries, what.seqlen_k = keys;
    what.head_dim = head_dim, what.head_dim_v = head_dim_v;
    what.seed = unsigned(10 * list.size() + 1);
    list.push_back(what);
  }
  return list;
}
template <class Kernel>
void check_sequences(DType dtype, int head_dim, int head_dim_v = 0) {
  int runs = 0;
  auto const check = [&](int gap, auto const& change) {
    std::vector<Case> list = sequences(head_dim, head_dim_v);
    for (Case& what : list) change(what);
    sm90_case::check_packed<Kernel>(list, dtype, gap, runs);
  };
  check(0, [](Case&) {});
  check(5, [](Case& what) { what.causal = what.sinks = true, what.num_heads_q = 2; });
  check(3, [](Case& what) {
    what.name = "packed heads", what.num_heads_q = 8, what.num_heads_kv = 2;
    what.seqlen_q = what.seqlen_q % 7, what.window_left = 100, what.window_right = 3;
  });
  check(1, [](Case& what) { what.name = "chunks", what.attention_chunk = 90; });
  CHECK_EQ(runs, 4);
}
template <class Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, int kWarps>
using Varlen = sm90::Forward<Element, TileShape<kHeadDim, kHeadDimV, kBlockM, kBlockN, kWarps>,
                             with::PackedRows>;

TEST(packed_of_64) { check_sequences<Varlen<half_t, 64, 64, 192, 128, 12>>(DType::kFloat16, 64); }
TEST(packed_of_192_128) {
  check_sequences<Varlen<half_t, 192, 128, 128, 128, 8>>(DType::kFloat16, 168, 120);
}
// Also dense calls, and entries with ignored keys, which are NaN.
TEST(dense_of_packed) {
  using Kernel = Varlen<half_t, 64, 64, 192, 128, 12>;
  int runs = 0;
  for (Case const& what : attention_case::few_cases(64)) {
    check_case<Kernel>(what, DType::kFloat16, runs);
  }
  CHECK(runs >= 3);
  Case what;
  what.name = "keys that do not count", what.seqlen_q = 90, what.seqlen_k = 150;
  what.batch = 3, what.num_heads_q = what.num_heads_kv = 2, what.causal = true;
  std::vector<SolvedCase> cases{SolvedCase(what, DType::kFloat16)};
  constexpr int kLeft = 2;
  std::vector<int32_t> const used(3, kLeft + what.seqlen_k), left(3, kLeft);
  Problem problem = cases[0].call();
  problem.seq_k.seqlen += kLeft + 3;
  problem.seq_k.seqused = used.data(), problem.seq_k.leftpad = left.data();
  for (auto* t : {&problem.k, &problem.v}) {
    t->data = static_cast<half_t*>(t->data) - kLeft * t->row_stride;
  }
  auto const run = [&](int num_sms) { return sm90_case::launch<Kernel>(problem, num_sms); };
  runs = 0;
  sm90_case::check_calls(what.name, cases, run, runs);
  CHECK_EQ(runs, 1);
}

// In pages: a tile of keys has several pages, one, a part of one, or parts of several.
template <class Kernel>
void check_pages(DType dtype, int head_dim, int head_dim_v = 0) {
  int runs = 0;
  auto const check = [&](packed::PageLayout layout, auto const& change) {
    std::vector<Case> list = sequences(head_dim, head_dim_v);
    for (Case& what : list) change(what);
    sm90_case::check_pages<Kernel>(list, dtype, layout, runs);
  };
  auto const causal = [](Case& what) {
    what.causal = what.sinks = true, what.num_heads_q = 4, what.num_heads_kv = 2;
  };
  for (int const size : {8, 16, 64, 128, 256, 384, 24, 48}) check({size}, causal);
  check({16, 0, true}, causal);
  check({256, 8, true}, [](Case& what) { what.num_heads_q = 2; });
  for (int const size : {16, 64, 256}) {
    check({size, 0, true}, [](Case& what) {
      what.name = "window, packed heads", what.num_heads_q = 8, what.num_heads_kv = 2;
      what.seqlen_q = what.seqlen_q % 7, what.window_left = 200, what.window_right = 3;
    });
  }
  check({16}, [](Case& what) { what.name = "chunks", what.attention_chunk = 90; });
  check({48}, [](Case& what) {
    what.name = "softcap, window", what.softcap = 3, what.window_left = 70, what.causal = true;
  });
  CHECK_EQ(runs, 15);
}
template <class Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, int kWarps>
using Paged =
    sm90::Forward<Element, TileShape<kHeadDim, kHeadDimV, kBlockM, kBlockN, kWarps>, with::Pages>;

TEST(pages_of_64) { check_pages<Paged<half_t, 64, 64, 192, 128, 12>>(DType::kFloat16, 64); }
TEST(pages_of_128) { check_pages<Paged<bfloat16_t, 128, 128, 128, 128, 8>>(DType::kBFloat16, 128); }
TEST(pages_of_192_128) {
  check_pages<Paged<half_t, 192, 128, 128, 128, 8>>(DType::kFloat16, 168, 120);
}
TEST(pages_of_256) { check_pages<Paged<half_t, 256, 256, 128, 64, 8>>(DType::kFloat16, 256); }
// Without packed queries: entries of equal lengths.
TEST(pages_of_dense_queries) {
  int runs = 0;
  Case what;
  what.name = "prefill of a batch", what.seqlen_q = 90, what.seqlen_k = 333;
  what.batch = 3, what.num_heads_q = 4, what.num_heads_kv = 2, what.causal = true;
  what.head_dim = 128, what.alibi = "bh", what.window_left = 120;
  std::vector<SolvedCase> cases{SolvedCase(what, DType::kBFloat16)};
  packed::Paged const pages(cases[0].call(), {32, 0, true});
  auto const run = [&](int num_sms) {
    return sm90_case::launch<Paged<bfloat16_t, 128, 128, 128, 128, 8>>(pages.problem, num_sms);
  };
  sm90_case::check_calls(what.name, cases, run, runs);
  CHECK_EQ(runs, 1);
}

// --- The engine's reports of misuse --------------------------------------------------------------

using arch::Sm90;
constexpr int kBytes = 64 * 128;  // of a tile of 64 x 64

struct Tiles {
  alignas(1024) char a[kBytes], b[kBytes];
  arch::Barrier full[1], empty[1];
};

struct Matrix {
  std::vector<half_t> values = std::vector<half_t>(64 * 64, half_t(1.0f));
  TensorMap map;
  Matrix() {
    TensorView const view{values.data(), {64, 64, 1, 1, 1}, {128, 16, 16, 16}, {64, 64, 1, 1, 1}};
    CHECK(encode(view, false, map) == nullptr);
  }
};

// Runs body(shared, thread, accumulators) in a warpgroup, after barriers are initialised.
std::string run(std::function<void(Tiles&, int, float (&)[32])> const& body, bool fences = true,
                bool overlaps = false) {
  simt::Schedule const schedule{1, simt::FiberOrder::kForward, 0};
  Status const status =
      simt::run_grid({1, 128, sizeof(Tiles), 1, overlaps}, schedule, [&](char* smem) {
        Tiles& shared = *reinterpret_cast<Tiles*>(smem);
        int const thread = Sm90::thread();
        if (thread == 0) {
          Sm90::mbarrier_init(shared.full, 1);
          Sm90::mbarrier_init(shared.empty, 4);
          if (fences) Sm90::fence_mbarrier_init();
        }
        Sm90::sync();
        float acc[32] = {};
        body(shared, thread, acc);
      });
  return status.message;
}

void load(Tiles& shared, Matrix const& a, Matrix const& b) {
  Sm90::mbarrier_arrive_expect_tx(shared.full, 2 * kBytes);
  Sm90::tma_load(shared.a, a.map, shared.full, 0, 0, 0, 0, 0);
  Sm90::tma_load(shared.b, b.map, shared.full, 0, 0, 0, 0, 0);
}

void multiply(Tiles& shared, float (&acc)[32], int leading = 16, int stride = 1024) {
  auto const a = Sm90::descriptor(shared.a, leading, stride);
  auto const b = Sm90::descriptor(shared.b, leading, stride);
  for (int k = 0; k < 4; ++k) Sm90::wgmma_ss<half_t>(acc, a + 2 * k, b + 2 * k, k > 0);
  Sm90::wgmma_commit();
}

bool has(std::string const& text, char const* part) {
  if (text.find(part) != std::string::npos) return true;
  std::printf("  said: %s\n", text.c_str());
  return false;
}

// Calls visit for element (row, column) of a thread's part of a product.
template <class Visit>
void for_accumulators(int thread, Visit&& visit) {
  int const row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  for (int i = 0; i < 32; ++i) visit(row + i / 2 % 2 * 8, i / 4 * 8 + column + i % 2, i);
}

struct Integers {
  Matrix a, b;
  Integers() {
    for (int i = 0; i < 64 * 64; ++i) {
      a.values[i] = half_t(float(i * 7 % 13 - 6));
      b.values[i] = half_t(float(i * 5 % 11 - 5));
    }
  }
};

TEST(a_product_is_there_after_its_wait) {
  Integers const m;
  std::vector<float> c(64 * 64), before(64 * 64);
  CHECK_EQ(run([&](Tiles& shared, int thread, float (&acc)[32]) {
             if (thread == 0) load(shared, m.a, m.b);
             Sm90::mbarrier_wait(shared.full, 0);
             Sm90::wgmma_fence(acc);
             multiply(shared, acc);
             auto const keep = [&](std::vector<float>& to) {
               for_accumulators(thread, [&](int i, int j, int at) { to[i * 64 + j] = acc[at]; });
             };
             keep(before);
             Sm90::wgmma_wait<0>(acc);
             keep(c);
           }),
           "");
  int wrong = 0, nan = 0;
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < 64; ++j) {
      float sum = 0;
      for (int k = 0; k < 64; ++k) {
        sum += float(m.a.values[i * 64 + k]) * float(m.b.values[j * 64 + k]);
      }
      wrong += c[i * 64 + j] != sum;
      nan += before[i * 64 + j] != before[i * 64 + j];
    }
  }
  CHECK_EQ(wrong, 0);
  CHECK_EQ(nan, 64 * 64);  // without the wait
}

TEST(a_product_of_rows_with_rows) {
  Integers const m;
  std::vector<float> c(64 * 64);
  CHECK_EQ(run([&](Tiles& shared, int thread, float (&acc)[32]) {
             if (thread == 0) load(shared, m.a, m.b);
             Sm90::mbarrier_wait(shared.full, 0);
             Sm90::wgmma_fence(acc);
             auto const a = Sm90::descriptor(shared.a, kBytes, 1024);
             auto const b = Sm90::descriptor(shared.b, kBytes, 1024);
             for (int k = 0; k < 4; ++k) {
               Sm90::wgmma_ts<half_t>(acc, a + k * 128, b + k * 128, k > 0);
             }
             Sm90::wgmma_commit();
             Sm90::wgmma_wait<0>(acc);
             for_accumulators(thread, [&](int i, int j, int at) { c[i * 64 + j] = acc[at]; });
           }),
           "");
  int wrong = 0;
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < 64; ++j) {
      float sum = 0;
      for (int k = 0; k < 64; ++k) {
        sum += float(m.a.values[k * 64 + i]) * float(m.b.values[k * 64 + j]);
      }
      wrong += c[i * 64 + j] != sum;
    }
  }
  CHECK_EQ(wrong, 0);
}

// 64 x 64 x 32 in 8 bits: A in registers as for m16n8k32, and in shared memory; B there, by rows.
template <class Byte, class Value, class Multiply>
void check_bytes(Value const& value, Multiply const& multiply) {
  std::vector<Byte> a(64 * 32), b(64 * 32);
  for (int i = 0; i < 64 * 32; ++i) a[i] = Byte(i * 37 % 101), b[i] = Byte(i * 53 % 103 + 128);
  std::vector<double> c(64 * 64);
  CHECK_EQ(run([&](Tiles& shared, int thread, float (&)[32]) {
             for (int at = thread; at < 64 * 32; at += 128) {
               int const row = at / 32, place = row * 128 + at % 32;
               uint32_t const swizzled = simt::swizzle128(uint32_t(place));
               shared.a[swizzled] = char(a[at]), shared.b[swizzled] = char(b[at]);
             }
             Sm90::sync();
             uint32_t words[4];
             int const row = thread / 32 * 16 + thread % 32 / 4, four = thread % 4 * 4;
             for (int i = 0; i < 4; ++i) {
               std::memcpy(&words[i], &a[(row + i % 2 * 8) * 32 + four + i / 2 * 16], 4);
             }
             auto const results = multiply(shared, words);
             for_accumulators(thread, [&](int i, int j, int at) { c[i * 64 + j] = results[at]; });
           }),
           "");
  int wrong = 0;
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < 64; ++j) {
      double sum = 0;
      for (int k = 0; k < 32; ++k) sum += value(a[i * 32 + k]) * value(b[j * 32 + k]);
      // Twice: the second call accumulates.
      wrong += std::fabs(c[i * 64 + j] - 2 * sum) > std::fabs(2 * sum) * 0x1p-12;
    }
  }
  CHECK_EQ(wrong, 0);
}
TEST(products_in_8_bits) {
  auto const b_of = [](Tiles& shared) { return Sm90::descriptor(shared.b, 16, 1024); };
  auto const int8 = [&](Tiles& shared, auto const& a) {
    uint32_t acc[32];
    Sm90::wgmma_fence(acc);
    for (bool accumulates : {false, true}) Sm90::wgmma_int8(acc, a, b_of(shared), accumulates);
    Sm90::wgmma_commit();
    Sm90::wgmma_wait<0>(acc);
    std::vector<double> results;
    for (uint32_t x : acc) results.push_back(int32_t(x));
    return results;
  };
  check_bytes<int8_t>([](int8_t x) { return double(x); }, int8);
  check_bytes<int8_t>([](int8_t x) { return double(x); },
                      [&](Tiles& shared, uint32_t const(&)[4]) {
                        return int8(shared, Sm90::descriptor(shared.a, 16, 1024));
                      });
  check_bytes<uint8_t>([](uint8_t x) { return double(float(E4M3{x})); },
                       [&](Tiles& shared, uint32_t const(&a)[4]) {
                         float acc[32];
                         Sm90::wgmma_fence(acc);
                         Sm90::wgmma_e4m3(acc, a, b_of(shared), false);
                         Sm90::wgmma_e4m3(acc, a, b_of(shared), true);
                         Sm90::wgmma_commit();
                         Sm90::wgmma_wait<0>(acc);
                         return std::vector<double>(acc, acc + 32);
                       });
}

// wgmma reads the stores of threads through another proxy.
TEST(stores_need_a_fence_for_wgmma) {
  Matrix const a;
  auto const store = [&](bool fences) {
    return run([&](Tiles& shared, int thread, float (&acc)[32]) {
      if (thread == 0) load(shared, a, a);
      Sm90::mbarrier_wait(shared.full, 0);
      Sm90::store_shared(Sm90::smem_address(shared.a + thread * 4), 0u);
      if (fences) Sm90::fence_proxy_async();
      Sm90::sync();
      Sm90::wgmma_fence(acc);
      multiply(shared, acc);
      Sm90::wgmma_wait<0>(acc);
    });
  };
  CHECK(has(store(false), "without an fence_proxy_async()"));
  CHECK_EQ(store(true), "");
}

TEST(a_wrong_parity_never_ends) {
  Matrix a;
  CHECK(has(run([&](Tiles& shared, int thread, float (&)[32]) {
              if (thread == 0) load(shared, a, a);
              Sm90::mbarrier_wait(shared.full, 0);
              Sm90::mbarrier_wait(shared.full, 1);
            }),
            "wait for parity 1 of the barrier at byte 16384"));
}

TEST(too_few_bytes_keep_a_phase_open) {
  Matrix a;
  CHECK(has(run([&](Tiles& shared, int thread, float (&)[32]) {
              if (thread == 0) {
                Sm90::mbarrier_arrive_expect_tx(shared.full, 2 * kBytes);
                Sm90::tma_load(shared.a, a.map, shared.full, 0, 0, 0, 0, 0);
              }
              Sm90::mbarrier_wait(shared.full, 0);
            }),
            "lacks 0 of 1 arrivals and 8192 bytes"));
}

TEST(too_many_arrivals) {
  CHECK(has(run([&](Tiles& shared, int thread, float (&)[32]) {
              if (thread == 0) Sm90::mbarrier_arrive_expect_tx(shared.full, 16);
              Sm90::sync();
              if (thread == 1) Sm90::mbarrier_arrive(shared.full);
            }),
            "after all 1 arrivals of its phase"));
}

TEST(one_lane_of_a_warp_is_elected) {
  std::vector<int> elected(128);
  CHECK_EQ(run([&](Tiles&, int thread, float (&)[32]) { elected[size_t(thread)] = Sm90::elect(); }),
           "");
  for (int warp = 0; warp < 4; ++warp) {
    auto const first = elected.begin() + 32 * warp;
    CHECK_EQ(std::accumulate(first, first + 32, 0), 1);
  }
  CHECK(has(run([&](Tiles&, int thread, float (&)[32]) {
              if (thread != 40) Sm90::elect();
            }),
            "lanes 8 have exited"));
}

TEST(barriers_need_a_fence_for_tma) {
  Matrix a;
  CHECK(has(run(
                [&](Tiles& shared, int thread, float (&)[32]) {
                  if (thread == 0) load(shared, a, a);
                },
                false),
            "without a fence_mbarrier_init()"));
}

// In a grid that begins before earlier grids end. One thread waits for its whole block.
TEST(copies_wait_for_grids_before) {
  Matrix a;
  auto const copy = [&](bool waits) {
    return run(
        [&](Tiles& shared, int thread, float (&)[32]) {
          if (thread == 0 && waits) Sm90::griddepcontrol_wait();
          Sm90::sync();
          if (thread == 32) load(shared, a, a);
          Sm90::mbarrier_wait(shared.full, 0);
        },
        true, true);
  };
  CHECK_EQ(copy(true), "");
  CHECK(has(copy(false), "thread 32 has TMA copy data that earlier grids may still write"));
}

TEST(wgmma_needs_a_fence) {
  Matrix a;
  CHECK(has(run([&](Tiles& shared, int thread, float (&acc)[32]) {
              if (thread == 0) load(shared, a, a);
              Sm90::mbarrier_wait(shared.full, 0);
              multiply(shared, acc);
              Sm90::wgmma_wait<0>(acc);
            }),
            "without a wgmma_fence()"));
}

TEST(wgmma_needs_a_wait) {
  Matrix a;
  CHECK(has(run([&](Tiles& shared, int thread, float (&acc)[32]) {
              if (thread == 0) load(shared, a, a);
              Sm90::mbarrier_wait(shared.full, 0);
              Sm90::wgmma_fence(acc);
              multiply(shared, acc);
            }),
            "4 wgmma in flight that no wait covers"));
}

TEST(accumulators_are_not_to_be_written_in_flight) {
  Matrix a;
  CHECK(has(run([&](Tiles& shared, int thread, float (&acc)[32]) {
              if (thread == 0) load(shared, a, a);
              Sm90::mbarrier_wait(shared.full, 0);
              Sm90::wgmma_fence(acc);
              multiply(shared, acc);
              acc[0] = 0.0f;
              Sm90::wgmma_wait<0>(acc);
            }),
            "wrote accumulators while a wgmma was in flight"));
}

TEST(a_is_not_to_be_written_in_flight) {
  Matrix a;
  CHECK(has(run([&](Tiles& shared, int thread, float (&acc)[32]) {
              if (thread == 0) load(shared, a, a);
              Sm90::mbarrier_wait(shared.full, 0);
              uint32_t registers[4] = {};
              Sm90::wgmma_fence(acc, registers);
              auto const b = Sm90::descriptor(shared.b, kBytes, 1024);
              Sm90::wgmma_rs<half_t>(acc, registers, b, false);
              Sm90::wgmma_commit();
              registers[2] = 1;
              Sm90::wgmma_wait<0>(acc);
            }),
            "changed registers of A"));
}

// A buffer that is released too early is NaN when wgmma reads it.
TEST(an_early_release_is_seen) {
  Matrix a;
  float sum = 0;
  CHECK_EQ(run([&](Tiles& shared, int thread, float (&acc)[32]) {
             if (thread == 0) load(shared, a, a);
             Sm90::mbarrier_wait(shared.full, 0);
             Sm90::wgmma_fence(acc);
             multiply(shared, acc);
             Sm90::sync();
             if (thread == 0) load(shared, a, a);
             Sm90::sync();
             Sm90::wgmma_wait<0>(acc);
             sum += acc[0];
             Sm90::mbarrier_wait(shared.full, 1);
           }),
           "");
  CHECK(sum != sum);
}

// A wait says nothing about reads of other warps of the warpgroup.
TEST(a_wait_is_of_its_own_warp) {
  Matrix a;
  for (bool const syncs : {false, true}) {
    std::string const said = run([&](Tiles& shared, int thread, float (&acc)[32]) {
      if (thread == 0) load(shared, a, a);
      Sm90::mbarrier_wait(shared.full, 0);
      Sm90::wgmma_fence(acc);
      multiply(shared, acc);
      Sm90::wgmma_wait<0>(acc);
      if (syncs) Sm90::sync();
      if (thread == 0) load(shared, a, a);
      Sm90::mbarrier_wait(shared.full, 1);
    });
    CHECK(syncs ? said.empty()
                : has(said, "wgmma reads for a warp that has not resumed from its wait"));
  }
}

TEST(descriptors_have_to_fit_the_tile) {
  Matrix a;
  auto const of = [&](int stride) {
    for (int i = 0; i < 64 * 64; ++i) a.values[i] = half_t(float(i / 64));
    float value = 0;
    std::string const error = run([&](Tiles& shared, int thread, float (&acc)[32]) {
      if (thread == 0) load(shared, a, a);
      Sm90::mbarrier_wait(shared.full, 0);
      Sm90::wgmma_fence(acc);
      multiply(shared, acc, 16, stride);
      Sm90::wgmma_wait<0>(acc);
      if (thread == 127) value = acc[31];
    });
    CHECK_EQ(error, "");
    return value;
  };
  CHECK_EQ(of(1024), 63.0f * 63.0f * 64.0f);
  CHECK(of(512) != 63.0f * 63.0f * 64.0f);
}

TEST(tiles_lie_at_the_period_of_the_swizzle) {
  Matrix a;
  CHECK(has(run([&](Tiles& shared, int thread, float (&)[32]) {
              if (thread != 0) return;
              Sm90::tma_load(shared.a + 128, a.map, shared.full, 0, 0, 0, 0, 0);
            }),
            "allowed: multiples of 1024"));
}

TEST(registers_come_in_eights) {
  CHECK(has(run([](Tiles&, int, float (&)[32]) { Sm90::setmaxnreg_inc<236>(); }),
            "allowed: multiples of 8"));
}

// 168 for each of 384 threads: a request for more would wait until the block ends.
TEST(a_block_gets_no_more_registers_than_it_began_with) {
  Status const status = simt::run_grid({1, 384, 0}, {1, simt::FiberOrder::kForward, 0},
                                       [](char*) { Sm90::setmaxnreg_inc<176>(); });
  CHECK(has(status.message, "a block of 384 threads has 64512"));
  CHECK(simt::run_grid({1, 384, 0}, {1, simt::FiberOrder::kForward, 0}, [](char*) {
          Sm90::setmaxnreg_inc<168>();
        }).ok());
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
