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
    PhiloxWords answer;
  } const vectors[] = {
      {{{0, 0, 0, 0}}, 0, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
      {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
       0xffffffff,
       0xffffffff,
       {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       0xa4093822,
       0x299f31d0,
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
  };
  for (auto const& vector : vectors) {
    PhiloxWords const drawn = philox4x32_10(vector.counter, vector.key0, vector.key1);
    for (int i = 0; i < 4; ++i) CHECK_EQ(drawn.word[i], vector.answer.word[i]);
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
  for (int key = 0; key < 1000; ++key) CHECK_EQ(dropout.factor(0, 1, 2, key), 0.0f);
}

// Rates within five standard deviations, and an expectation of 1 to the rounding of fp32.
TEST(the_rate_is_what_was_asked_for) {
  for (float p : {0.1f, 0.25f, 0.5f, 0.9f}) {
    DropoutMask const dropout = Call(p, 42).dropout();
    int kept = 0, count = 0;
    for (int q = 0; q < 300; ++q) {
      for (int key = 0; key < 500; ++key, ++count) {
        float const factor = dropout.factor(1, 2, q, key);
        CHECK(factor == 0 || factor == dropout.kept_scale);
        kept += factor != 0;
      }
    }
    double const deviation = std::sqrt(count * p * (1.0 - p));
    CHECK_NEAR(kept, count * (1.0 - p), 5 * deviation);
    double const kept_probability = 1 - std::round(p * 65536.0) / 65536;
    CHECK_NEAR(dropout.kept_scale * kept_probability, 1, 1e-7);
  }
}

// Neighbours along every dimension agree as often as independent weights do: half of the time.
TEST(neighbours_are_independent) {
  constexpr int kSize = 64;
  DropoutMask const dropout = Call(0.5f, 7).dropout();
  auto const keeps = [&](int b, int h, int q, int key) {
    return dropout.factor(b, h, q, key) != 0;
  };
  for (auto [db, dh, dq, dk] : {std::tuple(1, 0, 0, 0),
                                {0, 1, 0, 0},
                                {0, 0, 1, 0},
                                {0, 0, 0, 1},
                                {0, 0, 0, 2},
                                {0, 0, 0, 8},
                                {0, 0, 0, 32},
                                {0, 0, 1, 1}}) {
    int same = 0, count = 0;
    for (int b = 0; b < 2; ++b) {
      for (int h = 0; h < 3; ++h) {  // of 4: head 3 of a batch is next to head 0 of the following
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

// One draw serves eight keys of a row, at the places that the head of dropout.hpp names, and no
// other key of any row has those bits.
TEST(a_draw_serves_eight_keys) {
  DropoutMask const dropout = Call(0.5f, 9).dropout();
  std::set<std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>> draws;
  int count = 0;
  for (int q = 0; q < 3; ++q) {
    for (int first = 0; first < 4096; first += 32) {
      for (int pair = 0; pair < 8; pair += 2, ++count) {
        PhiloxWords const words = dropout.draw(0, 1, q, first + pair);
        draws.insert({words.word[0], words.word[1], words.word[2], words.word[3]});
        for (int i = 0; i < 4; ++i) {
          for (int j = 0; j < 2; ++j) {
            int const key = first + 8 * i + pair + j;
            uint32_t const bits = j == 0 ? words.word[i] & 0xffff : words.word[i] >> 16;
            float const factor = bits < 32768 ? 0.0f : 2.0f;
            CHECK_EQ(dropout.factor(words, key), factor);
            CHECK_EQ(dropout.factor(words.word[i], key), factor);
            CHECK_EQ(dropout.factor(0, 1, q, key), factor);
          }
        }
      }
    }
  }
  CHECK_EQ(int(draws.size()), count);
}

// Every bit of the state counts, so that replays which advance the offset draw anew.
TEST(seed_and_offset_choose_the_mask) {
  auto const first = [](uint64_t seed, uint64_t offset) {
    PhiloxWords const words = Call(0.5f, seed, offset).dropout().draw(0, 0, 0, 0);
    return uint64_t(words.word[0]) << 32 | words.word[1];
  };
  std::set<uint64_t> seen{first(0, 0)};
  for (int bit = 0; bit < 64; ++bit) {
    seen.insert(first(uint64_t(1) << bit, 0));
    // The upper half of the offset goes into the key beside the seed.
    seen.insert(first(uint64_t(0x5555) << 40, uint64_t(1) << bit));
  }
  CHECK_EQ(int(seen.size()), 1 + 2 * 64);
  CHECK_EQ(first(3, 4), first(3, 4));
}

int main(int argc, char** argv) { return check::run(argc, argv); }
