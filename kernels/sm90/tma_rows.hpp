// TMA copies of a tile of rows of Q, dO, K or V. A tile ends where its sequence ends: rows beyond
// become zeros, so that no value of another sequence, such as a NaN, enters a sum.
//
//   DenseRows    batch entries of equal length
//   RaggedRows   packed sequences, or batch entries of different lengths; dense calls as well
//   PagedRows    K and V in pages
#pragma once

#include <type_traits>

#include "core/macros.hpp"
#include "core/problem.hpp"
#include "core/sequences.hpp"
#include "core/tensor_map.hpp"

namespace cutlass_attn::sm90 {

// Stride in bytes. TMA checks even the stride of a dimension of size 1, which may be anything.
inline int64_t stride_bytes(int64_t extent, int64_t stride) { return extent > 1 ? stride * 2 : 16; }

// An operand without rows may have a null address, which TMA rejects. Nothing is read from the
// replacement.
inline void const* address_of(Operand const& t, Problem const& p) {
  return t.data ? t.data : p.q.data;
}

// Batch entries of equal length, in boxes of 64 columns and box_rows rows. Dimensions: column, row,
// head, entry.
inline TensorView dense_view(Problem const& p, Operand const& t, int columns,
                             Sequences const& sequences, int heads, int box_rows) {
  int32_t const rows = sequences.seqlen > 1 ? sequences.seqlen : 1;
  return {address_of(t, p),
          {uint32_t(columns), uint32_t(rows), uint32_t(heads), uint32_t(p.batch), 1},
          {stride_bytes(rows, t.row_stride), stride_bytes(heads, t.head_stride),
           stride_bytes(p.batch, t.batch_stride), 16},
          {64, uint32_t(box_rows), 1, 1, 1}};
}

// The rows of a sequence.
struct SequenceRows {
  int32_t batch;
  int32_t first;  // packed rows before this entry
  int32_t count;
};
template <class SeqInfo>
CA_HOST_DEVICE SequenceRows query_rows(SeqInfo const& seq, Problem const& p) {
  if constexpr (std::is_same_v<SeqInfo, DenseSeqInfo>) {
    return {seq.batch, 0, p.seq_q.seqlen};
  } else {
    return {seq.batch, seq.first_q, seq.lens(p).q};
  }
}
template <class SeqInfo>
CA_HOST_DEVICE SequenceRows key_rows(SeqInfo const& seq, Problem const& p) {
  if constexpr (std::is_same_v<SeqInfo, DenseSeqInfo>) {
    return {seq.batch, 0, p.seq_k.seqlen};
  } else {
    return {seq.batch, seq.first_k, seq.lens(p).k};
  }
}

struct DenseRows {
  TensorMap map;

  // On the host, for tiles of box_rows rows. Returns null, or why the map cannot be made.
  char const* prepare(Problem const& p, Operand const& t, int columns, Sequences const& sequences,
                      int heads, int box_rows, bool is_on_gpu) {
    return encode(dense_view(p, t, columns, sequences, heads, box_rows), is_on_gpu, map);
  }

  // Copies 64 columns of the tile that begins at `row`.
  template <class Arch>
  CA_HOST_DEVICE void load(void* to, uint64_t* full, int column, int row, int head,
                           SequenceRows const& of) const {
    Arch::tma_load(to, map, full, column, row, head, of.batch, 0);
  }
};

// A tensor map has one bound for all sequences. So row r of a sequence with n rows has coordinate
// kEnd - n + r, and every sequence ends at the bound kEnd. Two more dimensions correct the address:
// one adds the offset of the sequence's end, the other subtracts kEnd rows, modulo 2^64:
//
//   (kEnd - n + r) row + end of the sequence + kEnd (2^35 - row)  =  begin + r row + 2^65
//
// in bytes.
struct RaggedRows {
  static constexpr int kEnd = 1 << 30;
  static_assert(kMaxSeqlen <= kEnd);
  TensorMap map;
  int32_t batch_step, row_step;  // distance of two entries and of two rows, in units of dimension 3

  char const* prepare(Problem const& p, Operand const& t, int columns, Sequences const& sequences,
                      int heads, int box_rows, bool is_on_gpu) {
    return prepare(p, t, columns, p.batch, sequences.rows(), heads, box_rows, is_on_gpu);
  }

  template <class Arch>
  CA_HOST_DEVICE void load(void* to, uint64_t* full, int column, int row, int head,
                           SequenceRows const& of) const {
    int const end = of.batch * batch_step + (of.first + of.count) * row_step;
    Arch::tma_load(to, map, full, column, kEnd - of.count + row, head, end, kEnd);
  }

 protected:
  char const* prepare(Problem const& p, Operand const& t, int columns, int32_t entries,
                      int32_t rows, int heads, int box_rows, bool is_on_gpu) {
    constexpr int32_t kMax = 0x7fff0000;  // coordinates are signed
    int64_t const row = stride_bytes(rows, t.row_stride);
    int64_t const batch = entries > 1 ? t.batch_stride * 2 : 0;
    int64_t const unit = common_divisor(row, batch);
    if ((batch * (entries - 1) + row * rows) / unit >= kMax) {
      return "q, k, v or the gradient of the output takes more steps of the largest number that "
             "divides its strides than TMA "
             "counts";
    }
    batch_step = int32_t(batch / unit), row_step = int32_t(row / unit);
    int64_t const modulus = int64_t(1) << (row < int64_t(1) << 35 ? 35 : 40);
    return encode(
        {address_of(t, p),
         {uint32_t(columns), uint32_t(kEnd), uint32_t(heads), uint32_t(kMax), uint32_t(kMax)},
         {row, stride_bytes(heads, t.head_stride), unit, modulus - row},
         {64, uint32_t(box_rows), 1, 1, 1}},
        is_on_gpu, map);
  }

  // Greatest common divisor.
  static int64_t common_divisor(int64_t a, int64_t b) {
    while (b != 0) {
      int64_t const rest = a % b;
      a = b, b = rest;
    }
    return a > 0 ? a : 16;
  }
};

// A box that begins at `row` of a page. It copies rows of the page before `bound` if origin is
// RaggedRows::kEnd, rows from `bound` on if origin is 0. Its other rows become zeros.
struct PageRows {
  int32_t page, row, bound, origin;
};

// RaggedRows whose entries are pages. box_rows divides both a page and a tile, so a box never
// crosses the end of a page (page_boxes.hpp).
struct PagedRows : RaggedRows {
  int32_t box_rows, boxes;  // boxes: per tile

  // On the host, for tiles of tile_rows rows.
  char const* prepare(Problem const& p, Operand const& t, int columns, Sequences const&, int heads,
                      int tile_rows, bool is_on_gpu) {
    box_rows = int32_t(common_divisor(p.kv.page_size, tile_rows));
    boxes = tile_rows / box_rows;
    return RaggedRows::prepare(p, t, columns, p.kv.num_pages, p.kv.page_size, heads, box_rows,
                               is_on_gpu);
  }

  // Copies 64 columns of the box.
  template <class Arch>
  CA_HOST_DEVICE void load(void* to, uint64_t* full, int column, int head,
                           PageRows const& of) const {
    int const at = of.page * batch_step + of.bound * row_step;
    Arch::tma_load(to, map, full, column, of.origin - of.bound + of.row, head, at, of.origin);
  }
};

}  // namespace cutlass_attn::sm90
