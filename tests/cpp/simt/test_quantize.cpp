// K and V as rounded by the launch before the mma.sync kernel, bit by bit against plain loops; and
// the products of int8 and e4m3 against a table written by hand from the PTX ISA.
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "arch/sm80.hpp"
#include "check.hpp"
#include "runtime/kernel.hpp"
#include "simt/engine.hpp"
#include "simt/warp_ops.hpp"
#include "sm80/quantized/forward.hpp"

using namespace cutlass_attn;
using arch::Sm80;
using cutlass::bfloat16_t;
using cutlass::half_t;

namespace {

// --- Products ------------------------------------------------------------------------------------

// PTX ISA, "Matrix Fragments for mma.m16n8k32": byte i of a lane.
struct Position {
  int row, column;
};
Position position_a(int lane, int i) {
  return {lane / 4 + (i / 4 % 2) * 8, lane % 4 * 4 + i % 4 + (i >= 8 ? 16 : 0)};
}
Position position_b(int lane, int i) {  // row: k, column: n
  return {lane % 4 * 4 + i % 4 + (i >= 4 ? 16 : 0), lane / 4};
}
Position position_c(int lane, int i) { return {lane / 4 + (i >= 2 ? 8 : 0), lane % 4 * 2 + i % 2}; }

template <class A>
void check_products() {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> byte(-128, 127), word(-1000000, 1000000);
  std::uniform_int_distribution<int> byte_a(std::numeric_limits<A>::min(),
                                            std::numeric_limits<A>::max());
  int a[16][32], b[32][8], c[16][8], d[16][8];
  for (auto& row : a)
    for (int& x : row) x = byte_a(random);
  for (auto& row : b)
    for (int& x : row) x = byte(random);
  for (auto& row : c)
    for (int& x : row) x = word(random);
  CHECK(simt::run_grid({1, 32, 0}, {}, [&](char*) {
          int const lane = Sm80::thread();
          A a_bytes[16];
          int8_t b_bytes[8];
          int32_t before[4], after[4];
          for (int i = 0; i < 16; ++i) {
            a_bytes[i] = A(a[position_a(lane, i).row][position_a(lane, i).column]);
          }
          for (int i = 0; i < 8; ++i) {
            b_bytes[i] = int8_t(b[position_b(lane, i).row][position_b(lane, i).column]);
          }
          for (int i = 0; i < 4; ++i) {
            before[i] = c[position_c(lane, i).row][position_c(lane, i).column];
          }
          uint32_t a_words[4], b_words[2];
          std::memcpy(a_words, a_bytes, sizeof a_words);
          std::memcpy(b_words, b_bytes, sizeof b_words);
          Sm80::mma_int8<A>(after, a_words, b_words, before);
          for (int i = 0; i < 4; ++i) {
            d[position_c(lane, i).row][position_c(lane, i).column] = after[i];
          }
        }).ok());
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      int sum = c[m][n];
      for (int k = 0; k < 32; ++k) sum += a[m][k] * b[k][n];
      CHECK_EQ(d[m][n], sum);
    }
  }
}

TEST(products_are_exact) {
  check_products<int8_t>();
  check_products<uint8_t>();
}

TEST(a_sum_beyond_an_int32_is_an_error) {
  auto const run = [](int32_t c) {
    return simt::run_grid({1, 32, 0}, {}, [&](char*) {
      int32_t const before[4] = {c, c, c, c};
      int32_t after[4];
      Sm80::mma_int8<int8_t>(after, {0x01010101, 0x01010101, 0x01010101, 0x01010101},
                             {0x01010101, 0x01010101}, before);
    });
  };
  CHECK(run(INT32_MAX - 32).ok());
  CHECK(run(INT32_MAX - 31).message.find("overflows int32") != std::string::npos);
}

// Integers and their halves, which e4m3 and fp16 can hold. Their sums are rounded to fp16, once or
// after each half of the products.
void check_products_of_e4m3(bool halves) {
  std::mt19937 random(4);
  std::uniform_int_distribution<int> integer(-15, 15), half(-2047, 2047);
  float a[16][32], b[32][8], c[16][8], d[16][8];
  for (auto& row : a)
    for (float& x : row) x = float(integer(random)) / 2;
  for (auto& row : b)
    for (float& x : row) x = float(integer(random));
  for (auto& row : c)
    for (float& x : row) x = float(half(random));
  simt::Schedule schedule;
  schedule.halves_e4m3 = halves;
  CHECK(simt::run_grid({1, 32, 0}, schedule, [&](char*) {
          int const lane = Sm80::thread();
          float x[16], y[8];
          for (int i = 0; i < 16; ++i)
            x[i] = a[position_a(lane, i).row][position_a(lane, i).column];
          for (int i = 0; i < 8; ++i) y[i] = b[position_b(lane, i).row][position_b(lane, i).column];
          uint32_t a_words[4], b_words[2], before[2], after[2];
          for (int i = 0; i < 4; ++i) {
            float const* const four = x + 4 * i;
            a_words[i] = Sm80::pack_e4m3(four[0], four[1], four[2], four[3]);
          }
          for (int i = 0; i < 2; ++i) {
            float const* const four = y + 4 * i;
            b_words[i] = Sm80::pack_e4m3(four[0], four[1], four[2], four[3]);
            Position const at = position_c(lane, 2 * i);
            before[i] = Sm80::pack<half_t>(c[at.row][at.column], c[at.row][at.column + 1]);
          }
          Sm80::mma_e4m3(after, a_words, b_words, before);
          for (int i = 0; i < 4; ++i) {
            uint16_t const bits = uint16_t(after[i / 2] >> i % 2 * 16);
            d[position_c(lane, i).row][position_c(lane, i).column] = half_to_float(bits);
          }
        }).ok());
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      float sums[2] = {};
      for (int k = 0; k < 32; ++k) sums[k / 16] += a[m][k] * b[k][n];
      auto const rounded = [](float x) { return float(half_t(x)); };
      float const once = rounded(sums[0] + sums[1] + c[m][n]);
      float const thrice = rounded(rounded(rounded(sums[0]) + sums[1]) + c[m][n]);
      CHECK_EQ(d[m][n], halves ? thrice : once);
    }
  }
}

TEST(products_of_e4m3) {
  check_products_of_e4m3(false);
  check_products_of_e4m3(true);
}

TEST(halves_at_their_ends) {
  struct {
    double x;
    uint16_t bits;
  } const table[] = {{0, 0},           {-0.0, 0x8000},    {1, 0x3c00},          {-2, 0xc000},
                     {65504, 0x7bff},  {65519.9, 0x7bff}, {65520, 0x7c00},      {-1e9, 0xfc00},
                     {0x1p-14, 0x400}, {0x1p-24, 1},      {0x1p-25, 0},         {0x1.8p-24, 2},
                     {2049, 0x6800},   {2051, 0x6802},    {0x1.ffcp-15, 0x400}, {INFINITY, 0x7c00},
                     {0x1p-15, 0x200}, {-0x1p-24, 0x8001}};
  for (auto const& row : table) CHECK_EQ(simt::half_of(row.x), row.bits);
  CHECK(std::isnan(half_to_float(simt::half_of(NAN))));
}

// --- K -------------------------------------------------------------------------------------------

struct Keys {
  int batch = 1, heads = 1, seqlen = 1, head_dim = 64;
  int pitch = 64;                 // between two rows, in elements
  float bias = 0, magnitude = 1;  // of all values
  int num_sms = 0;                // 0: as many tiles per block as allowed
};

// K in float, and K from the workspace after the launch.
template <class Element, int kHeadDim>
struct Quantized {
  using Params = QuantizedParams;
  Keys keys;
  std::vector<Element> k;
  std::vector<char> workspace;
  int columns, tiles;

  template <class Edit>
  Quantized(Keys const& keys, Edit&& edit) : keys(keys) {
    int const rows = keys.batch * keys.heads * keys.seqlen;
    k.resize(size_t(rows) * keys.pitch, Element(NAN));
    std::mt19937 random(2);
    std::normal_distribution<float> normal(keys.bias, keys.magnitude);
    for (int row = 0; row < rows; ++row) {
      for (int d = 0; d < keys.head_dim; ++d) k[row * keys.pitch + d] = Element(normal(random));
    }
    edit(k.data());
    Problem p;
    p.batch = keys.batch;
    p.num_heads_q = p.num_heads_kv = keys.heads;
    p.head_dim = p.head_dim_v = keys.head_dim;
    p.seq_k.seqlen = keys.seqlen;
    p.seq_q.seqlen = 1;
    p.k.data = k.data();
    p.k.row_stride = keys.pitch;
    p.k.head_stride = int64_t(keys.seqlen) * keys.pitch;
    p.k.batch_stride = keys.heads * p.k.head_stride;
    workspace.resize(size_t(Params::workspace_bytes(p, {}, {})), char(0xaa));
    KernelFacts facts;
    facts.block_m = 64;
    DeviceLimits limits;
    limits.num_sms = keys.num_sms;
    Params const params =
        Params::prepare(p, {workspace.data(), int64_t(workspace.size())}, limits, facts);
    columns = params.columns;
    tiles = params.key_tiles.tiles;
    Launch const launch = params.launch_before(facts);
    Status const status = simt::run_grid(
        {launch.blocks, launch.threads, launch.smem_bytes}, {},
        [&](char* smem) { QuantizeKeys<Element, kHeadDim>::template run<Sm80>(params, smem); });
    CHECK_EQ(status.message, "");
  }

  float at(int head, int key, int d) const {
    return float(k[size_t(head * keys.seqlen + key) * keys.pitch + d]);
  }
  int8_t k8(int head, int key, int place) const {
    return int8_t(workspace[(size_t(head) * tiles * 64 + key) * columns + place]);
  }
  float const* floats() const {
    size_t const bytes = size_t(keys.batch) * keys.heads * tiles * 64 * columns;
    return reinterpret_cast<float const*>(workspace.data() + bytes);
  }
  float scale(int head, int key) const {
    return floats()[(head * tiles + key / 64) * 4 + key % 8 / 2];
  }
  float shift(int head, int d) const {
    return floats()[keys.batch * keys.heads * tiles * 4 + head * columns + d];
  }

  // Compares to the definition in kernels/core/quantize.hpp.
  void check() const {
    for (int head = 0; head < keys.batch * keys.heads; ++head) {
      std::vector<float> shifts(columns);
      int const samples = std::min(keys.seqlen, 64);
      for (int d = 0; d < keys.head_dim; ++d) {
        float sums[8] = {}, total = 0;
        for (int i = 0; i < samples; ++i) {
          float const x = at(head, i * keys.seqlen / samples, d);
          sums[i % 8] += std::isfinite(x) ? x : 0;
        }
        for (float sum : sums) total += sum;
        float const mean = total * (1.0f / float(samples));
        shifts[d] = std::isfinite(mean) ? mean : 0;
      }
      for (int d = 0; d < columns; ++d) CHECK_EQ(shift(head, d), shifts[d]);
      for (int key = 0; key < tiles * 64; ++key) {
        float amax = 0;
        bool is_finite = true;
        for (int other = key / 64 * 64; other < key / 64 * 64 + 64; ++other) {
          if (other >= keys.seqlen || other % 8 / 2 != key % 8 / 2) continue;
          for (int d = 0; d < keys.head_dim; ++d) {
            float const x = at(head, other, d) - shifts[d];
            is_finite = is_finite && std::isfinite(x);
            amax = std::fmax(amax, std::fabs(x));
          }
        }
        CHECK_EQ(std::isnan(scale(head, key)), !is_finite);
        if (!is_finite) continue;
        bool const is_zero = amax < 0x1p-100f;
        CHECK_EQ(scale(head, key), is_zero ? 0 : amax * (1.0f / 127));
        for (int place = 0; place < columns; ++place) {
          // A word is columns 2 t, 2 t + 1 and the columns 8 further on.
          int const t = place % 16 / 4;
          int const d = place / 16 * 16 + 2 * t + place % 2 + (place % 4 >= 2 ? 8 : 0);
          bool const is_there = key < keys.seqlen && d < keys.head_dim && !is_zero;
          double const product =
              is_there ? double(at(head, key, d) - shifts[d]) * double(127.0f / amax) : 0;
          CHECK_EQ(int(k8(head, key, place)), int(std::nearbyint(product)));
        }
      }
    }
  }
};

template <class Element, int kHeadDim, class Edit>
void check_keys(Keys const& keys, Edit&& edit) {
  Quantized<Element, kHeadDim>(keys, edit).check();
}
template <class Element, int kHeadDim>
void check_keys(Keys const& keys) {
  check_keys<Element, kHeadDim>(keys, [](Element*) {});
}

TEST(whole_and_ragged_tiles) {
  check_keys<half_t, 64>({1, 1, 64, 64, 64});
  check_keys<half_t, 64>({2, 3, 150, 64, 72});
  check_keys<bfloat16_t, 64>({1, 2, 70, 64, 64, 3.0f});
}
TEST(tiles_of_several_blocks) {
  Keys keys{1, 2, 150, 32, 32};
  keys.num_sms = 1;
  check_keys<half_t, 32>(keys);  // one tile per block
  keys.seqlen = 800;
  check_keys<half_t, 32>(keys);  // two tiles per block, 13 per head
  keys.num_sms = 0;
  check_keys<half_t, 32>(keys);  // eight tiles per block
}
TEST(head_dims_that_are_padded) {
  check_keys<half_t, 64>({1, 1, 70, 40, 48});
  check_keys<half_t, 128>({1, 2, 70, 72, 72});
  check_keys<half_t, 96>({1, 1, 65, 96, 96});
  check_keys<half_t, 256>({1, 1, 66, 200, 200});
  check_keys<half_t, 32>({1, 1, 66, 8, 8});
}
TEST(unaligned_rows) { check_keys<half_t, 64>({1, 2, 70, 64, 65}); }
TEST(one_key_is_its_own_mean) {
  Quantized<half_t, 64> const one({1, 1, 1, 64, 64, 5.0f}, [](half_t*) {});
  one.check();
  CHECK_EQ(one.scale(0, 0), 0.0f);
}
TEST(constant_and_zero_keys) {
  for (float value : {0.0f, 1.0f, -3.5f, 60000.0f}) {
    Quantized<half_t, 64> const same({1, 1, 130, 64, 64}, [&](half_t* k) {
      for (int i = 0; i < 130 * 64; ++i) k[i] = half_t(value);
    });
    same.check();
    for (int key = 0; key < 130; ++key) CHECK_EQ(same.scale(0, key), 0.0f);
  }
}
TEST(not_finite_keys_are_their_groups_business) {
  for (float bad : {INFINITY, -INFINITY, NAN}) {
    Quantized<half_t, 64> const one_bad({1, 1, 200, 64, 64},
                                        [&](half_t* k) { k[70 * 64 + 5] = half_t(bad); });
    one_bad.check();
    for (int key = 0; key < 200; ++key) {
      bool const is_its_group = key / 64 == 1 && key % 8 / 2 == 70 % 8 / 2;
      CHECK_EQ(std::isnan(one_bad.scale(0, key)), is_its_group);
    }
  }
}
TEST(extreme_magnitudes) {
  check_keys<bfloat16_t, 64>({1, 1, 70, 64, 64, 0.0f, 1e38f});  // means are infinite
  check_keys<bfloat16_t, 64>({1, 1, 70, 64, 64, 0.0f, 1e-30f});
  check_keys<bfloat16_t, 64>({1, 1, 70, 64, 64, 0.0f, 1e-36f});
  check_keys<half_t, 64>({1, 1, 70, 64, 64, 0.0f, 1e-6f});
}

// --- V -------------------------------------------------------------------------------------------

// V in float, and V from the workspace after the launch; K is V as well.
template <class Element, int kHeadDim, class Params>
struct Values {
  int const seqlen, head_dim, tiles = (seqlen + 63) / 64;
  std::vector<Element> v;
  std::vector<char> workspace;
  char const* v8;
  typename Params::TileScales const* scales;

  template <class Edit>
  Values(int heads, int seqlen, int head_dim, Edit&& edit) : seqlen(seqlen), head_dim(head_dim) {
    v.resize(size_t(heads) * seqlen * head_dim);
    std::mt19937 random(3);
    std::normal_distribution<float> normal(0.5f, 1.0f);
    for (Element& x : v) x = Element(normal(random));
    edit(v.data());
    Problem p;
    p.batch = 1;
    p.num_heads_q = p.num_heads_kv = heads;
    p.head_dim = p.head_dim_v = head_dim;
    p.seq_k.seqlen = seqlen;
    p.seq_q.seqlen = 1;
    p.v.data = v.data();
    p.v.row_stride = head_dim;
    p.v.head_stride = int64_t(seqlen) * head_dim;
    p.k = p.v;
    workspace.resize(size_t(Params::workspace_bytes(p, {}, {})), char(0xaa));
    KernelFacts facts;
    facts.block_m = 64;
    Params const params =
        Params::prepare(p, {workspace.data(), int64_t(workspace.size())}, {}, facts);
    v8 = static_cast<char const*>(params.problem.v.data);
    scales = params.scales;
    Launch const launch = params.launch_before(facts);
    Status const status =
        simt::run_grid({launch.blocks, launch.threads, launch.smem_bytes}, {}, [&](char* smem) {
          using Kernel = QuantizeKeysAndValues<Element, kHeadDim, kHeadDim, Params>;
          Kernel::template run<Sm80>(params, smem);
        });
    CHECK_EQ(status.message, "");
    CHECK_EQ(int64_t(reinterpret_cast<char const*>(params.shift_of(heads)) - workspace.data()),
             int64_t(workspace.size()) - quantize::kReadableBytes);
    for (int head = 0; head < heads; ++head) {
      for (int tile = 0; tile < tiles; ++tile) {
        if constexpr (std::is_same_v<Params, QuantizedValuesParams>) {
          check_int8(head, tile);
        } else {
          check_e4m3(head, tile);
        }
      }
    }
  }

  float value(int head, int tile, int n, int d) const {
    int const key = tile * 64 + n;
    return key < seqlen ? float(v[(size_t(head) * seqlen + key) * head_dim + d]) : 0.0f;
  }

  // Two keys per element; rows of a pair in the order 0, 4, 1, 5, ...
  uint8_t rounded(int head, int tile, int n, int d) const {
    int const pair = n % 16 / 2, row = tile * 32 + n / 16 * 8 + pair % 4 * 2 + pair / 4;
    return uint8_t(v8[((size_t(head) * tiles * 32 + row) * head_dim + d) * 2 + n % 2]);
  }

  // Compares to the definition in kernels/core/quantize.hpp.
  void check_e4m3(int head, int tile) const {
    float of_tile = 0;
    for (int n = 0; n < 64; ++n) {
      for (int d = 0; d < head_dim; ++d) {
        float const x = std::fabs(value(head, tile, n, d));
        if (std::isfinite(x)) of_tile = std::fmax(of_tile, x);
      }
    }
    float const scale = of_tile < 0x1p-100f ? 0 : std::ldexp(1.0f, std::ilogb(of_tile) - 6);
    CHECK_EQ(scales[head * tiles + tile].v, scale);
    for (int n = 0; n < 64; ++n) {
      for (int d = 0; d < head_dim; ++d) {
        float const x = value(head, tile, n, d);
        float const due = !std::isfinite(x) ? NAN : scale == 0 ? 0 : x / scale;
        CHECK_EQ(int(rounded(head, tile, n, d)) & 0x7f, int(to_e4m3(std::fabs(due)).raw()));
        CHECK(due != due || due == 0 || (rounded(head, tile, n, d) >> 7 == 1) == (due < 0));
      }
    }
  }

  void check_int8(int head, int tile) const {
    auto const value = [&](int n, int d) { return this->value(head, tile, n, d); };
    float amax[64] = {}, of_tile = 0;
    bool is_finite[64];
    for (int n = 0; n < 64; ++n) {
      is_finite[n] = true;
      for (int d = 0; d < head_dim; ++d) {
        is_finite[n] &= std::isfinite(value(n, d));
        amax[n] = std::fmax(amax[n], std::fabs(value(n, d)));
      }
      if (is_finite[n]) of_tile = std::fmax(of_tile, amax[n]);
    }
    quantize::KeyValueScales const& found = scales[head * tiles + tile];
    bool const is_zero = of_tile < 0x1p-100f;
    for (auto const& of_lane : found.lanes) {
      CHECK_EQ(of_lane.v, is_zero ? 0 : of_tile * (1.0f / 127));
    }
    for (int n = 0; n < 64; ++n) {
      auto const& of_lane = found.lanes[n % 8 / 2];
      float const folded = half_to_float(uint16_t(of_lane.folded[n / 8] >> (16 * (n % 2))));
      CHECK_EQ(std::isnan(folded), !is_finite[n]);
      if (!is_finite[n]) continue;
      int const e = int(std::nearbyint(8 / folded));
      CHECK(e >= 8 && e <= 255);
      CHECK(std::fabs(folded * float(e) - 8) < 0x1p-8f);  // rounded to fp16
      if (is_zero) continue;
      // The largest scale that clips nothing, in fp32.
      double const bound = 8.0 * of_tile / std::fmax(amax[n], of_tile / 32);
      CHECK(e <= bound * (1 + 1e-6) && (e == 255 || e + 1 > bound * (1 - 1e-6)));
      for (int d = 0; d < head_dim; ++d) {
        float const inverse = 127.0f / of_tile * (float(e) * 0.125f);
        CHECK_EQ(int(int8_t(rounded(head, tile, n, d))),
                 int(std::nearbyint(double(value(n, d)) * double(inverse))));
      }
    }
  }
};

template <class Element, int kHeadDim, class Edit>
void check_values(int heads, int seqlen, int head_dim, Edit&& edit) {
  Values<Element, kHeadDim, QuantizedValuesParams>(heads, seqlen, head_dim, edit);
  Values<Element, kHeadDim, Fp8ValuesParams>(heads, seqlen, head_dim, edit);
}
template <class Element, int kHeadDim>
void check_values(int heads, int seqlen, int head_dim) {
  check_values<Element, kHeadDim>(heads, seqlen, head_dim, [](Element*) {});
}

TEST(values_of_each_shape) {
  check_values<half_t, 64>(1, 64, 64);
  check_values<bfloat16_t, 128>(2, 150, 128);
  check_values<half_t, 96>(2, 65, 72);
  check_values<half_t, 32>(1, 1, 8);
  check_values<half_t, 32>(2, 650, 32);  // two blocks per head
}
TEST(values_far_apart) {
  check_values<half_t, 64>(1, 130, 64, [](half_t* v) {
    for (int d = 0; d < 64; ++d) {
      v[d] = half_t(float(v[d]) * 100);          // far larger than others of its tile
      v[70 * 64 + d] = half_t(float(v[d]) / 9);  // smaller
      v[71 * 64 + d] = half_t(0);
    }
  });
  check_values<half_t, 64>(1, 100, 64, [](half_t* v) {
    for (int i = 0; i < 100 * 64; ++i) v[i] = half_t(0);
  });
}
TEST(values_that_are_not_finite) {
  for (float bad : {INFINITY, -INFINITY, NAN}) {
    check_values<half_t, 64>(1, 130, 64, [&](half_t* v) { v[70 * 64 + 5] = half_t(bad); });
    // Next to a value of that key that is the largest of its tile.
    check_values<bfloat16_t, 64>(1, 130, 64, [&](bfloat16_t* v) {
      v[70 * 64 + 5] = bfloat16_t(bad);
      v[70 * 64 + 6] = v[70 * 64 + 40] = bfloat16_t(1000);
    });
  }
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
