// Tile shapes, shared memory and the tensor-core layout of the mma.sync forward kernel.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>
#include <type_traits>

#include "core/dropout.hpp"
#include "core/mask.hpp"
#include "core/scheduler.hpp"
#include "sm80/swizzle.hpp"

namespace cutlass_attn::sm80 {

using namespace cute;

// Shared memory a block may have on Ada: an SM has 100 KB, and a block takes 1 KB beyond its own.
inline constexpr int kMaxSmemBytes = 99 * 1024;

// QkAccumulator, PvAccumulator: what Q K^T and P V are added up in, float or cutlass::half_t.
template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_,
          class QkAccumulator_ = float, class PvAccumulator_ = float>
struct ForwardConfig {
  using Element = Element_;
  using QkAccumulator = QkAccumulator_;
  using PvAccumulator = PvAccumulator_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpRows = kBlockM / kWarps;
  static constexpr int kColumnWarps = 1;          // that share rows: see config_split.hpp
  static constexpr int kWarpColumns = kHeadDimV;  // of O
  static_assert(kHeadDim % 32 == 0 && kHeadDimV % 32 == 0);
  static_assert(kBlockM % (16 * kWarps) == 0 && kBlockN % 16 == 0);

  // Which loop: with Q in registers the next slice's Q K^T runs beside a slice's softmax; where Q
  // would take more than 32 of them, a tile's Q K^T comes before all of it.
  static constexpr bool kPipelined = kWarpRows / 16 * (kHeadDim / 16) * 4 <= 32;
  static constexpr int kStages = kPipelined ? 2 : 1;  // buffers of K and V each

  // Keys that go through softmax, and meet V, at a time: the more, the fewer branches and the more
  // registers, of which softcap needs some itself. A pipelined tile has an even number of slices:
  // the last one's scores are not where the next tile's first go.
  template <class Score>
  static constexpr int slice() {
    return kPipelined && kBlockN % 64 == 0 && (Score::kIsIdentity || Score::kIsGeneral) ? 32 : 16;
  }
  static_assert(!kPipelined || kBlockN % 32 == 0);

  // Bound for the sum of a thread's weights in a slice. In fp16, P V of a slice is a sum that has
  // to stay below 65504: with 16 for each of the four threads that share a row it does as long as
  // no |V| exceeds 1023. (Less than 8 is impossible: so many weights may be 1.)
  static constexpr int kWeightLimit = std::is_same_v<PvAccumulator, float> ? 4096 : 16;

  using TileQ = SwizzledTile<kBlockM, kHeadDim>;
  using TileK = SwizzledTile<kBlockN, kHeadDim>;
  using TileV = SwizzledTile<kBlockN, kHeadDimV>;
  using TileO = SwizzledTile<kBlockM, kHeadDimV>;

  // O of the block takes the place of Q, and then of K and V, once nobody reads them any more.
  struct SharedStorage {
    alignas(128) char q[TileQ::kBytes];  // first: O begins here
    alignas(128) char k[kStages][TileK::kBytes];
    alignas(128) char v[kStages][TileV::kBytes];
    // Here, because registers are what the loop is short of.
    TileCoord tile;
    TileRange range;  // of the tiles of keys that its queries touch, in keys
    NearMask mask;    // of the queries from the tile's first on
    Dropout dropout;  // with the general score
  };
  static constexpr int kBufferBytes = TileQ::kBytes + kStages * (TileK::kBytes + TileV::kBytes);
  static_assert(sizeof(SharedStorage) <= kMaxSmemBytes);
  static_assert(TileO::kBytes <= kBufferBytes);
  static constexpr int kQueriesAt = 0;  // where Q is

  // Warps stand below each other along the queries: a row of S belongs to one warp, and softmax
  // stays within it.
  template <class Arch, class Accumulator = float>
  using TiledMma = TiledMMA<MMA_Atom<typename Arch::template Mma<Element, Accumulator>>,
                            Layout<Shape<Int<kWarps>, _1, _1>>, Tile<Int<16 * kWarps>, _16, _16>>;

  // Two blocks per SM for 32 rows a warp, with up to 255 registers; half as many rows get by with
  // 168 registers while the head dimension is small.
  static constexpr int kMinBlocksPerSm =
      kWarpRows <= 16 && kHeadDim <= 64 && kHeadDimV <= 64 ? 3 : 2;
};

}  // namespace cutlass_attn::sm80
