// TMA boxes of a tile of paged keys: page and rows of each box.
#pragma once

#include "core/divide.hpp"
#include "core/mask.hpp"
#include "sm90/tma_rows.hpp"

namespace cutlass_attn::sm90 {

// A box without a seen key (a key that some row of the tile sees) is filled with zeros; neither its
// page nor its page number is read. In other boxes, rows before the first seen key and after the
// last one become zeros: they may hold NaN, which P V would multiply by 0. If one box has both
// ends, only the rows after the last one become zeros; the rows before the first one are copied,
// from a page that the sequence still owns.
struct PageBoxes {
  int32_t const* pages;  // block table of the sequence
  FastDivisor by_page;
  int32_t page_size, box_rows;
  KeyRange seen;

  // Page number of the box that begins at `key`.
  CA_HOST_DEVICE int32_t look_up(int32_t key) const {
    bool const is_seen = key < seen.end && key + box_rows > seen.first;
    return is_seen ? pages[by_page(key)] : 0;
  }
  // Row of the page at which the box begins.
  CA_HOST_DEVICE int32_t row(int32_t key) const { return key - by_page(key) * page_size; }

  CA_HOST_DEVICE PageRows rows(int32_t key, int32_t page) const {
    int32_t const row = this->row(key), begin = in_page(seen.first - key + row);
    int32_t const end = in_page(seen.end - key + row);
    if (begin > row && end >= row + box_rows) return {page, begin, 0};
    return {page, end, RaggedRows::kEnd};
  }

 private:
  CA_HOST_DEVICE int32_t in_page(int32_t row) const {
    return row < 0 ? 0 : row < page_size ? row : page_size;
  }
};

}  // namespace cutlass_attn::sm90
