// Launch parameters of the wgmma forward kernel with Q K^T in int8 and P V in e4m3, and its
// workspace: that of quantized/params.hpp behind a counter of tiles, with V transposed:
//
//   v8       (head, pair of tiles, column, 128 keys) e4m3. wgmma wants the keys of a column next to
//            each other. Each 16 keys are in the order of permuted_column(): a thread's weights of
//            P, as S has them, are then its registers of A
//
// A head has an even number of tiles of 64 keys.
#pragma once

#include "quantized/params.hpp"
#include "sm90/params.hpp"

namespace cutlass_attn::sm90 {

// Keys next to each other in v8: 128 bytes, the rows of a swizzled tile.
inline constexpr int kValueKeys = 128;

// TMA copies of v8.
struct TransposedValues {
  TensorMap map;

  // On the host, in boxes of 64 columns.
  char const* prepare(Problem const& p, int32_t key_tiles, bool is_on_gpu) {
    int64_t const of_pair = int64_t(kValueKeys) * p.head_dim_v;
    int64_t const of_head = key_tiles / 2 * of_pair, heads = p.num_heads_kv;
    uint32_t const pairs = key_tiles > 1 ? uint32_t(key_tiles / 2) : 1;
    return encode(
        {address_of(p.v, p),
         {kValueKeys / 2, uint32_t(p.head_dim_v), pairs, uint32_t(heads), uint32_t(p.batch)},
         {kValueKeys, pairs > 1 ? of_pair : 16, heads > 1 ? of_head : 16,
          p.batch > 1 ? heads * of_head : 16},
         {kValueKeys / 2, 64, 1, 1, 1}},
        is_on_gpu, map);
  }

  // Copies 64 columns of the tile that begins at this key.
  template <class Arch>
  CA_HOST_DEVICE void load(void* to, uint64_t* full, int column, int key, int head,
                           SequenceRows const& of) const {
    Arch::tma_load(to, map, full, 0, column, key / kValueKeys, head, of.batch);
  }
};

// v8 has pairs of key blocks, so each head has a whole number of them.
using KeyTilePairs = BasicDenseKeyTiles<2>;

template <class TileScales>
struct QuantizedTmaParams : BasicQuantizedParams<TileScales, KeyTilePairs>, PersistentTiles {
  using Quantized = BasicQuantizedParams<TileScales, KeyTilePairs>;
  static constexpr bool kTransposesV = true;
  TensorMap q;
  DenseRows k;
  TransposedValues v;
  TensorMap scale_pairs;  // scales of two tiles of K and V

  CA_HOST_DEVICE ForwardParams const& dense() const { return *this; }

  // On the host.
  static QuantizedTmaParams prepare(Problem const& p, Workspace const& workspace,
                                    DeviceLimits const& device, KernelFacts facts) {
    facts.packs_heads = packs_heads(p, facts);
    Workspace behind = workspace;
    behind.data = static_cast<char*>(workspace.data) + kCounterPlace;
    QuantizedTmaParams params = {Quantized::prepare(p, behind, device, facts), {}, {}, {}, {}, {}};
    static_cast<PersistentTiles&>(params) =
        PersistentTiles::prepare(params.scheduler.blocks, workspace, device);
    if (params.tiles == 0) return params;
    bool const is_on_gpu = device.compute_capability != 0;
    params.set_failure(encode(queries_of(p, params.scheduler.heads), is_on_gpu, params.q));
    Problem const& p8 = params.problem;
    params.set_failure(params.k.prepare(p8, p8.k, params.columns / 2, p8.seq_k, p8.num_heads_kv,
                                        facts.block_n, is_on_gpu));
    params.set_failure(params.v.prepare(p8, params.key_tiles.tiles, is_on_gpu));
    params.set_failure(params.prepare_scales(is_on_gpu));
    return params;
  }

  static int64_t workspace_bytes(Problem const& p, DeviceLimits const& device,
                                 KernelFacts const& facts) {
    return kCounterPlace + Quantized::workspace_bytes(p, device, facts);
  }

  Launch launch(KernelFacts const& facts) const { return PersistentTiles::launch(facts); }

  static constexpr int kScaleBytes = 2 * sizeof(TileScales);
  // In a kernel: copies the scales of the two tiles that begin at this key.
  template <class Arch>
  CA_HOST_DEVICE void load_scales(void* to, uint64_t* full, int key, int head,
                                  int32_t entry) const {
    Arch::tma_load(to, scale_pairs, full, 0, key / kValueKeys, head, entry, 0);
  }

 private:
  char const* prepare_scales(bool is_on_gpu) {
    static_assert(kScaleBytes == 128, "a row of a swizzled tile: its first row is not permuted");
    int64_t const pairs = this->key_tiles.tiles / 2, of_head = pairs * kScaleBytes;
    int64_t const heads = this->problem.num_heads_kv, batch = this->problem.batch;
    return encode(
        {this->scales,
         {kScaleBytes / 2, uint32_t(pairs > 0 ? pairs : 1), uint32_t(heads), uint32_t(batch), 1},
         {kScaleBytes, heads > 1 ? of_head : 16, batch > 1 ? heads * of_head : 16, 16},
         {kScaleBytes / 2, 1, 1, 1, 1}},
        is_on_gpu, scale_pairs);
  }

  static constexpr int64_t kCounterPlace = 128;  // bytes

  // Heads are packed only if their number divides the rows of a copy.
  static int32_t packs_heads(Problem const& p, KernelFacts const& facts) {
    int const heads = TileScheduler(p, facts.block_m, facts.packs_heads != 0).heads;
    return facts.packs_heads != 0 && kBoxRows % heads == 0;
  }
};

using Fp8TmaParams = QuantizedTmaParams<quantize::KeyFp8LaneScales>;

}  // namespace cutlass_attn::sm90
