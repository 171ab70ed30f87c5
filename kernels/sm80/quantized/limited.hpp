// Computes heads whose predicted error is within Problem::max_error in 8 bits, and the other heads
// in 16 bits.
//
// Before:   the launch that rounds K, or K and V, has one more block per query head. It predicts
//           the head's error (core/predict.hpp) and stores it in the workspace. These blocks come
//           first, because each takes longer than a block that rounds.
// Grid:     that of either kernel; both have equal tiles of queries.
// Block:    reads the predictions for its KV head, and runs the body of one of the two kernels. All
//           heads that share a KV head run in one of them, because a tile may have rows of all of
//           these heads.
//
// The choice is made on the device, so a replay of a CUDA graph makes it again.
#pragma once

#include "sm80/quantized/forward.hpp"
#include "sm80/quantized/limited_params.hpp"

namespace cutlass_attn::sm80 {

// The lanes of core/predict.hpp are the warps of a block.
template <class Arch, int kThreads>
struct WarpLanes {
  static constexpr int kWarps = kThreads / 32, kLanes = 32, kMaxColumns = 256;
  static constexpr bool kIsGpu = true;
  CUTE_DEVICE static int warp() { return Arch::thread() / 32; }
  CUTE_DEVICE static int lane() { return Arch::thread() % 32; }
  CUTE_DEVICE static void sync() { Arch::sync(); }
  CUTE_DEVICE static void sync_warp() { Arch::sync_warp(); }
  CUTE_DEVICE static float largest(float x) {
    CUTE_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) x = fmaxf(x, Arch::shuffle_xor(x, mask));
    return x;
  }
  CUTE_DEVICE static float sum(float x) {
    CUTE_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) x += Arch::shuffle_xor(x, mask);
    return x;
  }
};

// A block that predicts the error of one query head.
template <class Element, int kHeadDim, class Params>
struct PredictError {
  using Narrow = typename Params::Narrow;
  using Keys = QuantizeKeys<Element, kHeadDim, Narrow>;
  static constexpr Quantize kMode = !Narrow::kHasValues                       ? Quantize::kQk
                                    : std::is_same_v<Narrow, Fp8ValuesParams> ? Quantize::kFp8
                                                                              : Quantize::kInt8;

  // head: index over all batch entries.
  template <class Arch>
  CUTE_DEVICE static void run(Params const& params, int head, char* smem) {
    Problem const& p = params.wide.problem;
    int const head_kv = params.wide.scheduler.by_heads_per_kv(head);
    int const batch = params.narrow.key_tiles.by_heads_kv(head_kv);
    Rows const k(params.narrow, p.k, p.head_dim, head_kv);
    Rows const v(params.narrow, p.v, p.head_dim_v, head_kv);
    Rows const q(static_cast<Element const*>(p.q.data) + batch * p.q.batch_stride +
                     (head - batch * p.num_heads_q) * p.q.head_stride,
                 p.q.row_stride, p.seq_q.seqlen, p.head_dim);
    float error;
    if (q.is_aligned && k.is_aligned && v.is_aligned) {
      error = predict<Arch, true>(params, head, head_kv, q, k, v, smem);
    } else {
      error = predict<Arch, false>(params, head, head_kv, q, k, v, smem);
    }
    if (Arch::thread() == 0) params.errors[head] = error;
  }

 private:
  using Rows = SourceRows<Element>;

  // Rows for core/predict.hpp, in fp32.
  template <bool kIsAligned>
  struct Loaded {
    Rows const& rows;
    CUTE_DEVICE void load(int row, int column, float (&x)[8]) const {
      uint32_t words[4];
      rows.template load<kIsAligned>(row, column, words);
      CUTE_UNROLL
      for (int d = 0; d < 8; ++d) x[d] = element_of<Element>(words, d);
    }
    CUTE_DEVICE void load(int row, int column, float (&x)[2]) const {
      uint32_t pair = 0;
      if (row < rows.seqlen && column < rows.head_dim) {
        Element const* const from = rows.first + row * rows.row_stride + column;
        if constexpr (kIsAligned) {
          pair = *reinterpret_cast<uint32_t const*>(from);
        } else {
          pair = uint32_t(from[0].raw()) | uint32_t(from[1].raw()) << 16;
        }
      }
      for (int d = 0; d < 2; ++d) x[d] = element_of<Element>(&pair, d);
    }
  };
  template <bool kIsAligned>
  struct WithShift : Loaded<kIsAligned> {
    float const* shift;
    CUTE_DEVICE WithShift(Rows const& rows, float const* shift)
        : Loaded<kIsAligned>{rows}, shift(shift) {}
    CUTE_DEVICE void load_shift(int column, float (&x)[8]) const {
      CUTE_UNROLL
      for (int d = 0; d < 8; ++d) x[d] = shift[Keys::shift_place(column / 16, column % 16 + d)];
    }
  };

  template <class Arch, bool kIsAligned>
  CUTE_DEVICE static float predict(Params const& params, int head, int head_kv, Rows const& q,
                                   Rows const& k, Rows const& v, char* smem) {
    Problem const& p = params.wide.problem;
    if (k.seqlen == 0) return 0.0f;
    using Lanes = WarpLanes<Arch, Params::kPrePostThreads>;
    float* const shift = Keys::template shift_of<Arch, kIsAligned>(
        params.narrow, {head_kv, 1, 1}, k, reinterpret_cast<float*>(smem));
    auto& scratch = *reinterpret_cast<typename Params::Scratch*>(smem + Params::kShiftBytes);
    SeqLens const lens{p.seq_q.seqlen, p.seq_k.seqlen};
    int const batch = params.narrow.key_tiles.by_heads_kv(head_kv);
    return quantize::predicted_error<Lanes, kMode>(
        p, params.wide.template mask<true>(lens), batch, head - batch * p.num_heads_q,
        Loaded<kIsAligned>{q}, WithShift<kIsAligned>(k, shift), Loaded<kIsAligned>{v}, scratch);
  }
};

// Accumulators: of the products in 8 bits.
template <class Element, class Shape, class Accumulators>
struct Limited : KernelDefaults {
  using Narrow = Forward<Element, Shape, Accumulators>;
  using Wide = Forward<Element, Shape>;
  using Params = LimitedParams<typename Narrow::Params>;
  static constexpr int kBlockM = Shape::kBlockM;
  static constexpr int kThreads = Narrow::kThreads;
  static constexpr int kSmemBytes =
      Narrow::kSmemBytes > Wide::kSmemBytes ? Narrow::kSmemBytes : Wide::kSmemBytes;
  static constexpr int kMinBlocksPerSm = Wide::kMinBlocksPerSm;
  static constexpr bool kPacksHeads = true;
  static_assert(kThreads == Wide::kThreads && kMinBlocksPerSm <= Narrow::kMinBlocksPerSm);

  struct Before {
    static constexpr int kThreads = Params::kPrePostThreads;
    template <class Arch>
    CUTE_DEVICE static void run(Params const& params, char* smem) {
      int const block = Arch::block() - params.heads;
      if (block < 0) {
        PredictError<Element, Shape::kHeadDim, Params>::template run<Arch>(params, Arch::block(),
                                                                           smem);
      } else {
        Narrow::Before::template run<Arch>(params.narrow, smem, block);
      }
    }
  };
  using After = NoLaunch<Params>;

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    TileCoord const tile = params.wide.template tile<kBlockM, Arch>();
    if (params.is_within(params.narrow.head_of(tile.seq, tile.head_kv))) {
      Narrow::template run<Score, Arch>(params.narrow, smem);
    } else {
      Wide::template run<Score, Arch>(params.wide, smem);
    }
  }
};

}  // namespace cutlass_attn::sm80
