#include "runtime/overlap.hpp"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace cutlass_attn {
namespace {

constexpr int kDims = StridedRows::kDims;

// The set of offsets { origin + sum of stride_t * n_t, 0 <= n_t < count_t }.
//
// All questions here reduce to whether one of them lies in an interval, with one term per dimension
// of each operand. The search tries the largest stride first and visits only indices from which the
// remaining terms can still reach the interval: one or two per level if each stride spans the
// smaller ones, as in a slice or a transpose of a dense tensor.
class Offsets {
 public:
  explicit Offsets(int64_t origin) : origin_(origin) {}

  // Adds a dimension whose index runs over [first, last].
  void add(int64_t stride, int64_t first, int64_t last) {
    origin_ += stride * (stride >= 0 ? first : last);
    stride = std::abs(stride);
    if (stride == 0 || first == last) return;
    int t = 0;
    while (t < size_ && terms_[t].stride > stride) ++t;
    if (t < size_ && terms_[t].stride == stride) {
      terms_[t].last += last - first;
      return;
    }
    std::copy_backward(terms_ + t, terms_ + size_, terms_ + size_ + 1);
    terms_[t] = {stride, last - first, 0};
    ++size_;
  }

  bool any_between(int64_t low, int64_t high) {
    int64_t span = 0;
    for (int t = size_ - 1; t >= 0; --t) {
      terms_[t].span_below = span;
      span += terms_[t].stride * terms_[t].last;
    }
    low -= origin_;
    high -= origin_;
    return low <= span && search(0, low, high);
  }

 private:
  struct Term {
    int64_t stride, last;
    int64_t span_below;  // largest sum of the terms after this one
  };

  bool search(int t, int64_t low, int64_t high) const {
    if (t == size_) return low <= 0 && high >= 0;
    auto const [stride, last, span_below] = terms_[t];
    if (high < 0) return false;
    int64_t const missing = low - span_below;
    int64_t const first = missing <= 0 ? 0 : (missing + stride - 1) / stride;
    for (int64_t n = first; n <= std::min(last, high / stride); ++n) {
      if (search(t + 1, low - n * stride, high - n * stride)) return true;
    }
    return false;
  }

  Term terms_[2 * StridedRows::kDims];  // in decreasing order of strides, which are all different
  int size_ = 0;
  int64_t origin_;
};

// From the first byte to one past the last byte.
std::pair<int64_t, int64_t> extent(StridedRows const& r) {
  int64_t low = r.address, high = r.address + r.row_bytes;
  for (int d = 0; d < kDims; ++d) {
    int64_t const reach = r.strides[d] * (r.counts[d] - 1);
    (reach < 0 ? low : high) += reach;
  }
  return {low, high};
}

bool is_empty(StridedRows const& r) {
  return r.row_bytes == 0 || std::count(r.counts, r.counts + kDims, 0) != 0;
}

// Sufficient, not necessary: in increasing order, each stride exceeds the extent below it.
bool is_nested(StridedRows const& r) {
  std::pair<int64_t, int64_t> dims[kDims];
  for (int d = 0; d < kDims; ++d) dims[d] = {std::abs(r.strides[d]), r.counts[d]};
  std::sort(dims, dims + kDims);
  int64_t covered = r.row_bytes;
  for (auto const& [stride, count] : dims) {
    if (count == 1) continue;
    if (stride < covered) return false;
    covered += stride * (count - 1);
  }
  return true;
}

}  // namespace

bool span_is_sane(StridedRows const& r) {
  int64_t span = r.row_bytes;
  for (int d = 0; d < kDims; ++d) {
    int64_t reach;
    if (r.counts[d] <= 1) continue;
    if (r.strides[d] == INT64_MIN) return false;
    if (__builtin_mul_overflow(std::abs(r.strides[d]), r.counts[d] - 1, &reach)) return false;
    if (__builtin_add_overflow(span, reach, &span)) return false;
  }
  return span <= kMaxSpan;
}

bool overlaps_itself(StridedRows const& r) {
  if (is_empty(r) || is_nested(r)) return false;
  // Two rows overlap if the difference of their offsets is less than row_bytes. Without loss of
  // generality, the first index that differs is larger in the first row.
  for (int leading = 0; leading < kDims; ++leading) {
    if (r.counts[leading] == 1) continue;
    Offsets difference(0);
    difference.add(r.strides[leading], 1, r.counts[leading] - 1);
    for (int d = leading + 1; d < kDims; ++d) {
      difference.add(r.strides[d], 1 - r.counts[d], r.counts[d] - 1);
    }
    if (difference.any_between(1 - r.row_bytes, r.row_bytes - 1)) return true;
  }
  return false;
}

bool overlap(StridedRows const& a, StridedRows const& b) {
  if (is_empty(a) || is_empty(b)) return false;
  auto const [a_low, a_high] = extent(a);
  auto const [b_low, b_high] = extent(b);
  if (a_high <= b_low || b_high <= a_low) return false;  // true for most pairs of operands
  Offsets difference(a.address - b.address);
  for (int d = 0; d < kDims; ++d) {
    difference.add(a.strides[d], 0, a.counts[d] - 1);
    difference.add(b.strides[d], 1 - b.counts[d], 0);
  }
  return difference.any_between(1 - a.row_bytes, b.row_bytes - 1);
}

}  // namespace cutlass_attn
