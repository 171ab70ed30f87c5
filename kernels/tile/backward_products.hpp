// Products of the backward kernel, by one warp or by all warps of a block.
//
// Warps are along the keys. The first product of a chain multiplies the stationary operand by the
// transposed rows of a tile: K Q^T or V dO^T. So keys are rows of the accumulator, which, rounded,
// is the A operand of the second product, P^T dO or dS^T Q. Neither goes through shared memory. dQ
// = dS K sums over all keys of the block, so for dQ dS does go through shared memory.
#pragma once

#include "tile/fragment.hpp"
#include "tile/multiply.hpp"

namespace cutlass_attn {

template <class Config, class Arch>
struct BackwardProducts {
  using Element = typename Config::Element;
  using Address = typename Arch::SmemAddress;
  using TileKv = typename Config::TileKv;
  using TileQ = typename Config::TileQ;
  using TileS = typename Config::TileS;
  static constexpr int kKeyBlocks = Config::kKeyBlocks, kSlice = Config::kSlice;
  static constexpr int kStationary = Config::kStationary;

  using Words = uint32_t[4];  // A of one m16 block, or B of two n8 blocks
  // S or dP of a slice, in m16n8 blocks of (key, query); dK or dV, in blocks of (key, column).
  using Slice = Fragment<float, kKeyBlocks, kSlice / 8>;
  using Grad = Fragment<float, kKeyBlocks, 2 * Config::kSteps>;
  using Packed = Words[kSlice / 16][kKeyBlocks];  // a slice, rounded
  using Stationary = Words[kStationary > 0 ? kStationary : 1][kKeyBlocks];

  // ldmatrix addresses of this lane in block (0, 0): the warp's keys in K; Q as B of S = K Q^T; Q
  // as B of dK = dS^T Q. V and dO lie at a constant distance, passed as a second argument, so that
  // their addresses need no registers.
  CUTE_DEVICE static Address key_rows(Address tile, int warp_n, int lane) {
    return tile + TileKv::offset(warp_n * Config::kWarpKeys + lane % 16, lane / 16 * 8);
  }
  CUTE_DEVICE static Address query_columns(Address tile, int lane) {
    return tile + TileQ::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
  }
  CUTE_DEVICE static Address query_rows(Address tile, int lane) {
    return tile + TileQ::offset(lane % 16, lane / 16 * 8);
  }

  CUTE_DEVICE static void load_stationary(Address key_rows, int distance, Stationary& words) {
    CUTE_UNROLL
    for (int k = 0; k < kStationary; ++k) {
      CUTE_UNROLL
      for (int m = 0; m < kKeyBlocks; ++m)
        Arch::ldmatrix_x4(TileKv::block(key_rows, m, k) + Address(distance), words[k][m]);
    }
  }

  // x = (K or V) (Q or dO)^T for a slice of queries. kInRegisters: number of k-steps of K or V that
  // are in `stationary`.
  template <int kInRegisters = kStationary>
  CUTE_DEVICE static void first(Stationary const& stationary, Address key_rows, int key_distance,
                                Address query_columns, int query_distance, int slice, Slice& x) {
    clear(x);
    CUTE_UNROLL
    for (int k = 0; k < Config::kSteps; ++k) {
      Words a[kKeyBlocks];
      CUTE_UNROLL
      for (int m = 0; m < kKeyBlocks; ++m) {
        if (k < kInRegisters) {
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) a[m][i] = stationary[k < kInRegisters ? k : 0][m][i];
        } else {
          Arch::ldmatrix_x4(TileKv::block(key_rows, m, k) + Address(key_distance), a[m]);
        }
      }
      CUTE_UNROLL
      for (int n = 0; n < kSlice / 16; ++n) {
        Words b;
        Arch::ldmatrix_x4(
            TileQ::block(query_columns, slice * (kSlice / 16) + n, k) + Address(query_distance), b);
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          CUTE_UNROLL
          for (int m = 0; m < kKeyBlocks; ++m)
            multiply<Arch, Element>(a[m], b + 2 * half, x.block(m, 2 * n + half));
        }
      }
    }
  }

  // acc += (P or dS)^T (dO or Q) for a slice of queries.
  CUTE_DEVICE static void second(Packed const& words, Address query_rows, int query_distance,
                                 int slice, Grad& acc) {
    CUTE_UNROLL
    for (int n = 0; n < kSlice / 16; ++n) {
      CUTE_UNROLL
      for (int d = 0; d < Config::kSteps; ++d) {
        Words b;
        Arch::ldmatrix_x4_trans(
            TileQ::block(query_rows, slice * (kSlice / 16) + n, d) + Address(query_distance), b);
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          CUTE_UNROLL
          for (int m = 0; m < kKeyBlocks; ++m)
            multiply<Arch, Element>(words[n][m], b + 2 * half, acc.block(m, 2 * d + half));
        }
      }
    }
  }

  CUTE_DEVICE static void pack(Slice const& x, Packed& words) {
    CUTE_UNROLL
    for (int n = 0; n < kSlice / 16; ++n) pack(x, n, words);
  }
  // Packs the n-th 16 queries.
  template <class To = Element>
  CUTE_DEVICE static void pack(Slice const& x, int n, Packed& words) {
    CUTE_UNROLL
    for (int m = 0; m < kKeyBlocks; ++m) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const at = i % 2 * 2;  // rows g and g + 8 of n8 blocks 2 n and 2 n + 1
        words[n][m][i] =
            Arch::template pack<To>(x(at, m, 2 * n + i / 2), x(at + 1, m, 2 * n + i / 2));
      }
    }
  }

  // Stores dS of a slice to shared memory as (key, query). `tile`: this lane's address in the row
  // of the warp's key 0.
  CUTE_DEVICE static void store_s(Packed const& words, int slice, Address tile) {
    constexpr int kVectors = TileS::kVectors;
    static_assert(kVectors % (kSlice / 8) == 0);
    int const first = slice * (kSlice / 8);
    tile = (tile ^ Address(first % kVectors * 16)) + Address(first / kVectors * TileS::kChunkBytes);
    CUTE_UNROLL
    for (int n = 0; n < kSlice / 16; ++n) {
      CUTE_UNROLL
      for (int m = 0; m < kKeyBlocks; ++m) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          Arch::store_shared((tile ^ Address((2 * n + i / 2) * 16)) +
                                 Address((m * 16 + i % 2 * 8) * TileS::kRowBytes),
                             words[n][m][i]);
        }
      }
    }
  }

  // Adds dQ = dS K of a step to global memory. Called by all warps of the block: each has some of
  // the m16 blocks of rows and some of the columns.
  //   to: address of the step's first m16 block; columns: length of a row there
  CUTE_DEVICE static void add_q(Address s, Address k, float* to, int columns, int thread) {
    constexpr int kQueryBlocks = Config::kQueryBlocks, kAtOnce = Config::kColumnsAtOnce;
    int const lane = thread % 32, warp = thread / 32;
    int const first_row = warp % Config::kWarpsM * kQueryBlocks;
    int first_column = warp / Config::kWarpsM * Config::kColumnBlocks;
    to += Arch::place_of(lane, 0) + first_row * 16 * columns;
    Address const rows_s =
        s + TileS::offset(lane % 8 + lane / 16 * 8, first_row * 16 + lane / 8 % 2 * 8);
    CUTE_NO_UNROLL
    for (int i = 0; i < Config::kColumnBlocks / kAtOnce; ++i, first_column += kAtOnce) {
      Address const rows_k = k + TileKv::offset(lane % 16, first_column * 16 + lane / 16 * 8);
      Fragment<float, kQueryBlocks, 2 * kAtOnce> acc;
      multiply_q(rows_s, rows_k, acc);
      int const end = columns / 16 - first_column;  // column blocks left from here on
      CUTE_UNROLL
      for (int m = 0; m < kQueryBlocks; ++m) {
        float* const row = to + m * 16 * columns + first_column * 256;
        CUTE_UNROLL
        for (int d = 0; d < kAtOnce; ++d) {
          if (d >= end) break;
          Arch::red_add(row + d * 256, acc.block(m, 2 * d));
          Arch::red_add(row + d * 256 + 128, acc.block(m, 2 * d + 1));
        }
      }
    }
  }

 private:
  // dS K for the m16 blocks and column blocks at these addresses.
  template <class Acc>
  CUTE_DEVICE static void multiply_q(Address rows_s, Address rows_k, Acc& acc) {
    clear(acc);
    CUTE_UNROLL
    for (int n = 0; n < Config::kBlockN / 16; ++n) {
      Words a[Config::kQueryBlocks];
      CUTE_UNROLL
      for (int m = 0; m < Config::kQueryBlocks; ++m) {
        Arch::ldmatrix_x4_trans((rows_s ^ Address(m * 32)) + n * 16 * TileS::kRowBytes, a[m]);
      }
      CUTE_UNROLL
      for (int d = 0; d < Config::kColumnsAtOnce; ++d) {
        Words b;
        Arch::ldmatrix_x4_trans((rows_k ^ Address(d * 32)) + n * 16 * TileKv::kRowBytes, b);
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          CUTE_UNROLL
          for (int m = 0; m < Config::kQueryBlocks; ++m)
            multiply<Arch, Element>(a[m], b + 2 * half, acc.block(m, 2 * d + half));
        }
      }
    }
  }
};

}  // namespace cutlass_attn
