// From accumulators to global memory: O through shared memory in 16-byte stores, and LSE.
#pragma once

#include <cute/tensor.hpp>

#include "cute/fragment.hpp"
#include "cute/scheduler.hpp"
#include "cute/tile_copy.hpp"

namespace cutlass_attn {

// Writes the normalised O of a tile. `sO` is free to be overwritten; each warp writes its own rows
// of it, and all threads read it after the barrier.
template <class Arch, class StoreTile, class TiledMma, class AccO, class SmemTensor>
CUTE_DEVICE void store_output(AttnParams const& p, TileCoord const& tile, TiledMma const& mma,
                              AccO const& acc_o, SmemTensor& sO) {
  using namespace cute;
  using Element = typename SmemTensor::value_type;
  constexpr int kM = decltype(size<0>(sO))::value, kD = decltype(size<1>(sO))::value;
  int const thread = Arch::thread();

  Tensor rO = convert_to<Element>(acc_o);
  auto const copy_o = make_tiled_copy_C(Copy_Atom<UniversalCopy<uint32_t>, Element>{}, mma);
  auto const copy_thread = copy_o.get_slice(thread);
  copy(copy_o, copy_thread.retile_S(rO), copy_thread.partition_D(sO));
  Arch::sync();

  Tensor mO = make_tensor(make_gmem_ptr(tile.head_of<Element>(p.o, tile.head_q)),
                          make_shape(p.seqlen_q, Int<kD>{}), make_stride(p.o.row_stride, _1{}));
  Tensor gO = local_tile(mO, Shape<Int<kM>, Int<kD>>{}, make_coord(tile.q_begin / kM, 0));
  StoreTile store;
  auto const store_thread = store.get_slice(thread);
  store_rows(store, store_thread.partition_S(sO), store_thread.partition_D(gO),
             store_thread.partition_S(make_identity_tensor(Shape<Int<kM>, Int<kD>>{})),
             p.seqlen_q - tile.q_begin);
}

// Writes the LSE of a tile: of the threads that share a row, the one that holds column 0.
template <class Arch, class TiledMma, class Softmax, int kM>
CUTE_DEVICE void store_lse(AttnParams const& p, TileCoord const& tile, TiledMma const& mma,
                           Softmax const& softmax, float log2_scale, cute::Int<kM>) {
  using namespace cute;
  if (!p.softmax_lse) return;
  Tensor cO =
      mma.get_slice(Arch::thread()).partition_C(make_identity_tensor(Shape<Int<kM>, Int<16>>{}));
  Tensor cO_rows = as_rows(cO);  // (row, column)
  if (get<1>(cO_rows(0, 0)) != 0) return;
  CUTE_UNROLL
  for (int i = 0; i < size<0>(cO_rows); ++i) {
    int const q = tile.q_begin + get<0>(cO_rows(i, 0));
    if (q < p.seqlen_q) p.softmax_lse[tile.lse_row(p) + q] = softmax.rows[i].lse(log2_scale);
  }
}

}  // namespace cutlass_attn
