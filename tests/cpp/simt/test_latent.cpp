// Latent attention against fp64: contiguous caches, pages and lists of keys, with splits merged in
// one level and in two. The mutants run it as well.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention_case.hpp"
#include "check.hpp"
#include "simt/host_unit.hpp"
#include "simt/packed.hpp"
#include "sm80/latent.hpp"

using namespace cutlass_attn;
using attention_case::Case;
using attention_case::SolvedCase;
using cutlass::bfloat16_t;
using cutlass::half_t;
using packed::Rows;

namespace {

using Latent = sm80::Latent<half_t, TileShape<576, 512, 16, 32, 1, 4>>;
using WithoutTail = sm80::Latent<half_t, TileShape<512, 512, 16, 32, 1, 4>>;
using OfBFloat16 = sm80::Latent<bfloat16_t, TileShape<576, 512, 16, 32, 1, 4>>;
using OfFewKeys = sm80::Latent<half_t, TileShape<576, 512, 16, 16, 1, 4>>;  // more stages
using OfManyRows = sm80::Latent<half_t, TileShape<576, 512, 64, 16, 4, 2>>;

// The cache in pages of 13 keys, in an irregular order. All other rows are NaN.
struct Paged {
  static constexpr int kPageSize = 13;
  Problem problem;
  int const each;  // pages of a batch entry
  std::vector<int32_t> table, used;
  Rows k;

  explicit Paged(Problem const& p)
      : problem(p),
        each((p.seq_k.seqlen + kPageSize - 1) / kPageSize),
        table(size_t(p.batch * each)),
        used(size_t(p.batch), p.seq_k.seqlen),
        k(int64_t(p.batch) * each * kPageSize * p.head_dim + 1) {
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(1));
    k.move(p.k, p.batch, 1, p.seq_k.seqlen, p.head_dim, false,
           [&](int b, int, int r) { return slot(b, r) * p.head_dim; });
    problem.k = {k.memory.data(), int64_t(kPageSize) * p.head_dim, p.head_dim, p.head_dim,
                 p.k.dtype};
    problem.v = problem.k;
    problem.kv = {table.data(), each, kPageSize, int32_t(table.size())};
    problem.seq_k.seqused = used.data();
    problem.seq_k.seqlen = each * kPageSize;
  }
  Paged(Paged const&) = delete;
  void give_back() {}

  // The row of a key among the rows of all pages.
  int64_t slot(int batch, int key) const {
    return int64_t(table[size_t(batch * each + key / kPageSize)]) * kPageSize + key % kPageSize;
  }
};

// Lists of the keys that the mask lets each query see, in any order, with invalid places in
// between. Entries beyond the length of a list are out of bounds.
struct Listed : Paged {
  static constexpr int kNone = 3;  // places without a key, per list
  std::vector<int32_t> lists;

  explicit Listed(Problem const& p) : Paged(p) {
    std::mt19937 random(2);
    int32_t const most = p.seq_k.seqlen + kNone, length = most + 2;
    for (int b = 0; b < p.batch; ++b) {
      used[size_t(b)] = most;
      for (int q = 0; q < p.seq_q.seqlen; ++q) {
        std::vector<int32_t> list(size_t(most), -1);
        for (int key = 0; key < p.seq_k.seqlen; ++key) {
          int64_t const at = int64_t(q) + p.seq_k.seqlen - p.seq_q.seqlen;
          bool const is_before = p.mask.window_left != kUnbounded && key < at - p.mask.window_left;
          if (is_before || (p.mask.causal && key > at)) continue;
          list[size_t(key)] = int32_t(slot(b, key));
        }
        if (!list.empty()) list[0] = list[0] < 0 ? int32_t(table.size()) * kPageSize : list[0];
        std::shuffle(list.begin(), list.end(), random);
        list.resize(size_t(length), 1 << 30);
        lists.insert(lists.end(), list.begin(), list.end());
      }
    }
    problem.mask = {};
    problem.seq_k.seqlen = length;
    problem.kv.block_table = nullptr;
    problem.kv.indices = lists.data();
    problem.kv.indices_query_stride = length;
    problem.kv.indices_batch_stride = int64_t(length) * p.seq_q.seqlen;
  }
};

struct Dense {
  Problem problem;
  explicit Dense(Problem const& p) : problem(p) {}
  void give_back() {}
};

// Packed sequences, one of them without rows, with rows of NaN after the keys of each.
struct Packed : packed::Packed {
  explicit Packed(Problem const& p) : packed::Packed({p}, 3) {}
};

// Runs the case in `splits` parts, with a workspace of garbage and zeros that each run leaves.
template <class Kernel, class Cache>
std::string run(SolvedCase& solved, int splits, simt::FiberOrder order) {
  static KernelUnit const unit = simt::host_unit<Kernel, IdentityScore>();
  constexpr KernelArguments arguments = arguments_of<typename Kernel::Params, IdentityScore>();
  Cache cache(solved.call());
  cache.problem.num_splits = splits;
  std::vector<char> workspace(size_t(arguments.workspace_bytes(cache.problem, {}, unit.facts)),
                              char(0xff));
  std::vector<int32_t> zeros(size_t(order == simt::FiberOrder::kForward ? 256 : 0));
  RunOptions options;
  options.workspace = {workspace.data(), int64_t(workspace.size()), zeros.data(),
                       int64_t(zeros.size()) * 4};
  simt::launch_schedule().order = order;
  Status const status = launch(arguments, unit, cache.problem, {}, options);
  if (!status.ok()) return status.message;
  cache.give_back();
  if (std::any_of(zeros.begin(), zeros.end(), [](int32_t x) { return x != 0; })) {
    return "zeros are not left as zeros";
  }
  return solved.verdict();
}

template <class Kernel, class Cache>
void check(Case what, DType dtype, std::initializer_list<int> all_splits) {
  what.latent_kv = true;
  SolvedCase solved(what, dtype);
  for (int splits : all_splits) {
    for (simt::FiberOrder order : {simt::FiberOrder::kForward, simt::FiberOrder::kReverse}) {
      std::string const error = run<Kernel, Cache>(solved, splits, order);
      if (error.empty()) continue;
      check::fail(__FILE__, __LINE__,
                  what.name + ", " + std::to_string(splits) + " splits: " + error);
    }
  }
}

Case make(char const* name, int seqlen_q, int seqlen_k, int heads, int batch = 1) {
  Case x{name, seqlen_q, seqlen_k};
  x.num_heads_q = heads;
  x.batch = batch;
  x.head_dim = 576;
  x.head_dim_v = 512;
  return x;
}

Case causal(Case x) {
  x.causal = true;
  return x;
}

TEST(contiguous) {
  check<Latent, Dense>(make("one query", 1, 230, 16, 2), DType::kFloat16, {1, 3});
  Case rises = make("a row max that few keys raise", 3, 170, 5);
  rises.magnitude = 8;
  check<Latent, Dense>(rises, DType::kFloat16, {1, 3});
  check<Latent, Dense>(causal(make("a tile for each head", 20, 70, 2)), DType::kFloat16, {1, 2});
  Case nan = make("NaN in a key", 2, 100, 3);
  nan.nan_key = 40;
  check<Latent, Dense>(nan, DType::kFloat16, {1, 2});
  Case window = causal(make("a window", 2, 200, 4));
  window.window_left = 50;
  check<Latent, Dense>(window, DType::kFloat16, {2});
  check<OfBFloat16, Dense>(make("bf16", 1, 90, 16), DType::kBFloat16, {1});
  check<OfFewKeys, Dense>(make("more stages", 1, 330, 16), DType::kFloat16, {1, 2});
}

TEST(pages) {
  Case queries = causal(make("a few queries", 5, 100, 12, 2));
  queries.sinks = true;
  queries.softmax_scale = 0.07f;
  check<Latent, Paged>(queries, DType::kFloat16, {1, 3});
  check<Latent, Paged>(make("no key", 2, 0, 3), DType::kFloat16, {1, 2});
  check<Latent, Paged>(make("one key", 1, 1, 3), DType::kFloat16, {1, 2});
  Case without_tail = causal(make("512 columns", 2, 75, 20));
  without_tail.head_dim = 512;
  check<WithoutTail, Paged>(without_tail, DType::kFloat16, {1, 3});
  Case smaller = make("fewer columns", 1, 75, 16);
  smaller.head_dim = 320;
  smaller.head_dim_v = 256;
  check<Latent, Paged>(smaller, DType::kFloat16, {1});
}

TEST(packed) {
  check<Latent, Packed>(causal(make("few queries", 3, 100, 12, 3)), DType::kFloat16, {1, 3});
  check<Latent, Packed>(causal(make("many queries", 40, 50, 2, 2)), DType::kFloat16, {1});
  check<OfManyRows, Packed>(causal(make("tiles of 64", 3, 60, 40, 2)), DType::kFloat16, {1, 2});
}

TEST(many_rows) {
  Case queries = causal(make("rows of two tiles", 5, 100, 20));
  queries.sinks = true;
  check<OfManyRows, Paged>(queries, DType::kFloat16, {1, 3});
  Case rises = make("a row max that few keys raise", 1, 170, 40);
  rises.magnitude = 8;
  check<OfManyRows, Dense>(rises, DType::kFloat16, {1, 2});
  check<OfManyRows, Dense>(causal(make("a tile for each head", 70, 90, 2)), DType::kFloat16, {1});
  check<OfManyRows, Listed>(make("lists", 2, 75, 70), DType::kFloat16, {1, 2});
  check<OfManyRows, Listed>(causal(make("few rows", 6, 3, 2)), DType::kFloat16, {1});
}

TEST(two_levels) {
  check<Latent, Paged>(make("a merge of groups", 1, 700, 4, 2), DType::kFloat16, {16, 17, 21});
}

TEST(lists) {
  check<Latent, Listed>(make("one query", 1, 100, 20, 2), DType::kFloat16, {1, 3});
  Case queries = causal(make("other keys for each query", 5, 60, 12, 2));
  queries.sinks = true;
  check<Latent, Listed>(queries, DType::kFloat16, {1, 2});
  check<Latent, Listed>(make("no key", 2, 0, 3), DType::kFloat16, {1, 2});
  check<Latent, Listed>(causal(make("no key of the first queries", 6, 3, 2)), DType::kFloat16, {1});
  Case without_tail = make("512 columns", 2, 75, 5);
  without_tail.head_dim = 512;
  check<WithoutTail, Listed>(without_tail, DType::kFloat16, {1});
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
