// Attention of one tile in 8 bits, for one instruction set (each_isa.hpp).
//
// As tile_body.hpp, with q8 and k8 for Q and K, as fp32 numbers: their products are integers below
// 2^24, so sums of them are exact. P and V are unrounded (kQk) or rounded as well.

#include "cpu/rows_body.hpp"

// Computes the mean of the sampled keys.
template <class Element>
CA_CPU_TARGET void load_shift(PagedKv<Element> const& k, int seqlen_k, int head_dim, float* shift) {
  constexpr int kSums = quantize::kPartialSums;
  int const samples = quantize::samples_of(seqlen_k);
  float sums[kSums][kMaxHeadDim];
  for (int g = 0; g < kSums; ++g) std::fill_n(sums[g], head_dim, 0.0f);
  for (int i = 0; i < samples; ++i) {
    Element const* const row = k.row(quantize::sampled_key(i, seqlen_k));
    float* const sum = sums[i % kSums];
    for (int d = 0; d < head_dim; ++d) {
      float const x = to_float(row[d]);
      sum[d] += quantize::magnitude_bits(x) < 0x7f800000u ? x : 0.0f;
    }
  }
  float const inverse = 1.0f / float(std::max(samples, 1));
  for (int d = 0; d < head_dim; ++d) {
    float total = sums[0][d];
    for (int g = 1; g < kSums; ++g) total += sums[g][d];
    float const mean = total * inverse;
    shift[d] = quantize::magnitude_bits(mean) < 0x7f800000u ? mean : 0.0f;
  }
}

CA_CPU_TARGET inline uint32_t largest_bits(float const* x, int count) {
  uint32_t largest = 0;
  for (int i = 0; i < count; ++i) largest = std::max(largest, quantize::magnitude_bits(x[i]));
  return largest;
}

// Computes q8, transposed, and for each row its scale and its product with the shift. Padded with
// zeros.
template <class Element>
CA_CPU_TARGET void quantize_queries(Problem const& p, QuantizedState& state, int rows) {
  for (int row = 0; row < rows; row += kBlock) {
    int const width = block_width(row, rows);
    for (int r = 0; r < width; ++r) {
      float* const target = state.q + int64_t(row) * p.head_dim + r;
      float x[kMaxHeadDim] = {};
      if (row + r < rows) {
        Element const* const source = row_of<Element>(p.q, state, row + r);
        for (int d = 0; d < p.head_dim; ++d) x[d] = to_float(source[d]);
      }
      quantize::Factors const factors = quantize::factors_of(largest_bits(x, p.head_dim));
      float with_shift = 0.0f;
      for (int d = 0; d < p.head_dim; ++d) with_shift += x[d] * state.shift[d];
      for (int d = 0; d < p.head_dim; ++d) target[d * width] = rounded(x[d], factors.inverse);
      state.q_scale[row + r] = factors.scale;
      state.q_shift[row + r] = with_shift;
    }
  }
}

// Rounds a tile of keys to k8 in place, and returns the scales of its groups.
CA_CPU_TARGET inline void quantize_keys(float* k, int keys, int head_dim, float const* shift,
                                        float (&scale)[quantize::kGroups]) {
  uint32_t largest[quantize::kGroups] = {};
  for (int n = 0; n < keys; ++n) {
    float* const row = k + n * head_dim;
    for (int d = 0; d < head_dim; ++d) row[d] -= shift[d];
    uint32_t& of_group = largest[quantize::group_of(n)];
    of_group = std::max(of_group, largest_bits(row, head_dim));
  }
  float inverse[quantize::kGroups];
  for (int t = 0; t < quantize::kGroups; ++t) {
    quantize::Factors const factors = quantize::factors_of(largest[t]);
    scale[t] = factors.scale;
    inverse[t] = factors.inverse;
  }
  for (int n = 0; n < keys; ++n) {
    float* const row = k + n * head_dim;
    float const factor = inverse[quantize::group_of(n)];
    for (int d = 0; d < head_dim; ++d) row[d] = rounded(row[d], factor);
  }
}

// A tile of keys: k8, and V or rounded V.
struct KeyTile {
  int key, keys;
  bool is_full;
  Panel<float> k, v;
  float scale[quantize::kGroups];
  float folded[kTileKeys];  // kInt8: the factor folded into a key's weight
};

// kInt8: replaces a tile's values by v8 times the largest scale.
CA_CPU_TARGET inline void quantize_values(float* v, int keys, int head_dim_v, KeyTile& tile) {
  uint32_t amax[kTileKeys];
  float of_tile = 0.0f;
  for (int n = 0; n < keys; ++n) {
    amax[n] = largest_bits(v + n * head_dim_v, head_dim_v);
    of_tile = std::max(of_tile, quantize::finite_or_zero(float_of(amax[n])));
  }
  float const scale = quantize::factors_of(bits_of(of_tile)).scale;
  for (int n = 0; n < keys; ++n) {
    quantize::ValueFactors const factors = quantize::value_factors_of(amax[n], of_tile);
    float* const row = v + n * head_dim_v;
    for (int d = 0; d < head_dim_v; ++d) {
      row[d] = rounded(quantize::finite_or_zero(row[d]), factors.inverse) * scale;
    }
    tile.folded[n] = factors.folded;
  }
}

// kFp8: replaces a tile's values by v8 times its scale. An infinity becomes NaN.
CA_CPU_TARGET inline void round_values(float* v, int keys, int head_dim_v) {
  float of_tile = 0.0f;
  for (int i = 0; i < keys * head_dim_v; ++i) {
    float const size = float_of(quantize::magnitude_bits(v[i]));
    of_tile = std::max(of_tile, quantize::finite_or_zero(size));
  }
  quantize::Factors const factors = quantize::fp8_factors_of(of_tile);
  for (int i = 0; i < keys * head_dim_v; ++i) {
    v[i] = rounded_e4m3(quantize::to_fp8_value(v[i], factors.inverse)) * factors.scale;
  }
}

// kInt8: rounds the weights of a tile to 8 bits of the largest weight of their row.
template <int kWidth>
CA_CPU_TARGET void round_weights(float* s, int keys) {
  alignas(64) float largest[kWidth] = {}, inverse[kWidth];
  for (int n = 0; n < keys; ++n) {
    for (int r = 0; r < kWidth; ++r) {
      float const x = s[n * kWidth + r];
      largest[r] = x > largest[r] ? x : largest[r];
    }
  }
  for (int r = 0; r < kWidth; ++r) {
    inverse[r] = largest[r] < quantize::kMin ? 0.0f : 255.0f / largest[r];
    largest[r] *= 1.0f / 255.0f;
  }
  for (int n = 0; n < keys; ++n) {
    for (int r = 0; r < kWidth; ++r) {
      float& x = s[n * kWidth + r];
      x = rounded(x, inverse[r]) * largest[r];
    }
  }
}

// kFp8: rounds the weights of a tile to e4m3, scaled so that their sum is kFp8Sum.
template <int kWidth>
CA_CPU_TARGET void round_weights_e4m3(float* s, int keys, float const* sum) {
  alignas(64) float unit[kWidth], inverse[kWidth];
  for (int r = 0; r < kWidth; ++r) {
    inverse[r] = sum[r] < quantize::kMin ? 0.0f : quantize::kFp8Sum / sum[r];
    unit[r] = sum[r] * (1.0f / quantize::kFp8Sum);
  }
  for (int n = 0; n < keys; ++n) {
    for (int r = 0; r < kWidth; ++r) {
      float& x = s[n * kWidth + r];
      x = rounded_e4m3(x * inverse[r]) * unit[r];
    }
  }
}

// From the scores of a tile, in units of log2, to weights for V and the factors that rescale O.
template <Quantize kMode, int kVectors>
CA_CPU_TARGET void softmax_weights(State& state, int row, KeyTile const& tile, float* best,
                                   float* rescale) {
  constexpr int kWidth = kVectors * kLanes;
  alignas(64) float row_max[kWidth], sum[kWidth];
  int const keys = tile.keys;
  float* const s = state.s;
  SoftmaxRow* const rows = state.softmax + row;
  for (int r = 0; r < kWidth; ++r) {
    rescale[r] = rows[r].update_max(best[r], 1.0f);
    row_max[r] = rows[r].row_max_ref();
    sum[r] = 0.0f;
  }
  for (int n = 0; n < keys; ++n) {
    for (int r = 0; r < kWidth; ++r) {
      float& x = s[n * kWidth + r];
      float const weight = SoftmaxRow::weight(x, row_max[r], 1.0f);
      sum[r] += weight;
      if constexpr (kMode == Quantize::kInt8) {
        x = weight == 0.0f ? 0.0f : weight * tile.folded[n];  // NaN if a value is not finite
      } else {
        x = weight;
      }
    }
  }
  if constexpr (kMode == Quantize::kInt8) round_weights<kWidth>(s, keys);
  if constexpr (kMode == Quantize::kFp8) round_weights_e4m3<kWidth>(s, keys, sum);
  for (int r = 0; r < kWidth; ++r) rows[r].sum += sum[r];
}

// Processes a block of rows and a tile of keys.
template <Quantize kMode, int kVectors>
CA_CPU_TARGET void attend(Problem const& p, QuantizedState& state, int row, KeyTile const& tile) {
  constexpr int kWidth = kVectors * kLanes;
  alignas(64) float best[kWidth], rescale[kWidth];
  int const keys = tile.keys;
  float* const s = state.s;

  products<Broadcast::kRow, CA_CPU_COUNT, kVectors>(tile.k.data, tile.k.stride, keys, p.head_dim,
                                                    state.q + int64_t(row) * p.head_dim, nullptr,
                                                    s);
  for (int n = 0; n < keys; ++n) {
    float const scale = tile.scale[quantize::group_of(n)];
    for (int r = 0; r < kWidth; ++r) {
      float& x = s[n * kWidth + r];
      x = x * (state.q_scale[row + r] * scale) + state.q_shift[row + r];
    }
  }
  add_terms<kVectors>(p, state, row, tile.key, keys, s, static_cast<float*>(nullptr));
  for (int i = 0; i < keys * kWidth; ++i) s[i] *= kLog2e;
  apply_scores<kVectors>(IdentityScore(p), state, row, tile.key, keys, tile.is_full, s, best);
  softmax_weights<kMode, kVectors>(state, row, tile, best, rescale);
  products<Broadcast::kColumn, CA_CPU_COUNT, kVectors>(tile.v.data, tile.v.stride, p.head_dim_v,
                                                       keys, s, rescale,
                                                       state.o + int64_t(row) * p.head_dim_v);
}

template <Quantize kMode, int kVectors>
CA_CPU_TARGET void attend_width(int width, Problem const& p, QuantizedState& state, int row,
                                KeyTile const& tile) {
  if (width == kVectors * kLanes) {
    attend<kMode, kVectors>(p, state, row, tile);
  } else if constexpr (kVectors > 1) {
    attend_width<kMode, kVectors - 1>(width, p, state, row, tile);
  }
}

template <class Element, Quantize kMode>
CA_CPU_TARGET void run(Problem const& p, Tile const& tile, float* scratch) {
  QuantizedState state(VarlenSeqInfo(p, tile.batch));
  SeqLens const lens = state.seq.lens(p);
  int const rows = tile.rows();
  int const padded = (rows + kLanes - 1) / kLanes * kLanes;
  float* const k_panel = state.place(scratch, padded, kBlock, p);
  float* const v_panel = k_panel + kTileKeys * p.head_dim;
  state.shift = v_panel + kTileKeys * p.head_dim_v;

  IntervalMask const mask(p.mask, lens);
  place_rows(state, mask, tile, padded);
  PagedKv<Element> const k_source(p, state.seq, p.k, tile.kv_head);
  PagedKv<Element> const v_source(p, state.seq, p.v, tile.kv_head);
  load_shift(k_source, lens.k, p.head_dim, state.shift);
  quantize_queries<Element>(p, state, rows);
  std::fill_n(state.o, int64_t(padded) * p.head_dim_v, 0.0f);

  TileRange const range = mask.tiles(tile.q_begin, tile.q_end, kTileKeys);
  for (int n = range.begin; n < range.end; ++n) {
    KeyTile keys;
    keys.key = n * kTileKeys;
    keys.keys = std::min(kTileKeys, lens.k - keys.key);
    keys.is_full = range.is_full(n);
    keys.k = load_panel<Element, float>(k_source, keys.key, keys.keys, p.head_dim, k_panel);
    quantize_keys(k_panel, keys.keys, p.head_dim, state.shift, keys.scale);
    keys.v = load_panel<Element, float>(v_source, keys.key, keys.keys, p.head_dim_v, v_panel);
    if constexpr (kMode == Quantize::kInt8) {
      quantize_values(v_panel, keys.keys, p.head_dim_v, keys);
    } else if constexpr (kMode == Quantize::kFp8) {
      round_values(v_panel, keys.keys, p.head_dim_v);
    }
    for (int row = 0; row < rows; row += kBlock) {
      attend_width<kMode, CA_CPU_VECTORS>(block_width(row, rows), p, state, row, keys);
    }
  }
  for (int r = 0; r < rows; ++r) {
    state.scale[r] =
        finish_row(p, state.seq, state.head[r], state.query[r], state.softmax[r], 1.0f, true);
  }
  store_output<Element>(p, state, rows);
}

// Rows of a head for core/predict.hpp, of fp16 or bf16. Not a template: g++ 12 takes 2 s for each
// instance of a prediction. shift: of K.
struct PredictedRows {
  uint16_t const* first;
  int64_t row_stride;
  int seqlen, head_dim;
  bool is_half;
  float const* shift = nullptr;

  template <int kColumns>
  CA_CPU_TARGET void load(int row, int column, float (&x)[kColumns]) const {
    for (int d = 0; d < kColumns; ++d) {
      bool const is_there = row < seqlen && column + d < head_dim;
      uint16_t const bits = is_there ? first[row * row_stride + column + d] : uint16_t(0);
      x[d] = is_half ? half_to_float(bits) : bfloat16_to_float(bits);
    }
  }
  CA_CPU_TARGET void load_shift(int column, float (&x)[8]) const {
    for (int d = 0; d < 8; ++d) x[d] = column + d < head_dim ? shift[column + d] : 0.0f;
  }
};

// Predicts the error of a query head of a batch entry.
template <class Lanes, Quantize kMode>
CA_CPU_TARGET float predict(Problem const& p, int batch, int head, float const* shift) {
  DenseSeqInfo const seq(p, batch);
  int const head_kv = head / (p.num_heads_q / p.num_heads_kv);
  bool const is_half = p.q.dtype == DType::kFloat16;
  auto const rows = [&](Operand const& t, int of_head, int seqlen, int head_dim) {
    uint16_t const* const first = seq.queries<uint16_t>(t, of_head);
    return PredictedRows{first, t.row_stride, seqlen, head_dim, is_half, shift};
  };
  int const seqlen_q = p.seq_q.seqlen, seqlen_k = p.seq_k.seqlen;
  PredictedRows const q = rows(p.q, head, seqlen_q, p.head_dim);
  PredictedRows const k = rows(p.k, head_kv, seqlen_k, p.head_dim);
  PredictedRows const v = rows(p.v, head_kv, seqlen_k, p.head_dim_v);
  quantize::PredictedScratch<Lanes::kWarps> scratch;
  return quantize::predicted_error<Lanes, kMode>(p, IntervalMask(p.mask, {seqlen_q, seqlen_k}),
                                                 batch, head, q, k, v, scratch);
}

template <class Element>
CA_CPU_TARGET void load_shift(Problem const& p, int batch, int head, float* shift) {
  VarlenSeqInfo const seq(p, batch);
  PagedKv<Element> const k(p, seq, p.k, head / (p.num_heads_q / p.num_heads_kv));
  load_shift(k, p.seq_k.seqlen, p.head_dim, shift);
}

template <class Lanes>
CA_CPU_TARGET float predict_with(Problem const& p, int batch, int head) {
  float shift[kMaxHeadDim];
  if (p.q.dtype == DType::kFloat16) {
    load_shift<Float16>(p, batch, head, shift);
  } else {
    load_shift<BFloat16>(p, batch, head, shift);
  }
  switch (p.quantize) {
    case Quantize::kInt8:
      return predict<Lanes, Quantize::kInt8>(p, batch, head, shift);
    case Quantize::kFp8:
      return predict<Lanes, Quantize::kFp8>(p, batch, head, shift);
    default:
      return predict<Lanes, Quantize::kQk>(p, batch, head, shift);
  }
}

CA_CPU_TARGET inline float predict(Problem const& p, bool is_gpu, int batch, int head) {
  return is_gpu ? predict_with<OneLane<true>>(p, batch, head)
                : predict_with<OneLane<false>>(p, batch, head);
}

template <class Element>
CA_CPU_TARGET TileFunction function_for_element(Problem const& p) {
  switch (p.quantize) {
    case Quantize::kInt8:
      return run<Element, Quantize::kInt8>;
    case Quantize::kFp8:
      return run<Element, Quantize::kFp8>;
    default:
      return run<Element, Quantize::kQk>;
  }
}

CA_CPU_TARGET inline TileFunction function_for(Problem const& p) {
  return p.q.dtype == DType::kFloat16 ? function_for_element<Float16>(p)
                                      : function_for_element<BFloat16>(p);
}
