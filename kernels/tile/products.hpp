// Steps of Q K^T and P V of a warp, on fragments that the caller owns. Stateless.
//
// Operands come from shared memory by ldmatrix, a 16 x 16 block at a time. `rows` is this lane's
// address in block (0, 0) of a tile, from q_rows(), k_rows() or v_rows().
//
// Products are accumulated in fp32, or in the types of Config. With fp16 accumulation, Q K^T is
// converted before softmax. P V is accumulated in fp16 over one key block only and then added to O,
// which is in fp32, so that the error does not grow with the number of keys.
#pragma once

#include <cutlass/numeric_types.h>
#include <type_traits>

#include "core/e4m3.hpp"
#include "tile/fragment.hpp"
#include "tile/multiply.hpp"
#include "tile/visible_keys.hpp"

namespace cutlass_attn {

struct NoStart {};

// K and V in the dtype of Q. products_fp8.hpp specialises this for K and V in e4m3, and
// quantized/products.hpp for Q and K that are rounded to int8.
template <class Config, class Score, class Arch, class ElementK = typename Config::ElementK>
struct Products {
  static_assert(!std::is_same_v<ElementK, E4M3>, "this needs tile/products_fp8.hpp");
  static_assert(!std::is_same_v<ElementK, int8_t>, "this needs quantized/products.hpp");
  using Element = typename Config::Element;
  using Address = typename Arch::SmemAddress;
  using TileQ = typename Config::TileQ;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  using QkAccumulator = typename Config::QkAccumulator;
  using PvAccumulator = typename Config::PvAccumulator;
  static constexpr int kRowBlocks = Config::kRowBlocks;
  static constexpr int kKeyBlock = Config::template key_block<Score>();
  static constexpr int kKeyBlocks = Config::kBlockN / kKeyBlock;  // per tile
  static constexpr int kSteps = Config::kHeadDim / 16;            // of Q K^T

  using Words = uint32_t[4];  // A of one m16 block, or B of two n8 blocks
  using Q = Words[kSteps][kRowBlocks];
  using Start = NoStart;  // accumulators of Q K^T begin with 0
  using S = typename Config::template Fragment<QkAccumulator, kKeyBlock>;
  using Scores = typename Config::template Fragment<float, kKeyBlock>;  // S in fp32
  using P = Words[kKeyBlock < 16 ? 1 : kKeyBlock / 16][kRowBlocks];
  using O = typename Config::template Fragment<float, Config::kWarpColumns>;

  CUTE_DEVICE static Address q_rows(Address q, int warp_m, int lane) {
    return q + TileQ::offset(warp_m * 16 + lane % 16, lane / 16 * 8);
  }
  CUTE_DEVICE static Address k_rows(Address k, int lane) {
    return k + TileK::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
  }
  CUTE_DEVICE static Address v_rows(Address v, int lane) {
    return v + TileV::offset(lane % 16, lane / 16 * 8);
  }

  // Head-dim column of element j of a row of O: see FragmentPlace.
  template <class Place>
  CUTE_DEVICE static int o_column(Place const& place, int j) {
    return place.column(j);
  }

  template <class Acc>
  CUTE_DEVICE static void multiply(Words const& a, uint32_t const* b, Acc& acc) {
    cutlass_attn::multiply<Arch, Element>(a, b, acc);
  }

  CUTE_DEVICE static void load_q(Address q_rows, int m, int k, Words& words) {
    Arch::ldmatrix_x4(TileQ::block(q_rows, m * Config::kWarpsM, k), words);
  }
  CUTE_DEVICE static void load_q(Address q_rows, Q& q) {
    CUTE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) load_q(q_rows, m, k, q[k][m]);
    }
  }

  // S = Q K^T of a key block, with Q in registers.
  CUTE_DEVICE static void qk(Q const& q, Address k_rows, int key_block, Start, S& s) {
    clear(s);
    CUTE_UNROLL
    for (int k = 0; k < kSteps; ++k) qk_step(q[k], k_rows, key_block, k, s);
  }

  // S of all key blocks of a tile; reads Q from shared memory once.
  CUTE_DEVICE static void qk_of_tile(Address q_rows, Address k_rows, Start, S (&s)[kKeyBlocks]) {
    CUTE_UNROLL
    for (int j = 0; j < kKeyBlocks; ++j) clear(s[j]);
    CUTE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      Words q[kRowBlocks];
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) load_q(q_rows, m, k, q[m]);
      CUTE_UNROLL
      for (int j = 0; j < kKeyBlocks; ++j) qk_step(q, k_rows, j, k, s[j]);
    }
  }

  // One k-step of S: head-dim columns [16 k, 16 k + 16).
  CUTE_DEVICE static void qk_step(Words const (&q)[kRowBlocks], Address k_rows, int key_block,
                                  int k, S& s) {
    CUTE_UNROLL
    for (int n = 0; n < kKeyBlock / 16; ++n) {
      Words words;
      Arch::ldmatrix_x4(TileK::block(k_rows, key_block * (kKeyBlock / 16) + n, k), words);
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        CUTE_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) {
          multiply(q[m], words + 2 * half, s.block(m, 2 * n + half));
        }
      }
    }
  }

  // S in fp32: S itself, or a copy.
  CUTE_DEVICE static decltype(auto) in_fp32(S& s) {
    if constexpr (!std::is_same_v<QkAccumulator, cutlass::half_t>) {
      return (s);
    } else {
      return to_float(s);
    }
  }

  // Rounds the weights of a key block to the A operand of P V.
  template <class PvElement = Element>
  CUTE_DEVICE static void pack(Scores const& weights, P& p) {
    CUTE_UNROLL
    for (int n = 0; n < kKeyBlock / 16; ++n) {
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          // an m16n8 block: rows g and g + 8, two columns
          auto const& pair = weights.block(m, 2 * n + i / 2);
          p[n][m][i] = Arch::template pack<PvElement>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
        }
      }
    }
  }
  CUTE_DEVICE static void clear_p(P& p) {
    CUTE_UNROLL
    for (int n = 0; n < kKeyBlock / 16; ++n) {
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) p[n][m][i] = 0;
      }
    }
  }

  // Loads the first block of V that pv() needs: 16 keys of the key block, 16 head-dim columns.
  CUTE_DEVICE static void load_v(Address v_rows, int key_block, Words& words) {
    load_v(v_rows, key_block * (kKeyBlock / 16), 0, words);
  }
  CUTE_DEVICE static void load_v(Address v_rows, int n, int d, Words& words) {
    Arch::ldmatrix_x4_trans(TileV::block(v_rows, n, d), words);
  }

  // O += P V of a key block, after its load_v(). visible: AllKeys or VisibleKeys.
  template <class Visible = AllKeys>
  CUTE_DEVICE static void pv(P const& p, Address v_rows, int key_block, Words const& v_first, O& o,
                             Visible const& visible = {}) {
    if constexpr (std::is_same_v<PvAccumulator, float>) {
      CUTE_UNROLL
      for (int n = 0; n < kKeyBlock / 16; ++n) {
        CUTE_UNROLL
        for (int d = 0; d < Config::kHeadDimV / 16; ++d) {
          pv_step(p, v_rows, key_block, n, d, v_first, o, 2 * d, visible);
        }
      }
    } else {
      static_assert(std::is_same_v<Visible, AllKeys>);
      pv_in_two_levels(p, v_rows, key_block, v_first, o);
    }
  }

 private:
  // Accumulates the key block in PvAccumulator, 16 head-dim columns at a time, and adds the sum to
  // O.
  CUTE_DEVICE static void pv_in_two_levels(P const& p, Address v_rows, int key_block,
                                           Words const& v_first, O& o) {
    CUTE_UNROLL
    for (int d = 0; d < Config::kHeadDimV / 16; ++d) {
      typename Config::template Fragment<PvAccumulator, 16> sums;  // (MMA, M, half)
      clear(sums);
      CUTE_UNROLL
      for (int n = 0; n < kKeyBlock / 16; ++n) {
        pv_step(p, v_rows, key_block, n, d, v_first, sums, 0, AllKeys{});
      }
      auto const wide = to_float(sums);
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        CUTE_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) {
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) o(i, m, 2 * d + half) += wide(i, m, half);
        }
      }
    }
  }

  // Multiplies keys [16 n, 16 n + 16) of the key block and head-dim columns [16 d, 16 d + 16) into
  // acc.block(m, at) and acc.block(m, at + 1), 8 columns each.
  template <class Acc, class Visible>
  CUTE_DEVICE static void pv_step(P const& p, Address v_rows, int key_block, int n, int d,
                                  Words const& v_first, Acc& acc, int at, Visible const& visible) {
    Words words;
    if (n == 0 && d == 0) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) words[i] = v_first[i];
    } else {
      load_v(v_rows, key_block * (kKeyBlock / 16) + n, d, words);
    }
    visible.apply(n, words);
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m)
        multiply(p[n][m], words + 2 * half, acc.block(m, at + half));
    }
  }
};

}  // namespace cutlass_attn
