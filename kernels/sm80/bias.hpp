// The bias of a key block, which a thread reads before Q K^T and adds afterwards. For each of its
// rows it has the entries of its keys, as they are in memory.
//
//   PairedBias   of q's dtype, with contiguous keys: one load reads the entries of two keys
//   AnyBias      of q's dtype or float32, with any strides: one load reads one entry, or two of
//                float32 that are aligned to their size
#pragma once

#include <cstdint>
#include <cute/config.hpp>
#include <type_traits>

#include "core/math.hpp"
#include "core/opaque.hpp"
#include "core/problem.hpp"
#include "tile/fragment.hpp"

namespace cutlass_attn::sm80 {

template <class Config, int kKeyBlock>
struct PairedBias {
  uint32_t pairs[Config::kRows][(kKeyBlock + 7) / 8];

  CUTE_DEVICE static constexpr bool is_float(Logits const&) { return false; }
  // rows: address of key 0 of each row of the block. Keys from `end` on get the entries of key 0.
  template <class Place>
  CUTE_DEVICE void read(Logits const&, char const* const* rows, Place const& place, int key,
                        int end) {
    int const first = key + place.column(0);
    CUTE_UNROLL
    for (int i = 0; i < Config::kRows; ++i) {
      auto const* const row = reinterpret_cast<uint16_t const*>(rows[place.row(i)]);
      CUTE_UNROLL
      for (int j = 0; j < kKeyBlock / 8; ++j) {
        int const at = first + j * 8 < end ? first + j * 8 : 0;
        pairs[i][j] = *reinterpret_cast<uint32_t const*>(row + at);
      }
    }
  }
  CUTE_DEVICE float entry(int i, int n, bool) const {
    uint32_t const pair = pairs[i][n / 2];
    return element_to_float<typename Config::Element>(uint16_t(pair >> n % 2 * 16));
  }
};

template <class Config, int kKeyBlock>
struct AnyBias {
  static constexpr int kKeys = kKeyBlock / 4;  // of a thread
  uint32_t entries[Config::kRows][kKeys];

  CUTE_DEVICE static bool is_float(Logits const& logits) {
    return logits.bias_dtype == DType::kFloat32;
  }
  template <class Place>
  CUTE_DEVICE void read(Logits const& logits, char const* const* rows, Place const& place, int key,
                        int end) {
    bool const has_pairs = is_float(logits) && are_pairs(logits.bias, end);
    int64_t const stride = logits.bias.key_stride;
    unpredicated_if(has_pairs, [&] { read_pairs(rows, place, key, end); });
    unpredicated_if(is_float(logits) && !has_pairs,
                    [&] { read_as<uint32_t>(stride, rows, place, key, end); });
    unpredicated_if(!is_float(logits), [&] { read_as<uint16_t>(stride, rows, place, key, end); });
  }
  CUTE_DEVICE float entry(int i, int n, bool is_float) const {
    uint32_t const bits = entries[i][n];
    return is_float ? bits_float(bits) : element_to_float<typename Config::Element>(uint16_t(bits));
  }

 private:
  // Whether entries of an even key and the next one are side by side, aligned, and both exist.
  CUTE_DEVICE static bool are_pairs(PerLogit const& bias, int end) {
    bool const exist = end == INT32_MAX || end % 2 == 0;
    int64_t const strides = bias.batch_stride | bias.head_stride | bias.row_stride;
    return exist && bias.key_stride == 1 && strides % 2 == 0 &&
           reinterpret_cast<uint64_t>(bias.data) % 8 == 0;
  }
  template <class Place>
  CUTE_DEVICE void read_pairs(char const* const* rows, Place const& place, int key, int end) {
    struct alignas(8) Pair {
      uint32_t entries[2];
    };
    int const first = key + place.column(0);
    CUTE_UNROLL
    for (int i = 0; i < Config::kRows; ++i) {
      auto const* const row = reinterpret_cast<uint32_t const*>(rows[place.row(i)]);
      CUTE_UNROLL
      for (int n = 0; n < kKeys; n += 2) {
        int const at = first + n * 4;
        Pair const pair = *reinterpret_cast<Pair const*>(row + (at < end ? at : 0));
        entries[i][n] = pair.entries[0], entries[i][n + 1] = pair.entries[1];
      }
    }
  }
  template <class Entry, class Place>
  CUTE_DEVICE void read_as(int64_t stride, char const* const* rows, Place const& place, int key,
                           int end) {
    int const first = key + place.column(0);
    CUTE_UNROLL
    for (int i = 0; i < Config::kRows; ++i) {
      auto const* const row = reinterpret_cast<Entry const*>(rows[place.row(i)]);
      CUTE_UNROLL
      for (int n = 0; n < kKeys; ++n) {
        int const at = first + n / 2 * 8 + n % 2;
        entries[i][n] = row[(at < end ? at : 0) * stride];
      }
    }
  }
};

struct NoBias {};

template <class Config, int kKeyBlock>
struct BiasOf {
  using OfBias = std::conditional_t<Config::kHasAnyBias, AnyBias<Config, kKeyBlock>,
                                    PairedBias<Config, kKeyBlock>>;
  using Type = std::conditional_t<Config::kHasBias, OfBias, NoBias>;
};

}  // namespace cutlass_attn::sm80
