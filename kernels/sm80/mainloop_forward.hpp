// The loop over key tiles of the mma.sync forward kernel.
#pragma once

#include "core/mask.hpp"
#include "cute/fragment.hpp"
#include "cute/scheduler.hpp"
#include "cute/softmax.hpp"
#include "cute/tile_copy.hpp"
#include "sm80/config.hpp"

namespace cutlass_attn::sm80 {

// acc += A B, both operands read from shared memory slice by slice along k, each slice one step
// ahead of the product that uses it. tXs: (vector, MN, k) source, tXr: its view of the fragment.
template <class Mma, class CopyA, class CopyB, class SA, class RA, class VA, class SB, class RB,
          class VB, class Acc>
CUTE_DEVICE void gemm_smem(Mma const& mma, CopyA const& copy_a, SA const& tAs, VA&& tAr, RA& rA,
                           CopyB const& copy_b, SB const& tBs, VB&& tBr, RB& rB, Acc& acc) {
  copy(copy_a, tAs(_, _, _0{}), tAr(_, _, _0{}));
  copy(copy_b, tBs(_, _, _0{}), tBr(_, _, _0{}));
  CUTE_UNROLL
  for (int k = 0; k < size<2>(rA); ++k) {
    if (k + 1 < size<2>(rA)) {
      copy(copy_a, tAs(_, _, k + 1), tAr(_, _, k + 1));
      copy(copy_b, tBs(_, _, k + 1), tBr(_, _, k + 1));
    }
    gemm(mma, rA(_, _, k), rB(_, _, k), acc);
  }
}

// The same with A in registers already.
template <class Mma, class CopyB, class RA, class SB, class RB, class VB, class Acc>
CUTE_DEVICE void gemm_registers(Mma const& mma, RA const& rA, CopyB const& copy_b, SB const& tBs,
                                VB&& tBr, RB& rB, Acc& acc) {
  copy(copy_b, tBs(_, _, _0{}), tBr(_, _, _0{}));
  CUTE_UNROLL
  for (int k = 0; k < size<2>(rA); ++k) {
    if (k + 1 < size<2>(rA)) copy(copy_b, tBs(_, _, k + 1), tBr(_, _, k + 1));
    gemm(mma, rA(_, _, k), rB(_, _, k), acc);
  }
}

// Accumulates the unnormalised O of one tile of queries, and its softmax state.
//
// Pipeline: one buffer each for K and V. V of a tile is in flight during Q K^T and softmax, K of
// the next tile during P V:
//
//   cp.async   V(j) ------------+   K(j+1) ------+
//   compute    Q K(j)  softmax  |   P V(j)       |   Q K(j+1) ...
//           ^ K(j) landed       ^ V(j) landed    ^ barrier and wait
template <class Config, class Score, class Arch, class AccO, class Softmax>
CUTE_DEVICE void mainloop_forward(AttnParams const& p, TileCoord const& tile,
                                  typename Config::SharedStorage& shared, AccO& acc_o,
                                  Softmax& softmax) {
  using Element = typename Config::Element;
  constexpr int kM = Config::kBlockM, kN = Config::kBlockN, kD = Config::kHeadDim;
  int const thread = Arch::thread();

  IntervalMask const mask(p);
  TileRange const range = mask.tiles(tile.q_begin, tile.q_end, kN);
  if (range.begin >= range.end) return;  // these queries see no key
  Score const score(p);

  auto const global = [&](TensorRef const& t, int head, int rows) {
    return make_tensor(make_gmem_ptr(tile.head_of<Element const>(t, head)),
                       make_shape(rows, Int<kD>{}), make_stride(t.row_stride, _1{}));
  };
  Tensor gQ = local_tile(global(p.q, tile.head_q, p.seqlen_q), Shape<Int<kM>, Int<kD>>{},
                         make_coord(tile.q_begin / kM, 0));  // (M, D)
  Tensor gK = local_tile(global(p.k, tile.head_kv, p.seqlen_k), Shape<Int<kN>, Int<kD>>{},
                         make_coord(_, 0));  // (N, D, tiles)
  Tensor gV = local_tile(global(p.v, tile.head_kv, p.seqlen_k), Shape<Int<kN>, Int<kD>>{},
                         make_coord(_, 0));  // (N, D, tiles)
  Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Config::SmemLayoutQ{});    // (M, D)
  Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Config::SmemLayoutKV{});   // (N, D)
  Tensor sV = make_tensor(make_smem_ptr(shared.v), typename Config::SmemLayoutKV{});   // (N, D)
  Tensor sVt = make_tensor(make_smem_ptr(shared.v), typename Config::SmemLayoutVt{});  // (D, N)

  // Global to shared memory.
  typename Config::LoadTile load;
  auto const load_thread = load.get_slice(thread);
  Tensor tQgQ = load_thread.partition_S(gQ);  // (vector, row, column)
  Tensor tQsQ = load_thread.partition_D(sQ);
  Tensor tKgK = load_thread.partition_S(gK);  // (vector, row, column, tile)
  Tensor tKsK = load_thread.partition_D(sK);
  Tensor tVgV = load_thread.partition_S(gV);
  Tensor tVsV = load_thread.partition_D(sV);
  Tensor tQcQ = load_thread.partition_S(make_identity_tensor(Shape<Int<kM>, Int<kD>>{}));
  Tensor tKcK = load_thread.partition_S(make_identity_tensor(Shape<Int<kN>, Int<kD>>{}));

  // Shared memory to registers, and the two products.
  typename Config::TiledMma mma;
  auto const mma_thread = mma.get_slice(thread);
  Tensor tSrQ = mma_thread.partition_fragment_A(sQ);   // (MMA, M, k)
  Tensor tSrK = mma_thread.partition_fragment_B(sK);   // (MMA, N, k)
  Tensor tOrV = mma_thread.partition_fragment_B(sVt);  // (MMA, D, k)
  auto const copy_q = make_tiled_copy_A(typename Config::LoadOperand{}, mma);
  auto const copy_k = make_tiled_copy_B(typename Config::LoadOperand{}, mma);
  auto const copy_v = make_tiled_copy_B(typename Config::LoadOperandTrans{}, mma);
  Tensor tSsQ = copy_q.get_slice(thread).partition_S(sQ);
  Tensor tSsK = copy_k.get_slice(thread).partition_S(sK);
  Tensor tOsV = copy_v.get_slice(thread).partition_S(sVt);
  auto tSrQ_view = copy_q.get_slice(thread).retile_D(tSrQ);
  auto tSrK_view = copy_k.get_slice(thread).retile_D(tSrK);
  auto tOrV_view = copy_v.get_slice(thread).retile_D(tOrV);

  Tensor cS = mma_thread.partition_C(make_identity_tensor(Shape<Int<kM>, Int<kN>>{}));
  Tensor cS_rows = as_rows(cS);    // (row, key): coordinates in the tile
  Tensor o_rows = as_rows(acc_o);  // (row, column)

  auto const load_k = [&](int n) {
    load_rows(load, tKgK(_, _, _, n), tKsK, tKcK, p.seqlen_k - n * kN);
    Arch::async_copy_commit();
  };
  auto const load_v = [&](int n) {
    load_rows(load, tVgV(_, _, _, n), tVsV, tKcK, p.seqlen_k - n * kN);
    Arch::async_copy_commit();
  };

  auto const step = [&](int n, auto is_full) {
    Arch::template async_copy_wait<0>();
    Arch::sync();  // K(n) is there for all; V(n - 1) is read by none
    load_v(n);

    Tensor acc_s = partition_fragment_C(mma, Shape<Int<kM>, Int<kN>>{});  // (MMA, M, N)
    clear(acc_s);
    gemm_smem(mma, copy_q, tSsQ, tSrQ_view, tSrQ, copy_k, tSsK, tSrK_view, tSrK, acc_s);

    Tensor s_rows = as_rows(acc_s);  // (row, key)
    CUTE_UNROLL
    for (int i = 0; i < size<0>(s_rows); ++i) {
      int const q = tile.q_begin + get<0>(cS_rows(i, 0));
      int const lo = is_full ? 0 : mask.lo(q) - n * kN;
      int const hi = is_full ? 0 : mask.hi(q) - n * kN;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(s_rows); ++j) {
        int const key = get<1>(cS_rows(i, j));
        float const x = score(s_rows(i, j), tile.batch, tile.head_q, q, n * kN + key);
        s_rows(i, j) = is_full || (key >= lo && key < hi) ? x : -kInf;
      }
    }
    softmax.update(s_rows, o_rows, score.log2_scale());
    Tensor p_acc = convert_to<Element>(acc_s);
    Tensor tOrP = as_operand_a(p_acc);  // (MMA, M, k)

    Arch::template async_copy_wait<0>();
    Arch::sync();  // V(n) is there for all; K(n) is read by none
    if (n + 1 < range.end) load_k(n + 1);
    gemm_registers(mma, tOrP, copy_v, tOsV, tOrV_view, tOrV, acc_o);
  };

  load_rows(load, tQgQ, tQsQ, tQcQ, p.seqlen_q - tile.q_begin);
  load_k(range.begin);
  for (int n = range.begin; n < range.end; ++n) {
    if (range.is_full(n)) {
      step(n, true_type{});
    } else {
      step(n, false_type{});
    }
  }
}

}  // namespace cutlass_attn::sm80
