// What tests of kernels with a user's score_mod share: functions, calls, memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backward_case.hpp"
#include "core/vector.hpp"

namespace score_mod_case {

using namespace cutlass_attn;
using backward_case::Case;
using backward_case::Solved;
using cutlass::half_t;

namespace mods {
#include "score_mods.inc"
}

inline constexpr int kOffset = 3;

template <class T, int kRank>
mods::Captured<T, kRank> captured(T const* data, int32_t const (&size)[kRank]) {
  mods::Captured<T, kRank> result{data, {}, {}};
  int64_t stride = 1;
  for (int d = kRank - 1; d >= 0; --d) {
    result.size[d] = size[d], result.stride[d] = stride;
    stride *= size[d];
  }
  return result;
}

template <class Kernel, class Mod, class... Terms>
using ScoreOf = Score<Terms..., ScoreMod<Mod, typename Kernel::Params>>;

// The function's operands, and a workspace of garbage.
struct Memory {
  std::vector<Vector16> words;
  RunOptions options;
  UserScoreMod mod;

  template <class Mod>
  Memory(int64_t bytes, Mod const& of)
      : words(size_t(bytes) / 16 + 17, Vector16{0xaaaaaaaaaaaaaaaa, 0xaaaaaaaaaaaaaaaa}),
        mod{"test", &of, int32_t(sizeof of)} {
    auto const address = reinterpret_cast<uintptr_t>(words.data());
    options.workspace = {reinterpret_cast<char*>(words.data()) + (256 - address % 256), bytes};
    options.score_mod = &mod;
  }
  Memory(Memory const&) = delete;  // options has addresses of members
};

// seqlen_k - seqlen_q is kOffset, where ALiBi has its diagonal.
inline Case plain() {
  Case c;
  c.name = "ragged, grouped heads", c.seqlen_q = 70, c.seqlen_k = 70 + kOffset, c.batch = 2;
  c.heads_q = 4, c.heads_kv = 2;
  return c;
}
inline Case masked() {
  Case c = plain();
  c.name = "causal, sinks, gradient of LSE", c.mask = backward_case::causal();
  c.has_sinks = c.has_grad_lse = true;
  return c;
}
inline Case rows_without_keys() {
  Case c = masked();
  c.name = "rows without keys, large scores", c.seqlen_q = 100, c.seqlen_k = 60, c.batch = 1;
  c.has_sinks = false, c.magnitude = 4;
  return c;
}

}  // namespace score_mod_case
