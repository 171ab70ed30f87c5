// The mask of dense attention: for every query row one interval of visible keys.
//
// Query q sees the keys [lo(q), hi(q)). Both ends grow with q, so for a tile of queries the first
// and the last row alone tell which key tiles are touched and which need no per-element test.
// Causal masks, sliding windows and the ragged end of the keys are all this one interval.
#pragma once

#include <cstdint>

#include "core/macros.hpp"
#include "core/params.hpp"

namespace cutlass_attn {

// Key tiles that a tile of queries touches: [begin, end). Those in [full_begin, full_end) are
// visible to every row; full_begin may exceed full_end, then there is none.
struct TileRange {
  int32_t begin, end, full_begin, full_end;

  CA_HOST_DEVICE bool is_full(int32_t tile) const { return tile >= full_begin && tile < full_end; }

  // The same counted in keys.
  CA_HOST_DEVICE TileRange in_keys(int32_t block_n) const {
    return {begin * block_n, end * block_n, full_begin * block_n, full_end * block_n};
  }
};

// The intervals of the queries of a tile, in 32-bit arithmetic: query `first` + q sees the keys
// [lo(q), hi(q)), of which some may be below 0.
struct NearMask {
  int32_t first_lo, first_hi, seqlen_k;

  CA_HOST_DEVICE int32_t lo(int32_t q) const { return first_lo + q; }
  CA_HOST_DEVICE int32_t hi(int32_t q) const {
    return first_hi + q < seqlen_k ? first_hi + q : seqlen_k;
  }
};

struct IntervalMask {
  int32_t seqlen_k;
  int64_t lo_offset;  // lo(q) = q + lo_offset, before clamping
  int64_t hi_offset;  // hi(q) = q + hi_offset, before clamping

  CA_HOST_DEVICE explicit IntervalMask(AttnParams const& p) : seqlen_k(p.seqlen_k) {
    int64_t const diagonal = int64_t(p.seqlen_k) - p.seqlen_q + p.diagonal_shift;
    int64_t const right = p.causal ? 0 : p.window_right;
    // A row index is under 2^31, so an offset of 2^32 is beyond any key.
    lo_offset = p.window_left == kUnbounded ? -kFar : diagonal - p.window_left;
    hi_offset = right == kUnbounded ? kFar : diagonal + right + 1;
  }

  // One past the last key that query q sees, in [0, seqlen_k].
  CA_HOST_DEVICE int32_t hi(int32_t q) const { return clamp(q + hi_offset, seqlen_k); }

  // The first key that query q sees, in [0, hi(q)].
  CA_HOST_DEVICE int32_t lo(int32_t q) const { return clamp(q + lo_offset, hi(q)); }

  CA_HOST_DEVICE bool visible(int32_t q, int32_t key) const { return key >= lo(q) && key < hi(q); }

  // The intervals of the queries from `first` on.
  CA_HOST_DEVICE NearMask near(int32_t first) const {
    // Offsets within a tile are small, so far ends may come nearer: they stay beyond every key.
    constexpr int64_t kNear = 1 << 20;
    auto const bounded = [&](int64_t x) {
      return int32_t(x < -kNear ? -kNear : (x > seqlen_k ? seqlen_k : x));
    };
    return {bounded(first + lo_offset), bounded(first + hi_offset), seqlen_k};
  }

  // Key tiles of block_n keys for the queries [q_begin, q_end), q_begin < q_end.
  CA_HOST_DEVICE TileRange tiles(int32_t q_begin, int32_t q_end, int32_t block_n) const {
    int32_t const last = q_end - 1;
    return {lo(q_begin) / block_n, ceil_div(hi(last), block_n), ceil_div(lo(last), block_n),
            hi(q_begin) / block_n};
  }

 private:
  static constexpr int64_t kFar = int64_t(1) << 32;

  CA_HOST_DEVICE static int32_t clamp(int64_t x, int32_t upper) {
    return x < 0 ? 0 : (x > upper ? upper : int32_t(x));
  }
  CA_HOST_DEVICE static int32_t ceil_div(int32_t a, int32_t b) { return a / b + (a % b != 0); }
};

}  // namespace cutlass_attn
