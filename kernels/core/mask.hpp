// The mask of dense attention: one interval of visible keys per query row.
//
// Query q sees keys [lo(q), hi(q)). Both ends are monotonic in q, so the first and the last row of
// a query tile determine which key tiles to visit and which of them are full and need no predicate
// per element. Causal masks, sliding windows, attention chunks and the ragged end of the keys are
// all intervals.
#pragma once

#include <cstdint>

#include "core/divide.hpp"
#include "core/macros.hpp"
#include "core/problem.hpp"
#include "core/sequences.hpp"

namespace cutlass_attn {

// Key tiles [begin, end) that a tile of queries visits. Tiles in [full_begin, full_end) are visible
// to every row; that range is empty if full_begin >= full_end. For a tile of keys: the query tiles
// that see any of its keys, and the tiles whose every row sees all of them.
struct TileRange {
  int32_t begin, end, full_begin, full_end;

  CA_HOST_DEVICE bool is_full(int32_t tile) const { return tile >= full_begin && tile < full_end; }

  // This range in keys instead of tiles.
  CA_HOST_DEVICE TileRange in_keys(int32_t block_n) const {
    return {begin * block_n, end * block_n, full_begin * block_n, full_end * block_n};
  }
};

// Keys [first, end).
struct KeyRange {
  int32_t first, end;

  CA_HOST_DEVICE bool contains(int32_t key) const {
    return uint32_t(key - first) < uint32_t(end - first);
  }
};

// Intervals of the queries of a tile, in 32-bit arithmetic: query `first` + q sees keys [lo(q),
// hi(q)). Keys below 0 do not exist.
struct TileMask {
  int32_t first_lo, first_hi, seqlen_k;
  int32_t chunk;  // keys of an attention chunk; 0: no chunks, and own_key and by_chunk are not set
  int32_t own_key;  // key on the diagonal of query `first`
  FastDivisor by_chunk;

  CA_HOST_DEVICE int32_t lo(int32_t q) const {
    if (chunk == 0) return window_lo(q);
    return window_lo(q) > chunk_lo(q) ? window_lo(q) : chunk_lo(q);
  }
  CA_HOST_DEVICE int32_t hi(int32_t q) const {
    if (chunk == 0) return window_hi(q);
    return window_hi(q) < chunk_hi(q) ? window_hi(q) : chunk_hi(q);
  }

  // The interval is the intersection of window and chunk. The chunk is defined only if there are
  // chunks.
  CA_HOST_DEVICE int32_t window_lo(int32_t q) const { return first_lo + q; }
  CA_HOST_DEVICE int32_t window_hi(int32_t q) const {
    return first_hi + q < seqlen_k ? first_hi + q : seqlen_k;
  }
  CA_HOST_DEVICE int32_t chunk_lo(int32_t q) const {
    int32_t const key = own_key + q;
    return key < 0 ? -chunk : by_chunk(key) * chunk;
  }
  CA_HOST_DEVICE int32_t chunk_hi(int32_t q) const { return chunk_lo(q) + chunk; }

  // For masks without chunks. from(): the mask counted from query `first` + q. tiles(): key tiles
  // of block_n keys for the queries [q_begin, q_end).
  CA_HOST_DEVICE TileMask from(int32_t q) const {
    TileMask moved = *this;
    moved.first_lo += q;
    moved.first_hi += q;
    return moved;
  }
  CA_HOST_DEVICE TileRange tiles(int32_t q_begin, int32_t q_end, int32_t block_n) const {
    auto const begin = [&](int32_t q) { return window_lo(q) > 0 ? window_lo(q) : 0; };
    auto const end = [&](int32_t q) { return window_hi(q) > 0 ? window_hi(q) : 0; };
    int32_t const last = q_end - 1;
    return {begin(q_begin) / block_n, (end(last) + block_n - 1) / block_n,
            (begin(last) + block_n - 1) / block_n, end(q_begin) / block_n};
  }
};

struct IntervalMask {
  int32_t seqlen_q, seqlen_k;
  int64_t diagonal;   // key on the diagonal of query q is q + diagonal
  int64_t lo_offset;  // lo(q) = q + lo_offset, before clamping
  int64_t hi_offset;  // hi(q) = q + hi_offset, before clamping
  int32_t chunk;      // keys of an attention chunk; 0: no chunks
  FastDivisor by_chunk;

  // On the host.
  IntervalMask(Mask const& mask, SeqLens const& seqlens)
      : IntervalMask(mask, seqlens, divisor_of(mask), true) {}

  // In a kernel, with divisor_of() from the host: a division in the kernel is a call, for which the
  // compiler keeps convergence barriers in every main loop. has_chunks: false in code for calls
  // without chunks. Even a branch that is not taken costs time: on an H200, 7 % of d64 causal
  // 16x1024, and 7 % of the reference shape.
  CA_HOST_DEVICE IntervalMask(Mask const& mask, SeqLens const& seqlens, FastDivisor by_chunk,
                              bool has_chunks)
      : seqlen_q(seqlens.q),
        seqlen_k(seqlens.k),
        diagonal(int64_t(seqlens.k) - seqlens.q + mask.diagonal_shift),
        chunk(has_chunks ? mask.attention_chunk : 0),
        by_chunk(by_chunk) {
    int64_t const right = mask.causal ? 0 : mask.window_right;
    // A row index is under 2^31, so an offset of 2^32 is beyond any key.
    lo_offset = mask.window_left == kUnbounded ? -kFar : diagonal - mask.window_left;
    hi_offset = right == kUnbounded ? kFar : diagonal + right + 1;
  }

  static FastDivisor divisor_of(Mask const& mask) {
    return FastDivisor(mask.attention_chunk > 0 ? mask.attention_chunk : 1);
  }

  // One past the last key that query q sees, in [0, seqlen_k].
  CA_HOST_DEVICE int32_t hi(int32_t q) const { return at(q).hi; }

  // The first key that query q sees, in [0, hi(q)].
  CA_HOST_DEVICE int32_t lo(int32_t q) const { return at(q).lo; }

  // Contains every key that any query of [q_begin, q_end), q_begin < q_end, sees.
  CA_HOST_DEVICE KeyRange keys(int32_t q_begin, int32_t q_end) const {
    return {lo(q_begin), hi(q_end - 1)};
  }

  CA_HOST_DEVICE bool visible(int32_t q, int32_t key) const { return key >= lo(q) && key < hi(q); }

  // Intervals of `queries` queries from `first` on. The default covers all queries, for from().
  CA_HOST_DEVICE TileMask tile_mask(int32_t first, int32_t queries = 1 << 20) const {
    // Ends are moved closer to fit 32 bits. They stay beyond every key.
    int64_t const least = -int64_t(queries);
    auto const bounded = [&](int64_t x) {
      return int32_t(x < least ? least : (x > seqlen_k ? seqlen_k : x));
    };
    TileMask result;
    result.first_lo = bounded(first + lo_offset);
    result.first_hi = bounded(first + hi_offset);
    result.seqlen_k = seqlen_k;
    result.chunk = chunk;
    if (chunk > 0) {
      int64_t const own = first + diagonal;
      result.own_key = int32_t(own < least ? least : (own > kBehind ? kBehind : own));
      result.by_chunk = by_chunk;
    }
    return result;
  }

  // Key tiles of block_n keys for the queries [q_begin, q_end), q_begin < q_end.
  CA_HOST_DEVICE TileRange tiles(int32_t q_begin, int32_t q_end, int32_t block_n) const {
    Ends first = window_at(q_begin), last = window_at(q_end - 1);
    if (chunk > 0) {
      first = in_chunk(first, q_begin);
      last = in_chunk(last, q_end - 1);
    }
    return {first.lo / block_n, ceil_div(last.hi, block_n), ceil_div(last.lo, block_n),
            first.hi / block_n};
  }

  // The inverse. Both ends of a query's interval are monotonic, so the queries that see a key are
  // an interval as well. The key is in [0, seqlen_k).
  CA_HOST_DEVICE int32_t q_lo(int32_t key) const {
    int64_t lo = key - hi_offset + 1;
    if (chunk > 0 && lo < chunk_begin(key) - diagonal) lo = chunk_begin(key) - diagonal;
    return clamp(lo, q_hi(key));
  }
  CA_HOST_DEVICE int32_t q_hi(int32_t key) const {
    int64_t hi = key - lo_offset + 1;
    if (chunk > 0 && hi > chunk_begin(key) + chunk - diagonal) {
      hi = chunk_begin(key) + chunk - diagonal;
    }
    return clamp(hi, seqlen_q);
  }

  // Tiles of block_m queries for the keys [k_begin, k_end), 0 <= k_begin < k_end <= seqlen_k.
  CA_HOST_DEVICE TileRange query_tiles(int32_t k_begin, int32_t k_end, int32_t block_m) const {
    int32_t const last = k_end - 1;
    return {q_lo(k_begin) / block_m, ceil_div(q_hi(last), block_m), ceil_div(q_lo(last), block_m),
            q_hi(k_begin) / block_m};
  }

 private:
  static constexpr int64_t kFar = int64_t(1) << 32;
  // Offset behind all keys; the chunk of that key contains none of them.
  static constexpr int64_t kBehind = int64_t(kMaxSeqlen) + kMaxAttentionChunk;

  struct Ends {
    int32_t lo, hi;
  };
  CA_HOST_DEVICE Ends at(int32_t q) const {
    Ends const ends = window_at(q);
    return chunk > 0 ? in_chunk(ends, q) : ends;
  }
  CA_HOST_DEVICE Ends window_at(int32_t q) const {
    int32_t const hi = clamp(q + hi_offset, seqlen_k);
    return {clamp(q + lo_offset, hi), hi};
  }
  // The intersection of a query's window with its chunk.
  CA_HOST_DEVICE Ends in_chunk(Ends ends, int32_t q) const {
    int32_t const begin = chunk_begin(q + diagonal);
    if (ends.hi > begin + chunk) ends.hi = begin + chunk;
    if (ends.lo < begin) ends.lo = begin;
    return {ends.lo < ends.hi ? ends.lo : ends.hi, ends.hi};
  }

  // First key of the chunk that contains `key`; negative keys are in a chunk that ends at key 0.
  CA_HOST_DEVICE int32_t chunk_begin(int64_t key) const {
    return key < 0 ? -chunk : by_chunk(int32_t(key > kBehind ? kBehind : key)) * chunk;
  }
  CA_HOST_DEVICE static int32_t clamp(int64_t x, int32_t upper) {
    return x < 0 ? 0 : (x > upper ? upper : int32_t(x));
  }
  CA_HOST_DEVICE static int32_t ceil_div(int32_t a, int32_t b) { return a / b + (a % b != 0); }
};

}  // namespace cutlass_attn
