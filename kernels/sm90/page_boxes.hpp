// TMA boxes of a tile of paged keys: page and rows of each box.
#pragma once

#include "core/divide.hpp"
#include "core/mask.hpp"
#include "sm90/tma_rows.hpp"

namespace cutlass_attn::sm90 {

// A box without a visible key (a key that some row of the tile sees) is filled with zeros; neither
// its page nor its page number is read. In other boxes, rows before the first visible key and after
// the last one become zeros: they may hold NaN, which P V would multiply by 0. If one box has both
// ends, only the rows after the last one become zeros; the rows before the first one are copied,
// from a page that the sequence still owns.
struct PageBoxes {
  int32_t const* pages;  // block table of the sequence
  FastDivisor by_page;
  int32_t page_size, box_rows;
  KeyRange visible;

  // The box that begins at `key`.
  CA_HOST_DEVICE PageRows at(int32_t key) const {
    int32_t const index = by_page(key), row = key - index * page_size;
    bool const is_visible = key < visible.end && key + box_rows > visible.first;
    int32_t const page = is_visible ? pages[index] : 0;
    int32_t const begin = in_page(visible.first - key + row),
                  end = in_page(visible.end - key + row);
    if (begin > row && end >= row + box_rows) return {page, row, begin, 0};
    return {page, row, end, RaggedRows::kEnd};
  }

 private:
  CA_HOST_DEVICE int32_t in_page(int32_t row) const {
    return row < 0 ? 0 : row < page_size ? row : page_size;
  }
};

}  // namespace cutlass_attn::sm90
