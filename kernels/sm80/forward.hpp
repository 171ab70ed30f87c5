// Forward attention on mma.sync (sm_80 and later; what Ada runs).
//
// Grid:       batch * num_heads_q * ceil(seqlen_q / kBlockM) blocks of 32 * kWarps threads.
// Block:      one tile of kBlockM queries of one head, looping over tiles of kBlockN keys.
// Warp:       kBlockM / kWarps queries, all keys of the tile, the whole head dimension.
// Registers:  S of the tile, then P in its place; O; softmax state of the rows.
// Shared:     Q, K, V tiles, swizzled; filled by cp.async, read by ldmatrix. O leaves through Q's.
// Pipeline:   see mainloop_forward.hpp.
#pragma once

#include <algorithm>

#include "core/params.hpp"
#include "cute/epilogue.hpp"
#include "sm80/mainloop_forward.hpp"

namespace cutlass_attn::sm80 {

template <class Element, int kHeadDim, int kBlockM, int kBlockN, int kWarps>
struct Forward {
  template <class Arch>
  using Config = ForwardConfig<Element, kHeadDim, kBlockM, kBlockN, kWarps, Arch>;

  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kSmemBytes = (kBlockM + 2 * kBlockN) * kHeadDim * int(sizeof(Element));
  // As many as Ada's shared memory holds, up to 3: of 128 threads these leave 168 registers each,
  // and the compiler still spills nothing. A fourth, at 128 registers, spilled 64 bytes for D = 64.
  static constexpr int kMinBlocksPerSm = std::min(kSmemBytesPerSm / (kSmemBytes + 1024), 3);

  static int64_t blocks(AttnParams const& p) { return num_tiles(p, kBlockM); }

  template <class Score, class Arch>
  CUTE_DEVICE static void run(AttnParams const& p, char* smem) {
    using C = Config<Arch>;
    static_assert(sizeof(typename C::SharedStorage) == kSmemBytes);
    auto& shared = *reinterpret_cast<typename C::SharedStorage*>(smem);
    TileCoord const tile(p, kBlockM, Arch::block());

    typename C::TiledMma mma;
    Tensor acc_o = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kHeadDim>>{});  // (MMA, M, D)
    clear(acc_o);
    Tensor o_rows = as_rows(acc_o);  // (row, column)
    SoftmaxRows<Arch, decltype(size<0>(o_rows))::value> softmax;

    mainloop_forward<C, Score, Arch>(p, tile, shared, acc_o, softmax);

    softmax.finish(o_rows);
    store_lse<Arch>(p, tile, mma, softmax, Score(p).log2_scale(), Int<kBlockM>{});
    Tensor sO = make_tensor(make_smem_ptr(shared.q), typename C::SmemLayoutQ{});
    store_output<Arch, typename C::StoreTile>(p, tile, mma, acc_o, sO);
  }
};

}  // namespace cutlass_attn::sm80
