// How the caches of serving engines store a latent token in bytes. The first columns are e4m3 with
// a scale for each group of columns; the rest, which rotary embeddings rotated, are bf16.
//
//   DsMla     "ds_mla", 656 bytes a token (DeepSeek V3.2 in FlashMLA, vLLM and SGLang):
//               0            512             528               656
//               | 512 e4m3   | 4 float32     | 64 bf16         |       a scale for 128 columns
//
//   DsMlaV4   "ds_mla_v4", 584 bytes a token (DeepSeek V4). Scales of a page follow all its rows:
//               0            448             576
//               | 448 e4m3   | 64 bf16       |                 page_size such rows, then
//               | 7 e8m0, 1 of padding | ...                   8 bytes for each row; for 64 columns
//
// V is the first columns of K: 512 of 576, or all 512. A stored number is e4m3 times scale in
// float32, then rounded to the dtype of q; a scale that is a power of two loses nothing.
#pragma once

#include <cstdint>

#include "core/e4m3.hpp"
#include "core/macros.hpp"
#include "core/math.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

struct TokenFormat {
  int32_t columns, columns_v;  // of K and of V
  int32_t fp8_columns;         // the first ones, in e4m3
  int32_t group;               // columns of a scale
  int32_t token_bytes;         // of a token in all
  int32_t row_bytes;           // from a token to the next one of its page
  int32_t bf16_at;             // byte of a row where the columns in bf16 begin
  int32_t scale_bytes;         // 4: float32, in the row; 1: e8m0, behind the rows of a page
};

struct DsMla {
  static constexpr TokenFormat kFormat = {576, 512, 512, 128, 656, 656, 528, 4};
};
struct DsMlaV4 {
  static constexpr TokenFormat kFormat = {512, 512, 448, 64, 584, 576, 448, 1};
};
inline constexpr int kScaleBytesOfV4 = 8;  // of a token, one of them padding

CA_HOST_DEVICE bool is_token_format(DType dtype) {
  return dtype == DType::kDsMla || dtype == DType::kDsMlaV4;
}
CA_HOST_DEVICE TokenFormat format_of(DType dtype) {
  constexpr TokenFormat kV3 = DsMla::kFormat, kV4 = DsMlaV4::kFormat;  // members have no address
  return dtype == DType::kDsMla ? kV3 : kV4;
}

// 2^(bits - 127); all ones is NaN.
CA_HOST_DEVICE float e8m0_to_float(uint8_t bits) {
  uint32_t const wide = bits == 0xff ? 0x7fc00000u : bits == 0 ? 0x00400000u : uint32_t(bits) << 23;
  float x;
  __builtin_memcpy(&x, &wide, sizeof x);
  return x;
}

// The scale of a group whose largest magnitude is `amax`: the least power of two that is no less
// than amax / 448 and 1e-4, as FlashMLA's quantiser has it. Its exponent is biased, as in e8m0.
CA_HOST_DEVICE uint8_t e8m0_of_amax(float amax) {
  float const least = amax / 448.0f > 1e-4f ? amax / 448.0f : 1e-4f;
  uint32_t const bits = float_bits(least);
  uint32_t const exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);
  return uint8_t(exponent < 0xfe ? exponent : 0xfe);
}

// Rounds to nearest even; NaN stays NaN.
CA_HOST_DEVICE uint16_t bfloat16_bits(float x) {
  uint32_t const bits = float_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40u);
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Rounds to Element and converts back.
template <class Element>
struct Rounded {
  CA_HOST_DEVICE static float of(float x) { return float(Element(x)); }
};

// Where the bytes of a token are.
struct TokenBytes {
  uint8_t const* row;     // null: no such token
  uint8_t const* scales;  // of its first group

  // `page` is the address of row 0 of a page of page_size rows.
  CA_HOST_DEVICE TokenBytes(TokenFormat const& format, uint8_t const* page, int32_t page_size,
                            int32_t row)
      : row(page + int64_t(row) * format.row_bytes),
        scales(format.scale_bytes == 4
                   ? this->row + format.fp8_columns
                   : page + int64_t(page_size) * format.row_bytes + row * kScaleBytesOfV4) {}

  CA_HOST_DEVICE float scale(TokenFormat const& format, int group) const {
    return format.scale_bytes == 4 ? reinterpret_cast<float const*>(scales)[group]
                                   : e8m0_to_float(scales[group]);
  }
};

// A token as a row of numbers of Element.
template <class Element>
struct TokenRow {
  TokenFormat format;
  TokenBytes bytes;

  CA_HOST_DEVICE float operator[](int column) const {
    if (column < format.fp8_columns) {
      return Rounded<Element>::of(float(E4M3{bytes.row[column]}) *
                                  bytes.scale(format, column / format.group));
    }
    int const at = format.bf16_at + 2 * (column - format.fp8_columns);
    return Rounded<Element>::of(
        bfloat16_to_float(*reinterpret_cast<uint16_t const*>(bytes.row + at)));
  }
};

}  // namespace cutlass_attn
