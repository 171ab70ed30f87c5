// append_kv(): checks, the CPU loop, and the call of the GPU kernel. CMake defines
// CUTLASS_ATTN_CUDA as 0 or 1.
#include "serving/append.hpp"

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "cpu/element.hpp"
#include "runtime/check_lengths.hpp"
#include "runtime/device.hpp"
#include "runtime/options.hpp"
#include "runtime/overlap.hpp"
#include "serving/append_kernel.hpp"
#include "serving/elements.hpp"

namespace cutlass_attn {
namespace {

using serving::AppendParams;
using serving::AppendRow;
using serving::is_stored_as_fp8;

Status check(AppendProblem const& p) {
  // Queries beyond the last position are rotated by it.
  int32_t const positions = p.rotary.dim > 0 ? std::max(p.cache_rows, p.q.data ? 1 : 0) : 0;
  struct {
    char const* name;
    int64_t value, least, most;
  } const dims[] = {
      {"batch", p.batch, 0, INT32_MAX},
      {"seqlen", p.seqlen, 0, kMaxSeqlen},
      {"num_heads_kv", p.num_heads_kv, 0, INT32_MAX},
      {"head_dim", p.head_dim, 1, kMaxHeadDim},
      {"head_dim_v", p.head_dim_v, 1, kMaxHeadDim},
      {"page_size", p.kv.page_size, 1, INT32_MAX},
      {"num_pages", p.kv.num_pages, 0, INT32_MAX},
      {"cache_rows", p.cache_rows, 0, kMaxSeqlen},
      {"rotary.dim", p.rotary.dim, 0, p.head_dim},
      {"rotary.positions", p.rotary.positions, positions, INT32_MAX},
      {"num_pages x page_size", int64_t(p.kv.num_pages) * p.kv.page_size, 0, INT32_MAX},
      {"rows in all", AppendRow<float>::rows(p), 0, INT32_MAX},
  };
  for (auto const& dim : dims) {
    if (dim.value < dim.least || dim.value > dim.most) {
      return Status::invalid(std::string(dim.name) + " is " + std::to_string(dim.value) +
                             ", allowed: " + std::to_string(dim.least) + " to " +
                             std::to_string(dim.most));
    }
  }
  if (p.rotary.dim % 2 != 0) {
    return Status::invalid("rotary.dim is " + std::to_string(p.rotary.dim) +
                           ", allowed: an even number");
  }
  struct {
    char const* name;
    Operand const& operand;
  } const operands[] = {
      {"k", p.k}, {"v", p.v}, {"k_cache", p.k_cache}, {"v_cache", p.v_cache}, {"q", p.q}};
  for (auto const& [name, operand] : operands) {
    bool const is_cache = &operand == &p.k_cache || &operand == &p.v_cache;
    if (is_cache && (is_stored_as_fp8(p) || is_token_format(p.k_cache.dtype))) continue;
    if (operand.dtype != p.k.dtype && operand.data != nullptr) {
      return Status::invalid(std::string(name) + " is " + name_of(operand.dtype) +
                             ", allowed: " + name_of(p.k.dtype) + " like k" +
                             (is_cache ? ", or float8_e4m3fn for both caches" : ""));
    }
  }
  if (p.k.dtype == DType::kFloat64 || int32_t(p.k.dtype) >= kNumDTypes) {
    return Status::no_kernel(std::string(p.slot_mapping ? "k is " : "k_new is ") +
                             name_of(p.k.dtype) + ", allowed: float16, bfloat16, float32");
  }
  if (p.q.data && p.rotary.dim == 0) {
    return Status::invalid("q is set, but rotary.dim is 0: q would not be rotated");
  }
  if (is_token_format(p.k_cache.dtype)) {
    TokenFormat const format = format_of(p.k_cache.dtype);
    std::string const is = std::string("k_cache is ") + name_of(p.k_cache.dtype) + ", and ";
    if (p.head_dim != format.columns || p.num_heads_kv > 1) {
      return Status::invalid(is + "k has " + std::to_string(p.num_heads_kv) + " heads of " +
                             std::to_string(p.head_dim) + " columns; allowed: 1 of " +
                             std::to_string(format.columns));
    }
    if (p.v.data || p.v_cache.data) return Status::invalid(is + "v is given; allowed: none");
    if (p.k_cache.scale) return Status::invalid(is + "k_scale is given; allowed: None");
    if (p.rotary.dim > 0) {
      return Status::invalid(is + "rotary_cos is given; allowed: None, for rows rotated before");
    }
    if (p.k_cache.row_stride != format.row_bytes) {
      return Status::invalid(is + "its row stride is " + std::to_string(p.k_cache.row_stride) +
                             "; allowed: " + std::to_string(format.row_bytes));
    }
    if (reinterpret_cast<uint64_t>(p.k_cache.data) % 4 != 0 || p.k_cache.batch_stride % 4 != 0) {
      return Status::invalid(is + "its address or page stride is no multiple of 4 bytes");
    }
  }
  bool const by_slots = p.slot_mapping != nullptr, by_lengths = p.cache_seqlens != nullptr;
  if (by_slots == by_lengths && p.batch > 0 && p.seqlen > 0) {
    return Status::invalid(by_slots ? "slot_mapping and cache_seqlens are both set; allowed: one"
                                    : "neither slot_mapping nor cache_seqlens is set");
  }
  if (by_slots && (p.rotary.dim > 0 || p.q.data || p.seqlens_after)) {
    return Status::invalid(
        "slot_mapping tells no positions: rotary, q and seqlens_after need cache_seqlens");
  }
  return {};
}

// Checks that stored rows overlap neither each other nor rows that are read.
Status check_memory(AppendProblem const& p) {
  auto const rows = [](Operand const& t, int64_t batch, int64_t heads, int64_t seqlen,
                       int64_t head_dim) {
    int64_t const bytes = size_of(t.dtype);
    return StridedRows{reinterpret_cast<int64_t>(t.data),
                       {t.batch_stride * bytes, t.head_stride * bytes, t.row_stride * bytes, 0},
                       {batch, heads, seqlen, 1},
                       head_dim * bytes};
  };
  bool const by_slots = p.slot_mapping != nullptr;
  bool const has_v = !is_token_format(p.k_cache.dtype);
  auto const cache = [&](Operand t, int64_t head_dim) {
    // All bytes of a page of tokens, as if its scales were in the rows.
    if (!has_v) head_dim = t.row_stride = format_of(p.k_cache.dtype).token_bytes;
    return rows(t, p.kv.num_pages, p.num_heads_kv, p.kv.page_size, head_dim);
  };
  struct {
    char const* name;
    StridedRows rows;
    bool is_written;
  } const all[] = {
      {"k_cache", cache(p.k_cache, p.head_dim), true},
      {"v_cache", has_v ? cache(p.v_cache, p.head_dim_v) : StridedRows{}, true},
      {by_slots ? "k" : "k_new", rows(p.k, p.batch, p.num_heads_kv, p.seqlen, p.head_dim), false},
      {by_slots ? "v" : "v_new",
       rows(p.v, has_v ? p.batch : 0, p.num_heads_kv, p.seqlen, p.head_dim_v), false},
      {"q", rows(p.q, p.q.data ? p.batch : 0, p.num_heads_q, p.seqlen_q, p.head_dim), false}};
  for (auto const& a : all) {
    if (!span_is_sane(a.rows)) {
      return Status::invalid(std::string(a.name) +
                             "'s strides reach further than any address space");
    }
  }
  for (auto const& a : all) {
    if (!a.is_written) break;
    if (overlaps_itself(a.rows)) {
      return Status::invalid(std::string("the rows of ") + a.name +
                             " overlap each other, as those of an expanded array do; new keys "
                             "need memory of their own for every row");
    }
    for (auto const* b = &a + 1; b != std::end(all); ++b) {
      if (!overlap(a.rows, b->rows)) continue;
      return Status::invalid(std::string(b->name) + " overlaps " + a.name +
                             ", which is written; allowed: separate memory");
    }
  }
  return {};
}

// Checks that no two new rows go to one row of the cache.
Status check_rows_apart(AppendProblem const& p) {
  struct Place {
    int64_t row;
    int32_t batch;
  };
  std::vector<Place> places;
  places.reserve(size_t(int64_t(p.batch) * p.seqlen));
  for (int32_t b = 0; b < p.batch; ++b) {
    for (int32_t i = 0; i < p.seqlen; ++i) {
      int32_t const key = p.cache_seqlens[b] + i;
      int64_t const page = p.kv.block_table[b * p.kv.block_table_stride + key / p.kv.page_size];
      places.push_back({page * p.kv.page_size + key % p.kv.page_size, b});
    }
  }
  std::sort(places.begin(), places.end(),
            [](Place const& x, Place const& y) { return x.row < y.row; });
  auto const same = std::adjacent_find(places.begin(), places.end(),
                                       [](auto& x, auto& y) { return x.row == y.row; });
  if (same == places.end()) return {};
  auto const [first, second] = std::minmax(same[0].batch, same[1].batch);
  return Status::invalid("new keys of sequences " + std::to_string(first) + " and " +
                         std::to_string(second) + " both go to row " +
                         std::to_string(same->row % p.kv.page_size) + " of page " +
                         std::to_string(same->row / p.kv.page_size) +
                         ", as block_table or cache_batch_idx says; allowed: a row for each");
}

// Checks the contents of arrays that are on the host.
Status check_on_host(AppendProblem const& p) {
  int64_t const slots = int64_t(p.kv.num_pages) * p.kv.page_size;
  for (int64_t i = 0; p.slot_mapping && i < int64_t(p.batch) * p.seqlen; ++i) {
    if (p.slot_mapping[i] < slots) continue;
    return Status::invalid("slot_mapping[" + std::to_string(i) + "] is " +
                           std::to_string(p.slot_mapping[i]) +
                           ", allowed: a negative number to skip the row, or a slot of the " +
                           std::to_string(slots) + " of the cache");
  }
  for (int32_t b = 0; p.cache_seqlens && b < p.batch; ++b) {
    int64_t const before = p.cache_seqlens[b], after = before + p.seqlen;
    std::string const name = "cache_seqlens[" + std::to_string(b) + "]";
    if (before < 0) {
      return Status::invalid(name + " is " + std::to_string(before) + ", allowed: 0 or more");
    }
    if (after > p.cache_rows) {
      return Status::invalid(name + " is " + std::to_string(before) + " and there are " +
                             std::to_string(p.seqlen) + " new keys, but " +
                             (p.kv.block_table ? "block_table" : "the cache") + " covers " +
                             std::to_string(p.cache_rows) + " keys");
    }
    if (!p.kv.block_table) continue;
    Status const status = check_pages(p.kv, b, after);
    if (!status.ok()) return status;
  }
  return p.cache_seqlens && p.kv.block_table ? check_rows_apart(p) : Status{};
}

// Whether all rows are aligned to 16 bytes and have lengths that are multiples of 16 bytes.
bool is_aligned(AppendProblem const& p) {
  int64_t const bytes = size_of(p.k.dtype);
  bool result = p.head_dim * bytes % 16 == 0 && p.head_dim_v * bytes % 16 == 0;
  for (Operand const* t : {&p.k, &p.v, &p.k_cache, &p.v_cache}) {
    result &= reinterpret_cast<uint64_t>(t->data) % 16 == 0;
    for (int64_t stride : {t->batch_stride, t->head_stride, t->row_stride}) {
      result &= stride * bytes % 16 == 0;
    }
  }
  return result;
}

template <class Element, class Stored>
void append_rows(AppendParams const& params) {
  AppendProblem const& p = params.problem;
  AppendRow<Element, Stored, cpu::Convert> const row{p, params.is_aligned, 0, 1};
  for (int64_t i = 0; i < row.rows(p); ++i) row.run(i);
}

template <class Element>
void append_on_host(AppendParams const& params) {
  if (is_token_format(params.problem.k_cache.dtype)) {
    append_rows<Element, serving::Tokens>(params);
  } else if (is_stored_as_fp8(params.problem)) {
    append_rows<Element, E4M3>(params);
  } else {
    append_rows<Element, Element>(params);
  }
}

}  // namespace

Status append_kv(AppendProblem const& p, LaunchOptions const& options) {
  Status status = check(p);
  if (!status.ok() || AppendRow<float>::rows(p) == 0) return status;
  status = check_memory(p);
  if (!status.ok()) return status;
  AppendParams const params{p, is_aligned(p)};
  if (options.device == Device::kCuda) {
#if CUTLASS_ATTN_CUDA
    DeviceGuard const guard(options.device_index);
    return guard.status().ok() ? serving::append_on_device(params, options) : guard.status();
#else
    return Status::device_error("this build has no CUDA runtime");
#endif
  }
  status = check_on_host(p);
  if (!status.ok()) return status;
  serving::by_element<cpu::Float16, cpu::BFloat16>(
      p.k.dtype, [&](auto element) { append_on_host<decltype(element)>(params); });
  return {};
}

}  // namespace cutlass_attn
