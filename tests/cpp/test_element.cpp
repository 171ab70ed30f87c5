// fp16, bf16 and float8_e4m3fn of the CPU path: every bit pattern, and rounding against doubles.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "check.hpp"
#include "core/e4m3.hpp"
#include "cpu/element.hpp"

using namespace cutlass_attn::cpu;
using cutlass_attn::E4M3;

namespace {

struct Format {
  int significand_bits, exponent_bits;  // without the implicit bit
};

Format format(Float16) { return {10, 5}; }
Format format(BFloat16) { return {7, 8}; }

// The value of a bit pattern by the definition of the format.
double value_of(Format f, int bits) {
  int const bias = (1 << (f.exponent_bits - 1)) - 1;
  int const fraction = bits & ((1 << f.significand_bits) - 1);
  int const exponent = bits >> f.significand_bits & ((1 << f.exponent_bits) - 1);
  double const sign = bits >> 15 ? -1 : 1;
  if (exponent == (1 << f.exponent_bits) - 1) {
    return fraction ? std::numeric_limits<double>::quiet_NaN() : sign * INFINITY;
  }
  double const one = exponent == 0 ? 0 : 1 << f.significand_bits;
  return sign * std::ldexp(one + fraction, std::max(exponent, 1) - bias - f.significand_bits);
}

template <class Element>
Element element(int bits) {
  return Element{uint16_t(bits)};
}

template <class Element>
int rounded(float x) {
  Element result;
  from_float(x, result);
  return result.bits;
}

template <class Element>
void every_pattern_round_trips() {
  for (int bits = 0; bits < 65536; ++bits) {
    float const x = to_float(element<Element>(bits));
    double const expected = value_of(format(Element{}), bits);
    CHECK_NEAR(x, expected, 0);
    if (std::isnan(x)) {
      CHECK(std::isnan(to_float(element<Element>(rounded<Element>(x)))));
    } else {
      CHECK_EQ(std::signbit(x), bits >> 15 == 1);
      CHECK_EQ(rounded<Element>(x), bits);
    }
  }
}

// Between each number and the next: the middle goes to the even one, its fp32 neighbours to the
// nearer one. The "number" after the largest is where infinity begins.
template <class Element>
void rounds_to_nearest_even() {
  Format const f = format(Element{});
  int const infinity = ((1 << f.exponent_bits) - 1) << f.significand_bits;
  for (int bits = 0; bits < infinity; ++bits) {
    double const low = value_of(f, bits), step = low - value_of(f, std::max(bits, 1) - 1);
    double const high = bits + 1 < infinity ? value_of(f, bits + 1) : low + step;
    double const middle = (low + high) / 2;
    float const tie = float(middle);
    if (double(tie) != middle) continue;  // bf16 has subnormals whose middle fp32 cannot hold
    CHECK_EQ(rounded<Element>(tie), bits + bits % 2);
    CHECK_EQ(rounded<Element>(std::nextafter(tie, 0.0f)), bits);
    CHECK_EQ(rounded<Element>(std::nextafter(tie, INFINITY)), bits + 1);
    CHECK_EQ(rounded<Element>(-tie), (bits + bits % 2) | 0x8000);
  }
  CHECK_EQ(rounded<Element>(INFINITY), infinity);
  CHECK_EQ(rounded<Element>(std::numeric_limits<float>::max()), infinity);
  CHECK_EQ(rounded<Element>(-INFINITY), infinity | 0x8000);
  CHECK_EQ(rounded<Element>(0.0f), 0);
  CHECK_EQ(rounded<Element>(-0.0f), 0x8000);
}

// Any fp32 number goes to the nearest representable one.
template <class Element>
void rounds_any_number_to_the_nearest() {
  Format const f = format(Element{});
  int const infinity = ((1 << f.exponent_bits) - 1) << f.significand_bits;
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    float const x = std::fabs(float_of(uint32_t(random())));
    int const bits = rounded<Element>(x);
    if (std::isnan(x)) {
      CHECK(bits > infinity);
      continue;
    }
    if (bits == infinity) continue;  // the other test has the threshold
    double const error = std::fabs(x - value_of(f, bits));
    CHECK(bits == 0 || error <= std::fabs(x - value_of(f, bits - 1)));
    CHECK(bits + 1 == infinity || error <= std::fabs(x - value_of(f, bits + 1)));
  }
}

}  // namespace

TEST(fp16_round_trips) { every_pattern_round_trips<Float16>(); }
TEST(bf16_round_trips) { every_pattern_round_trips<BFloat16>(); }
TEST(fp16_rounds_to_nearest_even) { rounds_to_nearest_even<Float16>(); }
TEST(bf16_rounds_to_nearest_even) { rounds_to_nearest_even<BFloat16>(); }
TEST(fp16_rounds_any_number) { rounds_any_number_to_the_nearest<Float16>(); }
TEST(bf16_rounds_any_number) { rounds_any_number_to_the_nearest<BFloat16>(); }

// NaNs whose payload would vanish with the low bits must not become infinities.
TEST(every_nan_stays_one) {
  for (uint32_t bits : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu, 0x7fc00000u}) {
    CHECK(std::isnan(to_float(element<Float16>(rounded<Float16>(float_of(bits))))));
    CHECK(std::isnan(to_float(element<BFloat16>(rounded<BFloat16>(float_of(bits))))));
    CHECK_EQ(rounded<BFloat16>(float_of(bits)) >> 15, int(bits >> 31));
  }
}

// The value of a number that is not NaN, by the definition of the format.
double value_of(E4M3 x) {
  int const exponent = x.bits >> 3 & 15, fraction = x.bits & 7;
  double const value = std::ldexp((exponent ? 8 : 0) + fraction, std::max(exponent, 1) - 7 - 3);
  return x.bits & 0x80 ? -value : value;
}

TEST(e4m3_round_trips) {
  for (int bits = 0; bits < 256; ++bits) {
    E4M3 const x{uint8_t(bits)};
    // Two at once, as GPUs without an instruction for it convert them. The other one is NaN.
    uint32_t const halves = cutlass_attn::small_halves_of(uint32_t(bits) << 8 | 0x7f000000u);
    float const small = to_float(Float16{uint16_t(halves)});
    CHECK(std::isnan(to_float(Float16{uint16_t(halves >> 16)})));
    if ((bits & 0x7f) == 0x7f) {
      CHECK(std::isnan(to_float(x)) && std::isnan(small));
      CHECK_EQ(rounded<E4M3>(to_float(x)) & 0x7f, 0x7f);
      continue;
    }
    CHECK_NEAR(to_float(x), value_of(x), 0);
    CHECK_NEAR(small * 256, value_of(x), 0);
    CHECK_EQ(std::signbit(to_float(x)), bits >> 7 == 1);
    CHECK_EQ(std::signbit(small), bits >> 7 == 1);
    CHECK_EQ(rounded<E4M3>(to_float(x)), bits);
  }
}

TEST(e4m3_rounds_to_nearest_even) {
  for (int bits = 0; bits < 0x7e; ++bits) {
    double const low = value_of(E4M3{uint8_t(bits)}), high = value_of(E4M3{uint8_t(bits + 1)});
    float const tie = float((low + high) / 2);
    CHECK_EQ(rounded<E4M3>(tie), bits + bits % 2);
    CHECK_EQ(rounded<E4M3>(std::nextafter(tie, 0.0f)), bits);
    CHECK_EQ(rounded<E4M3>(std::nextafter(tie, INFINITY)), bits + 1);
    CHECK_EQ(rounded<E4M3>(-tie), (bits + bits % 2) | 0x80);
  }
}

TEST(e4m3_ends_at_448) {
  for (float x : {448.0f, 449.0f, 464.0f, 1e30f, float(INFINITY)}) {
    CHECK_EQ(rounded<E4M3>(x), 0x7e);
    CHECK_EQ(rounded<E4M3>(-x), 0xfe);
  }
  CHECK_EQ(rounded<E4M3>(float_of(0xff800001u)), 0xff);
  CHECK_EQ(rounded<E4M3>(1e-30f), 0);
}

int main(int argc, char** argv) { return check::run(argc, argv); }
