// Predicts the error of a head's result if it is computed in 8 bits: the RMS of the error relative
// to the RMS of the result. The prediction is made from a sample of the head's queries.
//
//   sample    up to kPredictedQueries of the queries that see a key, evenly spaced, with the first
//             and the last
//   error     each sampled query's result is computed twice, with all keys, mask, terms and sink:
//             from exact q, k, P and v, and from rounded ones (core/quantize.hpp)
//   ratio     sum of the squared errors / sum of the squared results, over the sample
//   margin    only if some queries are not in the sample: kDeviations standard deviations of the
//             ratio (ratio estimator of a sample without replacement), and kDeviations times the
//             share of one more query whose weights all have the mean error of a logit. The second
//             covers a key that has all of the weight in every sampled row
//   result    sqrt(kMargin^2 (ratio + margin) + square of the rounding error of a 16-bit result)
//
// If at most kPredictedQueries queries see keys, the prediction is an upper bound of the error.
// Otherwise it is one as far as the sample is representative; docs/eight-bit.md has the confidence.
// Errors with a common cause, such as many weights that round to 0, or equal keys, are measured
// like any other.
//
// All arithmetic is in fp32, in an order that depends on the lanes alone, so results are bitwise
// repeatable. Inf or NaN in K, V or the sampled queries makes the prediction Inf or NaN, for which
// is_within() is false.
#pragma once

#include "core/general_score.hpp"
#include "core/macros.hpp"
#include "core/mask.hpp"
#include "core/quantize.hpp"
#include "core/softmax.hpp"
#include "facts.hpp"

namespace cutlass_attn::quantize {

inline constexpr int kPredictedQueries = 32, kQueriesAtOnce = 4;
inline constexpr float kDeviations = 3.0f, kMargin = 1.1f;

// Query i of a sample of `queries` queries, and the size of the sample.
CA_HOST_DEVICE constexpr int predicted_count(int queries) {
  return queries < kPredictedQueries ? queries : kPredictedQueries;
}
CA_HOST_DEVICE constexpr int predicted_query(int i, int queries) {
  return queries <= kPredictedQueries ? i
                                      : int(int64_t(i) * (queries - 1) / (kPredictedQueries - 1));
}

// Whether a head with this prediction runs in 8 bits. False for NaN.
CA_HOST_DEVICE bool is_within(float error, float max_error) { return error <= max_error; }

CA_HOST_DEVICE float square(float x) { return x * x; }

// Rounds to nearest even, to kBits of mantissa. Numbers below 2^kMinExponent are subnormal. e4m3
// has (3, -6), fp16 (10, -14), bf16 (7, -126).
template <int kBits, int kMinExponent>
CA_HOST_DEVICE float rounded_to(float x) {
  constexpr uint32_t kUnit = 1u << (23 - kBits);
  uint32_t const bits = float_bits(x), sign = bits & 0x80000000u, magnitude = bits ^ sign;
  if (magnitude >= 0x7f800000u) return x;
  uint32_t const odd = magnitude >> (23 - kBits) & 1u;
  float y = bits_float((magnitude + kUnit / 2 - 1 + odd) & ~(kUnit - 1));
  if constexpr (kMinExponent > -126) {
    // Adding this rounds to the step of subnormal numbers.
    float const shifter = bits_float(uint32_t(127 + kMinExponent + 23 - kBits) << 23);
    float const small = bits_float(magnitude);
    if (magnitude < uint32_t(127 + kMinExponent) << 23) y = small + shifter - shifter;
  }
  return bits_float(float_bits(y) | sign);
}
CA_HOST_DEVICE float to_half(float x) { return rounded_to<10, -14>(x); }
CA_HOST_DEVICE float to_element(float x, bool is_half) {
  return is_half ? to_half(x) : rounded_to<7, -126>(x);
}

// x * inverse rounded to an integer, equal to the low bits of to_int8().
CA_HOST_DEVICE float to_integer(float x, float inverse) {
#if defined(__CUDA_ARCH__)
  return fmaf(x, inverse, kMagic) - kMagic;
#else
  // The product of two floats is exact in double, so the sum is rounded once.
  constexpr double kRounder = 6755399441055744.0;  // 1.5 * 2^52
  return float(double(x) * double(inverse) + kRounder - kRounder);
#endif
}

// Scratch memory of the threads that compute a prediction.
template <int kWarps>
struct PredictedScratch {
  struct OfWarp {
    uint32_t keys[kTileKeys];                  // bits of the largest magnitude of each key
    float inverse[kTileKeys];                  // factors of V before it is rounded
    float exact[kQueriesAtOnce][kTileKeys];    // P
    float rounded[kQueriesAtOnce][kTileKeys];  // rounded P, times the scale of V
  };
  OfWarp warps[kWarps];
  float errors[kPredictedQueries], sizes[kPredictedQueries];  // squared, per sampled query
  float logits[kPredictedQueries];                            // mean squared errors of their logits
};

// Lanes: the threads that compute a prediction together.
//
//   static constexpr int kWarps, kLanes;
//   static constexpr int kMaxColumns;           // of V
//   static constexpr bool kIsGpu;               // whether P is rounded to 16 bits before 8
//   static int warp(), lane();
//   static void sync(), sync_warp();            // barrier of all warps, and of a warp
//   static float largest(float), sum(float);    // reduction over a warp's lanes, returned to all
//
// Q, K, V: rows of one head. load(row, column, float (&)[n]) loads n columns: 8 of Q or K, 2 of V.
// `column` is a multiple of n; columns beyond the operand are zeros. K::load_shift(column, float
// (&)[8]) loads the shift that is subtracted from all keys. load() may be asked for keys beyond the
// last.
template <class Lanes, Quantize kMode, class Q, class K, class V>
struct Prediction {
  using Scratch = PredictedScratch<Lanes::kWarps>;
  static constexpr int kRows = kQueriesAtOnce;
  static constexpr int kLaneKeys = kTileKeys / Lanes::kLanes;                // of a tile
  static constexpr int kLanePairs = Lanes::kMaxColumns / 2 / Lanes::kLanes;  // of columns of V
  using Products = float[kRows][kLaneKeys];
  // State of a query of the warp, for exact and for rounded inputs.
  struct Row {
    int query;
    float scale, inverse, shift;  // of q; q . shift
    SoftmaxRow exact, rounded;
    float logits, keys;  // this lane's sum of squared errors of logits, and their number
  };
  using Columns = float[kRows][kLanePairs][2];
  // A tile of keys, with the rounding factors of this lane's keys.
  struct Tile {
    int first;
    float of_values;  // largest magnitude of V in the tile
    Factors keys[kLaneKeys];
    float folded[kLaneKeys];
  };

  Problem const& p;
  int const batch, head;
  Q const& q;
  K const& k;
  V const& v;
  Scratch& scratch;
  SeqLens const lens;
  GeneralScore const score;
  IntervalMask const mask;
  int first_query, queries;  // queries that see a key

  CA_HOST_DEVICE Prediction(Problem const& p, IntervalMask const& mask, int batch, int head,
                            Q const& q, K const& k, V const& v, Scratch& scratch)
      : p(p),
        batch(batch),
        head(head),
        q(q),
        k(k),
        v(v),
        scratch(scratch),
        lens{p.seq_q.seqlen, p.seq_k.seqlen},
        score(p, lens),
        mask(mask),
        first_query(lens.k > 0 ? mask.q_lo(0) : 0),
        queries(lens.k > 0 ? mask.q_hi(lens.k - 1) - first_query : 0) {}

  // Returns the prediction, equal in all lanes.
  CA_HOST_DEVICE float run() {
    int const count = predicted_count(queries);
    if (count <= 0) return 0.0f;
    for (int first = Lanes::warp() * kRows; first < count; first += Lanes::kWarps * kRows) {
      measure(first, count);
    }
    Lanes::sync();  // errors and sizes full
    float error = 0.0f, size = 0.0f, of_logits = 0.0f;
    for (int i = 0; i < count; ++i) {
      error += scratch.errors[i];
      size += scratch.sizes[i];
      of_logits += scratch.logits[i];
    }
    of_logits *= 1.0f / float(count);
    float const least = is_half() ? 0x1p-12f : 0x1p-9f;  // rounding error of a 16-bit result
    if (size == 0.0f) return error == 0.0f ? least : kInf;
    float const ratio = error / size;
    float residues = 0.0f;
    for (int i = 0; i < count; ++i) {
      residues += square(scratch.errors[i] / size - ratio * (scratch.sizes[i] / size));
    }
    // The residues are relative to the sum of the sizes, which is `count` times their mean.
    float const unseen = 1.0f - float(count) / float(queries);
    float const variance = residues * unseen * float(count) / float(count > 1 ? count - 1 : 1);
    float const one_more = queries > count ? of_logits / float(count + 1) : 0.0f;
    float const upper = ratio + kDeviations * (sqrtf(variance) + one_more);
    return sqrtf(square(kMargin) * upper + square(least));
  }

 private:
  // Stores squared errors and results of kRows queries of the sample, from query `first` on.
  CA_HOST_DEVICE void measure(int first, int count) {
    Row rows[kRows];
    Columns exact = {}, rounded = {};
    for (int i = 0; i < kRows; ++i) {
      int const number = first + i < count ? first + i : count - 1;
      rows[i] = row_of(first_query + predicted_query(number, queries));
    }
    for (int key = 0; key < lens.k; key += kTileKeys) {
      Products s = {}, s8 = {};
      Tile const tile = tile_at(key);
      multiply(rows, tile, s, s8);
      float rescale[2][kRows];
      softmax(rows, tile, s, s8, rescale);
      add_values(tile, rescale, exact, rounded);
      Lanes::sync_warp();  // the warp's scratch empty
    }
    for (int i = 0; i < kRows; ++i) {
      Row& row = rows[i];
      float const of_exact = finish(row.exact), of_rounded = finish(row.rounded);
      float error = 0.0f, size = 0.0f;
      for (int c = 0; c < kLanePairs; ++c) {
        for (int e = 0; e < 2; ++e) {
          float const x = exact[i][c][e] * of_exact;
          float const y = to_element(rounded[i][c][e] * of_rounded, is_half());
          error += square(y - x);
          size += square(x);
        }
      }
      error = Lanes::sum(error);
      size = Lanes::sum(size);
      float const logits = Lanes::sum(row.logits), keys = Lanes::sum(row.keys);
      if (Lanes::lane() == 0 && first + i < count) {
        scratch.errors[first + i] = error;
        scratch.sizes[first + i] = size;
        scratch.logits[first + i] = keys > 0.0f ? logits / keys : 0.0f;
      }
    }
  }

  static constexpr bool kIsGpu = Lanes::kIsGpu;
  CA_HOST_DEVICE static float in_16_bits(float x) { return kIsGpu ? to_half(x) : x; }
  CA_HOST_DEVICE bool is_half() const { return p.q.dtype == DType::kFloat16; }
  CA_HOST_DEVICE typename Scratch::OfWarp& own() const { return scratch.warps[Lanes::warp()]; }

  // Adds the sink; returns the factor that normalises O.
  CA_HOST_DEVICE float finish(SoftmaxRow& row) const {
    float const rescale = p.logits.sinks ? row.add_logit(p.logits.sinks[head], kLog2e) : 1.0f;
    return rescale * row.inverse_sum();
  }

  CA_HOST_DEVICE Row row_of(int query) const {
    uint32_t largest = 0;
    float shift = 0.0f;
    for (int column = 0; column < p.head_dim; column += 8) {
      float x[8], of_keys[8];
      q.load(query, column, x);
      k.load_shift(column, of_keys);
      for (int d = 0; d < 8; ++d) {
        largest = larger(largest, magnitude_bits(x[d]));
        shift = fmaf(x[d], of_keys[d], shift);
      }
    }
    Factors const factors = factors_of(largest);
    return {query, factors.scale, factors.inverse, shift, {}, {}, 0.0f, 0.0f};
  }

  // Computes the rounding factors of a tile. Stores those of V in the warp's scratch.
  CA_HOST_DEVICE Tile tile_at(int first) const {
    Tile tile{first, 0.0f, {}, {}};
    uint32_t of_values[kLaneKeys];
    for (int m = 0; m < kLaneKeys; ++m) {
      int const n = Lanes::lane() + m * Lanes::kLanes;
      uint32_t of_key = 0, of_value = 0;
      if (first + n < lens.k) {
        for (int column = 0; column < p.head_dim; column += 8) {
          float x[8], shift[8];
          k.load(first + n, column, x);
          k.load_shift(column, shift);
          for (int d = 0; d < 8; ++d) of_key = larger(of_key, magnitude_bits(x[d] - shift[d]));
        }
        for (int column = 0; column < p.head_dim_v; column += 2) {
          float x[2];
          v.load(first + n, column, x);
          for (float y : x) of_value = larger(of_value, magnitude_bits(y));
        }
      }
      own().keys[n] = of_key;
      of_values[m] = of_value;
      tile.of_values = fmaxf(tile.of_values, finite_or_zero(bits_float(of_value)));
    }
    tile.of_values = Lanes::largest(tile.of_values);
    Lanes::sync_warp();  // keys of the warp full
    for (int m = 0; m < kLaneKeys; ++m) {
      int const n = Lanes::lane() + m * Lanes::kLanes;
      uint32_t largest = 0;
      for (int j = 0; j < kTileKeys / kGroups; ++j) {
        largest = larger(largest, own().keys[j / 2 * 8 + group_of(n) * 2 + j % 2]);
      }
      tile.keys[m] = factors_of(largest);
      if constexpr (kMode == Quantize::kInt8) {
        ValueFactors const factors = value_factors_of(of_values[m], tile.of_values);
        tile.folded[m] = in_16_bits(factors.folded);
        own().inverse[n] = factors.inverse;
      } else {
        own().inverse[n] = fp8_factors_of(tile.of_values).inverse;
      }
    }
    return tile;
  }
  CA_HOST_DEVICE static uint32_t larger(uint32_t x, uint32_t y) { return x > y ? x : y; }

  // Q K^T of this lane's keys: s from exact, s8 from rounded q and k. Without terms and mask.
  CA_HOST_DEVICE void multiply(Row const (&rows)[kRows], Tile const& tile, Products& s,
                               Products& s8) const {
    for (int column = 0; column < p.head_dim; column += 8) {
      float x[kRows][8], x8[kRows][8], shift[8];
      k.load_shift(column, shift);
      for (int i = 0; i < kRows; ++i) {
        q.load(rows[i].query, column, x[i]);
        for (int d = 0; d < 8; ++d) x8[i][d] = to_integer(x[i][d], rows[i].inverse);
      }
      for (int m = 0; m < kLaneKeys; ++m) {
        float y[8], y8[8];
        k.load(tile.first + Lanes::lane() + m * Lanes::kLanes, column, y);
        for (int d = 0; d < 8; ++d) {
          y[d] -= shift[d];
          y8[d] = to_integer(y[d], tile.keys[m].inverse);
        }
        for (int i = 0; i < kRows; ++i) {
          for (int d = 0; d < 8; ++d) {
            s[i][m] += x[i][d] * y[d];
            s8[i][m] += x8[i][d] * y8[d];
          }
        }
      }
    }
    for (int m = 0; m < kLaneKeys; ++m) {
      for (int i = 0; i < kRows; ++i) {
        s[i][m] += rows[i].shift;
        s8[i][m] = s8[i][m] * (rows[i].scale * tile.keys[m].scale) + rows[i].shift;
      }
    }
  }

  // Computes P from logits, in the warp's scratch, and the factors that rescale O.
  CA_HOST_DEVICE void softmax(Row (&rows)[kRows], Tile const& tile, Products& s, Products& s8,
                              float (&rescale)[2][kRows]) const {
    for (int i = 0; i < kRows; ++i) {
      Row& row = rows[i];
      float most = -kInf, most8 = -kInf;
      for (int m = 0; m < kLaneKeys; ++m) {
        int const key = tile.first + Lanes::lane() + m * Lanes::kLanes;
        bool const is_there = key < lens.k && mask.visible(row.query, key);
        s[i][m] = is_there ? score(s[i][m], batch, head, row.query, key) : -kInf;
        s8[i][m] = is_there ? score(s8[i][m], batch, head, row.query, key) : -kInf;
        if (s[i][m] > -kInf) {
          row.logits += square(s8[i][m] - s[i][m]);
          row.keys += 1.0f;
        }
        // NaN is no maximum, and stays in the weight.
        most = fmaxf(most, s[i][m]);
        most8 = fmaxf(most8, s8[i][m]);
      }
      rescale[0][i] = row.exact.update_max(Lanes::largest(most), kLog2e);
      rescale[1][i] = row.rounded.update_max(Lanes::largest(most8), kLog2e);
      float sum = 0.0f, sum8 = 0.0f;
      for (int m = 0; m < kLaneKeys; ++m) {
        int const n = Lanes::lane() + m * Lanes::kLanes;
        s[i][m] = row.exact.weight(s[i][m], kLog2e);
        s8[i][m] = row.rounded.weight(s8[i][m], kLog2e);
        sum += s[i][m];
        sum8 += s8[i][m];
        own().exact[i][n] = s[i][m];
      }
      row.exact.sum += Lanes::sum(sum);
      row.rounded.sum += Lanes::sum(sum8);
      round_weights(s8[i], tile, own().rounded[i]);
    }
    Lanes::sync_warp();  // weights of the warp full
  }

  // The weights of a row with this lane's keys, rounded, times the scale of V.
  CA_HOST_DEVICE void round_weights(float const (&w)[kLaneKeys], Tile const& tile,
                                    float* to) const {
    constexpr float kAtMax = 128.0f, kMinFactor = 0x1p-7f;  // as in quantized/tile_weights.hpp
    float x[kLaneKeys], of_row = 0.0f;
    for (int m = 0; m < kLaneKeys; ++m) {
      x[m] = kMode == Quantize::kQk ? (kIsGpu ? to_element(w[m], is_half()) : w[m])
                                    : in_16_bits(kAtMax * w[m]);
      if constexpr (kMode == Quantize::kInt8) {
        x[m] = x[m] == 0.0f ? 0.0f : in_16_bits(x[m] * tile.folded[m]);
        of_row = fmaxf(of_row, x[m]);
      } else {
        of_row += x[m];
      }
    }
    if constexpr (kMode == Quantize::kQk) {
      for (int m = 0; m < kLaneKeys; ++m) to[Lanes::lane() + m * Lanes::kLanes] = x[m];
      return;
    }
    constexpr bool kIsInt8 = kMode == Quantize::kInt8;
    constexpr float kMax = kIsInt8 ? 255.0f : kFp8Sum;
    of_row = kIsInt8 ? Lanes::largest(of_row) : Lanes::sum(of_row);
    if (kIsGpu && of_row < kMinFactor) of_row = kMinFactor;
    float const inverse = of_row < kMin ? 0.0f : in_16_bits(kMax / of_row);
    float const v_scale = kIsInt8 ? factors_of(float_bits(tile.of_values)).scale
                                  : fp8_factors_of(tile.of_values).scale;
    float const unit = of_row * (1.0f / kAtMax / kMax) * v_scale;
    for (int m = 0; m < kLaneKeys; ++m) {
      float const y =
          kIsInt8 ? to_integer(x[m], inverse) : rounded_to<3, -6>(in_16_bits(x[m] * inverse));
      to[Lanes::lane() + m * Lanes::kLanes] = y * unit;
    }
  }

  // Adds weights times values of this lane's columns to the results.
  CA_HOST_DEVICE void add_values(Tile const& tile, float const (&rescale)[2][kRows], Columns& exact,
                                 Columns& rounded) const {
    for (int i = 0; i < kRows; ++i) {
      for (int c = 0; c < kLanePairs; ++c) {
        for (int e = 0; e < 2; ++e) {
          exact[i][c][e] *= rescale[0][i];
          rounded[i][c][e] *= rescale[1][i];
        }
      }
    }
    int const left = lens.k - tile.first, keys = left < kTileKeys ? left : kTileKeys;
    for (int n = 0; n < keys; ++n) {
      float const inverse = own().inverse[n];
      for (int c = 0; c < kLanePairs; ++c) {
        int const column = (c * Lanes::kLanes + Lanes::lane()) * 2;
        if (column >= p.head_dim_v) break;
        float x[2];
        v.load(tile.first + n, column, x);
        for (int e = 0; e < 2; ++e) {
          float y = x[e];
          if constexpr (kMode == Quantize::kInt8) {
            y = to_integer(finite_or_zero(y), inverse);
          } else if constexpr (kMode == Quantize::kFp8) {
            y = rounded_to<3, -6>(to_fp8_value(y, inverse));
          }
          for (int i = 0; i < kRows; ++i) {
            exact[i][c][e] += own().exact[i][n] * x[e];
            rounded[i][c][e] += own().rounded[i][n] * y;
          }
        }
      }
    }
  }
};

template <class Lanes, Quantize kMode, class Q, class K, class V>
CA_HOST_DEVICE float predicted_error(Problem const& p, IntervalMask const& mask, int batch,
                                     int head, Q const& q, K const& k, V const& v,
                                     PredictedScratch<Lanes::kWarps>& scratch) {
  return Prediction<Lanes, kMode, Q, K, V>(p, mask, batch, head, q, k, v, scratch).run();
}

}  // namespace cutlass_attn::quantize
