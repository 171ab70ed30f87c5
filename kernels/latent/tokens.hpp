// Copies the bytes of latent tokens (core/token_format.hpp), and converts them to 16 bits.
#pragma once

#include <cutlass/numeric_types.h>

#include <cute/config.hpp>
#include <type_traits>

#include "core/divide.hpp"
#include "core/sequences.hpp"
#include "core/token_format.hpp"
#include "latent/rows.hpp"

namespace cutlass_attn {

// Bytes of a tile of kRows tokens. kWarps warps divide its columns. Each warp has a slice, one byte
// per column, and further bytes: its columns that V lacks, or, for formats with bf16 columns in V,
// the second bytes of these columns.
template <class Format, int kRows, int kSlice_, int kTail, int kWarps>
struct TokenStage {
  static constexpr TokenFormat kFormat = Format::kFormat;
  static constexpr int kSlice = kSlice_;
  static constexpr bool kHasTail = kTail > 0;
  // Number of V's columns in bf16, which have a second byte.
  static constexpr int kLonger = kFormat.columns_v - kFormat.fp8_columns;
  static constexpr int kMore = kHasTail ? 2 * kTail : kLonger;
  static constexpr int kGroups = kSlice / kFormat.group;  // scales of a token that a warp needs
  static_assert(kSlice % kFormat.group == 0 && kMore % 16 == 0 && kMore > 0);
  static_assert(kHasTail ? kLonger == 0 : kLonger < kSlice);

  alignas(16) uint8_t slice[kWarps][kRows][kSlice];
  alignas(16) uint8_t more[kHasTail ? kWarps : 1][kRows][kMore];
  float scales[kWarps][kRows][kGroups];
};

template <class Stored, int kRows, int kSlice, int kTail, int kWarps, bool kConverts>
struct TokenStageOf {
  using Type = TokenStage<Stored, kRows, kSlice, kTail, kWarps>;
};
template <class Stored, int kRows, int kSlice, int kTail, int kWarps>
struct TokenStageOf<Stored, kRows, kSlice, kTail, kWarps, false> {
  using Type = int;  // unused
};

// Conversions of numbers of a token.
template <class Element, class Arch>
struct TokenNumbers {
  // Four e4m3 numbers times a scale, rounded to Element.
  CUTE_DEVICE static void scaled(uint32_t four, float scale, uint32_t& low, uint32_t& high) {
    uint32_t pairs[2];
    Arch::template unpack_e4m3<cutlass::half_t>(four, pairs);
    auto const number = [&](int i) {
      return half_to_float(uint16_t(pairs[i / 2] >> i % 2 * 16)) * scale;
    };
    low = Arch::template pack<Element>(number(0), number(1));
    high = Arch::template pack<Element>(number(2), number(3));
  }

  // Eight bf16 numbers as Element.
  CUTE_DEVICE static void bfloats(uint8_t const* from, uint32_t (&words)[4]) {
    Arch::load_shared(Arch::smem_address(from), words);
    if constexpr (std::is_same_v<Element, cutlass::half_t>) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        words[i] = Arch::template pack<Element>(bfloat16_to_float(uint16_t(words[i])),
                                                bfloat16_to_float(uint16_t(words[i] >> 16)));
      }
    }
  }
};

// Has the interface of LatentRows, and convert(). The scales of a token are looked up together with
// its row. They are stored, when the row is copied, next to the stage that it is copied to.
template <class Element, class Stage, class Slice, class Tail, int kRows, class Arch>
struct LatentTokens {
  using Address = typename Arch::SmemAddress;
  using Numbers = TokenNumbers<Element, Arch>;
  static constexpr TokenFormat kFormat = Stage::kFormat;
  static constexpr int kGroups = Stage::kGroups, kSlice = Stage::kSlice;
  static constexpr bool kHasTail = Stage::kHasTail;
  // A lane looks up a row and one of its scales, or all its scales if there are too few lanes. Not
  // always all, because tiles of 64 rows have no register to spare.
  static constexpr int kOwn = kRows * kGroups <= 32 ? 1 : kGroups, kLanes = kRows * kGroups / kOwn;
  static_assert(kLanes <= 32);

  Problem const& p;
  FastDivisor const by_page;
  int const lane, begin;
  uint8_t const** const rows;  // addresses of the next tile, in shared memory; null: no token
  LatentColumns const columns;
  LatentSource<uint8_t> const& source;
  uint8_t const* row = nullptr;  // address of this lane's row in the tile that was looked up
  float scales[kOwn] = {};
  int const warp = columns.warp;

  // Looks up the tile that begins at `key`.
  CUTE_DEVICE void look_up(int key) {
    int const j = key + begin + lane % kRows;
    row = nullptr;
    CUTE_UNROLL
    for (int i = 0; i < kOwn; ++i) scales[i] = 0.0f;  // zeros times NaN would be NaN
    if (lane >= kLanes || !source.keys.contains(j)) return;
    int const at = source.list(j);
    if (at < 0) return;
    int const page = p.kv.has_pages() ? by_page(at) : 0;
    int const number = source.pages ? source.pages[page] : page;
    constexpr TokenFormat kHere = Stage::kFormat;  // a member has no address on a GPU
    TokenBytes const bytes(kHere, source.first + number * p.k.batch_stride, p.kv.page_size,
                           at - page * p.kv.page_size);
    row = bytes.row;
    CUTE_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      int const group = warp * kGroups + lane / kRows + i;
      if (group * kFormat.group < kFormat.fp8_columns) scales[i] = bytes.scale(kHere, group);
    }
  }
  CUTE_DEVICE void look_up_if(int key, int end) {
    if (key < end) look_up(key);
  }

  // Stores that tile's addresses and scales. Other lanes may read them after a sync_warp().
  CUTE_DEVICE void place(Stage& stage) const {
    Arch::sync_warp();  // rows of the previous tile empty
    if (lane < kRows) rows[lane] = row;
    if (lane >= kLanes) return;
    CUTE_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      stage.scales[warp][begin + lane % kRows][lane / kRows + i] = scales[i];
    }
  }

  CUTE_DEVICE uint32_t present() const { return Arch::ballot(lane < kRows && row) << begin; }

  // Starts the copy of that tile. Tokens that do not exist become zeros.
  CUTE_DEVICE void copy(Stage& stage) const {
    copy_bytes<kSlice>(stage.slice[warp], warp * kSlice);
    if constexpr (kHasTail) {
      copy_bytes<Stage::kMore>(stage.more[warp], kFormat.bf16_at + warp * Stage::kMore);
    } else if (has_longer()) {
      copy_bytes<Stage::kMore>(stage.more[0], kFormat.columns_v);
    }
  }

  // Converts the rows of a stage that this warp has copied.
  CUTE_DEVICE void convert(Stage const& stage, Address to_slice, Address to_tail) const {
    constexpr int kLanes = kSlice / 8, kRowsAtOnce = 32 / kLanes;
    int const column = lane % kLanes * 8, group = column / kFormat.group;
    // Unrolled, tiles of 64 rows have 24 bytes of local memory (nvcc 13.0).
    [[maybe_unused]] constexpr int kUnroll = kRows < 32 ? 1 : 8;
    // With a tail all columns of V are: no test in the loop.
    bool const is_fp8 = kHasTail || warp * kSlice + column < kFormat.fp8_columns;
#pragma unroll kUnroll
    for (int i = 0; i < (kRows + kRowsAtOnce - 1) / kRowsAtOnce; ++i) {
      int const r = begin + i * kRowsAtOnce + lane / kLanes;
      uint32_t words[4];
      if (is_fp8) {
        uint32_t eight[2];
        Arch::load_shared(Arch::smem_address(&stage.slice[warp][r][column]), eight);
        float const scale = stage.scales[warp][r][group];
        Numbers::scaled(eight[0], scale, words[0], words[1]);
        Numbers::scaled(eight[1], scale, words[2], words[3]);
      } else {
        // Behind the columns in e4m3, two bytes each.
        constexpr int kFirst = kFormat.fp8_columns % kSlice;
        int const at = kFirst + 2 * (column - kFirst);
        Numbers::bfloats(at < kSlice ? &stage.slice[warp][r][at] : &stage.more[0][r][at - kSlice],
                         words);
      }
      Arch::store_shared(to_slice + Slice::offset(r, column), words);
    }
    if constexpr (kHasTail) {
      constexpr int kVectors = Stage::kMore / 16;
      CUTE_UNROLL
      for (int i = 0; i < (kRows * kVectors + 31) / 32; ++i) {
        int const r = (i * 32 + lane) / kVectors, vector = lane % kVectors;
        if (kRows * kVectors % 32 != 0 && r >= kRows) break;
        uint32_t words[4];
        Numbers::bfloats(&stage.more[warp][begin + r][16 * vector], words);
        Arch::store_shared(to_tail + Tail::offset(begin + r, 8 * vector), words);
      }
    }
  }

 private:
  // Whether the warp's columns are not all e4m3.
  CUTE_DEVICE bool has_longer() const { return (warp + 1) * kSlice > kFormat.fp8_columns; }

  // kBytes bytes of each row, from `first` on.
  template <int kBytes>
  CUTE_DEVICE void copy_bytes(uint8_t (*to)[kBytes], int first) const {
    constexpr int kLanes = kBytes / 16, kRowsAtOnce = 32 / kLanes;
    int const at = lane % kLanes * 16;
    CUTE_UNROLL
    for (int i = 0; i < (kRows + kRowsAtOnce - 1) / kRowsAtOnce; ++i) {
      int const r = i * kRowsAtOnce + lane / kLanes;
      if (kRows % kRowsAtOnce != 0 && r >= kRows) break;
      uint8_t const* const from = rows[r];
      Arch::cp_async(Arch::smem_address(&to[begin + r][at]), from + first + at, from != nullptr);
    }
  }
};

}  // namespace cutlass_attn
