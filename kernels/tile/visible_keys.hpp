// Excludes V of keys that no row of a warp sees from P V. Their weights are 0, but 0 times NaN or
// infinity is NaN, and a page may still hold data of another request.
#pragma once

#include "tile/fragment.hpp"

namespace cutlass_attn {

// For tiles in which some row sees every key.
struct AllKeys {
  CUTE_DEVICE void apply(int, uint32_t (&)[4]) const {}
};

// kKeys: keys of a key block.
template <class Arch, int kKeys>
struct VisibleKeys {
  static constexpr uint32_t kAll = (1u << kKeys / 4) - 1;
  uint32_t bits = kAll;  // per column of S of this thread: whether a row of the warp sees the key

  // s: scores of the key block; -inf where masked.
  template <class S>
  CUTE_DEVICE void find(S&& s) {
    static_assert(columns_of<S> == kKeys / 4);
    bits = 0;
    CUTE_UNROLL
    for (int j = 0; j < columns_of<S>; ++j) {
      bool is_visible = false;
      CUTE_UNROLL
      for (int i = 0; i < rows_of<S>; ++i) is_visible = is_visible || s(i, j) != -kInf;
      bits |= uint32_t(is_visible) << j;
    }
    CUTE_UNROLL
    for (int lanes = 4; lanes < 32; lanes *= 2) bits |= Arch::shuffle_xor(bits, lanes);
  }

  // Whether the warp sees all keys; uniform over the warp.
  CUTE_DEVICE bool are_all() const { return !Arch::any(bits != kAll); }

  // Clears V of masked keys. v: words of the n-th 16 keys, as ldmatrix.trans loads them. As in S, a
  // thread has keys 2t and 2t + 1 of each eight, here in the halves of a word.
  CUTE_DEVICE void apply(int n, uint32_t (&v)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t const pair = bits >> (4 * n + i % 2 * 2);
      v[i] &= (pair & 1 ? 0x0000ffffu : 0) | (pair & 2 ? 0xffff0000u : 0);
    }
  }
};

// O += P V of a key block, after Step::load_v(), without V of masked keys. The code of pv() is
// there twice, so that a warp that sees all keys executes no extra instruction. Where registers are
// short, call Step::pv() with `visible` instead.
template <class Step, class Visible>
CUTE_DEVICE void pv_of_visible(typename Step::P const& p, typename Step::Address v_rows,
                               int key_block, typename Step::Words const& v_first,
                               typename Step::O& o, Visible const& visible) {
  if (visible.are_all()) {
    Step::pv(p, v_rows, key_block, v_first, o);
  } else {
    Step::pv(p, v_rows, key_block, v_first, o, visible);
  }
}

}  // namespace cutlass_attn
