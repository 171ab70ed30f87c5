// Writes new rows of K and V into a cache, with rotary positions, and rotates the queries: one
// launch before a decoding step.
//
// Grid: blocks of 128 threads with 8 rows each. A row is one head of one token of K, V or Q, and is
// shared by 16 threads. A thread copies 16 bytes at a time if all rows are aligned to 16 bytes,
// otherwise an element or a pair. The last rows are the lengths, one batch entry each. No shared
// memory.
#pragma once

#include <type_traits>

#include "core/append.hpp"
#include "core/launch.hpp"
#include "core/macros.hpp"
#include "core/token_format.hpp"
#include "serving/convert.hpp"

namespace cutlass_attn::serving {

// Whether the cache is stored as E4M3, whatever dtype the new rows have.
inline bool is_stored_as_fp8(AppendProblem const& p) {
  return p.k_cache.dtype == DType::kFloat8E4M3 && p.v_cache.dtype == DType::kFloat8E4M3;
}

// In place of a type in which the cache is stored: a format of tokens.
struct Tokens {};

struct AppendParams {
  AppendProblem problem;
  bool is_aligned;  // addresses and lengths of rows are multiples of 16 bytes
};

// Stored: the type in which the cache is stored.
template <class Element, class Stored = Element, class Convert = ByConstructor>
struct AppendRow {
  AppendProblem const& p;
  bool is_aligned;
  int lane, lanes;  // threads that share the row

  // Number of rows of K and V. Rows of Q follow, then lengths.
  CA_HOST_DEVICE static int64_t rows_kv(AppendProblem const& p) {
    int const kinds = is_token_format(p.k_cache.dtype) ? 1 : 2;
    return int64_t(p.batch) * p.seqlen * p.num_heads_kv * kinds;
  }
  CA_HOST_DEVICE static int64_t rows_q(AppendProblem const& p) {
    return p.q.data ? int64_t(p.batch) * p.seqlen_q * p.num_heads_q : 0;
  }
  CA_HOST_DEVICE static int64_t rows(AppendProblem const& p) {
    return rows_kv(p) + rows_q(p) + (p.seqlens_after ? p.batch : 0);
  }

  CA_HOST_DEVICE void run(int64_t row) const {
    if (row < rows_kv(p)) return key_or_value(int32_t(row));
    row -= rows_kv(p);
    if (row < rows_q(p)) return query(int32_t(row));
    row -= rows_q(p);
    if (lane == 0 && row < (p.seqlens_after ? p.batch : 0)) {
      int64_t const after = int64_t(p.cache_seqlens[row]) + p.seqlen;
      p.seqlens_after[row] = after < p.cache_rows ? int32_t(after) : p.cache_rows;
    }
  }

 private:
  // Destination of a token's new row; page -1: none.
  struct Place {
    int32_t page;
    int32_t row;
    int32_t position;  // in the batch entry
  };

  CA_HOST_DEVICE Place place_of(int32_t batch, int32_t i) const {
    Place const nowhere{-1, 0, 0};
    if (p.slot_mapping) {
      int64_t const slot = p.slot_mapping[int64_t(batch) * p.seqlen + i];
      if (slot < 0 || slot >= p.kv.num_pages * p.kv.page_size) return nowhere;
      return {int32_t(slot) / p.kv.page_size, int32_t(slot) % p.kv.page_size, 0};
    }
    int32_t const before = p.cache_seqlens[batch];
    if (before < 0 || before >= p.cache_rows - i) return nowhere;
    int32_t const position = before + i;
    int32_t const page =
        p.kv.block_table
            ? p.kv.block_table[batch * p.kv.block_table_stride + position / p.kv.page_size]
            : batch;
    if (page < 0 || page >= p.kv.num_pages) return nowhere;
    return {page, position % p.kv.page_size, position};
  }

  CA_HOST_DEVICE void key_or_value(int32_t row) const {
    int32_t const head = row % p.num_heads_kv;
    row /= p.num_heads_kv;
    constexpr bool kIsToken = std::is_same_v<Stored, Tokens>;
    bool const is_v = !kIsToken && row % 2 != 0;
    row /= kIsToken ? 1 : 2;
    int32_t const batch = row / p.seqlen, i = row % p.seqlen;
    Place const place = place_of(batch, i);
    if (place.page < 0) return;
    if constexpr (kIsToken) {
      token(at<Element>(p.k, batch, head, i), place);
    } else {
      Operand const &from = is_v ? p.v : p.k, &to = is_v ? p.v_cache : p.k_cache;
      copy(at<Element>(from, batch, head, i), at<Stored>(to, place.page, head, place.row),
           is_v ? p.head_dim_v : p.head_dim, is_v ? 0 : p.rotary.dim, place.position,
           to.scale ? 1.0f / to.scale[head * to.scale_head_stride] : 1.0f, to.scale != nullptr);
    }
  }

  // Rounds a row to the format of the cache. Two threads share a group of columns: each computes
  // its scale, and stores half of it.
  CA_HOST_DEVICE void token(Element const* from, Place place) const {
    TokenFormat const f = format_of(p.k_cache.dtype);
    auto* const page = static_cast<uint8_t*>(p.k_cache.data) + place.page * p.k_cache.batch_stride;
    TokenBytes const bytes(f, page, p.kv.page_size, place.row);
    auto* const to = const_cast<uint8_t*>(bytes.row);
    for (int32_t half = lane; half < 2 * f.fp8_columns / f.group; half += lanes) {
      int32_t const group = half / 2, first = group * f.group, begin = half * f.group / 2;
      float amax = 0.0f;
      for (int32_t d = first; d < first + f.group; ++d) {
        float const size = fabsf(Convert::load(from[d]));
        amax = size > amax ? size : amax;  // ignores NaN, which is stored as NaN
      }
      uint8_t const exponent = e8m0_of_amax(amax);
      float const inverse = bits_float(uint32_t(254 - exponent) << 23);  // normal up to 2^126
      for (int32_t d = begin; d < begin + f.group / 2; ++d) {
        to[d] = to_e4m3(Convert::load(from[d]) * inverse).bits;
      }
      if (half % 2 != 0) continue;
      auto* const scales = const_cast<uint8_t*>(bytes.scales);
      if (f.scale_bytes == 4) {
        reinterpret_cast<float*>(scales)[group] = e8m0_to_float(exponent);
      } else {
        scales[group] = exponent;
      }
    }
    for (int32_t d = f.fp8_columns + lane; d < f.columns; d += lanes) {
      *reinterpret_cast<uint16_t*>(to + f.bf16_at + 2 * (d - f.fp8_columns)) =
          bfloat16_bits(Convert::load(from[d]));
    }
  }

  CA_HOST_DEVICE void query(int32_t row) const {
    int32_t const head = row % p.num_heads_q;
    row /= p.num_heads_q;
    int32_t const batch = row / p.seqlen_q, i = row % p.seqlen_q;
    int64_t position = int64_t(p.cache_seqlens[batch]) + (p.q_advances ? i : 0);
    if (position < 0) position = 0;
    if (position >= p.rotary.positions) position = p.rotary.positions - 1;
    copy(at<Element>(p.q, batch, head, i), at<Element>(p.q_rotated, batch, head, i), p.head_dim,
         p.rotary.dim, int32_t(position), 1.0f, false);
  }

  template <class T>
  CA_HOST_DEVICE static T* at(Operand const& t, int64_t batch, int32_t head, int32_t row) {
    return static_cast<T*>(t.data) + batch * t.batch_stride + head * t.head_stride +
           row * t.row_stride;
  }

  template <class To>
  CA_HOST_DEVICE void copy(Element const* from, To* to, int32_t columns, int32_t rotary_dim,
                           int32_t position, float factor, bool is_scaled) const {
    if constexpr (sizeof(To) == sizeof(Element)) {
      if (rotary_dim == 0 && !is_scaled) return copy_as_is(from, to, columns);
    }
    Rotary const& r = p.rotary;
    auto const* const cos = static_cast<Element const*>(r.cos) + position * r.cos_stride;
    auto const* const sin = static_cast<Element const*>(r.sin) + position * r.sin_stride;
    int32_t const half = rotary_dim / 2;
    for (int32_t j = lane; j < half; j += lanes) {
      int32_t const a = r.interleaved ? 2 * j : j, b = r.interleaved ? 2 * j + 1 : j + half;
      float const c = Convert::load(cos[j]), s = Convert::load(sin[j]);
      float const x = Convert::load(from[a]), y = Convert::load(from[b]);
      Convert::store((x * c - y * s) * factor, to[a]);
      Convert::store((y * c + x * s) * factor, to[b]);
    }
    for (int32_t d = rotary_dim + lane; d < columns; d += lanes) {
      Convert::store(Convert::load(from[d]) * factor, to[d]);
    }
  }

  CA_HOST_DEVICE void copy_as_is(Element const* from, Element* to, int32_t columns) const {
    if (is_aligned) {
      struct alignas(16) Words {
        uint32_t word[4];
      };
      auto const* const source = reinterpret_cast<Words const*>(from);
      auto* const target = reinterpret_cast<Words*>(to);
      int32_t const count = columns * int32_t(sizeof(Element)) / 16;
      for (int32_t d = lane; d < count; d += lanes) target[d] = source[d];
    } else {
      for (int32_t d = lane; d < columns; d += lanes) to[d] = from[d];
    }
  }
};

// The kernel on a GPU, and under simt.
template <class Element, class Stored = Element>
struct AppendKernel {
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocksPerSm = 4;  // without it, ptxas spills
  static constexpr int kLanes = 16;
  static constexpr int kRows = kThreads / kLanes;  // per block

  static Launch launch(AppendParams const& params) {
    int64_t const rows = AppendRow<Element>::rows(params.problem);
    return {(rows + kRows - 1) / kRows, 1, kThreads, 0};
  }

  CA_HOST_DEVICE static void run(AppendParams const& params, int block, int thread) {
    AppendRow<Element, Stored> const row{params.problem, params.is_aligned, thread % kLanes,
                                         kLanes};
    row.run(int64_t(block) * kRows + thread / kLanes);
  }
};

}  // namespace cutlass_attn::serving
