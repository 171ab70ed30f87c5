// Where TMA finds a tile of K or V, that ends where the sequence does: what is beyond is zeros, as
// P of masked keys is, so that nothing of another sequence comes into O, be it NaN.
//
//   DenseKeys    entries of as many rows each, a dimension of their own
//   RaggedKeys   packed rows, or entries of which the first rows count; dense calls, too
#pragma once

#include "core/macros.hpp"
#include "core/problem.hpp"
#include "core/sequences.hpp"
#include "core/tensor_map.hpp"

namespace cutlass_attn::sm90 {

// A stride in bytes. One along which no step is taken may be anything; TMA looks at it.
inline int64_t stride_bytes(int64_t extent, int64_t stride) { return extent > 1 ? stride * 2 : 16; }

// Of no keys there may be no address either; none of them is read.
inline void const* address_of(Operand const& t, Problem const& p) {
  return t.data ? t.data : p.q.data;
}

// Rows of entries of as many each, in boxes of 64 columns and so many rows: column, row, head,
// entry.
inline TensorView dense_view(Problem const& p, Operand const& t, int columns,
                             Sequences const& sequences, int heads, int box_rows) {
  int32_t const rows = sequences.seqlen > 1 ? sequences.seqlen : 1;
  return {address_of(t, p),
          {uint32_t(columns), uint32_t(rows), uint32_t(heads), uint32_t(p.batch), 1},
          {stride_bytes(rows, t.row_stride), stride_bytes(heads, t.head_stride),
           stride_bytes(p.batch, t.batch_stride), 16},
          {64, uint32_t(box_rows), 1, 1, 1}};
}

struct DenseKeys {
  TensorMap map;

  // On the host, for tiles of block_n keys. Returns why there is no map, or null.
  char const* prepare(Problem const& p, Operand const& t, int head_dim, int block_n,
                      bool is_on_gpu) {
    return encode(dense_view(p, t, head_dim, p.seq_k, p.num_heads_kv, block_n), is_on_gpu, map);
  }

  // Copies 64 columns of the tile that begins at `key`.
  template <class Arch, class Tile>
  CA_HOST_DEVICE void load(void* to, uint64_t* full, int column, int key, Problem const&,
                           Tile const& tile) const {
    Arch::tma_load(to, map, full, column, key, tile.head_kv, tile.seq.batch, 0);
  }
};

// TMA has one end for all sequences. So row r of one that has n is at coordinate kEnd - n + r of a
// dimension that ends at kEnd, and two more dimensions bring the address back to where the sequence
// is, one by what lies before its end, the other by kEnd rows:
//
//   (kEnd - n + r) row + end of the sequence + kEnd (2^35 - row)  =  begin + r row + 2^65
//
// in bytes; addresses are modulo 2^64.
struct RaggedKeys {
  static constexpr int kEnd = 1 << 30;
  static_assert(kMaxSeqlen <= kEnd);
  TensorMap map;
  int32_t batch_step, row_step;  // from one entry, one row, to the next, in units of dimension 3

  char const* prepare(Problem const& p, Operand const& t, int head_dim, int block_n,
                      bool is_on_gpu) {
    constexpr int32_t kMost = 0x7fff0000;  // coordinates are signed
    int64_t const row = stride_bytes(p.seq_k.rows(), t.row_stride);
    int64_t const batch = p.batch > 1 ? t.batch_stride * 2 : 0;
    int64_t const unit = unit_of(row, batch);
    if ((batch * (p.batch - 1) + row * p.seq_k.rows()) / unit >= kMost) {
      return "k or v takes more steps of the largest number that divides its strides than TMA "
             "counts";
    }
    batch_step = int32_t(batch / unit), row_step = int32_t(row / unit);
    int64_t const modulus = int64_t(1) << (row < int64_t(1) << 35 ? 35 : 40);
    return encode({address_of(t, p),
                   {uint32_t(head_dim), uint32_t(kEnd), uint32_t(p.num_heads_kv), uint32_t(kMost),
                    uint32_t(kMost)},
                   {row, stride_bytes(p.num_heads_kv, t.head_stride), unit, modulus - row},
                   {64, uint32_t(block_n), 1, 1, 1}},
                  is_on_gpu, map);
  }

  template <class Arch, class Tile>
  CA_HOST_DEVICE void load(void* to, uint64_t* full, int column, int key, Problem const& p,
                           Tile const& tile) const {
    int const rows = tile.seq.lens(p).k;
    int const end = tile.seq.batch * batch_step + (tile.seq.first_k + rows) * row_step;
    Arch::tma_load(to, map, full, column, kEnd - rows + key, tile.head_kv, end, kEnd);
  }

 private:
  // The largest number that divides both.
  static int64_t unit_of(int64_t a, int64_t b) {
    while (b != 0) {
      int64_t const rest = a % b;
      a = b, b = rest;
    }
    return a > 0 ? a : 16;
  }
};

}  // namespace cutlass_attn::sm90
