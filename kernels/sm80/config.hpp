// Tile shapes, shared-memory layouts and copies of the mma.sync forward kernel.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

namespace cutlass_attn::sm80 {

using namespace cute;

// Shared memory of an SM of Ada, of which every thread block takes 1 KB beyond its own.
inline constexpr int kSmemBytesPerSm = 100 * 1024;
inline constexpr int kMaxSmemBytes = kSmemBytesPerSm - 1024;

template <class Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps, class Arch>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kThreads = 32 * kWarps;
  static_assert(kHeadDim % 32 == 0 && kBlockM % (16 * kWarps) == 0 && kBlockN % 16 == 0);
  // SmemLayoutVt is composed with the layout of K and V; with 48 keys and two chunks of the head
  // dimension that compiled and addressed memory outside the tile.
  static_assert((kBlockN & (kBlockN - 1)) == 0);

  // Warps stand below each other along the queries: a row of S belongs to one warp, and softmax
  // stays within it.
  using TiledMma = TiledMMA<MMA_Atom<typename Arch::template Mma<Element>>,
                            Layout<Shape<Int<kWarps>, _1, _1>>, Tile<Int<16 * kWarps>, _16, _16>>;

  // Shared memory holds rows in chunks of 64 elements (128 bytes), or of 32 where the head
  // dimension is no multiple of 64. The 16-byte vectors of a chunk are permuted by the row, so that
  // the 8 rows an ldmatrix reads at one column, and the vectors one cp.async phase writes, fall
  // into different banks.
  static constexpr int kChunk = kHeadDim % 64 == 0 ? 64 : 32;
  using SmemAtom = decltype(composition(Swizzle<kChunk == 64 ? 3 : 2, 3, 3>{},
                                        Layout<Shape<_8, Int<kChunk>>, Stride<Int<kChunk>, _1>>{}));
  using SmemLayoutQ = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kBlockM>, Int<kHeadDim>>{}));
  using SmemLayoutKV = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kBlockN>, Int<kHeadDim>>{}));
  // V as the B operand of P V, (head_dim, keys): the same bytes, ldmatrix.trans does the rest.
  using SmemLayoutVt = decltype(composition(
      SmemLayoutKV{}, Layout<Shape<Int<kHeadDim>, Int<kBlockN>>, Stride<Int<kBlockN>, _1>>{}));

  // Q becomes the staging buffer of O: the last product that reads Q is behind a barrier by then.
  struct SharedStorage {
    alignas(128) Element q[kBlockM * kHeadDim];
    alignas(128) Element k[kBlockN * kHeadDim];
    alignas(128) Element v[kBlockN * kHeadDim];
  };
  static_assert(sizeof(SharedStorage) <= kMaxSmemBytes);

  // 16 bytes a thread; neighbours in a row, as many as a chunk has vectors.
  static constexpr int kVectors = kChunk / 8;
  using RowLayout =
      Layout<Shape<Int<kThreads / kVectors>, Int<kVectors>>, Stride<Int<kVectors>, _1>>;
  using LoadTile = decltype(make_tiled_copy(Copy_Atom<typename Arch::AsyncCopy, Element>{},
                                            RowLayout{}, Layout<Shape<_1, _8>>{}));
  using StoreTile = decltype(make_tiled_copy(Copy_Atom<UniversalCopy<uint128_t>, Element>{},
                                             RowLayout{}, Layout<Shape<_1, _8>>{}));

  using LoadOperand = Copy_Atom<typename Arch::LoadMatrix, Element>;
  using LoadOperandTrans = Copy_Atom<typename Arch::LoadMatrixTrans, Element>;
};

}  // namespace cutlass_attn::sm80
