// Philox against its published vectors, and the dropout drawn from it.
#include "core/dropout.hpp"

#include <cmath>
#include <cstdint>
#include <set>
#include <tuple>

#include "check.hpp"

using namespace cutlass_attn;

namespace {

struct Call {
  uint64_t rng_state[2];
  Problem p;

  Call(float dropout_p, uint64_t seed, uint64_t offset = 0) : rng_state{seed, offset} {
    p.dropout.p = dropout_p;
    p.dropout.rng_state = rng_state;
    p.num_heads_q = 4;
  }
  DropoutMask dropout() const { return DropoutMask(p); }
};

}  // namespace

// From kat_vectors of Random123 (Salmon et al., SC 2011).
TEST(philox_known_answers) {
  struct {
    PhiloxWords counter;
    uint32_t key0, key1;
    PhiloxWords after_7, after_10;
  } const vectors[] = {
      {{{0, 0, 0, 0}},
       0,
       0,
       {{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
       {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
      {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
       0xffffffff,
       0xffffffff,
       {{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
       {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       0xa4093822,
       0x299f31d0,
       {{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
  };
  for (auto const& vector : vectors) {
    PhiloxWords const few = philox4x32<7>(vector.counter, vector.key0, vector.key1);
    PhiloxWords const many = philox4x32<10>(vector.counter, vector.key0, vector.key1);
    for (int i = 0; i < 4; ++i) CHECK_EQ(few.word[i], vector.after_7.word[i]);
    for (int i = 0; i < 4; ++i) CHECK_EQ(many.word[i], vector.after_10.word[i]);
  }
}

TEST(no_dropout_needs_no_state) {
  Call call(0, 0);
  call.p.dropout.rng_state = nullptr;
  CHECK(!call.dropout().is_active());
}

TEST(a_probability_of_one_drops_all) {
  DropoutMask const dropout = Call(1, 5).dropout();
  CHECK(dropout.is_active());
  CHECK_EQ(dropout.kept_scale, 1.0f);  // nothing is kept
  for (int key = 0; key < 1000; ++key) CHECK_EQ(dropout.factor(0, 1, 2, key), 0.0f);
}

// Over all possible numbers, the kept share is exactly the share by which weights are divided, so
// the expectation is 1 to the rounding of fp32. The share is the requested one to 2^-16.
TEST(the_expectation_is_exact) {
  for (float p : {1e-5f, 1e-4f, 1e-3f, 0.1f, 1 / 3.0f, 0.5f, 0.50001f, 0.9f, 0.999f, 1.0f}) {
    DropoutMask const dropout = Call(p, 1).dropout();
    int kept = 0;
    for (uint32_t number = 0; number < 32768; ++number) {
      float const factor = dropout.factor(number);
      CHECK(factor == 0.0f || factor == dropout.kept_scale);
      kept += factor != 0.0f;
    }
    double const share = kept / 32768.0;
    CHECK_NEAR(share, 1.0 - double(p), 1.0 / 65536 + 1e-7);
    if (kept > 0) CHECK_NEAR(double(dropout.kept_scale) * share, 1, 1e-7);
    if (kept > 0) CHECK_EQ(double(kept_share(p)), share);
    CHECK_EQ(dropout.is_active(), kept < 32768);
  }
}

// Rates within five standard deviations.
TEST(the_rate_is_what_was_asked_for) {
  for (float p : {1e-3f, 0.1f, 0.25f, 0.5f, 0.9f}) {
    DropoutMask const dropout = Call(p, 42).dropout();
    int kept = 0, count = 0;
    for (int q = 0; q < 300; ++q) {
      for (int key = 0; key < 500; ++key, ++count) kept += dropout.factor(1, 2, q, key) != 0;
    }
    CHECK_NEAR(kept, count * (1.0 - p), 5 * std::sqrt(count * p * (1.0 - p)));
  }
}

// Neighbours along every dimension agree as often as independent weights: half of the time.
TEST(neighbours_are_independent) {
  constexpr int kSize = 64;
  DropoutMask const dropout = Call(0.5f, 7).dropout();
  auto const keeps = [&](int b, int h, int q, int key) {
    return dropout.factor(b, h, q, key) != 0;
  };
  for (auto [db, dh, dq, dk] : {std::tuple(1, 0, 0, 0),
                                {0, 1, 0, 0},
                                {0, 0, 1, 0},
                                {0, 0, 8, 0},
                                {0, 0, 16, 0},
                                {0, 0, 0, 1},
                                {0, 0, 0, 2},
                                {0, 0, 0, 8},
                                {0, 0, 0, 16},
                                {0, 0, 0, 32},
                                {0, 0, 1, 1},
                                {0, 0, 8, 8}}) {
    int same = 0, count = 0;
    for (int b = 0; b < 2; ++b) {
      // Three of 4 heads: head 3 of a batch entry is next to head 0 of the next one.
      for (int h = 0; h < 3; ++h) {
        for (int q = 0; q < kSize; ++q) {
          for (int key = 0; key < kSize; ++key, ++count) {
            same += keeps(b, h, q, key) == keeps(b + db, h + dh, q + dq, key + dk);
          }
        }
      }
    }
    CHECK_NEAR(same, count / 2.0, 5 * std::sqrt(count / 4.0));
  }
}

// One draw serves the 16 weights listed at the top of dropout.hpp, and no others have its words.
// Their numbers are the four byte rotations of two 32-bit numbers for each half.
TEST(a_draw_serves_16_weights) {
  DropoutMask const dropout = Call(0.25f, 9).dropout();
  std::set<std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>> draws;
  int count = 0;
  for (int q0 : {0, 3, 16, 23, 160}) {
    for (int k0 = 0; k0 < 4096; k0 += k0 % 8 == 6 ? 26 : 2, ++count) {
      PhiloxWords const words = dropout.draw(0, 1, q0, k0);
      draws.insert({words.word[0], words.word[1], words.word[2], words.word[3]});
      for (int i = 0; i < 16; ++i) {
        int const second = i % 2, half = i / 2 % 2, upper = i / 8, turn = i / 4 % 2;
        int const q = q0 + 8 * second, key = k0 + half + 8 * turn + 16 * upper;
        uint32_t const own = words.word[2 * upper + second] >> 16 * half & 0xffff;
        uint32_t const other = words.word[2 * upper + 1 - second] >> 16 * half & 0xffff;
        uint32_t const number = (turn ? own << 8 | other >> 8 : own) & 0x7fff;
        CHECK_EQ(DropoutMask::number(own << 16 * half, other << 16 * half, key), number);
        CHECK_EQ(dropout.factor(0, 1, q, key), number < 8192 ? 0.0f : dropout.kept_scale);
      }
    }
  }
  CHECK_EQ(int(draws.size()), count);
}

// Every bit of the state counts, so that replays that advance the offset draw again.
TEST(seed_and_offset_choose_the_mask) {
  auto const first = [](uint64_t seed, uint64_t offset) {
    PhiloxWords const words = Call(0.5f, seed, offset).dropout().draw(0, 0, 0, 0);
    return uint64_t(words.word[0]) << 32 | words.word[1];
  };
  std::set<uint64_t> seen{first(0, 0)};
  for (int bit = 0; bit < 64; ++bit) {
    seen.insert(first(uint64_t(1) << bit, 0));
    // The upper half of the offset goes into the key, next to the seed.
    seen.insert(first(uint64_t(0x5555) << 40, uint64_t(1) << bit));
  }
  CHECK_EQ(int(seen.size()), 1 + 2 * 64);
  CHECK_EQ(first(3, 4), first(3, 4));
}

// A part of a larger call draws what that call draws there.
TEST(a_part_is_of_the_larger_call) {
  Call whole(0.5f, 3, 5), part(0.5f, 3, 5);
  whole.p.num_heads_q = 12;
  uint64_t const state[6] = {3, 5, 12, 7, 16 * 3, 32 * 5};
  part.p.dropout.rng_state = state;
  part.p.dropout.is_part = true;
  DropoutMask const of_whole = whole.dropout(), of_part = part.dropout();
  for (int b = 0; b < 2; ++b) {
    for (int h = 0; h < 4; ++h) {
      for (int q = 0; q < 40; ++q) {
        for (int key = 0; key < 70; ++key) {
          CHECK_EQ(of_part.factor(b, h, q, key), of_whole.factor(b, 7 + h, 48 + q, 160 + key));
        }
      }
    }
  }
}

int main(int argc, char** argv) { return check::run(argc, argv); }
