// Predicts the error of a head's result from products in 8 bits: the RMS of the error relative to
// the RMS of the result, from a sample of queries, keys and values. cutlass_attn/quantized.py has
// the formula in numpy and derives it; docs/eight-bit.md says how accurate it is.
//
//   keys      up to 8 tiles of 64, evenly spread, less the shift of core/quantize.hpp
//   queries   up to 256, evenly spread; without a mask
//   logit     has the error softmax_scale * sqrt((|q|^2 dk^2 + |k|^2 dq^2) / 12), where each square
//             is a mean over the sample, dq = amax / 127 is the step of a query, and dk that of a
//             tile
//   kInt8     adds the squared error of rounding V and the weights of up to 16 of the queries; kFp8
//             adds twice kE4m3Error^2
//
// All in fp32, in an order that depends on the lanes alone: results are bitwise repeatable. Inf or
// NaN in the sample makes the prediction Inf or NaN, for which is_within() is false.
#pragma once

#include "core/macros.hpp"
#include "core/quantize.hpp"
#include "facts.hpp"

namespace cutlass_attn::quantize {

inline constexpr int kPredictedTiles = 8, kPredictedQueries = 256;
inline constexpr int kSoftmaxQueries = 16, kSoftmaxAtOnce = 4;
inline constexpr float kE4m3Error = 0.026f;  // RMS, of a number rounded to e4m3

// Element i of a sample of at most `most` of `all` numbers, evenly spread; and the sample's size.
CA_HOST_DEVICE constexpr int spread_count(int most, int all) { return all < most ? all : most; }
CA_HOST_DEVICE constexpr int spread(int i, int most, int all) {
  return all < most ? i : int(int64_t(i) * all / most);
}

// Whether a head with this prediction runs in 8 bits. False for NaN.
CA_HOST_DEVICE bool is_within(float error, float max_error) { return error <= max_error; }

CA_HOST_DEVICE float square(float x) { return x * x; }

// The shape of a head.
struct PredictedShape {
  int seqlen_q, seqlen_k, head_dim, head_dim_v;
  float softmax_scale;
};

// Scratch that the lanes of a prediction share: sums of each warp, and values of each sampled key.
template <int kWarps>
struct PredictedScratch {
  static constexpr int kKeys = kPredictedTiles * kTileKeys;
  float sums[kWarps][6];
  float of_tile[kPredictedTiles];  // largest magnitudes
  float folded[kKeys];             // 8 / e of a key, not rounded
  float values[kKeys];             // |v|^2
};

// Lanes defines the threads that compute a prediction together:
//
//   static constexpr int kWarps, kLanes;
//   static int warp(), lane();
//   static void sync();                         // barrier of all warps
//   static float largest(float), sum(float);    // reduction over a warp's lanes, returned to all
//
// Q, K and V are rows of one head; K without the shift. load(row, column, float (&)[8]) loads eight
// columns from a multiple of eight on, with zeros beyond the operand. It is called for all keys of
// a tile, even those beyond the last.
template <class Lanes, Quantize kMode, class Q, class K, class V>
struct Prediction {
  using Scratch = PredictedScratch<Lanes::kWarps>;
  static constexpr int kLaneKeys = kTileKeys / Lanes::kLanes;  // keys of a tile in a lane

  PredictedShape const& shape;
  Q const& q;
  K const& k;
  V const& v;
  Scratch& scratch;
  int tiles, queries;

  CA_HOST_DEVICE Prediction(PredictedShape const& shape, Q const& q, K const& k, V const& v,
                            Scratch& scratch)
      : shape(shape),
        q(q),
        k(k),
        v(v),
        scratch(scratch),
        tiles(spread_count(kPredictedTiles, all_tiles())),
        queries(spread_count(kPredictedQueries, shape.seqlen_q)) {}

  // Returns the prediction, equal in all lanes.
  CA_HOST_DEVICE float run() {
    if (tiles == 0 || queries == 0) return 0.0f;
    float sums[6] = {};  // of |q|^2, dq^2, |k|^2, dk^2; with kInt8 of the error and of the result
    for (int t = Lanes::warp(); t < tiles; t += Lanes::kWarps) add_keys(t, sums);
    for (int i = Lanes::warp() * Lanes::kLanes + Lanes::lane(); i < queries;
         i += Lanes::kWarps * Lanes::kLanes) {
      float largest = 0.0f;
      sums[0] += norm(q, spread(i, kPredictedQueries, shape.seqlen_q), shape.head_dim, largest);
      sums[1] += square(largest * (1.0f / 127.0f));
    }
    if constexpr (kMode == Quantize::kInt8) {
      Lanes::sync();  // of_tile, folded and values full
      int const softmax_queries = spread_count(kSoftmaxQueries, queries);
      for (int i = Lanes::warp() * kSoftmaxAtOnce; i < softmax_queries;
           i += Lanes::kWarps * kSoftmaxAtOnce) {
        add_weights(i, softmax_queries, sums);
      }
    }
    for (int i = 0; i < 6; ++i) sums[i] = Lanes::sum(sums[i]);
    if (Lanes::lane() == 0) {
      for (int i = 0; i < 6; ++i) scratch.sums[Lanes::warp()][i] = sums[i];
    }
    Lanes::sync();  // sums full
    for (int i = 0; i < 6; ++i) {
      sums[i] = scratch.sums[0][i];
      for (int warp = 1; warp < Lanes::kWarps; ++warp) sums[i] += scratch.sums[warp][i];
    }
    int keys = 0;
    for (int t = 0; t < tiles; ++t) keys += keys_of(t);
    float const per_pair = 1.0f / (float(queries) * float(keys));
    float variance = square(shape.softmax_scale) * per_pair * (1.0f / 12.0f) *
                     fmaf(sums[0], sums[3], sums[1] * sums[2]);
    if constexpr (kMode == Quantize::kInt8) {
      variance += sums[4] / (12.0f * (sums[5] == 0.0f ? 1.0f : sums[5]));
    } else if constexpr (kMode == Quantize::kFp8) {
      variance += 2.0f * kE4m3Error * kE4m3Error;
    }
    return sqrtf(variance);
  }

 private:
  CA_HOST_DEVICE int all_tiles() const { return (shape.seqlen_k + kTileKeys - 1) / kTileKeys; }
  CA_HOST_DEVICE int first_key(int t) const {
    return spread(t, kPredictedTiles, all_tiles()) * kTileKeys;
  }
  CA_HOST_DEVICE int keys_of(int t) const {
    int const left = shape.seqlen_k - first_key(t);
    return left < kTileKeys ? left : kTileKeys;
  }

  // |x|^2 of a row, and its largest magnitude.
  template <class Rows>
  CA_HOST_DEVICE static float norm(Rows const& rows, int row, int columns, float& largest) {
    float sum = 0.0f;
    for (int column = 0; column < columns; column += 8) {
      float x[8];
      rows.load(row, column, x);
      CA_UNROLL
      for (int d = 0; d < 8; ++d) {
        sum = fmaf(x[d], x[d], sum);
        largest = fmaxf(largest, fabsf(x[d]));
      }
    }
    return sum;
  }

  // Adds the keys of a tile, and with kInt8 their values.
  CA_HOST_DEVICE void add_keys(int t, float (&sums)[6]) const {
    int const first = first_key(t), count = keys_of(t);
    float of_keys = 0.0f, of_values = 0.0f;
    for (int n = Lanes::lane(); n < count; n += Lanes::kLanes) {
      sums[2] += norm(k, first + n, shape.head_dim, of_keys);
      if constexpr (kMode == Quantize::kInt8) {
        float of_key = 0.0f;
        scratch.values[t * kTileKeys + n] = norm(v, first + n, shape.head_dim_v, of_key);
        scratch.folded[t * kTileKeys + n] = of_key;
        of_values = fmaxf(of_values, of_key);
      }
    }
    float const step = Lanes::largest(of_keys) * (1.0f / 127.0f);
    if (Lanes::lane() == 0) sums[3] += float(count) * square(step);
    if constexpr (kMode == Quantize::kInt8) {
      float const of_tile = Lanes::largest(of_values);
      for (int n = Lanes::lane(); n < count; n += Lanes::kLanes) {
        float& folded = scratch.folded[t * kTileKeys + n];
        folded = fmaxf(of_tile > 0.0f ? folded / of_tile : 0.0f, kLeastOfTile);
      }
      if (Lanes::lane() == 0) scratch.of_tile[t] = of_tile;
    }
  }

  // kInt8: adds the errors of kSoftmaxAtOnce queries, from sampled query `first` on, with weights
  // relative to the largest score of their row so far.
  CA_HOST_DEVICE void add_weights(int first, int softmax_queries, float (&sums)[6]) const {
    float row_max[kSoftmaxAtOnce], error[kSoftmaxAtOnce] = {}, size[kSoftmaxAtOnce] = {};
    CA_UNROLL
    for (float& max : row_max) max = -kInf;
    for (int t = 0; t < tiles; ++t) {
      float s[kSoftmaxAtOnce][kLaneKeys] = {};
      add_products(first, softmax_queries, t, s);
      CA_UNROLL
      for (int i = 0; i < kSoftmaxAtOnce; ++i) add_errors(t, s[i], row_max[i], error[i], size[i]);
    }
    CA_UNROLL
    for (int i = 0; i < kSoftmaxAtOnce; ++i) {
      if (first + i >= softmax_queries) continue;
      sums[4] += error[i];
      sums[5] += size[i];
    }
  }

  // q . k for this lane's keys of a tile.
  CA_HOST_DEVICE void add_products(int first, int softmax_queries, int t,
                                   float (&s)[kSoftmaxAtOnce][kLaneKeys]) const {
    int const key = first_key(t) + Lanes::lane();
    for (int column = 0; column < shape.head_dim; column += 8) {
      float x[kSoftmaxAtOnce][8];
      CA_UNROLL
      for (int i = 0; i < kSoftmaxAtOnce; ++i) {
        int const number = first + i < softmax_queries ? first + i : softmax_queries - 1;
        int const query = spread(number, kSoftmaxQueries, queries);
        q.load(spread(query, kPredictedQueries, shape.seqlen_q), column, x[i]);
      }
      CA_UNROLL
      for (int m = 0; m < kLaneKeys; ++m) {
        float y[8];
        k.load(key + m * Lanes::kLanes, column, y);
        CA_UNROLL
        for (int i = 0; i < kSoftmaxAtOnce; ++i) {
          CA_UNROLL
          for (int d = 0; d < 8; ++d) s[i][m] = fmaf(x[i][d], y[d], s[i][m]);
        }
      }
    }
  }

  // Adds a tile to the squares of a query's error and of its result.
  CA_HOST_DEVICE void add_errors(int t, float (&s)[kLaneKeys], float& row_max, float& error,
                                 float& size) const {
    int const count = keys_of(t);
    float max = row_max;
    CA_UNROLL
    for (int m = 0; m < kLaneKeys; ++m) {
      s[m] =
          Lanes::lane() + m * Lanes::kLanes < count ? s[m] * (shape.softmax_scale * kLog2e) : -kInf;
      max = fmaxf(max, s[m]);
    }
    max = Lanes::largest(max);
    float const rescale = square(fast_exp2(row_max - max));
    row_max = max;
    float largest = 0.0f;
    CA_UNROLL
    for (int m = 0; m < kLaneKeys; ++m) {
      s[m] = fast_exp2(s[m] - max);
      int const n = Lanes::lane() + m * Lanes::kLanes;
      if (n < count) largest = fmaxf(largest, s[m] * scratch.folded[t * kTileKeys + n]);
    }
    float const of_p = square(Lanes::largest(largest) * (1.0f / 255.0f));
    float const of_v = float(shape.head_dim_v) * square(scratch.of_tile[t] * (1.0f / 127.0f));
    error *= rescale;
    size *= rescale;
    CA_UNROLL
    for (int m = 0; m < kLaneKeys; ++m) {
      int const n = Lanes::lane() + m * Lanes::kLanes;
      if (n >= count) continue;
      float const folded = square(scratch.folded[t * kTileKeys + n]);
      float const value = scratch.values[t * kTileKeys + n], weight = square(s[m]);
      error += weight * folded * of_v + of_p / folded * value;
      size += weight * value;
    }
  }
};

template <class Lanes, Quantize kMode, class Q, class K, class V>
CA_HOST_DEVICE float predicted_error(PredictedShape const& shape, Q const& q, K const& k,
                                     V const& v, PredictedScratch<Lanes::kWarps>& scratch) {
  return Prediction<Lanes, kMode, Q, K, V>(shape, q, k, v, scratch).run();
}

}  // namespace cutlass_attn::quantize
