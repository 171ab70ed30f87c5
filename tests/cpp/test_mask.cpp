// The interval mask, against a predicate that uses no intervals.
#include "check.hpp"
#include "core/mask.hpp"

using namespace cutlass_attn;

namespace {

Problem call(int seqlen_q, int seqlen_k, int left, int right, bool causal, int64_t shift,
             int chunk = 0) {
  Problem p;
  p.seq_q.seqlen = seqlen_q;
  p.seq_k.seqlen = seqlen_k;
  p.mask.window_left = left;
  p.mask.window_right = right;
  p.mask.causal = causal;
  p.mask.diagonal_shift = shift;
  p.mask.attention_chunk = chunk;
  return p;
}

IntervalMask mask_of(Problem const& p) { return {p.mask, {p.seq_q.seqlen, p.seq_k.seqlen}}; }

// Whether query q sees key k, literally from the comment on Problem.
bool sees(Problem const& p, int64_t q, int64_t k) {
  int64_t const own_key = q + p.seq_k.seqlen - p.seq_q.seqlen + p.mask.diagonal_shift;
  if (k < 0 || k >= p.seq_k.seqlen) return false;
  if (p.mask.causal && k > own_key) return false;
  if (p.mask.window_left >= 0 && own_key - k > p.mask.window_left) return false;
  if (p.mask.window_right >= 0 && k - own_key > p.mask.window_right) return false;
  int const chunk = p.mask.attention_chunk;
  // Chunks are counted from key 0, to both sides.
  auto const number = [&](int64_t key) { return key < 0 ? -1 - (-1 - key) / chunk : key / chunk; };
  return chunk == 0 || number(k) == number(own_key);
}

template <class Body>
void for_small_calls(Body const& body) {
  for (int seqlen_q : {1, 2, 3, 5, 8}) {
    for (int seqlen_k : {0, 1, 2, 4, 7, 9}) {
      for (int left : {kUnbounded, 0, 1, 3, 20}) {
        for (int right : {kUnbounded, 0, 1, 3, 20}) {
          for (bool causal : {false, true}) {
            for (int64_t shift : {-12, -5, -1, 0, 1, 4, 12}) {
              for (int chunk : {0, 1, 3, 4, 100}) {
                body(call(seqlen_q, seqlen_k, left, right, causal, shift, chunk));
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace

TEST(visible_keys_are_those_of_the_definition) {
  for_small_calls([](Problem const& p) {
    IntervalMask const mask = mask_of(p);
    for (int q = 0; q < p.seq_q.seqlen; ++q) {
      CHECK(0 <= mask.lo(q) && mask.lo(q) <= mask.hi(q) && mask.hi(q) <= p.seq_k.seqlen);
      if (q > 0) CHECK(mask.lo(q - 1) <= mask.lo(q) && mask.hi(q - 1) <= mask.hi(q));
      for (int k = -1; k <= p.seq_k.seqlen; ++k) CHECK_EQ(mask.visible(q, k), sees(p, q, k));
    }
  });
}

// Tiles outside [begin, end) hold no visible key. is_full() names exactly the tiles that need no
// predicate.
TEST(tiles_cover_what_is_visible) {
  for_small_calls([](Problem const& p) {
    IntervalMask const mask = mask_of(p);
    for (int block : {1, 2, 3, 4, 16}) {
      for (int begin = 0; begin < p.seq_q.seqlen; ++begin) {
        for (int end = begin + 1; end <= p.seq_q.seqlen; ++end) {
          TileRange const range = mask.tiles(begin, end, block);
          CHECK(range.begin >= 0 && range.end <= (p.seq_k.seqlen + block - 1) / block);
          for (int tile = 0; tile * block < p.seq_k.seqlen; ++tile) {
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

// The queries that see a key, and the query tiles that a tile of keys meets.
TEST(queries_of_keys) {
  for_small_calls([](Problem const& p) {
    IntervalMask const mask = mask_of(p);
    int const seqlen_q = p.seq_q.seqlen, seqlen_k = p.seq_k.seqlen;
    for (int k = 0; k < seqlen_k; ++k) {
      CHECK(0 <= mask.q_lo(k) && mask.q_lo(k) <= mask.q_hi(k) && mask.q_hi(k) <= seqlen_q);
      for (int q = 0; q < seqlen_q; ++q) {
        CHECK_EQ(q >= mask.q_lo(k) && q < mask.q_hi(k), sees(p, q, k));
      }
    }
    for (int block : {1, 2, 3, 16}) {
      for (int begin = 0; begin < seqlen_k; ++begin) {
        for (int end = begin + 1; end <= seqlen_k; ++end) {
          TileRange const range = mask.query_tiles(begin, end, block);
          CHECK(range.begin >= 0 && range.end <= (seqlen_q + block - 1) / block);
          for (int tile = 0; tile * block < seqlen_q; ++tile) {
            int visible = 0;
            for (int q = tile * block; q < (tile + 1) * block && q < seqlen_q; ++q) {
              for (int k = begin; k < end; ++k) visible += sees(p, q, k);
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

// If the windows of a tile's first and last row have no gap in between, every visited tile has a
// visible key.
TEST(no_tile_is_visited_in_vain) {
  for (int shift : {-3, 0, 5}) {
    for (bool causal : {false, true}) {
      for (int left : {kUnbounded, 3, 9}) {
        Problem const p = call(16, 32, left, kUnbounded, causal, shift);
        IntervalMask const mask = mask_of(p);
        for (int begin = 0; begin < p.seq_q.seqlen; begin += 4) {
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
    for (int seqlen_k : {0, 1, int(kMaxSeqlen), most}) {
      for (int left : {kUnbounded, 0, most}) {
        for (int right : {kUnbounded, 0, most}) {
          for (bool causal : {false, true}) {
            for (int64_t shift : {-far, int64_t(-most), int64_t(0), int64_t(most), far}) {
              for (int chunk : {0, 5, kMaxAttentionChunk}) {
                if (chunk != 0 && seqlen_k > kMaxSeqlen) continue;
                Problem const p = call(seqlen_q, seqlen_k, left, right, causal, shift, chunk);
                IntervalMask const mask = mask_of(p);
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
}

TEST(tile_mask_agrees) {
  auto const check_from = [](Problem const& p, int first, bool is_moved) {
    IntervalMask const mask = mask_of(p);
    TileMask const near =
        is_moved ? mask.tile_mask(0, p.seq_q.seqlen).from(first) : mask.tile_mask(first);
    for (int q = first; q < p.seq_q.seqlen && q < first + 4; ++q) {
      for (int k = 0; k < p.seq_k.seqlen && k < 12; ++k) {
        for (int key : {k, p.seq_k.seqlen - 1 - k}) {
          CHECK_EQ(key >= near.lo(q - first) && key < near.hi(q - first), sees(p, q, key));
        }
      }
      CHECK(near.hi(q - first) <= p.seq_k.seqlen);
    }
  };
  for_small_calls([&](Problem const& p) {
    for (int first = 0; first < p.seq_q.seqlen; ++first) {
      for (bool is_moved : {false, p.mask.attention_chunk == 0}) check_from(p, first, is_moved);
    }
  });
  int64_t const far = int64_t(1) << 32;
  for (int seqlen_k : {1, 100, int(kMaxSeqlen)}) {
    for (int window : {kUnbounded, 5, INT32_MAX}) {
      for (int64_t shift : {-far, int64_t(-kMaxSeqlen), int64_t(-7), int64_t(kMaxSeqlen), far}) {
        for (int chunk : {0, 3, 1 << 20, kMaxAttentionChunk - 1, kMaxAttentionChunk}) {
          Problem const p = call(kMaxSeqlen, seqlen_k, window, window, false, shift, chunk);
          for (int first : {0, 1000, 3 << 20, kMaxSeqlen / 2, kMaxSeqlen - 4}) {
            for (bool is_moved : {false, chunk == 0}) check_from(p, first, is_moved);
          }
        }
      }
    }
  }
}

int main(int argc, char** argv) { return check::run(argc, argv); }
