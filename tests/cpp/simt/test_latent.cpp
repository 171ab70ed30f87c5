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
#include "simt/packed.hpp"
#include "simt/sanitized.hpp"
#include "simt/unit_of.hpp"
#include "sm80/latent.hpp"
#include "sm90/latent.hpp"

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
using OfTokens = sm80::Latent<half_t, TileShape<576, 512, 16, 32, 1, 4>, with::StoredAs<DsMla>>;
using OfTokensV4 =
    sm80::Latent<bfloat16_t, TileShape<512, 512, 16, 32, 1, 4>, with::StoredAs<DsMlaV4>>;
using OfManyRowsOfTokens =
    sm80::Latent<bfloat16_t, TileShape<576, 512, 64, 16, 4, 2>, with::StoredAs<DsMla>>;
using OfManyRowsOfTokensV4 =
    sm80::Latent<half_t, TileShape<512, 512, 64, 16, 4, 2>, with::StoredAs<DsMlaV4>>;
using Wgmma = sm90::Latent<half_t, TileShape<576, 512, 64, 48, 4, 2>>;
using WgmmaOfBFloat16 = sm90::Latent<bfloat16_t, TileShape<576, 512, 64, 48, 4, 2>>;
using WgmmaWithoutTail = sm90::Latent<half_t, TileShape<512, 512, 64, 48, 4, 2>>;
using WgmmaOfTokens =
    sm90::Latent<bfloat16_t, TileShape<576, 512, 64, 32, 4, 2>, with::StoredAs<DsMla>>;
using WgmmaOfValues = sm90::Latent<half_t, TileShape<512, 512, 64, 32, 4, 2>, with::OwnValues>;

// The cache in pages, in an irregular order. All other rows are NaN.
template <int kSize>
struct PagesOf {
  static constexpr int kPageSize = kSize;
  Problem problem;
  int const each;  // pages of a batch entry
  std::vector<int32_t> table, used;
  Rows k;

  explicit PagesOf(Problem const& p)
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
  PagesOf(PagesOf const&) = delete;
  void give_back() {}

  // The row of a key among the rows of all pages.
  int64_t slot(int batch, int key) const {
    return int64_t(table[size_t(batch * each + key / kPageSize)]) * kPageSize + key % kPageSize;
  }
};

using Paged = PagesOf<13>;
using PagesOfBoxes = PagesOf<32>;  // TMA copies units of 16 rows

// V in pages of its own.
struct PagesOfValues : PagesOfBoxes {
  packed::Rows v;

  explicit PagesOfValues(Problem const& p)
      : PagesOfBoxes(p), v(int64_t(table.size()) * kPageSize * p.head_dim_v + 1) {
    v.move(p.v, p.batch, 1, p.seq_k.seqlen, p.head_dim_v, false,
           [&](int b, int, int r) { return slot(b, r) * p.head_dim_v; });
    problem.v = {v.memory.data(), int64_t(kPageSize) * p.head_dim_v, p.head_dim_v, p.head_dim_v,
                 p.v.dtype};
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

// The same with a block table: places of a list are keys of the entry, whose table is longer than
// its keys.
struct ListedInPages : Listed {
  std::vector<int32_t> lengths;

  explicit ListedInPages(Problem const& p) : Listed(p), lengths(size_t(p.batch), p.seq_k.seqlen) {
    int64_t const rows = int64_t(p.batch) * each * kPageSize;
    std::vector<int32_t> key_of(size_t(rows), 0);
    for (int b = 0; b < p.batch; ++b) {
      for (int key = 0; key < p.seq_k.seqlen; ++key) key_of[size_t(slot(b, key))] = key;
    }
    // What is no key is now the first row beyond the entry's keys.
    for (int32_t& row : lists) {
      if (row == 1 << 30) continue;
      row = row < 0 || row >= rows ? p.seq_k.seqlen : key_of[size_t(row)];
    }
    problem.kv.block_table = table.data();
    problem.kv.list_seqlens = lengths.data();
  }
};

// The cache in bytes, where K is e4m3 and less than 28. What is no key is NaN, in scales as well.
template <class Format, class Cache>
struct Tokens : Cache {
  static constexpr TokenFormat kFormat = Format::kFormat;
  // A multiple of 16, and of the 576 to which engines pad.
  static constexpr int64_t kPageBytes = (Cache::kPageSize * kFormat.token_bytes + 575) / 576 * 576;
  std::vector<uint8_t> bytes;

  explicit Tokens(Problem const& p) : Cache(p), bytes(size_t(kPageBytes) * table().size(), 0xff) {
    for (int b = 0; b < p.batch; ++b) {
      for (int key = 0; key < p.seq_k.seqlen; ++key) {
        auto const* const row =
            static_cast<uint16_t const*>(p.k.data) + b * p.k.batch_stride + key * p.k.row_stride;
        store(row, p.k.dtype, this->slot(b, key), b + key);
      }
    }
    DType const dtype = kFormat.scale_bytes == 4 ? DType::kDsMla : DType::kDsMlaV4;
    this->problem.k = {bytes.data(), kPageBytes, 0, kFormat.row_bytes, dtype};
    this->problem.v = this->problem.k;
  }

 private:
  std::vector<int32_t> const& table() const { return Cache::table; }

  // Each group has a scale of 1 to 1/16. Bytes as engines have them, whatever the kernel takes.
  void store(uint16_t const* row, DType dtype, int64_t slot, int seed) {
    constexpr bool kIsV4 = std::is_same_v<Format, DsMlaV4>;
    int64_t const r = slot % Cache::kPageSize;
    uint8_t* const page = bytes.data() + slot / Cache::kPageSize * kPageBytes;
    uint8_t* const to = page + r * (kIsV4 ? 576 : 656);
    auto const number = [&](int d) {
      return dtype == DType::kFloat16 ? half_to_float(row[d]) : bfloat16_to_float(row[d]);
    };
    constexpr int kColumns = kIsV4 ? 448 : 512, kGroup = kIsV4 ? 64 : 128;
    for (int d = 0; d < kColumns; ++d) {
      int const group = d / kGroup, power = (seed + 3 * group) % 5;
      to[d] = to_e4m3(number(d) * float(1 << power)).bits;
      float const scale = 1.0f / float(1 << power);
      if (kIsV4) {
        page[Cache::kPageSize * 576 + r * 8 + group] = uint8_t(127 - power);
      } else {
        std::memcpy(to + 512 + 4 * group, &scale, 4);
      }
    }
    for (int d = 0; d < 64; ++d) {
      uint16_t const bits = bfloat16_bits(number(kColumns + d));
      std::memcpy(to + (kIsV4 ? 448 : 528) + 2 * d, &bits, 2);
    }
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

// Runs the case in `splits` parts, with a workspace of garbage.
template <class Kernel, class Cache, class Score>
std::string run(SolvedCase& solved, int splits, simt::FiberOrder order) {
  static KernelUnit const unit = simt::unit_of<Kernel, Score>();
  constexpr KernelArguments arguments = simt::arguments_of_kernel<Kernel, Score>();
  Cache cache(solved.call());
  cache.problem.num_splits = splits;
  std::vector<char> workspace(size_t(arguments.workspace_bytes(cache.problem, {}, unit.facts)),
                              char(0xff));
  RunOptions options;
  options.workspace = {workspace.data(), int64_t(workspace.size())};
  simt::launch_schedule().order = order;
  Status const status = launch(arguments, unit, cache.problem, {}, options);
  if (!status.ok()) return status.message;
  cache.give_back();
  return solved.verdict();
}

template <class Kernel, class Cache, class Score = IdentityScore>
void check(Case what, DType dtype, std::initializer_list<int> all_splits) {
  constexpr simt::FiberOrder kOrders[] = {simt::FiberOrder::kForward, simt::FiberOrder::kReverse};
  static int call = 0;
  what.latent_kv = !std::is_base_of_v<WgmmaOfValues, Kernel>;
  what.max_logits = Score::kKeepsMaxLogit;
  SolvedCase solved(what, dtype);
  for (int splits : all_splits) {
    ++call;
    for (int i = 0; i < 2; ++i) {
      if (is_left_out(i, call)) continue;
      simt::FiberOrder const order = kOrders[i];
      std::string const error = run<Kernel, Cache, Score>(solved, splits, order);
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

// Of up to 8 splits a thread of the merge reads all, of more every n-th.
TEST(merges) {
  check<Latent, Paged>(make("shares of splits", 1, 700, 12, 2), DType::kFloat16,
                       {2, 4, 7, 9, 17, 21});
  Case many = make("more splits than a thread reads at once", 1, 2400, 3);
  many.sinks = true;
  check<Latent, Dense>(many, DType::kFloat16, {75});
}

TEST(wgmma) {
  check<Wgmma, Dense>(make("more tiles than stages", 1, 330, 64), DType::kFloat16, {1, 3});
  Case rises = make("a row max that few keys raise", 3, 170, 24);
  rises.magnitude = 8;
  check<Wgmma, Dense>(rises, DType::kFloat16, {1, 2});
  Case nan = make("NaN in a key", 2, 100, 3);
  nan.nan_key = 40;
  check<Wgmma, Dense>(nan, DType::kFloat16, {1});
  Case window = causal(make("a window", 2, 200, 4));
  window.window_left = 50;
  check<Wgmma, Dense>(window, DType::kFloat16, {2});
  check<Wgmma, Dense>(causal(make("a tile for each head", 70, 90, 2)), DType::kFloat16, {1});
  check<WgmmaOfBFloat16, Dense>(make("bf16", 1, 150, 128), DType::kBFloat16, {1});
  check<Wgmma, Packed>(causal(make("packed", 3, 60, 40, 2)), DType::kFloat16, {1, 2});
}

TEST(wgmma_pages) {
  Case queries = causal(make("rows of two tiles", 5, 100, 20, 2));
  queries.sinks = true;
  queries.softmax_scale = 0.07f;
  check<Wgmma, Paged>(queries, DType::kFloat16, {1, 3});
  check<Wgmma, Paged>(make("no key", 2, 0, 3), DType::kFloat16, {1, 2});
  check<Wgmma, Paged>(make("one key", 1, 1, 3), DType::kFloat16, {1});
  check<Wgmma, Paged>(make("a merge of groups", 1, 900, 4), DType::kFloat16, {18});
  Case without_tail = causal(make("512 columns", 2, 250, 20));
  without_tail.head_dim = 512;
  check<WgmmaWithoutTail, Paged>(without_tail, DType::kFloat16, {1, 3});
  Case smaller = make("fewer columns", 1, 75, 16);
  smaller.head_dim = 320;
  smaller.head_dim_v = 256;
  check<Wgmma, Paged>(smaller, DType::kFloat16, {1});
}

TEST(wgmma_lists) {
  check<Wgmma, Listed>(make("two tiles of heads", 2, 170, 70), DType::kFloat16, {1, 2});
  Case queries = causal(make("other keys for each query", 5, 60, 12, 2));
  queries.sinks = true;
  check<Wgmma, Listed>(queries, DType::kFloat16, {1});
  check<Wgmma, Listed>(make("no key", 2, 0, 3), DType::kFloat16, {1});
  check<Wgmma, Listed>(causal(make("few rows", 6, 3, 2)), DType::kFloat16, {1});
  check<WgmmaWithoutTail, ListedInPages>(
      [] {
        Case x = make("in pages", 2, 75, 40, 2);
        x.head_dim = 512;
        return x;
      }(),
      DType::kFloat16, {1, 2});
}

Case of_tokens(Case x, int head_dim = 576) {
  x.fp8_kv = true;
  x.head_dim = head_dim;
  return x;
}

TEST(tokens) {
  using Pages = Tokens<DsMla, Paged>;
  using PagesV4 = Tokens<DsMlaV4, Paged>;
  Case queries = of_tokens(causal(make("a few queries", 5, 100, 12, 2)));
  queries.sinks = true;
  check<OfTokens, Pages>(queries, DType::kFloat16, {1, 3});
  check<OfTokens, Pages>(of_tokens(make("no key", 2, 0, 3)), DType::kFloat16, {1, 2});
  check<OfTokens, Pages>(of_tokens(make("one key", 1, 1, 3)), DType::kFloat16, {1});
  check<OfTokensV4, PagesV4>(of_tokens(causal(make("V4", 2, 130, 16, 2)), 512), DType::kBFloat16,
                             {1, 2});
  check<OfManyRowsOfTokens, Pages>(of_tokens(causal(make("many rows", 3, 100, 40))),
                                   DType::kBFloat16, {1, 2});
  check<OfManyRowsOfTokensV4, PagesV4>(of_tokens(make("many rows, V4", 2, 120, 40), 512),
                                       DType::kFloat16, {1, 2});
}

TEST(wgmma_tokens) {
  Case queries = of_tokens(causal(make("a few queries", 5, 300, 20, 2)));
  queries.sinks = true;
  check<WgmmaOfTokens, Tokens<DsMla, Paged>>(queries, DType::kBFloat16, {1, 3});
  check<WgmmaOfTokens, Tokens<DsMla, Paged>>(of_tokens(make("one key", 1, 1, 3)), DType::kBFloat16,
                                             {1, 2});
  check<WgmmaOfTokens, Tokens<DsMla, Listed>>(of_tokens(make("lists", 2, 170, 70)),
                                              DType::kBFloat16, {1, 2});
  check<WgmmaOfTokens, Tokens<DsMla, ListedInPages>>(
      of_tokens(causal(make("in pages", 4, 70, 8, 2))), DType::kBFloat16, {1});
}

Case of_values(char const* name, int rows) {
  Case values = make(name, 2, 200, rows, 2);
  values.num_heads_kv = 2;
  values.head_dim = 512;
  return values;
}

Case fewer_columns(Case values) {
  values.head_dim = 448;
  values.head_dim_v = 384;
  return values;
}

// Two blocks bring in half of each tile each: units of 16 keys by TMA, others by cp.async.
TEST(wgmma_clusters) {
  check<Wgmma, Dense>(make("more tiles than stages", 1, 330, 128, 2), DType::kFloat16, {1, 3});
  Case rises = make("rows of two queries in a tile", 4, 170, 32);
  rises.magnitude = 8;
  rises.sinks = true;
  check<Wgmma, Dense>(rises, DType::kFloat16, {1, 2});
  check<Wgmma, Dense>(causal(make("a query for each cluster", 3, 100, 128)), DType::kFloat16, {1});
  Case window = causal(make("NaN before the window", 1, 200, 128));
  window.window_left = 50;
  window.nan_key = 146;
  check<Wgmma, PagesOfBoxes>(window, DType::kFloat16, {1, 2});
  check<Wgmma, PagesOfBoxes>(make("few rows in the second tile", 1, 150, 70, 2), DType::kFloat16,
                             {2});
  Case other_keys = causal(make("other keys in the second tile", 120, 150, 1));
  other_keys.sinks = true;
  check<Wgmma, PagesOfBoxes>(other_keys, DType::kFloat16, {1, 3});
  other_keys.seqlen_k = 40;  // the first tile has none
  check<Wgmma, Dense>(other_keys, DType::kFloat16, {1, 2});
  check<Wgmma, PagesOfBoxes>(make("no key", 1, 0, 128, 2), DType::kFloat16, {1, 2});
  check<Wgmma, PagesOfBoxes>(make("one key", 1, 1, 128), DType::kFloat16, {1});
  check<Wgmma, PagesOfBoxes>(make("many splits", 1, 900, 128), DType::kFloat16, {18});
  check<WgmmaOfBFloat16, PagesOfBoxes>(make("one unit", 1, 16, 128), DType::kBFloat16, {1});
  check<WgmmaOfValues, Dense>(of_values("two KV heads", 128), DType::kFloat16, {1, 3});
  check<WgmmaOfValues, Dense>(fewer_columns(of_values("fewer columns", 128)), DType::kFloat16, {1});
}

// A block alone copies units of K and V by TMA.
TEST(wgmma_boxes_of_one_block) {
  check<WgmmaOfValues, Dense>(of_values("two KV heads", 40), DType::kFloat16, {1, 3});
  check<WgmmaOfValues, Dense>(fewer_columns(of_values("fewer columns", 40)), DType::kFloat16, {1});
  Case window = causal(of_values("NaN before the window", 6));
  window.window_left = 50;
  window.nan_key = 146;
  check<WgmmaOfValues, Dense>(window, DType::kFloat16, {1, 2});
  Case pages = causal(of_values("pages", 6));
  pages.num_heads_kv = 1;
  check<WgmmaOfValues, PagesOfValues>(pages, DType::kFloat16, {1, 3});
  Case packed = of_values("packed", 4);
  check<WgmmaOfValues, Packed>(packed, DType::kFloat16, {1, 2});
}

TEST(wgmma_clusters_of_tokens) {
  Case pages = of_tokens(make("pages", 1, 500, 128, 2));
  pages.sinks = true;
  check<WgmmaOfTokens, Tokens<DsMla, Paged>>(pages, DType::kBFloat16, {1, 3});
  check<WgmmaOfTokens, Tokens<DsMla, Paged>>(of_tokens(make("no key", 1, 0, 128)), DType::kBFloat16,
                                             {1});
  check<WgmmaOfTokens, Tokens<DsMla, Paged>>(of_tokens(make("one key", 1, 1, 128)),
                                             DType::kBFloat16, {2});
  check<WgmmaOfTokens, Tokens<DsMla, Listed>>(of_tokens(make("lists", 2, 250, 100)),
                                              DType::kBFloat16, {1, 2});
}

// Blocks share copies only if their tiles of rows surely go through the same keys.
TEST(wgmma_clusters_read_the_same_keys) {
  KernelFacts const facts = facts_of<WgmmaOfTokens>();
  auto const cluster_of = [&](Problem const& p, KernelFacts const& facts) {
    return LatentBoxParams::prepare(p, {}, {}, facts).launch(facts).cluster;
  };
  Problem one;  // a query of 128 heads
  one.batch = 3;
  one.num_heads_q = 128;
  one.num_heads_kv = 1;
  one.head_dim = 576;
  one.head_dim_v = 512;
  one.seq_q.seqlen = 1;
  one.seq_k.seqlen = 1000;
  one.mask.causal = true;
  CHECK_EQ(cluster_of(one, facts), 2);
  CHECK_EQ(cluster_of(one, facts_of<Wgmma>()), 2);
  CHECK_EQ(cluster_of(one, facts_of<OfManyRows>()), 1);  // mma.sync
  Problem few = one, odd = one, four = one;
  few.num_heads_q = 64;  // one tile
  CHECK_EQ(cluster_of(few, facts), 1);
  odd.num_heads_q = 192;
  CHECK_EQ(cluster_of(odd, facts), 1);
  four.seq_q.seqlen = 4;  // a query for each two tiles
  CHECK_EQ(cluster_of(four, facts), 2);
  four.num_heads_q = 64;  // a query for each tile
  CHECK_EQ(cluster_of(four, facts), 2);
  four.mask.window_left = 100;
  CHECK_EQ(cluster_of(four, facts), 1);
  int32_t const lengths[4] = {0, 1, 2, 3};
  Problem packed = one, padded = one;
  packed.seq_q = {1, lengths, nullptr, nullptr, 3};
  CHECK_EQ(cluster_of(packed, facts), 1);
  padded.seq_q.seqused = lengths;
  CHECK_EQ(cluster_of(padded, facts), 1);
  Problem paged = one, listed = one, fewer = one;  // what TMA cannot copy, unless it is converted
  paged.kv = {lengths, 4, 24, 4};
  listed.kv.indices = lengths, listed.kv.page_size = 16;
  fewer.head_dim = 568;
  for (Problem* p : {&paged, &listed, &fewer}) {
    CHECK_EQ(cluster_of(*p, facts), 1);
    p->k.dtype = DType::kDsMla;
    CHECK_EQ(cluster_of(*p, facts), 2);
  }
  paged.k.dtype = one.k.dtype;
  paged.kv.page_size = 48;
  CHECK_EQ(cluster_of(paged, facts), 2);
}

TEST(lists_of_tokens) {
  check<OfTokens, Tokens<DsMla, Listed>>(of_tokens(make("one query", 1, 100, 20, 2)),
                                         DType::kFloat16, {1, 3});
  check<OfTokensV4, Tokens<DsMlaV4, Listed>>(of_tokens(causal(make("V4", 3, 70, 5)), 512),
                                             DType::kBFloat16, {1, 2});
  check<OfManyRowsOfTokens, Tokens<DsMla, Listed>>(of_tokens(make("many rows", 2, 75, 70)),
                                                   DType::kBFloat16, {1, 2});
  check<OfTokens, Tokens<DsMla, ListedInPages>>(of_tokens(causal(make("in pages", 4, 70, 8, 2))),
                                                DType::kFloat16, {1, 2});
}

TEST(lists_in_pages) {
  check<Latent, ListedInPages>(make("one query", 1, 100, 20, 2), DType::kFloat16, {1, 3});
  check<Latent, ListedInPages>(causal(make("other keys for each query", 5, 60, 12, 2)),
                               DType::kFloat16, {1, 2});
  check<OfManyRows, ListedInPages>(make("many rows", 2, 75, 40, 2), DType::kFloat16, {1});
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

// Merged over splits, some of which have no keys. Sinks are larger than any logit.
TEST(largest_logits) {
  using Largest = Score<MaxLogit>;
  Case rises = make("a row max that few keys raise", 3, 170, 5);
  rises.magnitude = 8;
  check<Latent, Dense, Largest>(rises, DType::kFloat16, {1, 3});
  check<OfManyRows, Dense, Largest>(rises, DType::kFloat16, {2});
  check<Wgmma, Dense, Largest>(rises, DType::kFloat16, {1, 2});
  Case lists = causal(make("lists, no key of the first queries", 6, 3, 2));
  lists.sinks = true;
  lists.magnitude = 0.01f;
  check<Latent, Listed, Largest>(lists, DType::kFloat16, {1});
  check<Latent, Paged, Largest>(make("many splits", 1, 700, 4), DType::kFloat16, {21});
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
