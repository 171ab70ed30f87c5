// Attention of one tile, for one instruction set (each_isa.hpp).
//
// Query rows lie along the lanes of vectors. Queries are transposed to [head_dim][row]. Then both
// products read K and V in place and broadcast one number to all lanes, and softmax is lane by
// lane:
//
//   scores   S[key][row]  = sum over d    K[key][d] * Q[d][row]
//   output   O[d][row]   += sum over key  V[key][d] * P[key][row]
//
// A block is kBlock rows, which the products process at a time. The last block of a tile has the
// remaining rows, padded to whole vectors.

#include "cpu/rows_body.hpp"

// Q as fp32, times the scales of q and k, transposed. Padded with zeros.
template <class Element>
CA_CPU_TARGET void load_queries(Problem const& p, State const& state, int rows, float k_scale) {
  for (int row = 0; row < rows; row += kBlock) {
    int const width = block_width(row, rows);
    for (int r = 0; r < width; ++r) {
      float* const target = state.q + int64_t(row) * p.head_dim + r;
      if (row + r < rows) {
        Element const* const source = row_of<Element>(p.q, state, row + r);
        float const scale = scale_of(p.q, state.head[row + r]) * k_scale;
        float converted[kMaxHeadDim];
        for (int d = 0; d < p.head_dim; ++d) converted[d] = to_float(source[d]) * scale;
        for (int d = 0; d < p.head_dim; ++d) target[d * width] = converted[d];
      } else {
        for (int d = 0; d < p.head_dim; ++d) target[d * width] = 0.0f;
      }
    }
  }
}

// Processes a block of rows and a tile of keys.
template <class Score, int kVectors>
CA_CPU_TARGET void attend(Problem const& p, Score const& score, DropoutMask const& dropout,
                          State& state, int row, int key, int keys, bool is_full, Panel<float> k,
                          Panel<float> v) {
  constexpr int kWidth = kVectors * kLanes;
  alignas(64) float best[kWidth], rescale[kWidth], row_max[kWidth], sum[kWidth];
  float const log2_scale = score.log2_scale();
  float* const s = state.s;

  products<Broadcast::kRow, CA_CPU_COUNT, kVectors>(
      k.data, k.stride, keys, p.head_dim, state.q + int64_t(row) * p.head_dim, nullptr, s);
  if constexpr (std::is_same_v<Score, GeneralScore>) {
    add_terms<kVectors>(p, state, row, key, keys, s, static_cast<float*>(nullptr));
    apply_scores<kVectors>(IdentityScore(p), state, row, key, keys, is_full, s, best);
  } else {
    apply_scores<kVectors>(score, state, row, key, keys, is_full, s, best);
  }
  bool const may_be_masked = !is_full || std::is_same_v<Score, GeneralScore>;
  uint64_t const unseen = may_be_masked ? unseen_keys<kVectors>(s, keys) : 0;
  for (int r = 0; r < kWidth; ++r) {
    rescale[r] = state.softmax[row + r].update_max(best[r], log2_scale);
    row_max[r] = state.softmax[row + r].row_max_ref();
    sum[r] = 0.0f;
  }
  for (int n = 0; n < keys; ++n) {
    for (int r = 0; r < kWidth; ++r) {
      float const weight = SoftmaxRow::weight(s[n * kWidth + r], row_max[r], log2_scale);
      s[n * kWidth + r] = weight;
      sum[r] += weight;
    }
  }
  for (int r = 0; r < kWidth; ++r) state.softmax[row + r].sum += sum[r];
  if (dropout.is_active()) drop<kVectors>(p, dropout, state, row, key, keys, s);
  add_values<kVectors>(v, p.head_dim_v, keys, unseen, s, rescale,
                       state.o + int64_t(row) * p.head_dim_v);
}

template <class Score, int kVectors>
CA_CPU_TARGET void attend_width(int width, Problem const& p, Score const& score,
                                DropoutMask const& dropout, State& state, int row, int key,
                                int keys, bool is_full, Panel<float> k, Panel<float> v) {
  if (width == kVectors * kLanes) {
    attend<Score, kVectors>(p, score, dropout, state, row, key, keys, is_full, k, v);
  } else if constexpr (kVectors > 1) {
    attend_width<Score, kVectors - 1>(width, p, score, dropout, state, row, key, keys, is_full, k,
                                      v);
  }
}

template <class Element, class Score>
CA_CPU_TARGET void run(Problem const& p, Tile const& tile, float* scratch) {
  State state(VarlenSeqInfo(p, tile.batch));
  SeqLens lens = state.seq.lens(p);
  std::vector<int32_t> const listed = rows_of_list(p, tile, lens.k);
  int32_t const* const list = p.kv.indices ? listed.data() : nullptr;
  if (p.kv.indices) lens.k = int32_t(listed.size());
  int const rows = tile.rows();
  int const padded = (rows + kLanes - 1) / kLanes * kLanes;
  float* const k_panel = state.place(scratch, padded, kBlock, p);
  float* const v_panel = k_panel + kTileKeys * p.head_dim;

  IntervalMask const mask(p.mask, lens);
  place_rows(state, mask, tile, padded);
  load_queries<Element>(p, state, rows, scale_of(p.k, tile.kv_head));
  std::fill_n(state.o, int64_t(padded) * p.head_dim_v, 0.0f);

  Score const score(p, lens);
  DropoutMask const dropout(p);
  StoredKv<Element> const k_source(p, state.seq, p.k, tile.kv_head);
  StoredKv<Element> const v_source(p, state.seq, p.v, tile.kv_head);
  TileRange const range = mask.tiles(tile.q_begin, tile.q_end, kTileKeys);
  for (int n = range.begin; n < range.end; ++n) {
    int const key = n * kTileKeys;
    int const keys = std::min(kTileKeys, lens.k - key);
    Panel<float> const k = load_panel(k_source, key, keys, p.head_dim, k_panel, list);
    Panel<float> const v = load_panel(v_source, key, keys, p.head_dim_v, v_panel, list);
    for (int row = 0; row < rows; row += kBlock) {
      attend_width<Score, CA_CPU_VECTORS>(block_width(row, rows), p, score, dropout, state, row,
                                          key, keys, range.is_full(n), k, v);
    }
  }
  float const v_scale = scale_of(p.v, tile.kv_head);
  for (int r = 0; r < rows; ++r) {
    if (p.max_logits) {
      float const largest = state.softmax[r].max * score.log2_scale();
      MaxLogit::store(p, state.seq, state.head[r], state.query[r], largest);
    }
    state.scale[r] = finish_row(p, state.seq, state.head[r], state.query[r], state.softmax[r],
                                score.log2_scale(), true) *
                     (v_scale / scale_of(p.o, state.head[r]));
  }
  store_output<Element>(p, state, rows);
}

template <class Element>
CA_CPU_TARGET TileFunction function_for_element(Problem const& p) {
  if (IdentityScore::can_run(p)) return run<Element, IdentityScore>;
  if (SoftcapScore::can_run(p)) return run<Element, SoftcapScore>;
  return run<Element, GeneralScore>;
}

CA_CPU_TARGET inline TileFunction function_for(Problem const& p) {
  switch (p.q.dtype) {
    case DType::kFloat16:
      return function_for_element<Float16>(p);
    case DType::kBFloat16:
      return function_for_element<BFloat16>(p);
    default:
      return function_for_element<float>(p);
  }
}
