// Checks arrays that lie on the host: offsets, lengths and pages. On a GPU only kernels read them.
#include <algorithm>
#include <numeric>
#include <string>

#include "core/sequences.hpp"
#include "runtime/check_lengths.hpp"

namespace cutlass_attn {
namespace {

std::string entry(std::string const& name, int64_t at) {
  return name + "[" + std::to_string(at) + "]";
}

// Whether the offsets look like lengths: the first is not 0, and they add up to all rows.
bool are_lengths(Sequences const& s, int32_t batch) {
  if (s.cu_seqlens[0] <= 0) return false;
  return std::accumulate(s.cu_seqlens, s.cu_seqlens + batch + 1, int64_t(0)) == s.total;
}

// `operand`: "q" or "k". An entry may have up to `most` rows, the rows of `holder`.
Status check(std::string const& operand, Sequences const& s, int32_t batch, int64_t most,
             char const* holder) {
  std::string const cu_seqlens = "cu_seqlens_" + operand, seqused = "seqused_" + operand;
  std::string const leftpad = "leftpad_" + operand;
  if (s.cu_seqlens && are_lengths(s, batch)) {
    return Status::invalid(cu_seqlens + " has lengths, which sum up to the " +
                           std::to_string(s.total) + " rows of " + operand +
                           "; allowed: offsets, 0 and after each sequence the sum so far");
  }
  if (s.cu_seqlens && batch > 0 && s.cu_seqlens[0] < 0) {
    return Status::invalid(entry(cu_seqlens, 0) + " is " + std::to_string(s.cu_seqlens[0]) +
                           ", allowed: 0 or more");
  }
  for (int32_t b = 0; b < batch; ++b) {
    int64_t rows = most;
    if (s.cu_seqlens) {
      int64_t const begin = s.cu_seqlens[b], end = s.cu_seqlens[b + 1];
      if (end < begin) {
        return Status::invalid(entry(cu_seqlens, b + 1) + " is " + std::to_string(end) +
                               ", allowed: " + std::to_string(begin) +
                               " or more, as the offset before it");
      }
      if (end > s.total) {
        return Status::invalid(entry(cu_seqlens, b + 1) + " is " + std::to_string(end) + ", but " +
                               operand + " has " + std::to_string(s.total) + " rows");
      }
      rows = end - begin;
      if (rows > s.seqlen) {
        return Status::invalid("entry " + std::to_string(b) + " of " + cu_seqlens + " has " +
                               std::to_string(rows) + " rows, but seqlen_" + operand +
                               ", the maximum, is " + std::to_string(s.seqlen));
      }
    }
    if (s.seqused && (s.seqused[b] < 0 || s.seqused[b] > rows)) {
      return Status::invalid(entry(seqused, b) + " is " + std::to_string(s.seqused[b]) + ", but " +
                             (s.cu_seqlens ? cu_seqlens.c_str() : holder) + " has " +
                             std::to_string(rows) + " rows for that entry");
    }
    int64_t const end = s.seqused ? s.seqused[b] : rows;
    if (s.leftpad && (s.leftpad[b] < 0 || s.leftpad[b] > end)) {
      return Status::invalid(entry(leftpad, b) + " is " + std::to_string(s.leftpad[b]) +
                             ", allowed: 0 to " + std::to_string(end) +
                             ", the end of the valid rows of " + operand + " in that entry");
    }
  }
  return {};
}

}  // namespace

Status check_pages(KvStore const& kv, int32_t batch_entry, int64_t rows) {
  int64_t const pages = (rows + kv.page_size - 1) / kv.page_size;
  int32_t const* const table = kv.block_table + batch_entry * kv.block_table_stride;
  auto const wrong = std::find_if(table, table + pages,
                                  [&](int32_t page) { return page < 0 || page >= kv.num_pages; });
  if (wrong == table + pages) return {};
  return Status::invalid("block_table[" + std::to_string(batch_entry) + ", " +
                         std::to_string(wrong - table) + "] is " + std::to_string(*wrong) +
                         ", allowed: 0 to " + std::to_string(kv.num_pages - 1) +
                         ", the pages of the cache");
}

namespace {

// Checks the entries of the lists that are read.
Status check_indices(Problem const& p, int32_t batch) {
  int64_t const rows = KeyList(p, batch, 0).num_rows;
  int32_t const keys = VarlenSeqInfo(p, batch).lens(p).k;
  for (int32_t query = 0; query < p.seq_q.seqlen; ++query) {
    int32_t const* const list =
        p.kv.indices + batch * p.kv.indices_batch_stride + query * p.kv.indices_query_stride;
    auto const wrong =
        std::find_if(list, list + keys, [&](int32_t row) { return row < -1 || row >= rows; });
    if (wrong == list + keys) continue;
    return Status::invalid(
        "indices[" + std::to_string(batch) + ", " + std::to_string(query) + ", " +
        std::to_string(wrong - list) + "] is " + std::to_string(*wrong) + ", allowed: 0 to " +
        std::to_string(rows - 1) +
        (p.kv.list_seqlens ? ", the rows of the entry" : ", the rows of all pages") +
        ", or -1 for none");
  }
  return {};
}

}  // namespace

Status check_lengths(Problem const& p) {
  Status status = check("q", p.seq_q, p.batch, p.seq_q.seqlen, "q");
  if (status.ok()) {
    status = check("k", p.seq_k, p.batch, p.seq_k.seqlen, p.kv.block_table ? "block_table" : "k");
  }
  for (int32_t b = 0; b < p.batch && status.ok() && p.kv.block_table; ++b) {
    bool const is_listed = p.kv.list_seqlens != nullptr;
    status = check_pages(p.kv, b, is_listed ? p.kv.list_seqlens[b] : VarlenSeqInfo(p, b).lens(p).k);
  }
  for (int32_t b = 0; b < p.batch && status.ok() && p.kv.indices; ++b) status = check_indices(p, b);
  return status;
}

}  // namespace cutlass_attn
