// The host atoms against tables written by hand from the PTX ISA, and against plain loops.
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cute/arch/mma_sm80.hpp>
#include <cute/atom/mma_atom.hpp>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "arch/sm90.hpp"
#include "check.hpp"
#include "simt/warp_ops.hpp"
#include "tile/fragment.hpp"

using namespace cutlass_attn::simt;
using cutlass::bfloat16_t;
using cutlass::half_t;
using cutlass_attn::arch::Sm80;
using cutlass_attn::arch::Sm90;

namespace {

struct Position {
  int row, column;
};

// PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type": element i of a lane.
Position position_a(int lane, int i) {
  return {lane / 4 + (i == 2 || i == 3 || i == 6 || i == 7 ? 8 : 0),
          lane % 4 * 2 + (i & 1) + (i >= 4 ? 8 : 0)};
}
Position position_b(int lane, int i) {  // row: k, column: n
  return {lane % 4 * 2 + (i & 1) + (i >= 2 ? 8 : 0), lane / 4};
}
Position position_c(int lane, int i) {
  return {lane / 4 + (i >= 2 ? 8 : 0), lane % 4 * 2 + (i & 1)};
}

// CuTe's layouts of the instruction are a second source; they must agree.
template <class Atom>
void check_traits() {
  using Traits = cute::MMA_Traits<Atom>;
  typename Traits::ALayout const a;  // (lane, i) -> m + 16 k
  typename Traits::BLayout const b;  // (lane, i) -> n + 8 k
  typename Traits::CLayout const c;  // (lane, i) -> m + 16 n
  int wrong = 0;
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 8; ++i) {
      auto const [m, k] = position_a(lane, i);
      wrong += int(a(lane, i)) != m + 16 * k;
    }
    for (int i = 0; i < 4; ++i) {
      auto const [k, n] = position_b(lane, i);
      wrong += int(b(lane, i)) != n + 8 * k;
    }
    for (int i = 0; i < 4; ++i) {
      auto const [m, n] = position_c(lane, i);
      wrong += int(c(lane, i)) != m + 16 * n;
    }
  }
  CHECK(wrong == 0);
}

// A fragment has its elements in the order of CuTe's accumulators of several blocks; its rows and
// columns are those of FragmentPlace.
void check_fragment() {
  using namespace cute;
  constexpr int kM = 2, kN = 3;
  using Atom = MMA_Atom<SM80_16x8x16_F32F16F16F32_TN>;
  auto const cutes = partition_fragment_C(TiledMMA<Atom, Layout<Shape<_1, _1, _1>>>{},
                                          Shape<Int<16 * kM>, Int<8 * kN>>{});
  using Ours = cutlass_attn::Fragment<float, kM, kN>;
  static_assert(decltype(size(cutes))::value == Ours::kSize);
  Ours ours;
  for (int i = 0; i < Ours::kSize; ++i) ours(i) = float(i);
  auto const rows = cutlass_attn::as_rows(ours);
  static_assert(rows.kRows == 2 * kM && rows.kColumns == 2 * kN);
  int wrong = 0;
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) {
      for (int i = 0; i < 4; ++i) {
        float const expected = float(cutes.layout()(make_coord(i % 2, i / 2), m, n));
        wrong += ours(i, m, n) != expected || ours.block(m, n)[i] != expected;
        wrong += rows(2 * m + i / 2, 2 * n + i % 2) != expected;
      }
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    cutlass_attn::FragmentPlace<1, 1> const place{lane};
    for (int i = 0; i < 4; ++i) {
      auto const [row, column] = position_c(lane, i);
      wrong += place.row(2 + i / 2) != 16 + row || place.column(2 + i % 2) != 8 + column;
    }
  }
  CHECK(wrong == 0);
}

// c += a b by the instruction, each lane in a fiber.
template <class Element>
void mma(Element const (&a)[16][16], Element const (&b)[16][8], float (&c)[16][8]) {
  CHECK(run_grid({1, 32, 0}, {}, [&](char*) {
          int const lane = Sm80::thread();
          Element a_values[8], b_values[4];
          float c_values[4];
          for (int i = 0; i < 8; ++i) {
            a_values[i] = a[position_a(lane, i).row][position_a(lane, i).column];
          }
          for (int i = 0; i < 4; ++i) {
            b_values[i] = b[position_b(lane, i).row][position_b(lane, i).column];
            c_values[i] = c[position_c(lane, i).row][position_c(lane, i).column];
          }
          uint32_t a_words[4], b_words[2];
          std::memcpy(a_words, a_values, sizeof(a_words));
          std::memcpy(b_words, b_values, sizeof(b_words));
          Sm80::mma_m16n8k16<Element>(c_values, a_words, b_words);
          for (int i = 0; i < 4; ++i) {
            c[position_c(lane, i).row][position_c(lane, i).column] = c_values[i];
          }
        }).ok());
}

template <class Element>
void check_product() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> integer(-8, 8);
  for (bool exact : {true, false}) {
    Element a[16][16], b[16][8];
    float c[16][8], before[16][8];
    auto const value = [&] { return exact ? float(integer(random)) : normal(random); };
    for (auto& row : a)
      for (auto& x : row) x = Element(value());
    for (auto& row : b)
      for (auto& x : row) x = Element(value());
    for (auto& row : c)
      for (auto& x : row) x = value();
    std::memcpy(before, c, sizeof(c));
    mma(a, b, c);
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 8; ++n) {
        double sum = before[m][n], magnitude = std::fabs(sum);
        for (int k = 0; k < 16; ++k) {
          double const product = double(float(a[m][k])) * double(float(b[k][n]));
          sum += product;
          magnitude += std::fabs(product);
        }
        CHECK(std::fabs(c[m][n] - sum) <= (exact ? 0.0 : 16 * 0x1p-24 * magnitude));
      }
    }
  }
}

// In fp16 the sum of an instruction is rounded once, to nearest even, and overflows to infinity.
void check_sums_in_fp16() {
  struct {
    float a, b, c, expected;  // 16 a b + c
  } const sums[] = {{1, 1, 2048, 2064},       {0.0625f, 1, 2048, 2048},
                    {0.1875f, 1, 2048, 2052},  // ties go to the even one
                    {64, 64, 0, INFINITY},    {-64, 64, 0, -INFINITY},
                    {1, -1, 16, 0},           {0.0009765625f, 1, 1, 1.015625f}};
  for (auto const& sum : sums) {
    CHECK(run_grid({1, 32, 0}, {}, [&](char*) {
            auto const pair = [](float x) { return half_t(x).raw() * 0x10001u; };
            uint32_t const a = pair(sum.a), b = pair(sum.b);
            half_t d[4] = {half_t(sum.c), half_t(sum.c), half_t(sum.c), half_t(sum.c)};
            Sm80::mma_m16n8k16<half_t>(d, {a, a, a, a}, {b, b});
            for (half_t x : d) CHECK(x.raw() == half_t(sum.expected).raw());
          }).ok());
  }
  // Positions: row 3 and column 5 of C are in lane 14, high half of the first word.
  CHECK(run_grid({1, 32, 0}, {}, [&](char*) {
          int const lane = Sm80::thread();
          half_t d[4] = {half_t(0), half_t(lane == 14 ? 7.0f : 0.0f), half_t(0), half_t(0)};
          uint32_t const b = lane / 4 == 5 ? half_t(1.0f).raw() * 0x10001u : 0;
          uint32_t const a = lane / 4 == 3 ? half_t(1.0f).raw() * 0x10001u : 0;
          Sm80::mma_m16n8k16<half_t>(d, {a, 0, a, 0}, {b, b});
          for (int i = 0; i < 4; ++i) {
            CHECK(float(d[i]) == (lane == 14 && i == 1 ? 23.0f : 0.0f));
          }
        }).ok());
}

template <class Element>
void check_special_values() {
  Element a[16][16], b[16][8];
  float c[16][8] = {};
  for (auto& row : a)
    for (auto& x : row) x = Element(1.0f);
  for (auto& row : b)
    for (auto& x : row) x = Element(1.0f);
  a[3][5] = Element(INFINITY);
  a[9][0] = Element(NAN);
  mma(a, b, c);
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      CHECK(m == 3 ? std::isinf(c[m][n]) : m == 9 ? std::isnan(c[m][n]) : c[m][n] == 16.0f);
    }
  }
}

// All 65,536 values, in every lane of the vector.
template <class Element>
void check_conversion(engine::MmaInput input) {
  std::vector<uint16_t> bits(1 << 16);
  std::vector<float> floats(bits.size());
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = uint16_t(i);
  widen(input, bits.data(), floats.data(), int(bits.size()));
  int wrong = 0;
  for (size_t i = 0; i < bits.size(); ++i) {
    float const expected = float(Element::bitcast(bits[i]));
    wrong += std::isnan(expected) ? !std::isnan(floats[i])
                                  : std::memcmp(&expected, &floats[i], sizeof(float)) != 0;
  }
  CHECK(wrong == 0);
}

template <bool kTransposed>
void check_load_matrix() {
  // Lane 8 m + r supplies row r of matrix m. Here rows are in reverse order, to distinguish lanes
  // from addresses.
  int wrong = 0;
  CHECK(run_grid({1, 32, 512}, {}, [&](char* smem) {
          int const lane = Sm80::thread();
          uint16_t* const own = reinterpret_cast<uint16_t*>(smem + 16 * (31 - lane));
          for (int column = 0; column < 8; ++column) own[column] = uint16_t(lane * 8 + column);
          Sm80::sync();
          Sm80::SmemAddress const row = Sm80::smem_address(own);
          uint32_t d[4];
          if constexpr (kTransposed) {
            Sm80::ldmatrix_x4_trans(row, d);
          } else {
            Sm80::ldmatrix_x4(row, d);
          }
          for (int matrix = 0; matrix < 4; ++matrix) {
            for (int i = 0; i < 2; ++i) {
              // PTX ISA, "ldmatrix": lane l holds row l / 4, columns 2 (l % 4) and the next.
              int r = lane / 4, c = lane % 4 * 2 + i;
              if (kTransposed) std::swap(r, c);
              wrong += (d[matrix] >> 16 * i & 0xffff) != uint32_t((matrix * 8 + r) * 8 + c);
            }
          }
        }).ok());
  CHECK(wrong == 0);
}

void check_store_matrix() {
  int wrong = 0;
  CHECK(run_grid({1, 32, 512}, {}, [&](char* smem) {
          int const lane = Sm90::thread();
          uint32_t d[4];
          for (int matrix = 0; matrix < 4; ++matrix) {
            uint32_t const element = (matrix * 8 + lane / 4) * 8 + lane % 4 * 2;
            d[matrix] = element | (element + 1) << 16;
          }
          // Lane 8 m + r supplies row r of matrix m: in reverse order, as above.
          Sm90::stmatrix_x4(Sm90::smem_address(smem + 16 * (31 - lane)), d);
          Sm90::sync();
          uint16_t const* const own = reinterpret_cast<uint16_t const*>(smem + 16 * (31 - lane));
          for (int column = 0; column < 8; ++column) wrong += own[column] != lane * 8 + column;
        }).ok());
  CHECK(wrong == 0);
}

// The bits of pack() in the low and in the high half, next to a value that shows a mix-up.
template <class Element>
void check_pack(float x, uint16_t expected) {
  uint32_t const one = Element(1.0f).raw();
  CHECK(Sm80::pack<Element>(x, 1.0f) == (one << 16 | expected));
  CHECK(Sm80::pack<Element>(1.0f, x) == (uint32_t(expected) << 16 | one));
}

template <class Element>
bool packs_to_nan(float x) {
  uint32_t const packed = Sm80::pack<Element>(x, x);
  return std::isnan(float(Element::bitcast(uint16_t(packed)))) && packed >> 16 == (packed & 0xffff);
}

// Every value packs to itself; a value between two neighbours packs to the nearest, in the middle
// to the even one.
template <class Element>
void check_pack_rounds_to_nearest_even(uint16_t infinity) {
  int wrong = 0;
  auto const pack = [](float x) { return uint16_t(Sm80::pack<Element>(x, 0.0f)); };
  for (uint16_t bits = 0; bits + 1 < infinity; ++bits) {
    for (uint16_t sign : {uint16_t(0), uint16_t(0x8000)}) {
      float const x = float(Element::bitcast(bits | sign));
      float const next = float(Element::bitcast(uint16_t(bits + 1) | sign));
      float const middle = x + (next - x) / 2;  // exact: both formats have fewer bits than fp32
      uint16_t const even = uint16_t(bits + bits % 2);
      wrong += pack(x) != (bits | sign);
      wrong += pack(middle) != (even | sign);
      wrong += pack(std::nextafterf(middle, x)) != (bits | sign);
      wrong += pack(std::nextafterf(middle, next)) != (uint16_t(bits + 1) | sign);
    }
  }
  CHECK(wrong == 0);
}

template <class T>
void check_shuffle(T scale) {
  CHECK(run_grid({1, 32, 0}, {}, [&](char*) {
          CHECK(Sm80::shuffle_xor(T(scale * Sm80::thread()), 5) == T(scale * (Sm80::thread() ^ 5)));
          CHECK(Sm80::shuffle(T(scale * Sm80::thread()), 3) == T(scale * 3));
        }).ok());
}

TEST(async_copy_by_address) {
  alignas(16) uint32_t const source[4] = {1, 2, 3, 4};
  for (bool predicate : {true, false}) {
    std::string const error =
        run_grid({1, 32, 32}, {}, [&](char* smem) {
          if (Sm80::thread() != 0) return;
          uint32_t const* const to = reinterpret_cast<uint32_t const*>(smem + 16);
          Sm80::cp_async(Sm80::smem_address(smem) ^ 16, predicate ? source : nullptr, predicate);
          Sm80::cp_async_commit_group();
          CHECK(to[0] == 0xffffffff);
          Sm80::cp_async_wait_group<0>();
          for (int i = 0; i < 4; ++i) CHECK(to[i] == (predicate ? source[i] : 0));
        }).message;
    CHECK(error.empty());
  }
}

TEST(pack_puts_two_in_a_word) {
  check_pack<half_t>(-2.0f, 0xc000);
  check_pack<half_t>(-0.0f, 0x8000);
  check_pack<half_t>(1.0f + 0x1p-11f, 0x3c00);      // a tie, to even
  check_pack<half_t>(1.0f + 3 * 0x1p-11f, 0x3c02);  // a tie, to even
  check_pack<half_t>(0x1p-25f, 0x0000);             // half of the smallest subnormal
  check_pack<half_t>(0x1.8p-25f, 0x0001);
  check_pack<half_t>(65519.0f, 0x7bff);
  check_pack<half_t>(65520.0f, 0x7c00);  // overflow
  check_pack<half_t>(-1e30f, 0xfc00);
  check_pack<half_t>(INFINITY, 0x7c00);
  check_pack<half_t>(-INFINITY, 0xfc00);

  check_pack<bfloat16_t>(-2.0f, 0xc000);
  check_pack<bfloat16_t>(-0.0f, 0x8000);
  check_pack<bfloat16_t>(1.0f + 0x1p-8f, 0x3f80);      // a tie, to even
  check_pack<bfloat16_t>(1.0f + 3 * 0x1p-8f, 0x3f82);  // a tie, to even
  check_pack<bfloat16_t>(65520.0f, 0x4780);
  check_pack<bfloat16_t>(0x1.fep127f, 0x7f7f);
  check_pack<bfloat16_t>(0x1.ffp127f, 0x7f80);  // overflow
  check_pack<bfloat16_t>(-FLT_MAX, 0xff80);
  check_pack<bfloat16_t>(INFINITY, 0x7f80);
  check_pack<bfloat16_t>(-INFINITY, 0xff80);

  // Also a NaN whose payload is in the bits that are cut off.
  uint32_t const low_payload = 0x7f800001;
  float nan;
  std::memcpy(&nan, &low_payload, sizeof(nan));
  CHECK(packs_to_nan<half_t>(NAN) && packs_to_nan<half_t>(-NAN) && packs_to_nan<half_t>(nan));
  CHECK(packs_to_nan<bfloat16_t>(NAN) && packs_to_nan<bfloat16_t>(-NAN));
  CHECK(packs_to_nan<bfloat16_t>(nan));
}
TEST(pack_rounds_to_nearest_even) {
  check_pack_rounds_to_nearest_even<half_t>(0x7c00);
  check_pack_rounds_to_nearest_even<bfloat16_t>(0x7f80);
}

TEST(traits_follow_the_isa) {
  check_traits<cute::SM80_16x8x16_F32F16F16F32_TN>();
  check_traits<cute::SM80_16x8x16_F32BF16BF16F32_TN>();
  check_traits<cute::SM80_16x8x16_F16F16F16F16_TN>();
  check_fragment();
}
TEST(mma_is_a_matrix_product) {
  check_product<half_t>();
  check_product<bfloat16_t>();
}
TEST(mma_rounds_sums_in_fp16) { check_sums_in_fp16(); }
TEST(mma_keeps_nan_and_infinity_in_their_row) {
  check_special_values<half_t>();
  check_special_values<bfloat16_t>();
}
TEST(conversion_is_exact) {
  check_conversion<half_t>(engine::MmaInput::kFloat16);
  check_conversion<bfloat16_t>(engine::MmaInput::kBFloat16);
}
TEST(e4m3_is_unpacked_in_order) {
  for (uint32_t bits = 0; bits < 256; ++bits) {
    uint32_t const four = bits | 0x38u << 8 | (bits ^ 0x80u) << 16 | 0xc0u << 24;  // 1, -2
    uint32_t halves[2], bfloats[2];
    Sm80::unpack_e4m3<half_t>(four, halves);
    Sm80::unpack_e4m3<bfloat16_t>(four, bfloats);
    float const x = float(cutlass_attn::E4M3{uint8_t(bits)});
    for (int i = 0; i < 4; ++i) {
      float const expected[] = {x, 1, -x, -2};
      auto const half = half_t::bitcast(uint16_t(halves[i / 2] >> i % 2 * 16));
      auto const bfloat = bfloat16_t::bitcast(uint16_t(bfloats[i / 2] >> i % 2 * 16));
      CHECK_NEAR(float(half), expected[i], 0);
      CHECK_NEAR(float(bfloat), expected[i], 0);
    }
  }
  CHECK_EQ(Sm80::prmt(0x44332211u, 0, 0x3120), 0x44223311u);
  CHECK_EQ(Sm80::prmt(0x44332211u, 0x88776655u, 0x2705), 0x33881166u);
}
TEST(below_15bit_compares_halves) {
  CHECK_EQ(Sm80::below_15bit(0x80040005u, 0x00050005u), 0xffff0000u);
  CHECK_EQ(Sm80::below_15bit(0x7fff7bffu, 0x7c007c00u), 0x0000ffffu);
  CHECK_EQ(Sm80::below_15bit(0x0000ffffu, 0u), 0u);
}
TEST(columns_before_is_a_bit_a_column) {
  for (int thread = 0; thread < 8; ++thread) {
    cutlass_attn::FragmentPlace<4, 1> const place{thread};
    for (int end = -300; end < 300; ++end) {
      uint32_t const bits = place.columns_before(end);
      for (int j = 0; j < 32; ++j) CHECK_EQ(bits >> j & 1, uint32_t(place.column(j) < end));
    }
    CHECK_EQ(place.columns_before(1 << 30), ~0u);
    CHECK_EQ(place.columns_before(-(1 << 30)), 0u);
  }
}
TEST(load_matrix_distributes_rows) {
  check_load_matrix<false>();
  check_load_matrix<true>();
  check_store_matrix();
}
TEST(transpose_swaps_rows_and_columns) {
  int wrong = 0;
  CHECK(run_grid({1, 32, 0}, {}, [&](char*) {
          int const row = Sm80::thread() / 4, column = Sm80::thread() % 4 * 2;
          uint32_t const x = Sm80::movmatrix_trans(uint32_t(row * 8 + column) |
                                                   uint32_t(row * 8 + column + 1) << 16);
          wrong += (x & 0xffff) != uint32_t(column * 8 + row);
          wrong += x >> 16 != uint32_t((column + 1) * 8 + row);
        }).ok());
  CHECK(wrong == 0);
}
TEST(shuffle_carries_any_type) {
  check_shuffle<float>(0.5f);
  check_shuffle<double>(0.5);
  check_shuffle<int>(3);
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
