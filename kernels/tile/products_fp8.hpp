// Steps of Q K^T and P V of a warp for K and V in float8_e4m3fn: the interface of products.hpp,
// with conversions in registers.
//
// Rows are copied as stored, half as many bytes, and ldmatrix treats two neighbouring columns as
// one 16-bit element. So one ldmatrix loads 32 columns, and no data changes lanes:
//
//   K   thread t of a quad gets columns 4t .. 4t + 3 of every 16 of a key, where B of Q K^T has 2t,
//       2t + 1, 2t + 8 and 2t + 9. The order in which columns are summed does not matter, if Q is
//       loaded in that order as well.
//   V   ldmatrix.trans loads columns 2g and 2g + 1 of keys 2t and 2t + 1 together, but B of P V has
//       one column at a time. So even columns form one n8 block and odd columns the next: of every
//       16 columns of O, a thread has 4t and 4t + 2 in the first block, 4t + 1 and 4t + 3 in the
//       second.
//
// P and V are multiplied in fp16, whatever type Q has: weights are at most 4096, e4m3 numbers are
// exact in fp16 and bf16, and the conversion to fp16 takes the fewest instructions. K is converted
// to the dtype of Q.
#pragma once

#include "core/e4m3.hpp"
#include "tile/products.hpp"

namespace cutlass_attn {

template <class Config, class Score, class Arch>
struct Products<Config, Score, Arch, E4M3>
    : Products<Config, Score, Arch, typename Config::Element> {
  using Base = Products<Config, Score, Arch, typename Config::Element>;
  using typename Base::Address;
  using typename Base::Element;
  using typename Base::O;
  using typename Base::P;
  using typename Base::Q;
  using typename Base::S;
  using typename Base::Scores;
  using typename Base::TileK;
  using typename Base::TileQ;
  using typename Base::TileV;
  using typename Base::Words;
  using PvElement = cutlass::half_t;
  using Base::kKeyBlock;
  using Base::kKeyBlocks;
  using Base::kRowBlocks;
  using Base::kSteps;
  using Base::load_v;
  static_assert(std::is_same_v<typename Config::QkAccumulator, float> &&
                std::is_same_v<typename Config::PvAccumulator, float>);
  static_assert(kKeyBlock % 16 == 0 && Config::kHeadDim % 32 == 0 && Config::kHeadDimV % 32 == 0);

  template <class Place>
  CUTE_DEVICE static int o_column(Place const& place, int j) {
    return j / 4 * 16 + place.thread % 4 * 4 + j % 2 * 2 + j / 2 % 2;
  }

  // This lane's row and columns of Q, in the order of K's columns.
  CUTE_DEVICE static Address q_rows(Address q, int warp_m, int lane) {
    return q + TileQ::offset(warp_m * 16 + lane / 4, lane % 4 / 2 * 8) + lane % 2 * 8;
  }
  CUTE_DEVICE static void load_q(Address q_rows, int m, int k, Words& words) {
    Address const row = TileQ::block(q_rows, m * Config::kWarpsM, k);
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {  // rows g and g + 8
      uint32_t pair[2];
      Arch::load_shared(row + Address(half * 8 * TileQ::kRowBytes), pair);
      words[half] = pair[0];
      words[2 + half] = pair[1];
    }
  }
  CUTE_DEVICE static void load_q(Address q_rows, Q& q) {
    CUTE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) load_q(q_rows, m, k, q[k][m]);
    }
  }

  CUTE_DEVICE static void qk(Q const& q, Address k_rows, int key_block, NoStart, S& s) {
    clear(s);
    CUTE_UNROLL
    for (int k = 0; k < kSteps; k += 2) qk_steps(q[k], q[k + 1], k_rows, key_block, k / 2, s);
  }
  CUTE_DEVICE static void qk_of_tile(Address q_rows, Address k_rows, NoStart, S (&s)[kKeyBlocks]) {
    CUTE_UNROLL
    for (int j = 0; j < kKeyBlocks; ++j) clear(s[j]);
    CUTE_UNROLL
    for (int k = 0; k < kSteps; k += 2) {
      Words q[2][kRowBlocks];
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        load_q(q_rows, m, k, q[0][m]);
        load_q(q_rows, m, k + 1, q[1][m]);
      }
      CUTE_UNROLL
      for (int j = 0; j < kKeyBlocks; ++j) qk_steps(q[0], q[1], k_rows, j, k / 2, s[j]);
    }
  }

  // Rounds the weights of a key block to fp16.
  CUTE_DEVICE static void pack(Scores const& weights, P& p) {
    Base::template pack<PvElement>(weights, p);
  }

  template <class Visible = AllKeys>
  CUTE_DEVICE static void pv(P const& p, Address v_rows, int key_block, Words const& v_first, O& o,
                             Visible const& visible = {}) {
    CUTE_UNROLL
    for (int n = 0; n < kKeyBlock / 16; ++n) {
      CUTE_UNROLL
      for (int d = 0; d < Config::kHeadDimV / 32; ++d) {
        Words words;
        if (n == 0 && d == 0) {
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) words[i] = v_first[i];
        } else {
          load_v(v_rows, key_block * (kKeyBlock / 16) + n, d, words);
        }
        visible.apply(n, words);
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) pv_step(p[n], words + 2 * half, 4 * d + 2 * half, o);
      }
    }
  }

 private:
  // One step of Q K^T: head-dim columns [32 k, 32 k + 32).
  CUTE_DEVICE static void qk_steps(Words const (&q0)[kRowBlocks], Words const (&q1)[kRowBlocks],
                                   Address k_rows, int key_block, int k, S& s) {
    CUTE_UNROLL
    for (int n = 0; n < kKeyBlock / 16; ++n) {
      Words words;  // by 8 keys, then 16 columns
      Arch::ldmatrix_x4(TileK::block(k_rows, key_block * (kKeyBlock / 16) + n, k), words);
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        uint32_t b[2][2];
        Arch::template unpack_e4m3<Element>(words[2 * half], b[0]);
        Arch::template unpack_e4m3<Element>(words[2 * half + 1], b[1]);
        CUTE_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) {
          Base::multiply(q0[m], b[0], s.block(m, 2 * n + half));
          Base::multiply(q1[m], b[1], s.block(m, 2 * n + half));
        }
      }
    }
  }

  // Multiplies 16 keys and 16 head-dim columns into o.block(m, at) (even columns) and o.block(m, at
  // + 1) (odd columns). words: keys 0 to 7, then 8 to 15.
  CUTE_DEVICE static void pv_step(Words const (&p)[kRowBlocks], uint32_t const* words, int at,
                                  O& o) {
    uint32_t b[2][2];  // by column parity, then 8 keys
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t pairs[2];
      Arch::template unpack_e4m3<PvElement>(Arch::prmt(words[i], 0, 0x3120), pairs);
      b[0][i] = pairs[0];
      b[1][i] = pairs[1];
    }
    CUTE_UNROLL
    for (int place = 0; place < 2; ++place) {
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        cutlass_attn::multiply<Arch, PvElement>(p[m], b[place], o.block(m, at + place));
      }
    }
  }
};

}  // namespace cutlass_attn
