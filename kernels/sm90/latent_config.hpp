// Tiles, shared memory and registers of the wgmma kernel for latent attention.
#pragma once

#include "arch/mbarrier.hpp"
#include "core/mask.hpp"
#include "core/softmax.hpp"
#include "core/token_format.hpp"
#include "core/traits.hpp"
#include "latent/rows.hpp"
#include "sm90/config.hpp"
#include "sm90/latent_params.hpp"
#include "tile/fragment.hpp"
#include "tile/swizzle.hpp"

namespace cutlass_attn::sm90 {

template <class Traits>
struct LatentConfig {
  using Element = typename Traits::Element;
  using Coord = BasicTileCoord<VarlenSeqInfo>;
  using Params = LatentBoxParams;
  using Stored = typename Traits::Kv;  // Element, or a format of core/token_format.hpp
  static constexpr bool kConverts = !std::is_same_v<Stored, Element>;
  using Source = LatentSource<std::conditional_t<kConverts, uint8_t, Element>>;
  static constexpr int kHeadDim = Traits::kHeadDim, kHeadDimV = Traits::kHeadDimV;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  // Whether V is a tensor of its own. The ring then holds tiles of K and of V in turn.
  static constexpr bool kHasOwnValues = Traits::template has<with::OwnValues>;
  static constexpr int kTilesOfStep = kHasOwnValues ? 2 : 1;
  static_assert(!kHasOwnValues || (!kConverts && kHeadDim == kHeadDimV));
  static constexpr int kGroupThreads = 128, kOutputGroups = Traits::kWarpsN;
  static constexpr int kThreads = kGroupThreads * (2 + kOutputGroups);
  static constexpr int kColumns = kHeadDimV / kOutputGroups;  // of O, of an output warpgroup
  static constexpr int kRows = 2;                             // of a thread
  static_assert(kBlockM == 64 && Traits::kWarpsM == 4 && kOutputGroups == 2);
  static_assert(kHeadDim % 64 == 0 && kColumns % 64 == 0 && kHeadDim >= kHeadDimV);

  // Registers per thread; four threads, one of each warpgroup, have 512. O takes 128, each chunk of
  // 64 columns of Q that stays in registers takes 16, and S of 48 keys takes 24.
  static constexpr int kCopyRegisters = 40, kScoreRegisters = 136, kOutputRegisters = 168;
  static constexpr int kKeptChunks = 5;

  using TileK = GroupedTile<kBlockN, kHeadDim>;
  using TileQ = SwizzledTile<kBlockM, kHeadDim - kKeptChunks * 64>;  // the other chunks of Q

  // The copying warps take units of 16 keys in turn. With values of their own, half of the warps
  // copy V.
  static constexpr int kUnit = 16, kUnits = kBlockN / kUnit, kCopyWarps = kGroupThreads / 32;
  static constexpr int kWarpsOfTile = kCopyWarps / kTilesOfStep;
  static_assert(kBlockN % kUnit == 0);
  static_assert(!kHasOwnValues || kUnits == kWarpsOfTile, "a warp copies only K or only V");

  struct alignas(16) Words {
    uint32_t words[4];
  };
  // P of a tile, rounded, as the A operand of wgmma: thread t of the scores' warpgroup stores the
  // registers that thread t of each output warpgroup loads. factors: of the rows of O, because of a
  // new row max.
  struct Weights {
    Words p[kBlockN / 16][kGroupThreads];
    float factors[kBlockM];
  };
  struct BlockInfo {
    Coord tile;
    TileRange range;      // key tiles, in keys
    int32_t first, last;  // keys of this split, in whole tiles
    TileMask interval;
    Source source;
  };

  // Bytes of a warp's unit of tokens; in a cluster, of this block's rows of two units. The row
  // length puts neighbouring rows in different banks.
  struct Tokens {
    static constexpr int kRowBytes = 704;
    static_assert(DsMla::kFormat.row_bytes <= kRowBytes);
    alignas(16) uint8_t rows[kUnit][kRowBytes];
  };
  struct NoTokens {};
  struct Values {
    Source values;  // rows of V
  };
  struct NoValues {};
  struct TokenBuffers {
    Tokens tokens[kCopyWarps];
    uint32_t started[kCopyWarps][2];  // which rows of the units in `tokens` are keys
  };
  static constexpr int kTokenBytes = kConverts ? int(sizeof(TokenBuffers)) : 0;

  static constexpr int kMaxSmemBytes = 227 * 1024, kOtherBytes = 2048;
  static constexpr int kWeights = 2;  // buffers
  static constexpr int kStages = (kMaxSmemBytes - kOtherBytes - TileQ::kBytes -
                                  kWeights * int(sizeof(Weights)) - kTokenBytes) /
                                 TileK::kBytes;
  static_assert(kStages >= 2 * kTilesOfStep);
  // Arrivals that release a tile: of the output warpgroups' warps, which read tiles of V. A tile of
  // K that is not V as well is released by the four warps of the scores.
  static constexpr int kReaders = kOutputGroups * 4, kScoreArrivals = kReaders / 4;

  struct Tiles {
    alignas(1024) char k[kStages][TileK::kBytes];
    char q[TileQ::kBytes];
    Weights weights[kWeights];
    SoftmaxRow rows[kBlockM];                           // after the last tile
    typename Source::Row addresses[kCopyWarps][kUnit];  // rows that a warp copies next
    uint32_t present[kStages][kUnits];                  // with lists: a unit's rows that are keys
    arch::Barrier k_full[kStages], k_empty[kStages];    // empty: kReaders of each block released it
    arch::Barrier q_full;  // the columns of Q that are in shared memory
    arch::Barrier p_full[kWeights], p_empty[kWeights];
    BlockInfo block;
  };
  struct SharedStorage : Tiles,
                         std::conditional_t<kConverts, TokenBuffers, NoTokens>,
                         std::conditional_t<kHasOwnValues, Values, NoValues> {};
  static_assert(sizeof(SharedStorage) <= kMaxSmemBytes);

  // Position of a thread of any warpgroup in the 64 rows.
  using Place = FragmentPlace<4, 1>;
};

}  // namespace cutlass_attn::sm90
