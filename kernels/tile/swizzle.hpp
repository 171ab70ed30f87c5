// Layout of a tile of 16-bit elements in shared memory.
//
// Rows are cut into chunks of 64 elements (128 bytes), or of 32 or 16 if the width is no multiple
// of 64 or 32. A chunk of all rows is followed by the next chunk of all rows. The 16-byte vectors
// of a chunk are permuted by the row, so that the 8 rows that an ldmatrix reads at one column, and
// the vectors that one cp.async phase writes, fall into different banks. Position of vector v of
// row r in its chunk:
//
//   chunk of 8 vectors   v ^ (r % 8)
//   chunk of 4 vectors   v ^ (r / 2 % 4)
//   chunk of 2 vectors   v ^ (r / 4 % 2)
//
// Addresses are computed by hand, not by CuTe's swizzled layouts: the permutation then costs one
// XOR per ldmatrix, because a lane's offset from its row is constant, and a step of 16 columns
// flips one bit. (With CuTe's copies and two stages the compiler recomputed every address in every
// tile: a sixth of all instructions at head_dim 64.)
#pragma once

#include <cute/config.hpp>

namespace cutlass_attn {

template <int kRows_, int kColumns_>
struct SwizzledTile {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kChunk = kColumns % 64 == 0 ? 64 : (kColumns % 32 == 0 ? 32 : 16);
  static constexpr int kChunks = kColumns / kChunk;
  static constexpr int kVectors = kChunk / 8;  // 16-byte vectors of a row within a chunk
  static constexpr int kRowBytes = kChunk * 2;
  static constexpr int kChunkBytes = kRows * kRowBytes;
  static constexpr int kBytes = kChunks * kChunkBytes;
  static_assert(kColumns % kChunk == 0 && kRows % 8 == 0);

  // Byte offset of element (row, column), `column` a multiple of 8.
  CUTE_HOST_DEVICE static constexpr int offset(int row, int column) {
    int const vector = column % kChunk / 8;
    int const permuted = vector ^ (row / (64 / kChunk) % kVectors);
    return column / kChunk * kChunkBytes + row * kRowBytes + permuted * 16;
  }

  // From an address in the 16 x 16 block (0, 0) to the address of that element in block (row,
  // column). Rows that are 8 apart have one permutation.
  template <class Address>
  CUTE_HOST_DEVICE static constexpr Address block(Address first, int row, int column) {
    constexpr int kBlocks = kChunk / 16;
    return (first ^ Address(column % kBlocks * 32)) +
           Address(column / kBlocks * kChunkBytes + row * 16 * kRowBytes);
  }

  // block() for blocks of 8 x 8, and for offsets instead of addresses.
  CUTE_HOST_DEVICE static constexpr int block8(int first, int row, int column) {
    return (first ^ (column % kVectors * 16)) + column / kVectors * kChunkBytes +
           row * 8 * kRowBytes;
  }
};

// A tile of which every 8 rows are contiguous, so that one bulk copy moves them: chunks of 64
// columns of 8 rows, permuted as above, then those of the next 8 rows. For wgmma, to which both
// distances are strides of a descriptor.
template <int kRows_, int kColumns_>
struct GroupedTile {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kGroupRows = 8;
  static constexpr int kChunks = kColumns / 64;
  static constexpr int kRowBytes = 128;  // of a chunk
  static constexpr int kChunkBytes = kGroupRows * kRowBytes;
  static constexpr int kGroupBytes = kChunks * kChunkBytes;
  static constexpr int kBytes = kRows / kGroupRows * kGroupBytes;
  static_assert(kColumns % 64 == 0 && kRows % kGroupRows == 0);

  // Byte offset of element (row, column), `column` a multiple of 8.
  CUTE_HOST_DEVICE static constexpr int offset(int row, int column) {
    int const in_group = row % kGroupRows;
    return row / kGroupRows * kGroupBytes + column / 64 * kChunkBytes + in_group * kRowBytes +
           (column % 64 / 8 ^ in_group) * 16;
  }
};

}  // namespace cutlass_attn
