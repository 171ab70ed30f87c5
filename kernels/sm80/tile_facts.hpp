// Properties of a tile of the mma.sync forward kernel. Config takes its constants from here. The
// library also evaluates them for tiles that are not compiled: those of a tuning file, and the
// candidates of the tuner (runtime/registry.cpp).
#pragma once

#include "core/quantize.hpp"

namespace cutlass_attn::sm80 {

struct TileFacts {
  static constexpr int kMaxSmemBytes = 99 << 10;  // of a block on Ada
  static constexpr int kRegisters = 64 << 10;     // of an SM

  int head_dim, head_dim_v;
  int block_m, block_n;
  int warps_m, warps_n;
  bool is_paged;
  bool is_fp8_kv;          // K and V are stored in e4m3
  bool is_int8 = false;    // Q K^T in int8
  bool is_int8_v = false;  // P V in int8
  bool is_e4m3_v = false;  // P V in e4m3

  constexpr bool is_split() const { return warps_n > 1; }
  constexpr bool is_8_bit_v() const { return is_int8_v || is_e4m3_v; }
  constexpr int threads() const { return 32 * warps_m * warps_n; }
  constexpr int row_blocks() const { return block_m / warps_m / 16; }     // m16 blocks per warp
  constexpr int warp_columns() const { return head_dim_v / warps_n; }     // columns of O per warp
  constexpr int steps() const { return head_dim / (is_int8 ? 32 : 16); }  // k-steps of Q K^T
  // Registers of Q and O.
  constexpr int q_and_o() const { return row_blocks() * (steps() * 4 + head_dim_v / 2); }

  // Whether Q stays in registers, which selects the schedule. It does if it takes at most 32
  // registers, or, in int8, if Q and O take at most 128; K and V then have two stages each. With P
  // V in 8 bits, S of a whole tile needs these registers.
  constexpr bool keeps_q() const {
    if (is_split() || is_8_bit_v()) return false;
    return is_int8 ? q_and_o() <= 128 : row_blocks() * steps() * 4 <= 32;
  }
  // Columns of Q, in k-steps of 16, that stay in registers if several warps share a row. The other
  // columns are read from shared memory in every tile. Q and O together take up to 160 registers.
  // The general score holds more values and leaves room for fewer.
  constexpr int q_steps_kept(bool is_general) const {
    int const budget = is_general ? 144 : 160;
    int const steps = (budget - row_blocks() * (warp_columns() / 8) * 4) / (row_blocks() * 4);
    return steps < head_dim / 16 ? steps : head_dim / 16;
  }

  // Two blocks per SM for 32 rows per warp, with up to 255 registers. 16 rows per warp need at most
  // 168 registers while the head dim is small. Q in int8 takes half of the registers, so it also
  // fits 168 at a head_dim of 128, and with 32 rows per warp in tiles of 128 keys, which are for
  // GPUs whose shared memory holds three blocks.
  constexpr bool is_small() const {
    return row_blocks() == 1 && head_dim <= 64 && head_dim_v <= 64 && !is_paged;
  }
  constexpr bool is_small_in_int8() const {
    return is_int8 && keeps_q() && q_and_o() <= 80 && (row_blocks() == 1 || block_n == 128);
  }
  constexpr int min_blocks_per_sm() const {
    return is_split() ? 1 : is_small() || is_small_in_int8() ? 3 : 2;
  }

  // Bytes in shared memory of the tiles of Q, K, V and O, of P if warps share rows, and of the
  // columns of Q that are in registers before V is copied.
  constexpr int q_bytes() const { return 2 * block_m * head_dim; }
  constexpr int k_bytes() const { return (is_fp8_kv || is_int8 ? 1 : 2) * block_n * head_dim; }
  constexpr int v_bytes() const {
    return (is_fp8_kv || is_8_bit_v() ? 1 : 2) * block_n * head_dim_v;
  }
  constexpr int o_bytes() const { return 2 * block_m * head_dim_v; }
  constexpr int p_bytes() const { return 2 * block_m * block_n; }
  constexpr int moved_bytes() const { return q_steps_kept(true) / 4 * (2 * block_m * 64); }
  // With P V in 8 bits, shared memory also has room for two stages, up to a head_dim of 128.
  constexpr bool has_two_8_bit_tiles() const {
    return is_8_bit_v() && k_bytes() + v_bytes() <= 16 * 1024;
  }
  constexpr int stages() const { return keeps_q() || has_two_8_bit_tiles() ? 2 : 1; }
  // Bytes of all buffers: the storage of Config without BlockInfo.
  constexpr int buffer_bytes() const {
    int const kv = k_bytes() + v_bytes(), q = q_bytes(), o = o_bytes();
    if (is_split()) return kv + q - moved_bytes() + p_bytes() + 4 * warps_m * warps_n;
    if (!is_int8) return q + stages() * kv;
    if (keeps_q()) return kv + larger_of(larger_of(q, kv), o - kv);
    if (has_two_8_bit_tiles()) {
      return kv + q / 2 + larger_of(larger_of(kv, q - q / 2), o - kv - q / 2);
    }
    return k_bytes() + q / 2 + larger_of(larger_of(v_bytes(), q - q / 2), o - k_bytes() - q / 2);
  }

  // Why the kernel cannot have this tile; null if it can.
  constexpr char const* why_not() const {
    int const dims = is_split() ? 64 : 32, keys = is_split() ? 0 : keeps_q() ? 32 : 16;
    if (head_dim % dims != 0)
      return is_split() ? "head_dim must be a multiple of 64" : "head_dim must be a multiple of 32";
    if (head_dim_v % (dims * warps_n) != 0) {
      return is_split() ? "head_dim_v must be a multiple of 64 for each warp that shares rows"
                        : "head_dim_v must be a multiple of 32";
    }
    if (block_m % (16 * warps_m) != 0) return "queries must be a multiple of 16 for each warp";
    if (is_8_bit_v() && block_n != quantize::kTileKeys) {
      return "keys must be 64: weights are rounded relative to their row in 64 keys";
    }
    if (is_int8 && block_n != 32 && block_n % quantize::kTileKeys != 0) {
      return "keys must be 32 or a multiple of 64: 64 keys share scales";
    }
    if (is_split() && block_n != 8 * warps_n) {
      return "keys must be 8 for each warp that shares rows";
    }
    if (!is_split() && block_n % keys != 0) {
      return keeps_q() ? "keys must be a multiple of 32" : "keys must be a multiple of 16";
    }
    if (threads() > 1024) return "a block has at most 1024 threads";
    // A row of a chunk is 4 or 8 vectors of 16 bytes, which as many threads copy.
    int const vectors = head_dim % 64 != 0 && head_dim_v % 64 != 0 ? 4 : 8;
    if (threads() % (8 * vectors) != 0) return "threads must copy 8 rows of a tile at once";
    if (is_split() && moved_bytes() > v_bytes()) return "V has no room for the columns of Q";
    if (!is_int8 && o_bytes() > (is_split() ? k_bytes() + v_bytes() : buffer_bytes())) {
      return "O must fit where Q, K and V were";
    }
    return nullptr;
  }

  // Whether O, the scores in flight if Q is in shared memory, and what a thread needs for addresses
  // and row maxima are certainly more registers than it has.
  constexpr bool spills() const {
    int const scores = is_split() || keeps_q() ? 0 : row_blocks() * block_n / 4;  // in fp16
    int const available = kRegisters / (threads() * min_blocks_per_sm());
    return row_blocks() * warp_columns() / 2 + 24 + scores > (available < 255 ? available : 255);
  }

 private:
  static constexpr int larger_of(int a, int b) { return a > b ? a : b; }
};

}  // namespace cutlass_attn::sm80
