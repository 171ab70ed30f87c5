// The interval mask against a predicate that knows no intervals.
#include "check.hpp"
#include "core/mask.hpp"

using namespace cutlass_attn;

namespace {

AttnParams call(int seqlen_q, int seqlen_k, int left, int right, bool causal, int64_t shift) {
  AttnParams p;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.window_left = left;
  p.window_right = right;
  p.causal = causal;
  p.diagonal_shift = shift;
  return p;
}

// May query q see key k? Word by word from the comment on AttnParams.
bool sees(AttnParams const& p, int64_t q, int64_t k) {
  int64_t const own_key = q + p.seqlen_k - p.seqlen_q + p.diagonal_shift;
  if (k < 0 || k >= p.seqlen_k) return false;
  if (p.causal && k > own_key) return false;
  if (p.window_left >= 0 && own_key - k > p.window_left) return false;
  if (p.window_right >= 0 && k - own_key > p.window_right) return false;
  return true;
}

template <class Body>
void for_small_calls(Body const& body) {
  for (int seqlen_q : {1, 2, 3, 5, 8}) {
    for (int seqlen_k : {0, 1, 2, 4, 7, 9}) {
      for (int left : {kUnbounded, 0, 1, 3, 20}) {
        for (int right : {kUnbounded, 0, 1, 3, 20}) {
          for (bool causal : {false, true}) {
            for (int64_t shift : {-12, -5, -1, 0, 1, 4, 12}) {
              body(call(seqlen_q, seqlen_k, left, right, causal, shift));
            }
          }
        }
      }
    }
  }
}

}  // namespace

TEST(visible_keys_are_those_of_the_definition) {
  for_small_calls([](AttnParams const& p) {
    IntervalMask const mask(p);
    for (int q = 0; q < p.seqlen_q; ++q) {
      CHECK(0 <= mask.lo(q) && mask.lo(q) <= mask.hi(q) && mask.hi(q) <= p.seqlen_k);
      if (q > 0) CHECK(mask.lo(q - 1) <= mask.lo(q) && mask.hi(q - 1) <= mask.hi(q));
      for (int k = -1; k <= p.seqlen_k; ++k) CHECK_EQ(mask.visible(q, k), sees(p, q, k));
    }
  });
}

// Tiles beyond [begin, end) hold no visible key; is_full() says exactly which need no test.
TEST(tiles_cover_what_is_visible) {
  for_small_calls([](AttnParams const& p) {
    IntervalMask const mask(p);
    for (int block : {1, 2, 3, 4, 16}) {
      for (int begin = 0; begin < p.seqlen_q; ++begin) {
        for (int end = begin + 1; end <= p.seqlen_q; ++end) {
          TileRange const range = mask.tiles(begin, end, block);
          CHECK(range.begin >= 0 && range.end <= (p.seqlen_k + block - 1) / block);
          for (int tile = 0; tile * block < p.seqlen_k; ++tile) {
            int visible = 0;
            for (int q = begin; q < end; ++q) {
              for (int k = tile * block; k < (tile + 1) * block; ++k) visible += sees(p, q, k);
            }
            bool const inside = tile >= range.begin && tile < range.end;
            CHECK(inside || visible == 0);
            CHECK_EQ(range.is_full(tile), visible == (end - begin) * block);
          }
        }
      }
    }
  });
}

// Without a gap between the windows of a tile's first and last row, no tile is visited in vain.
TEST(no_tile_is_visited_in_vain) {
  for (int shift : {-3, 0, 5}) {
    for (bool causal : {false, true}) {
      for (int left : {kUnbounded, 3, 9}) {
        AttnParams const p = call(16, 32, left, kUnbounded, causal, shift);
        IntervalMask const mask(p);
        for (int begin = 0; begin < p.seqlen_q; begin += 4) {
          TileRange const range = mask.tiles(begin, begin + 4, 4);
          for (int tile = range.begin; tile < range.end; ++tile) {
            int visible = 0;
            for (int q = begin; q < begin + 4; ++q) {
              for (int k = tile * 4; k < tile * 4 + 4; ++k) visible += sees(p, q, k);
            }
            CHECK(visible > 0);
          }
        }
      }
    }
  }
}

TEST(the_largest_sizes_do_not_overflow) {
  int const most = INT32_MAX;
  int64_t const far = int64_t(1) << 32;
  for (int seqlen_q : {1, most}) {
    for (int seqlen_k : {0, 1, most}) {
      for (int left : {kUnbounded, 0, most}) {
        for (int right : {kUnbounded, 0, most}) {
          for (bool causal : {false, true}) {
            for (int64_t shift : {-far, int64_t(-most), int64_t(0), int64_t(most), far}) {
              AttnParams const p = call(seqlen_q, seqlen_k, left, right, causal, shift);
              IntervalMask const mask(p);
              for (int q : {0, seqlen_q / 2, seqlen_q - 1}) {
                for (int k : {0, 1, seqlen_k / 2, seqlen_k - 1, mask.lo(q) - 1, mask.lo(q),
                              mask.hi(q) - 1, mask.hi(q)}) {
                  CHECK_EQ(mask.visible(q, k), sees(p, q, k));
                }
              }
              for (int block : {1, 64, most}) {
                TileRange const range = mask.tiles(0, seqlen_q, block);
                CHECK(range.begin >= 0 && int64_t(range.end - 1) * block < seqlen_k);
              }
            }
          }
        }
      }
    }
  }
}

TEST(near_mask_agrees) {
  auto const check_from = [](AttnParams const& p, int first) {
    NearMask const near = IntervalMask(p).near(first);
    for (int q = first; q < p.seqlen_q && q < first + 4; ++q) {
      for (int k = 0; k < p.seqlen_k && k < 12; ++k) {
        for (int key : {k, p.seqlen_k - 1 - k}) {
          CHECK_EQ(key >= near.lo(q - first) && key < near.hi(q - first), sees(p, q, key));
        }
      }
      CHECK(near.hi(q - first) <= p.seqlen_k);
    }
  };
  for_small_calls([&](AttnParams const& p) {
    for (int first = 0; first < p.seqlen_q; ++first) check_from(p, first);
  });
  int64_t const far = int64_t(1) << 32;
  for (int seqlen_k : {1, 100, int(kMaxSeqlen)}) {
    for (int window : {kUnbounded, 5, INT32_MAX}) {
      for (int64_t shift : {-far, int64_t(-kMaxSeqlen), int64_t(-7), int64_t(kMaxSeqlen), far}) {
        AttnParams const p = call(kMaxSeqlen, seqlen_k, window, window, false, shift);
        for (int first : {0, 1000, kMaxSeqlen / 2, kMaxSeqlen - 4}) check_from(p, first);
      }
    }
  }
}

int main(int argc, char** argv) { return check::run(argc, argv); }
