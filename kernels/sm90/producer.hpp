// The producer warp. One lane fetches tiles of rows from the counter, publishes them to the
// consumers and keeps the stages of Q, K and V full. The other lanes only help to find the sequence
// of a tile. With pages, all lanes of all warps of the producer warpgroup copy K and V.
#pragma once

#include "sm90/config.hpp"
#include "sm90/page_boxes.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Score, class Arch>
struct Producer {
  using Shared = typename Config::SharedStorage;
  using Info = typename Config::TileInfo;
  using Coord = typename Config::Coord;
  using TileQ = typename Config::TileQ;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  static constexpr int kN = Config::kBlockN;

  typename Config::Params const& params;
  Shared& shared;
  Ring<Config::kKStages> k = {};
  Ring<Config::kVStages> v = {};
  uint32_t published = 0;  // index of the next tile of rows
  int taken = 0;           // tile number from the counter
  bool has_asked = false;
  bool copies = false;  // whether this lane copies Q, and without pages K and V

  CUTE_DEVICE void run() {
    // With elect(), NVRTC 13.0 makes the consumer loop of three warpgroups wait for P V before the
    // exponentials, which takes 5 to 15 % longer on an H200.
    constexpr bool kElects = Config::kGroups < 3;
    if constexpr (Config::kIsPaged) {
      if (warp() > 0) return follow();
    }
    copies = kElects ? Arch::elect() : Arch::thread() == 0;
    if (Config::kIsDense && !copies) return;
    if (is_copying()) {
      Arch::prefetch_tensormap(params.q);
      Arch::prefetch_tensormap(params.k.map);
      Arch::prefetch_tensormap(params.v.map);
      if constexpr (Config::kHasBias) Arch::prefetch_tensormap(params.bias);
    }
    for (int number = Arch::block(); number < params.tiles; number = next()) {
      Coord const tile = params.template tile_of<Config::kBlockM, Arch>(number);
      bool const has_rows = Config::kIsDense || tile.rows > 0;
      if constexpr (Config::kIsPaged) {
        if (!has_rows) continue;
        if (copies) publish(tile);
        Arch::sync_warp();  // the TileInfo is visible to all lanes
        copy_tile(shared.info(info_stage()));
        ++published;
      } else if (is_copying() && has_rows) {
        copy_tile(publish(tile));
        ++published;
      }
    }
    if (!is_copying()) return;
    next_info().exists = 0;
    Arch::mbarrier_arrive(&shared.info_full[info_stage()]);
  }

 private:
  // Constant in dense kernels, where the other lanes have returned.
  CUTE_DEVICE bool is_copying() const { return Config::kIsDense || copies; }

  CUTE_DEVICE static int warp() { return int(uint32_t(Arch::thread()) / 32); }
  CUTE_DEVICE static int lane() { return int(uint32_t(Arch::thread()) % 32); }

  // In the warps after the first: copies K and V of the tiles of rows that the first warp
  // publishes.
  CUTE_DEVICE void follow() {
    for (;; ++published) {
      Arch::mbarrier_wait(&shared.info_full[info_stage()], round_of<Config::kInfos>(published));
      Info const& info = shared.info(info_stage());
      if (!info.exists) return;
      copy_tile(info);
      // No lane reads the TileInfo after the last sync_warp() of copy_pages().
      if (lane() == 0) Arch::mbarrier_arrive(&shared.info_empty[info_stage()]);
    }
  }

  // Fetches the next tile number from the counter. Called early, because the atomic takes long.
  CUTE_DEVICE void ask() {
    if (params.counter != nullptr && is_copying()) taken = Arch::atom_add(params.counter, 1);
    has_asked = true;
  }

  // Each block fetches numbers until no tile is left. The last block to do so resets the counter to
  // 0.
  CUTE_DEVICE int next() {
    if (params.counter == nullptr) return params.tiles;
    if (!has_asked) ask();
    has_asked = false;
    if (is_copying() && taken == params.tiles - 1) Arch::atom_add(params.counter, -params.tiles);
    int number = is_copying() ? taken : 0;
    if constexpr (!Config::kIsDense) {  // broadcast to all lanes
      CUTE_UNROLL
      for (int lanes = 1; lanes < 32; lanes *= 2) number += Arch::shuffle_xor(number, lanes);
    }
    return params.blocks + number;
  }

  CUTE_DEVICE int info_stage() const { return stage_of<Config::kInfos>(published); }
  CUTE_DEVICE Info& next_info() {
    int const round = round_of<Config::kInfos>(published);
    Arch::mbarrier_wait(&shared.info_empty[info_stage()], round ^ 1);
    return shared.info(info_stage());
  }

  CUTE_DEVICE Info& publish(Coord const& tile) {
    Info& info = next_info();
    if constexpr (Config::kHasMask) {
      int64_t const row = params.map.row_of(tile, params.dense().scheduler);
      info.exists = 1;
      info.tile = tile;
      info.tiles = typename Config::Tiles(params.map, row);
      info.bits = params.map.bits_of(row);
    } else {
      SeqLens const lens = tile.seq.lens(params.dense().problem);
      IntervalMask const mask = params.dense().template mask<Score::kHasChunks>(lens);
      TileRange range = mask.tiles(tile.q_begin, tile.q_end, kN);
      if (range.begin >= range.end) {
        // no row sees a key: use a tile beyond the last key, which TMA fills with zeros
        int const beyond = (lens.k + kN - 1) / kN + 1;
        range = {beyond, beyond + 1, 0, 0};
      }
      info.exists = 1;
      info.tile = tile;
      info.range = range.in_keys(kN);
      info.interval = mask.tile_mask(tile.q_begin);
      if constexpr (Config::kIsPaged) info.visible = mask.keys(tile.q_begin, tile.q_end);
      CUTE_NO_UNROLL
      for (int i = 0; i < Config::kGroups; ++i) set_range(mask, range, i, info);
    }
    Arch::mbarrier_arrive(&shared.info_full[info_stage()]);
    return info;
  }

  // Keys of a warpgroup's rows: at least one of the tiles that are copied. A warpgroup without rows
  // gets the first copied tile, because others wait for it to begin.
  CUTE_DEVICE static void set_range(IntervalMask const& mask, TileRange const& all, int group,
                                    Info& info) {
    Coord const& tile = info.tile;
    int const without = all.end - 1;
    TileRange range = {without, without + 1, 0, 0};
    int end = 0;  // one past the last key that any row sees
    int const first = group * Config::kGroupRows;
    if (first < tile.rows) {
      int const last =
          first + Config::kGroupRows < tile.rows ? first + Config::kGroupRows : tile.rows;
      int const query = tile.query(last - 1);
      TileRange const own = mask.tiles(tile.query(first), query + 1, kN);
      if (own.begin < own.end) range = own;
      end = mask.hi(query);
    }
    info.ranges[group] = range.in_keys(kN);
    info.is_half[group] = end <= info.ranges[group].end - kN + Config::kHalf;
  }

  CUTE_DEVICE void copy_tile(Info const& info) {
    typename Config::Tiles tiles(Config::start_of_copies(info));
    // With two stages, Q is copied while consumers still process the previous tile. With one stage,
    // K must not wait for that.
    if constexpr (Config::kQStages > 1) copy_q(info);
    copy_k(info, tiles.key());
    if constexpr (Config::kQStages == 1) copy_q(info);
    if constexpr (Config::kAsksEarly) ask();
    CUTE_NO_UNROLL
    while (tiles.has_tile()) {
      int const key = tiles.key();
      tiles.advance();
      if (tiles.has_tile()) copy_k(info, tiles.key());
      copy_v(info, key);
    }
  }

  CUTE_DEVICE void copy_q(Info const& info) {
    if (Config::kIsPaged && !copies) return;
    int const stage = stage_of<Config::kQStages>(published);
    int const round = round_of<Config::kQStages>(published);
    Coord const& tile = info.tile;
    CUTE_NO_UNROLL
    for (int i = 0; i < Config::kGroups; ++i) {
      arch::Barrier* const full = &shared.q_full[stage][i];
      Arch::mbarrier_wait(&shared.q_empty[stage][i], round ^ 1);
      Arch::mbarrier_arrive_expect_tx(full, TileQ::kBytes);
      int const query = tile.query(i * Config::kGroupRows), group = tile.head_q / tile.heads;
      // Rows beyond the sequence belong to the next sequence. Their results are not stored.
      int const row = first_q(tile.seq) + query;
      CUTE_UNROLL
      for (int c = 0; c < TileQ::kChunks; ++c) {
        Arch::tma_load(shared.q[stage][i] + c * TileQ::kChunkBytes, params.q, full, c * 64, 0, row,
                       group, tile.seq.batch);
      }
    }
  }
  CUTE_DEVICE static int first_q(DenseSeqInfo const&) { return 0; }
  CUTE_DEVICE static int first_q(VarlenSeqInfo const& seq) { return seq.first_q; }

  CUTE_DEVICE void copy_k(Info const& info, int key) {
    copy<TileK>(params.k, shared.k[k.stage], &shared.k_full[k.stage], &shared.k_empty[k.stage],
                k.round, info, key, k_bytes());
    if constexpr (Config::kHasBias) copy_bias(info.tile, key);
    if constexpr (Config::kScaleBytes > 0) {
      params.template load_scales<Arch>(shared.k[k.stage] + TileK::kBytes, &shared.k_full[k.stage],
                                        key, info.tile.head_kv, info.tile.seq.batch);
    }
    k.advance();
  }
  CUTE_DEVICE void copy_v(Info const& info, int key) {
    copy<TileV>(params.v, shared.v[v.stage], &shared.v_full[v.stage], &shared.v_empty[v.stage],
                v.round, info, key, TileV::kBytes);
    v.advance();
  }

  CUTE_DEVICE int k_bytes() const {
    if constexpr (Config::kHasBias) return TileK::kBytes + params.bias_bytes;
    return TileK::kBytes + Config::kScaleBytes;
  }

  // The bias of all warpgroups' rows, or the one row that they share, is stored behind K.
  CUTE_DEVICE void copy_bias(Coord const& tile, int key) const {
    using TileBias = typename Config::TileBias;
    int const group = tile.head_q / tile.heads;
    char* to = shared.k[k.stage] + TileK::kBytes;
    CUTE_NO_UNROLL
    for (int i = 0; i < (params.shares_rows ? 1 : Config::kGroups); ++i) {
      int const query = tile.query(i * Config::kGroupRows);
      CUTE_UNROLL
      for (int c = 0; c < TileBias::kChunks; ++c, to += TileBias::kChunkBytes) {
        Arch::tma_load(to, params.bias, &shared.k_full[k.stage], key + c * 64, 0, query, group,
                       tile.seq.batch);
      }
    }
  }

  // bytes: number of bytes that the barrier expects.
  template <class Tile, class Rows>
  CUTE_DEVICE void copy(Rows const& from, char* to, arch::Barrier* full, arch::Barrier* empty,
                        int round, Info const& info, int key, int bytes) const {
    if constexpr (Config::kIsPaged) {
      copy_pages<Tile>(from, to, full, empty, round, info, key);
    } else {
      begin_copy(full, empty, round, bytes);
      Coord const& tile = info.tile;
      CUTE_UNROLL
      for (int c = 0; c < Tile::kChunks; ++c) {
        from.template load<Arch>(to + c * Tile::kChunkBytes, full, c * 64, key, tile.head_kv,
                                 key_rows(tile.seq, params.dense().problem));
      }
    }
  }

  // Each warp copies every fourth box, and each lane 64 columns of a box. The hardware issues the
  // copies of a warp's lanes one after the other, in 60 to 100 clocks each on an H200, but lanes
  // look up pages and compute coordinates in parallel.
  template <class Tile>
  CUTE_DEVICE void copy_pages(PagedRows const& from, char* to, arch::Barrier* full,
                              arch::Barrier* empty, int round, Info const& info, int key) const {
    constexpr int kWarps = Config::kCopyWarps, kChunks = Tile::kChunks;
    static_assert(Tile::kRows / 8 <= 32 / kChunks * kWarps, "a lane copies at most once");
    KvStore const& kv = params.dense().problem.kv;
    PageBoxes const boxes{kv.block_table + info.tile.seq.batch * kv.block_table_stride,
                          params.dense().by_page, kv.page_size, from.box_rows, info.visible};
    int const box = lane() / kChunks * kWarps + warp(), row = box * from.box_rows;
    int const chunk = lane() % kChunks, head = info.tile.head_kv;
    int const own = int(uint32_t(from.boxes - warp() + kWarps - 1) / kWarps);
    bool const has_box = box < from.boxes;
    PageRows rows = {};
    if (has_box) rows = boxes.at(key + row);  // in flight while the warp waits
    begin_copy(full, empty, round, own * from.box_rows * kChunks * Tile::kRowBytes);
    Arch::sync_warp();  // the barrier expects the bytes; all lanes have read the TileInfo
    if (has_box) {
      from.template load<Arch>(to + chunk * Tile::kChunkBytes + row * Tile::kRowBytes, full,
                               chunk * 64, head, rows);
    }
  }

  CUTE_DEVICE void begin_copy(arch::Barrier* full, arch::Barrier* empty, int round,
                              int bytes) const {
    Arch::mbarrier_wait(empty, round ^ 1);
    if (!Config::kIsPaged || lane() == 0) Arch::mbarrier_arrive_expect_tx(full, bytes);
  }
};

}  // namespace cutlass_attn::sm90
