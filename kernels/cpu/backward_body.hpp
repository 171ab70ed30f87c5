// The backward pass for one instruction set (each_isa.hpp), and the forward pass in float64.
//
// A block of queries of one head loops over tiles of keys. With rows along lanes:
//
//   scores    S[key][row]    = sum over d     K[key][d] * Q[d][row]
//   grad P   dP[key][row]    = sum over d     V[key][d] * dO[d][row]
//   grad Q   dQ[d][row]     += sum over key   K[key][d] * dS[key][row]
//
// With columns along lanes, from row-major copies of Q and dO:
//
//   grad K   dK[key][d]     += sum over row   dS[key][row] * Q[row][d]
//   grad V   dV[key][d]     += sum over row    P[key][row] * dO[row][d]
//
// Arrays with columns along lanes are cut into blocks of columns. The block that starts at column c
// begins at c * rows, and its rows have width_at(c) numbers.

#include "cpu/block_body.hpp"

template <class Real>
CA_CPU_TARGET int width_at(int column, int columns) {
  constexpr int kLanes = kLanesOf<Real>;
  return std::min(kBlockOf<Real>, (columns - column + kLanes - 1) / kLanes * kLanes);
}

// C += A X, for arrays C and X with columns along lanes. A(key, row) is a[key * kBlock + row].
template <int kVectors, class Real>
CA_CPU_TARGET void add_product(int width, int keys, int rows, Real const* a, Real const* x,
                               Real const* ones, Real* c) {
  if (width == kVectors * kLanesOf<Real>) {
    products<Broadcast::kRow, CA_CPU_COUNT, kVectors>(a, kBlockOf<Real>, keys, rows, x, ones, c);
  } else if constexpr (kVectors > 1) {
    add_product<kVectors - 1>(width, keys, rows, a, x, ones, c);
  }
}
template <class Real>
CA_CPU_TARGET void add_product(int columns, int keys, int rows, Real const* a, Real const* x,
                               Real const* ones, Real* c) {
  for (int at = 0; at < columns; at += kBlockOf<Real>) {
    add_product<CA_CPU_VECTORS>(width_at<Real>(at, columns), keys, rows, a, x + at * kBlockOf<Real>,
                                ones, c + at * kTileKeys);
  }
}

// Loads rows of q, o or a gradient as Real: transposed, and, if by_columns is not null, in blocks
// of columns. Columns beyond the last are 0.
template <class Element, class Real>
CA_CPU_TARGET void load_rows(Operand const& t, Rows<Real> const& rows, int columns,
                             Real* transposed, Real* by_columns) {
  constexpr int kBlock = kBlockOf<Real>;
  Real row[kMaxHeadDim + kMaxLanes] = {};
  for (int r = 0; r < kBlock; ++r) {
    if (r < rows.count) {
      Element const* const source = rows.template row_of<Element>(t, r);
      for (int d = 0; d < columns; ++d) row[d] = Real(to_float(source[d]));
    } else {
      std::fill_n(row, columns, Real(0));
    }
    for (int d = 0; d < columns; ++d) transposed[d * kBlock + r] = row[d];
    for (int at = 0; by_columns && at < columns; at += kBlock) {
      int const width = width_at<Real>(at, columns);
      std::copy_n(row + at, width, by_columns + at * kBlock + r * width);
    }
  }
}

// Loads a block's rows before the loop over keys. Returns the sum of their contributions to the
// gradient of their head's sink.
template <class Element, class Real>
CA_CPU_TARGET Real load_block(Problem const& p, IntervalMask const& mask, int head, int q_begin,
                              Rows<Real>& rows, Buffers<Real> const& to) {
  constexpr int kBlock = kBlockOf<Real>;
  rows.set(mask, head, q_begin, kBlock);
  load_rows<Element>(p.q, rows, p.head_dim, to.q, to.q_columns);
  load_rows<Element>(p.grad->o, rows, p.head_dim_v, to.grad_o, to.grad_o_columns);
  Real sink = 0;
  for (int r = 0; r < kBlock; ++r) {
    rows.lse[r] = Real(kInf);  // weights of 0
    rows.delta[r] = 0;
    if (r >= rows.count) continue;
    int64_t const at = rows.seq.lse(p, head, rows.query[r]);
    Real const lse = reinterpret_cast<Real const*>(p.softmax_lse)[at];
    if (lse == Real(-kInf)) continue;  // no visible key and no sink
    Element const* const o = rows.template row_of<Element>(p.o, r);
    Real delta = 0;
    for (int d = 0; d < p.head_dim_v; ++d) {
      delta += Real(to_float(o[d])) * to.grad_o[d * kBlock + r];
    }
    if (p.grad->softmax_lse) {
      delta -= reinterpret_cast<Real const*>(p.grad->softmax_lse)[at];
    }
    rows.lse[r] = lse;
    rows.delta[r] = delta;
    if (p.grad->sinks) {
      sink -= exp_of(reinterpret_cast<Real const*>(p.logits.sinks)[head] - lse) * delta;
    }
  }
  return sink;
}

// Computes masked logits of a block and a tile of keys into to.p, and the derivative of the softcap
// into to.slope.
template <class Real>
CA_CPU_TARGET void compute_logits(Problem const& p, Rows<Real> const& rows, int key, int keys,
                                  bool is_full, Panel<Real> k, Buffers<Real> const& to) {
  constexpr int kBlock = kBlockOf<Real>;
  products<Broadcast::kRow, CA_CPU_COUNT, CA_CPU_VECTORS>(k.data, k.stride, keys, p.head_dim, to.q,
                                                          nullptr, to.p);
  add_terms<CA_CPU_VECTORS>(p, rows, 0, key, keys, to.p, to.slope);
  for (int n = 0; !is_full && n < keys; ++n) {
    for (int r = 0; r < kBlock; ++r) {
      bool const is_visible = key + n >= rows.lo[r] && key + n < rows.hi[r];
      to.p[n * kBlock + r] = is_visible ? to.p[n * kBlock + r] : Real(-kInf);
    }
  }
}

// Computes the weights, after dropout, into to.p, and the gradients of the logits into to.ds.
template <class Real>
CA_CPU_TARGET void compute_gradients(Problem const& p, Rows<Real> const& rows,
                                     DropoutMask const& dropout, int key, int keys, bool is_full,
                                     Panel<Real> k, Panel<Real> v, Buffers<Real> const& to) {
  constexpr int kBlock = kBlockOf<Real>;
  compute_logits(p, rows, key, keys, is_full, k, to);
  products<Broadcast::kRow, CA_CPU_COUNT, CA_CPU_VECTORS>(v.data, v.stride, keys, p.head_dim_v,
                                                          to.grad_o, nullptr, to.ds);
  if (dropout.is_active()) {
    std::fill_n(to.factor, keys * kBlock, Real(1));
    drop<CA_CPU_VECTORS>(p, dropout, rows, 0, key, keys, to.factor);
  }
  for (int n = 0; n < keys; ++n) {
    Real* const weights = to.p + n * kBlock;
    Real* const grad = to.ds + n * kBlock;
    Real const* const factor = to.factor + n * kBlock;
    for (int r = 0; r < kBlock; ++r) weights[r] = exp_of(weights[r] - rows.lse[r]);
    if (dropout.is_active()) {
      for (int r = 0; r < kBlock; ++r) {
        grad[r] = weights[r] * (grad[r] * factor[r] - rows.delta[r]);
        weights[r] *= factor[r];
      }
    } else {
      for (int r = 0; r < kBlock; ++r) grad[r] = weights[r] * (grad[r] - rows.delta[r]);
    }
  }
}

// Computes dQ, dK and dV of all heads that share a KV head, and each query head's contribution to
// its sink's gradient. run_bias() computes the gradient of the bias.
template <class Element, class Real = RealOf<Element>>
CA_CPU_TARGET void run_kv_head(Problem const& p, int batch, int kv_head, char* scratch,
                               double* sinks) {
  constexpr int kBlock = kBlockOf<Real>;
  Gradients const& grad = *p.grad;
  Rows<Real> rows{VarlenSeqInfo(p, batch)};
  SeqLens const lens = rows.seq.lens(p);
  Buffers<Real> const to(p, scratch);
  int const tiles = (lens.k + kTileKeys - 1) / kTileKeys;
  int64_t const k_tile = kTileKeys * padded(p.head_dim), v_tile = kTileKeys * padded(p.head_dim_v);
  std::fill_n(to.grad_k, tiles * k_tile, Real(0));
  std::fill_n(to.grad_v, tiles * v_tile, Real(0));
  alignas(64) Real ones[kBlock];
  std::fill_n(ones, kBlock, Real(1));

  IntervalMask const mask(p.mask, lens);
  DropoutMask const dropout(p);
  PagedKv<Element> const k_source(p, rows.seq, p.k, kv_head);
  PagedKv<Element> const v_source(p, rows.seq, p.v, kv_head);
  Real const scale = Scalars<Real>(p).softmax_scale;
  int const group = p.num_heads_q / p.num_heads_kv;
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    double sink = 0;
    for (int q_begin = 0; q_begin < lens.q; q_begin += kBlock) {
      sink += double(load_block<Element>(p, mask, head, q_begin, rows, to));
      std::fill_n(to.grad_q, p.head_dim * kBlock, Real(0));
      TileRange const range = mask.tiles(q_begin, q_begin + rows.count, kTileKeys);
      for (int n = range.begin; n < range.end; ++n) {
        int const key = n * kTileKeys;
        int const keys = std::min(kTileKeys, lens.k - key);
        Panel<Real> const k = load_panel<Element>(k_source, key, keys, p.head_dim, to.k_panel);
        Panel<Real> const v = load_panel<Element>(v_source, key, keys, p.head_dim_v, to.v_panel);
        compute_gradients(p, rows, dropout, key, keys, range.is_full(n), k, v, to);
        if (grad.v.data) {
          add_product(p.head_dim_v, keys, rows.count, to.p, to.grad_o_columns, ones,
                      to.grad_v + n * v_tile);
        }
        // From the gradient of logits to the gradient of products.
        if (to.slope) {
          for (int i = 0; i < keys * kBlock; ++i) to.ds[i] *= to.slope[i];
        } else {
          for (int i = 0; i < keys * kBlock; ++i) to.ds[i] *= scale;
        }
        if (grad.k.data) {
          add_product(p.head_dim, keys, rows.count, to.ds, to.q_columns, ones,
                      to.grad_k + n * k_tile);
        }
        if (grad.q.data) {
          products<Broadcast::kColumn, CA_CPU_COUNT, CA_CPU_VECTORS>(k.data, k.stride, p.head_dim,
                                                                     keys, to.ds, ones, to.grad_q);
        }
      }
      for (int r = 0; grad.q.data && r < rows.count; ++r) {
        Element* const target = rows.template row_of<Element>(grad.q, r);
        for (int d = 0; d < p.head_dim; ++d) from_float(to.grad_q[d * kBlock + r], target[d]);
      }
    }
    sinks[head] = sink;
  }

  struct {
    Operand const& t;
    Real const* from;
    int64_t tile;
    int columns;
  } const outputs[] = {{grad.k, to.grad_k, k_tile, p.head_dim},
                       {grad.v, to.grad_v, v_tile, p.head_dim_v}};
  for (auto const& out : outputs) {
    if (out.t.data == nullptr) continue;
    Element* const first = rows.seq.template keys<Element>(out.t, kv_head);
    for (int key = 0; key < lens.k; ++key) {
      Element* const target = first + key * out.t.row_stride;
      Real const* const tile = out.from + key / kTileKeys * out.tile;
      for (int at = 0; at < out.columns; at += kBlock) {
        int const width = width_at<Real>(at, out.columns);
        Real const* const source = tile + at * kTileKeys + key % kTileKeys * width;
        for (int j = 0; j < std::min(width, out.columns - at); ++j) {
          from_float(source[j], target[at + j]);
        }
      }
    }
  }
}

// The gradient of a bias, for the entries of one block of queries, or of all queries if they are
// broadcast: sums over every (batch, head, query, key) that reads the entry.
template <class Element, class Real = RealOf<Element>>
CA_CPU_TARGET void run_bias(Problem const& p, BiasItem const& item, char* scratch) {
  constexpr int kBlock = kBlockOf<Real>;
  PerLogit const& t = p.grad->bias;
  Buffers<Real> const to(p, scratch);
  std::fill_n(to.grad_bias, int64_t(p.seq_k.seqlen) * kBlock, 0.0);
  int const group = p.num_heads_q / p.num_heads_kv;
  for (int batch = item.batch.begin; batch < item.batch.end; ++batch) {
    Rows<Real> rows{VarlenSeqInfo(p, batch)};
    SeqLens const lens = rows.seq.lens(p);
    IntervalMask const mask(p.mask, lens);
    DropoutMask const dropout(p);
    for (int head = item.head.begin; head < item.head.end; ++head) {
      PagedKv<Element> const k_source(p, rows.seq, p.k, head / group);
      PagedKv<Element> const v_source(p, rows.seq, p.v, head / group);
      int const q_end = std::min(item.query.end, lens.q);
      for (int q_begin = item.query.begin; q_begin < q_end; q_begin += kBlock) {
        load_block<Element>(p, mask, head, q_begin, rows, to);
        TileRange const range = mask.tiles(q_begin, q_begin + rows.count, kTileKeys);
        for (int n = range.begin; n < range.end; ++n) {
          int const key = n * kTileKeys;
          int const keys = std::min(kTileKeys, lens.k - key);
          Panel<Real> const k = load_panel<Element>(k_source, key, keys, p.head_dim, to.k_panel);
          Panel<Real> const v = load_panel<Element>(v_source, key, keys, p.head_dim_v, to.v_panel);
          compute_gradients(p, rows, dropout, key, keys, range.is_full(n), k, v, to);
          double* const sum = to.grad_bias + int64_t(key) * kBlock;
          for (int i = 0; i < keys * kBlock; ++i) sum[i] += double(to.ds[i]);
        }
      }
    }
  }

  Real* const first = static_cast<Real*>(const_cast<void*>(t.data)) +
                      item.batch.begin * t.batch_stride + item.head.begin * t.head_stride +
                      item.query.begin * t.row_stride;
  int const rows = t.row_stride == 0 ? 1 : item.query.end - item.query.begin;
  for (int r = 0; r < rows; ++r) {
    double all = 0;
    for (int key = 0; key < p.seq_k.seqlen; ++key) {
      double const* const sums = to.grad_bias + int64_t(key) * kBlock;
      double sum = sums[r];
      for (int i = 1; t.row_stride == 0 && i < kBlock; ++i) sum += sums[i];
      all += sum;
      if (t.key_stride != 0) first[r * t.row_stride + key * t.key_stride] = Real(sum);
    }
    if (t.key_stride == 0) first[r * t.row_stride] = Real(all);
  }
}

// Computes rows of the output in float64: a block of queries of one head.
CA_CPU_TARGET inline void run_forward(Problem const& p, int batch, int head, int q_begin,
                                      char* scratch) {
  constexpr int kBlock = kBlockOf<double>;
  Rows<double> rows{VarlenSeqInfo(p, batch)};
  SeqLens const lens = rows.seq.lens(p);
  if (q_begin >= lens.q) return;
  Buffers<double> const to(p, scratch);
  IntervalMask const mask(p.mask, lens);
  DropoutMask const dropout(p);
  rows.set(mask, head, q_begin, kBlock);
  load_rows<double, double>(p.q, rows, p.head_dim, to.q, nullptr);
  int const kv_head = head / (p.num_heads_q / p.num_heads_kv);
  PagedKv<double> const k_source(p, rows.seq, p.k, kv_head);
  PagedKv<double> const v_source(p, rows.seq, p.v, kv_head);
  double const qk_scale = double(scale_of(p.q, head)) * double(scale_of(p.k, kv_head));
  for (int i = 0; i < p.head_dim * kBlock; ++i) to.q[i] *= qk_scale;

  double* const o = to.grad_o;
  std::fill_n(o, p.head_dim_v * kBlock, 0.0);
  alignas(64) double max[kBlock], sum[kBlock], rescale[kBlock], largest[kBlock];
  for (int r = 0; r < kBlock; ++r) {
    bool const has_sink = p.logits.sinks != nullptr;
    max[r] = has_sink ? reinterpret_cast<double const*>(p.logits.sinks)[head] : -double(kInf);
    sum[r] = max[r] == -double(kInf) ? 0.0 : 1.0;
    largest[r] = -double(kInf);
  }
  TileRange const range = mask.tiles(q_begin, q_begin + rows.count, kTileKeys);
  for (int n = range.begin; n < range.end; ++n) {
    int const key = n * kTileKeys;
    int const keys = std::min(kTileKeys, lens.k - key);
    Panel<double> const k = load_panel<double>(k_source, key, keys, p.head_dim, to.k_panel);
    Panel<double> const v = load_panel<double>(v_source, key, keys, p.head_dim_v, to.v_panel);
    compute_logits(p, rows, key, keys, range.is_full(n), k, to);
    uint64_t const unseen = unseen_keys<CA_CPU_VECTORS>(to.p, keys);
    for (int r = 0; r < kBlock; ++r) {
      for (int i = 0; i < keys; ++i) largest[r] = std::fmax(largest[r], to.p[i * kBlock + r]);
      double const best = std::fmax(max[r], largest[r]);
      double const base = best == -double(kInf) ? 0.0 : best;
      rescale[r] = std::exp(max[r] - base);
      sum[r] *= rescale[r];
      for (int i = 0; i < keys; ++i) {
        double& weight = to.p[i * kBlock + r];
        weight = std::exp(weight - base);
        sum[r] += weight;
      }
      max[r] = best;
    }
    if (dropout.is_active()) drop<CA_CPU_VECTORS>(p, dropout, rows, 0, key, keys, to.p);
    add_values<CA_CPU_VECTORS>(v, p.head_dim_v, keys, unseen, to.p, rescale, o);
  }
  double const scale = double(scale_of(p.v, kv_head)) / double(scale_of(p.o, head));
  for (int r = 0; r < rows.count; ++r) {
    int64_t const at = rows.seq.lse(p, head, rows.query[r]);
    if (p.softmax_lse) {
      reinterpret_cast<double*>(p.softmax_lse)[at] =
          sum[r] == 0.0 ? -double(kInf) : max[r] + std::log(sum[r]);
    }
    if (p.max_logits) reinterpret_cast<double*>(p.max_logits)[at] = largest[r];
    double* const target = rows.template row_of<double>(p.o, r);
    double const factor = sum[r] == 0.0 ? 0.0 : scale / sum[r];
    for (int d = 0; d < p.head_dim_v; ++d) target[d] = o[d * kBlock + r] * factor;
  }
}

CA_CPU_TARGET inline void run_kv_head(DType dtype, Problem const& p, int batch, int kv_head,
                                      char* scratch, double* sinks) {
  switch (dtype) {
    case DType::kFloat16:
      return run_kv_head<Float16>(p, batch, kv_head, scratch, sinks);
    case DType::kBFloat16:
      return run_kv_head<BFloat16>(p, batch, kv_head, scratch, sinks);
    case DType::kFloat32:
      return run_kv_head<float>(p, batch, kv_head, scratch, sinks);
    default:
      return run_kv_head<double>(p, batch, kv_head, scratch, sinks);
  }
}

CA_CPU_TARGET inline void run_bias(DType dtype, Problem const& p, BiasItem const& item,
                                   char* scratch) {
  switch (dtype) {
    case DType::kFloat16:
      return run_bias<Float16>(p, item, scratch);
    case DType::kBFloat16:
      return run_bias<BFloat16>(p, item, scratch);
    case DType::kFloat32:
      return run_bias<float>(p, item, scratch);
    default:
      return run_bias<double>(p, item, scratch);
  }
}

// Rows in a block.
CA_CPU_TARGET inline int block_rows(DType dtype) {
  return dtype == DType::kFloat64 ? kBlockOf<double> : kBlockOf<float>;
}
