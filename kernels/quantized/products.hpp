// Steps of Q K^T in int8, and its operands: the interface of tile/products.hpp. Products of uint8
// and int8 are also those of P V (sm80/quantized/int8_weights.hpp).
//
// Two numbers of K count as one 16-bit element of its tile, so ldmatrix loads the operands of
// m16n8k32. Q comes from registers (quantized/queries.hpp), or from shared memory, where it was
// written back in int8.
#pragma once

#include "tile/products.hpp"

namespace cutlass_attn {

template <class Config, class Score, class Arch>
struct Products<Config, Score, Arch, int8_t>
    : Products<Config, Score, Arch, typename Config::Element> {
  using Base = Products<Config, Score, Arch, typename Config::Element>;
  using Base::kKeyBlock;
  using Base::kKeyBlocks;
  using Base::kRowBlocks;
  using typename Base::Address;
  using typename Base::TileK;
  using typename Base::Words;
  static constexpr int kSteps = Config::kHeadDim / 32;  // of Q K^T

  using Q = Words[kSteps][kRowBlocks];
  using Start = Words;  // initial value of accumulators: kMagic, four times
  // int32 sums are stored as the bits of floats (quantized/queries.hpp).
  using S = typename Config::template Fragment<float, kKeyBlock>;

  // This lane's address in Q in int8, after Q was written back.
  CUTE_DEVICE static Address q8_rows(Address q8, int warp_m, int lane) {
    return q8 + Config::TileQ8::offset(warp_m * 16 + lane % 16, lane / 16 * 8);
  }
  template <class Shared, class Place>
  CUTE_DEVICE static void store_q8(Q const& q, Shared& shared, Place const& place) {
    Address const q8 = Arch::smem_address(shared.q8) + place.thread % 4 * 4;
    CUTE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          int const row = place.row(2 * m + i % 2), column = k * 16 + i / 2 * 8;
          Arch::store_shared(q8 + Config::TileQ8::offset(row, column), q[k][m][i]);
        }
      }
    }
  }

  // S = Q K^T of a key block, with Q in registers.
  CUTE_DEVICE static void qk(Q const& q, Address k_rows, int key_block, Start const& start, S& s) {
    CUTE_UNROLL
    for (int k = 0; k < kSteps; ++k) qk_step(q[k], k_rows, key_block, k, start, s);
  }

  // S of all key blocks of a tile; reads Q from shared memory once.
  CUTE_DEVICE static void qk_of_tile(Address q_rows, Address k_rows, Start const& start,
                                     S (&s)[kKeyBlocks]) {
    CUTE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      Words q[kRowBlocks];
      load_q8(q_rows, k, q);
      CUTE_UNROLL
      for (int j = 0; j < kKeyBlocks; ++j) qk_step(q, k_rows, j, k, start, s[j]);
    }
  }

  // S of a key block; reads Q from shared memory.
  CUTE_DEVICE static void qk_from_shared(Address q_rows, Address k_rows, int key_block,
                                         Start const& start, S& s) {
    CUTE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      Words q[kRowBlocks];
      load_q8(q_rows, k, q);
      qk_step(q, k_rows, key_block, k, start, s);
    }
  }

  // One k-step of S: head-dim columns [32 k, 32 k + 32). The first k-step initialises S.
  CUTE_DEVICE static void qk_step(Words const (&q)[kRowBlocks], Address k_rows, int key_block,
                                  int k, Start const& start, S& s) {
    CUTE_UNROLL
    for (int n = 0; n < kKeyBlock / 16; ++n) {
      Words words;
      Arch::ldmatrix_x4(TileK::block(k_rows, key_block * (kKeyBlock / 16) + n, k), words);
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        CUTE_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) {
          multiply_int8<int8_t>(q[m], words + 2 * half, k == 0, start, s.block(m, 2 * n + half));
        }
      }
    }
  }

  // A: type of a, int8_t or uint8_t. is_first: the sum begins with `start`, not with acc.
  template <class A, class Acc>
  CUTE_DEVICE static void multiply_int8(Words const& a, uint32_t const* b, bool is_first,
                                        Start const& start, Acc& acc) {
    uint32_t const b_words[2] = {b[0], b[1]};
    int32_t before[4], after[4];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      before[i] = int32_t(is_first ? start[i] : float_bits(acc[i]));
    }
    Arch::template mma_int8<A>(after, a, b_words, before);
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) acc[i] = bits_float(uint32_t(after[i]));
  }

  CUTE_DEVICE static S& in_fp32(S& s) { return s; }

 private:
  CUTE_DEVICE static void load_q8(Address q_rows, int k, Words (&q)[kRowBlocks]) {
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      Arch::ldmatrix_x4(Config::TileQ8::block(q_rows, m * Config::kWarpsM, k), q[m]);
    }
  }
};

}  // namespace cutlass_attn
