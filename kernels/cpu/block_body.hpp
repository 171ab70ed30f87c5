// Operations of the per-instruction-set bodies (each_isa.hpp) on a block of query rows and a tile
// of keys: products, and logits from products. `Real` is float, or double for float64 operands.
//
// Query rows lie along the lanes of vectors. `Rows` has the properties that logits depend on: each
// row's query head in head[], its query in query[], and the batch entry's `seq`.

template <class Real>
struct VectorOf {
  typedef Real Type __attribute__((vector_size(4 * CA_CPU_LANES), may_alias));
  using Scalar = Real;  // not deduced
};

// Numbers per vector register and rows per block: in fp32, and for Real.
inline constexpr int kLanes = CA_CPU_LANES;
inline constexpr int kBlock = CA_CPU_LANES * CA_CPU_VECTORS;
template <class Real>
inline constexpr int kLanesOf = 4 * CA_CPU_LANES / int(sizeof(Real));
template <class Real>
inline constexpr int kBlockOf = kLanesOf<Real> * CA_CPU_VECTORS;
static_assert(kLanes <= kMaxLanes && kBlock <= kMaxBlock);

enum class Broadcast { kRow, kColumn };

// C[i][row] (+)= sum over t < steps of A(i, t) * X[t][row], for i < kCount and kVectors vectors of
// rows. A(i, t) is a[i * stride + t] for kRow and a[t * stride + i] for kColumn. With `factor`, C
// is first multiplied by factor[row]; without it, C is overwritten.
template <Broadcast kA, int kCount, int kVectors, class Real>
CA_CPU_TARGET void product(Real const* a, int64_t stride, int steps, Real const* x,
                           typename VectorOf<Real>::Scalar const* factor, Real* c) {
  using Vector = typename VectorOf<Real>::Type;
  constexpr int kLanes = kLanesOf<Real>, kWidth = kVectors * kLanes;
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
      Real const value = kA == Broadcast::kRow ? a[i * stride + t] : a[t * stride + i];
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

// product() for any number `count` of i.
template <Broadcast kA, int kCount, int kVectors, class Real>
CA_CPU_TARGET void products(Real const* a, int64_t stride, int count, int steps, Real const* x,
                            typename VectorOf<Real>::Scalar const* factor, Real* c) {
  constexpr int kLanes = kLanesOf<Real>;
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

// Keys of a block that no row sees, one bit each: all their scores are -inf.
template <int kVectors, class Real>
CA_CPU_TARGET uint64_t unseen_keys(Real const* s, int keys) {
  constexpr int kWidth = kVectors * kLanesOf<Real>;
  static_assert(kTileKeys <= 64);
  uint64_t unseen = 0;
  for (int n = 0; n < keys; ++n) {
    bool is_seen = false;
    for (int r = 0; r < kWidth; ++r) is_seen |= s[n * kWidth + r] != -Real(kInf);
    unseen |= uint64_t(!is_seen) << n;
  }
  return unseen;
}

// O = O * factor + P V. Skips `unseen` keys whose V is not finite: their weights are 0, but 0 times
// NaN is NaN. Overwrites `factor`.
template <int kVectors, class Real>
CA_CPU_TARGET void add_values(Panel<Real> v, int columns, int keys, uint64_t unseen,
                              Real const* weights, Real* factor, Real* o) {
  constexpr int kWidth = kVectors * kLanesOf<Real>;
  for (uint64_t left = unseen; left != 0; left &= left - 1) {
    int const n = __builtin_ctzll(left);
    bool is_finite = true;
    for (int d = 0; d < columns; ++d) is_finite &= std::isfinite(v.data[n * v.stride + d]);
    if (is_finite) unseen &= ~(uint64_t(1) << n);
  }
  for (int first = 0; first < keys;) {
    uint64_t const later = unseen >> first;
    int const end = later == 0 ? keys : first + __builtin_ctzll(later);
    products<Broadcast::kColumn, CA_CPU_COUNT, kVectors>(v.data + first * v.stride, v.stride,
                                                         columns, end - first,
                                                         weights + first * kWidth, factor, o);
    std::fill_n(factor, kWidth, Real(1));
    first = end + 1;
  }
}

// Rows [first, first + count) of K or V, or of the rows in `list`: in place, or converted into
// `scratch`.
template <class Element, class Real>
CA_CPU_TARGET Panel<Real> load_panel(PagedKv<Element> const& source, int first, int count,
                                     int head_dim, Real* scratch, int32_t const* list = nullptr) {
  if constexpr (std::is_same_v<Element, Real>) {
    if (source.is_dense) return {source.row(first), source.row_stride};
  }
  for (int n = 0; n < count; ++n) {
    Element const* const row = source.row(list ? list[first + n] : first + n);
    Real* const target = scratch + n * head_dim;
    for (int d = 0; d < head_dim; ++d) target[d] = to_float(row[d]);
  }
  return {scratch, head_dim};
}

// load_panel() for rows in the type in which the call stores them.
template <class Element>
CA_CPU_TARGET Panel<float> load_panel(StoredKv<Element> const& source, int first, int count,
                                      int head_dim, float* scratch, int32_t const* list) {
  if (source.dtype == DType::kFloat8E4M3)
    return load_panel<E4M3, float>(source.rows_fp8, first, count, head_dim, scratch, list);
  if (is_token_format(source.dtype)) {
    for (int n = 0; n < count; ++n) {
      source.with_row(list ? list[first + n] : first + n, [&](auto const& row) {
        for (int d = 0; d < head_dim; ++d) scratch[n * head_dim + d] = to_float(row[d]);
      });
    }
    return {scratch, head_dim};
  }
  return load_panel<Element, float>(source.rows, first, count, head_dim, scratch, list);
}

// Adds an operand with one entry per logit to the logits of a block, in place. Rows that share
// their entries, as with a padding mask, read each entry once.
template <class Element, int kVectors, class Real, class Rows>
CA_CPU_TARGET void add_entries(PerLogit const& t, Rows const& state, int row, int key, int keys,
                               Real* s) {
  constexpr int kWidth = kVectors * kLanesOf<Real>;
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

// From products to logits, in place, one term of GeneralScore after the other. If `slope` is not
// null, it receives d logit / d product; without a softcap that is softmax_scale.
template <int kVectors, class Real, class Rows>
CA_CPU_TARGET void add_terms(Problem const& p, Rows const& state, int row, int key, int keys,
                             Real* s, typename VectorOf<Real>::Scalar* slope) {
  constexpr int kWidth = kVectors * kLanesOf<Real>;
  auto const [scale, cap] = Scalars<Real>(p);
  if (cap > 0) {
    Real const inner = scale / cap;
    for (int i = 0; i < keys * kWidth; ++i) s[i] = tanh_of(s[i] * inner);
    for (int i = 0; slope && i < keys * kWidth; ++i) slope[i] = (1 - s[i] * s[i]) * scale;
    for (int i = 0; i < keys * kWidth; ++i) s[i] *= cap;
  } else {
    for (int i = 0; i < keys * kWidth; ++i) s[i] *= scale;
  }
  if (p.logits.alibi_slopes != nullptr) {
    SeqLens const lens = state.seq.lens(p);
    alignas(64) Real alibi[kWidth], diagonal[kWidth];
    for (int r = 0; r < kWidth; ++r) {
      alibi[r] = alibi_slope_of<Real>(p, state.seq.batch, state.head[row + r]);
      diagonal[r] = Real(int64_t(state.query[row + r]) + lens.k - lens.q + p.mask.diagonal_shift);
    }
    for (int n = 0; n < keys; ++n) {
      for (int r = 0; r < kWidth; ++r) {
        s[n * kWidth + r] -= alibi[r] * std::fabs(Real(key + n) - diagonal[r]);
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
    default:
      add_entries<double, kVectors>(p.logits.bias, state, row, key, keys, s);
  }
  add_entries<MaskByte, kVectors>(p.mask.elements, state, row, key, keys, s);
}

// Applies dropout to the weights of a block, in place, and scales the kept weights. `key`: a
// multiple of 32.
template <int kVectors, class Real, class Rows>
CA_CPU_TARGET void drop(Problem const& p, DropoutMask const& dropout, Rows const& state, int row,
                        int key, int keys, Real* s) {
  constexpr int kWidth = kVectors * kLanesOf<Real>;
  Real const kept_scale = Real(1) / Real(kept_share(p.dropout.p));
  alignas(64) uint32_t own[2][kWidth], other[2][kWidth];  // words of 16 keys each
  for (int n0 = 0; n0 < keys; n0 += 32) {
    for (int pair = 0; pair < 8; pair += 2) {
      for (int r = 0; r < kWidth; ++r) {
        int const query = state.query[row + r];
        PhiloxWords const drawn =
            dropout.draw(state.seq.batch, state.head[row + r], query, key + n0 + pair);
        bool const is_second = query / 8 % 2;
        for (int i = 0; i < 2; ++i) {
          own[i][r] = is_second ? drawn.word[2 * i + 1] : drawn.word[2 * i];
          other[i][r] = is_second ? drawn.word[2 * i] : drawn.word[2 * i + 1];
        }
      }
      for (int i = 0; i < 8; ++i) {
        int const n = n0 + i / 2 * 8 + pair + i % 2;
        if (n >= keys) break;
        for (int r = 0; r < kWidth; ++r) {
          uint32_t const number = DropoutMask::number(own[i / 4][r], other[i / 4][r], n);
          s[n * kWidth + r] *= dropout.factor(number) > 0.0f ? kept_scale : Real(0);
        }
      }
    }
  }
}
