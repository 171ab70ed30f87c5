// Attention of one tile, for one instruction set. tile.cpp includes this file once for each, inside
// a namespace of its own, with these defined:
//
//   CA_CPU_TARGET    the attribute that selects the instruction set
//   CA_CPU_LANES     fp32 numbers in a vector register
//   CA_CPU_VECTORS   vectors of query rows and
//   CA_CPU_COUNT     keys or output columns that one product keeps in registers, as vectors x count
//
// Query rows lie along the lanes of vectors. With the queries transposed to [head_dim][row], both
// products read K and V as they are, one number at a time for all lanes, and the softmax is lane by
// lane:
//
//   scores   S[key][row]  = sum over d    K[key][d] * Q[d][row]
//   output   O[d][row]   += sum over key  V[key][d] * P[key][row]
//
// A block is what the products take at a time: kBlock rows, or for the last one of a tile what is
// left, padded to whole vectors.

typedef float Vector __attribute__((vector_size(4 * CA_CPU_LANES), may_alias));

inline constexpr int kLanes = CA_CPU_LANES;
inline constexpr int kBlock = CA_CPU_LANES * CA_CPU_VECTORS;
static_assert(kLanes <= kMaxLanes && kBlock <= kMaxBlock);

enum class Broadcast { kRow, kColumn };

// C[i][row] (+)= sum over t < steps of A(i, t) * X[t][row] for i < kCount and kVectors vectors of
// rows; A(i, t) is a[i * stride + t] for kRow, a[t * stride + i] for kColumn. With `factor`, C is
// first multiplied by factor[row]; without, it is overwritten.
template <Broadcast kA, int kCount, int kVectors>
CA_CPU_TARGET void product(float const* a, int64_t stride, int steps, float const* x,
                           float const* factor, float* c) {
  constexpr int kWidth = kVectors * kLanes;
  Vector sum[kCount][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      if (factor == nullptr) {
        sum[i][j] = Vector{};
      } else {
        sum[i][j] = *reinterpret_cast<Vector const*>(c + i * kWidth + j * kLanes) *
                    *reinterpret_cast<Vector const*>(factor + j * kLanes);
      }
    }
  }
  for (int t = 0; t < steps; ++t) {
    Vector row[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      row[j] = *reinterpret_cast<Vector const*>(x + t * kWidth + j * kLanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      float const value = kA == Broadcast::kRow ? a[i * stride + t] : a[t * stride + i];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] += row[j] * value;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      *reinterpret_cast<Vector*>(c + i * kWidth + j * kLanes) = sum[i][j];
    }
  }
}

// The same for any number of i.
template <Broadcast kA, int kCount, int kVectors>
CA_CPU_TARGET void products(float const* a, int64_t stride, int count, int steps, float const* x,
                            float const* factor, float* c) {
  int64_t const next = kA == Broadcast::kRow ? stride : 1;
  int i = 0;
  for (; i + kCount <= count; i += kCount) {
    product<kA, kCount, kVectors>(a + i * next, stride, steps, x, factor,
                                  c + i * kVectors * kLanes);
  }
  if constexpr (kCount > 1) {
    products<kA, kCount / 2, kVectors>(a + i * next, stride, count - i, steps, x, factor,
                                       c + i * kVectors * kLanes);
  }
}

// Rows [first, first + count) of K or V as fp32: where they are, or converted in `scratch`.
template <class Element>
CA_CPU_TARGET Panel load_panel(PagedKv<Element> const& source, int first, int count, int head_dim,
                               float* scratch) {
  if constexpr (std::is_same_v<Element, float>) {
    if (source.pages == nullptr) return {source.row(first), source.row_stride};
  }
  for (int n = 0; n < count; ++n) {
    Element const* const row = source.row(first + n);
    float* const target = scratch + n * head_dim;
    for (int d = 0; d < head_dim; ++d) target[d] = to_float(row[d]);
  }
  return {scratch, head_dim};
}

// Rows of the block that starts at `row`.
CA_CPU_TARGET inline int block_width(int row, int rows) {
  return std::min(kBlock, (rows - row + kLanes - 1) / kLanes * kLanes);
}

// The first element of a row of q or o.
template <class Element>
CA_CPU_TARGET Element* row_of(Operand const& t, State const& state, int row) {
  return state.seq.template queries<Element>(t, state.head[row]) + state.query[row] * t.row_stride;
}

// Q as fp32, times the scales of q and k, transposed; padded with zeros.
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

template <class Element>
CA_CPU_TARGET void store_output(Problem const& p, State const& state, int rows) {
  for (int row = 0; row < rows; row += kBlock) {
    int const width = block_width(row, rows);
    for (int r = 0; r < width && row + r < rows; ++r) {
      float const scale = state.scale[row + r];
      float const* const source = state.o + int64_t(row) * p.head_dim_v + r;
      Element* const target = row_of<Element>(p.o, state, row + r);
      float finished[kMaxHeadDim];
      for (int d = 0; d < p.head_dim_v; ++d) finished[d] = source[d * width] * scale;
      for (int d = 0; d < p.head_dim_v; ++d) from_float(finished[d], target[d]);
    }
  }
}

// The scores of the keys [key, key + keys) for a block of rows, masked, in place in `s`; the
// largest of each row in `best`.
template <int kVectors, bool kMasked, class Score>
CA_CPU_TARGET void apply_scores(Score const& score, State const& state, int row, int key, int keys,
                                float* s, float* best) {
  constexpr int kWidth = kVectors * kLanes;
  int32_t const* const lo = state.lo + row;
  int32_t const* const hi = state.hi + row;
  for (int r = 0; r < kWidth; ++r) best[r] = -kInf;
  for (int k = key; k < key + keys; ++k, s += kWidth) {
    for (int r = 0; r < kWidth; ++r) {
      float x = score(s[r], state.seq.batch, state.head[row + r], state.query[row + r], k);
      if (kMasked) x = (k >= lo[r]) & (k < hi[r]) ? x : -kInf;
      best[r] = x > best[r] ? x : best[r];  // passes over NaN; the weights will show it
      s[r] = x;
    }
  }
}

template <int kVectors, class Score>
CA_CPU_TARGET void apply_scores(Score const& score, State const& state, int row, int key, int keys,
                                bool is_full, float* s, float* best) {
  if (is_full) {
    apply_scores<kVectors, false>(score, state, row, key, keys, s, best);
  } else {
    apply_scores<kVectors, true>(score, state, row, key, keys, s, best);
  }
}

// The logits of a block, in place, changed by an operand with one entry for each. Rows that share
// their entries, as those of a padding mask do, read each of them once.
template <class Element, int kVectors>
CA_CPU_TARGET void add_entries(PerLogit const& t, State const& state, int row, int key, int keys,
                               float* s) {
  constexpr int kWidth = kVectors * kLanes;
  if (t.data == nullptr) return;
  Entries const rows(t, state, row, kWidth);
  Element const* const first = static_cast<Element const*>(t.data) + key * t.key_stride;
  if (rows.is_same) {
    for (int n = 0; n < keys; ++n) {
      Element const entry = first[rows.offset[0] + n * t.key_stride];
      for (int r = 0; r < kWidth; ++r) s[n * kWidth + r] = with_entry(s[n * kWidth + r], entry);
    }
  } else {
    for (int r = 0; r < kWidth; ++r) {
      Element const* const entries = first + rows.offset[r];
      for (int n = 0; n < keys; ++n) {
        s[n * kWidth + r] = with_entry(s[n * kWidth + r], entries[n * t.key_stride]);
      }
    }
  }
}

// From products to logits, in place, as GeneralScore does it, a term at a time.
template <int kVectors>
CA_CPU_TARGET void add_terms(Problem const& p, State const& state, int row, int key, int keys,
                             float* s) {
  constexpr int kWidth = kVectors * kLanes;
  SoftcapScore const capped(p);
  float const outer = capped.outer();
  for (int i = 0; i < keys * kWidth; ++i) s[i] = outer * capped(s[i], 0, 0, 0, 0);
  if (p.logits.alibi_slopes != nullptr) {
    SeqLens const lens = state.seq.lens(p);
    alignas(64) float slope[kWidth], diagonal[kWidth];
    for (int r = 0; r < kWidth; ++r) {
      slope[r] =
          p.logits
              .alibi_slopes[state.seq.batch * p.logits.alibi_batch_stride + state.head[row + r]];
      diagonal[r] = float(int64_t(state.query[row + r]) + lens.k - lens.q + p.mask.diagonal_shift);
    }
    for (int n = 0; n < keys; ++n) {
      for (int r = 0; r < kWidth; ++r) {
        s[n * kWidth + r] -= slope[r] * std::fabs(float(key + n) - diagonal[r]);
      }
    }
  }
  switch (p.logits.bias_dtype) {
    case DType::kFloat16:
      add_entries<Float16, kVectors>(p.logits.bias, state, row, key, keys, s);
      break;
    case DType::kBFloat16:
      add_entries<BFloat16, kVectors>(p.logits.bias, state, row, key, keys, s);
      break;
    case DType::kFloat32:
      add_entries<float, kVectors>(p.logits.bias, state, row, key, keys, s);
      break;
  }
  add_entries<MaskByte, kVectors>(p.mask.elements, state, row, key, keys, s);
}

// Drops weights of a block, in place, and scales the others. `key` is a multiple of 32.
template <int kVectors>
CA_CPU_TARGET void drop(DropoutMask const& dropout, State const& state, int row, int key, int keys,
                        float* s) {
  constexpr int kWidth = kVectors * kLanes;
  alignas(64) uint32_t words[4][kWidth];
  for (int n0 = 0; n0 < keys; n0 += 32) {
    for (int pair = 0; pair < 8; pair += 2) {
      for (int r = 0; r < kWidth; ++r) {
        PhiloxWords const drawn = dropout.draw(state.seq.batch, state.head[row + r],
                                               state.query[row + r], key + n0 + pair);
        for (int i = 0; i < 4; ++i) words[i][r] = drawn.word[i];
      }
      for (int i = 0; i < 8; ++i) {
        int const n = n0 + i / 2 * 8 + pair + i % 2;
        if (n >= keys) break;
        for (int r = 0; r < kWidth; ++r) s[n * kWidth + r] *= dropout.factor(words[i / 2][r], n);
      }
    }
  }
}

// A block of rows meets a tile of keys.
template <class Score, int kVectors>
CA_CPU_TARGET void attend(Problem const& p, Score const& score, DropoutMask const& dropout,
                          State& state, int row, int key, int keys, bool is_full, Panel k,
                          Panel v) {
  constexpr int kWidth = kVectors * kLanes;
  alignas(64) float best[kWidth], rescale[kWidth], row_max[kWidth], sum[kWidth];
  float const log2_scale = score.log2_scale();
  float* const s = state.s;

  products<Broadcast::kRow, CA_CPU_COUNT, kVectors>(
      k.data, k.stride, keys, p.head_dim, state.q + int64_t(row) * p.head_dim, nullptr, s);
  if constexpr (std::is_same_v<Score, GeneralScore>) {
    add_terms<kVectors>(p, state, row, key, keys, s);
    apply_scores<kVectors>(IdentityScore(p), state, row, key, keys, is_full, s, best);
  } else {
    apply_scores<kVectors>(score, state, row, key, keys, is_full, s, best);
  }
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
  if (dropout.is_active()) drop<kVectors>(dropout, state, row, key, keys, s);
  products<Broadcast::kColumn, CA_CPU_COUNT, kVectors>(
      v.data, v.stride, p.head_dim_v, keys, s, rescale, state.o + int64_t(row) * p.head_dim_v);
}

template <class Score, int kVectors>
CA_CPU_TARGET void attend_width(int width, Problem const& p, Score const& score,
                                DropoutMask const& dropout, State& state, int row, int key,
                                int keys, bool is_full, Panel k, Panel v) {
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
  SeqLens const lens = state.seq.lens(p);
  int const rows = tile.rows();
  int const padded = (rows + kLanes - 1) / kLanes * kLanes;
  state.q = scratch;
  state.o = state.q + int64_t(padded) * p.head_dim;
  state.s = state.o + int64_t(padded) * p.head_dim_v;
  float* const k_panel = state.s + kBlock * kTileKeys;
  float* const v_panel = k_panel + kTileKeys * p.head_dim;

  IntervalMask const mask(p.mask, lens);
  for (int r = 0; r < padded; ++r) state.softmax[r] = {};
  int r = 0;
  for (int query = tile.q_begin; query < tile.q_end; ++query) {
    for (int head = 0; head < tile.heads; ++head, ++r) {
      state.head[r] = tile.head_begin + head;
      state.query[r] = query;
      state.lo[r] = mask.lo(query);
      state.hi[r] = mask.hi(query);
    }
  }
  for (; r < padded; ++r) state.head[r] = state.query[r] = state.lo[r] = state.hi[r] = 0;
  load_queries<Element>(p, state, rows, scale_of(p.k, tile.kv_head));
  std::fill_n(state.o, int64_t(padded) * p.head_dim_v, 0.0f);

  Score const score(p, lens);
  DropoutMask const dropout(p);
  PagedKv<Element> const k_source(p, state.seq, p.k, tile.kv_head);
  PagedKv<Element> const v_source(p, state.seq, p.v, tile.kv_head);
  TileRange const range = mask.tiles(tile.q_begin, tile.q_end, kTileKeys);
  for (int n = range.begin; n < range.end; ++n) {
    int const key = n * kTileKeys;
    int const keys = std::min(kTileKeys, lens.k - key);
    Panel const k = load_panel<Element>(k_source, key, keys, p.head_dim, k_panel);
    Panel const v = load_panel<Element>(v_source, key, keys, p.head_dim_v, v_panel);
    for (int row = 0; row < rows; row += kBlock) {
      attend_width<Score, CA_CPU_VECTORS>(block_width(row, rows), p, score, dropout, state, row,
                                          key, keys, range.is_full(n), k, v);
    }
  }
  float const v_scale = scale_of(p.v, tile.kv_head);
  for (r = 0; r < rows; ++r) {
    state.scale[r] = finish_row(p, state.seq, state.head[r], state.query[r], state.softmax[r],
                                score.log2_scale(), true) *
                     (v_scale / scale_of(p.o, state.head[r]));
  }
  store_output<Element>(p, state, rows);
}

template <class Element>
CA_CPU_TARGET TileFunction function_for_element(Problem const& p) {
  if (IdentityScore::takes(p)) return run<Element, IdentityScore>;
  if (SoftcapScore::takes(p)) return run<Element, SoftcapScore>;
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

#undef CA_CPU_TARGET
#undef CA_CPU_LANES
#undef CA_CPU_VECTORS
#undef CA_CPU_COUNT
