// K as the launch before the mma.sync kernel rounds it, bit by bit against plain loops; and the
// products of int8 against a table written down by hand from the PTX ISA.
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "arch/sm80.hpp"
#include "check.hpp"
#include "runtime/kernel.hpp"
#include "simt/engine.hpp"
#include "sm80/forward.hpp"

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

TEST(products_are_exact) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> byte(-128, 127), word(-1000000, 1000000);
  int a[16][32], b[32][8], c[16][8], d[16][8];
  for (auto& row : a)
    for (int& x : row) x = byte(random);
  for (auto& row : b)
    for (int& x : row) x = byte(random);
  for (auto& row : c)
    for (int& x : row) x = word(random);
  CHECK(simt::run_grid({1, 32, 0}, {}, [&](char*) {
          int const lane = Sm80::thread();
          int8_t a_bytes[16], b_bytes[8];
          int32_t before[4], after[4];
          for (int i = 0; i < 16; ++i) {
            a_bytes[i] = int8_t(a[position_a(lane, i).row][position_a(lane, i).column]);
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
          Sm80::mma_s8(after, a_words, b_words, before);
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

TEST(a_sum_beyond_an_int32_is_an_error) {
  auto const run = [](int32_t c) {
    return simt::run_grid({1, 32, 0}, {}, [&](char*) {
      int32_t const before[4] = {c, c, c, c};
      int32_t after[4];
      Sm80::mma_s8(after, {0x01010101, 0x01010101, 0x01010101, 0x01010101},
                   {0x01010101, 0x01010101}, before);
    });
  };
  CHECK(run(INT32_MAX - 32).ok());
  CHECK(run(INT32_MAX - 31).message.find("beyond an int32") != std::string::npos);
}

// --- K -------------------------------------------------------------------------------------------

struct Keys {
  int batch = 1, heads = 1, seqlen = 1, head_dim = 64;
  int pitch = 64;                 // elements from a row to the next
  float bias = 0, magnitude = 1;  // of all values
};

// K in float, and as the launch left it: what the workspace says it is.
template <class Element, int kHeadDim>
struct Quantized {
  using Params = sm80::QuantizedParams;
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
    Params const params =
        Params::prepare(p, {workspace.data(), int64_t(workspace.size())}, {}, facts);
    columns = params.columns;
    tiles = params.tiles;
    Launch const launch = params.launch_before(facts);
    Status const status =
        simt::run_grid({launch.blocks, launch.threads, launch.smem_bytes}, {}, [&](char* smem) {
          sm80::QuantizeKeys<Element, kHeadDim>::template run<Sm80>(params, smem);
        });
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

  // Against kernels/core/quantize.hpp's words.
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
          // A word is columns 2 t, 2 t + 1 and those 8 on.
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
  check_keys<bfloat16_t, 64>({1, 1, 70, 64, 64, 0.0f, 1e38f});  // of which means are infinite
  check_keys<bfloat16_t, 64>({1, 1, 70, 64, 64, 0.0f, 1e-30f});
  check_keys<bfloat16_t, 64>({1, 1, 70, 64, 64, 0.0f, 1e-36f});
  check_keys<half_t, 64>({1, 1, 70, 64, 64, 0.0f, 1e-6f});
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
