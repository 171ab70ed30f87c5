// Kernels on the host side: KernelArguments describes a kernel of the manifest with any tile;
// KernelUnit is a compiled instance, made by nvcc or g++ with the library, or by NVRTC at first
// use.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>

#include "core/launch.hpp"
#include "cutlass_attn.hpp"

namespace cutlass_attn {

inline constexpr int kMaxScores = 8;
inline constexpr int kNumPrePost = 2;  // launches before and after the kernel

// How a kernel's parameters are made, and the scores that it is compiled with. `Params`, the
// kernel's parameter struct, supplies
//
//   static Params prepare(Problem const&, Workspace const&, DeviceLimits const&,
//                         KernelFacts const&);
//   static int64_t workspace_bytes(Problem const&, DeviceLimits const&, KernelFacts const&);
//   Launch launch(KernelFacts const&) const;
//
// The facts are those of the instance that runs. workspace_bytes() is also called before the
// instance is compiled, when only block_m and block_n are known.
//
// and, if blocks share the keys of a tile, their number:
//
//   static int32_t num_splits(Problem const&, DeviceLimits const&, KernelFacts const&);
//
// A kernel may have a pre-launch and a post-launch: launches before and after it, with equal
// parameters. Its Params then also supplies launch_before() and launch_after(); their grids may be
// empty.
struct KernelArguments {
  static constexpr int kMaxBytes = 2048;  // of Params

  int params_bytes = 0;
  void (*prepare)(Problem const&, Workspace const&, DeviceLimits const&, KernelFacts const&,
                  void* params) = nullptr;
  int64_t (*workspace_bytes)(Problem const&, DeviceLimits const&, KernelFacts const&) = nullptr;
  int32_t (*splits)(Problem const&, DeviceLimits const&, KernelFacts const&) = nullptr;
  Launch (*launch)(void const* params, KernelFacts const&) = nullptr;
  Launch (*launch_pre_post[kNumPrePost])(void const* params, KernelFacts const&) = {};

  bool has_pre_post() const { return launch_pre_post[0] != nullptr; }

  int num_scores = 0;
  struct {
    char const* token;
    bool (*can_run)(Problem const&);
  } scores[kMaxScores] = {};
};

namespace detail {
// Params::num_splits, if the kernel splits keys.
template <class Params, class = void>
inline constexpr std::nullptr_t splits_of = nullptr;
template <class Params>
inline constexpr auto splits_of<Params, std::void_t<decltype(&Params::num_splits)>> =
    &Params::num_splits;

// Whether a kernel with these scores runs the call with one of them, Own. Where some keep the
// largest logits, they are for the calls that want them, and for no others.
template <class Own, class... Scores>
bool runs_with(Problem const& p) {
  constexpr bool kSomeKeep = (Scores::kKeepsMaxLogit || ...);
  return Own::can_run(p) && (!kSomeKeep || Own::kKeepsMaxLogit == (p.max_logits != nullptr));
}
}  // namespace detail

// tokens: names of the scores, with which the names of entries end.
template <class Params, class... Scores>
constexpr KernelArguments arguments_of(std::array<char const*, sizeof...(Scores)> tokens = {}) {
  static_assert(sizeof...(Scores) <= kMaxScores);
  static_assert(sizeof(Params) <= KernelArguments::kMaxBytes && alignof(Params) <= 64);
  KernelArguments result;
  result.params_bytes = int(sizeof(Params));
  result.prepare = [](Problem const& p, Workspace const& workspace, DeviceLimits const& device,
                      KernelFacts const& facts, void* params) {
    new (params) Params(Params::prepare(p, workspace, device, facts));
  };
  result.workspace_bytes = &Params::workspace_bytes;
  result.splits = detail::splits_of<Params>;
  result.launch = [](void const* params, KernelFacts const& facts) {
    return static_cast<Params const*>(params)->launch(facts);
  };
  ((result.scores[result.num_scores] = {tokens[size_t(result.num_scores)],
                                        &detail::runs_with<Scores, Scores...>},
    ++result.num_scores),
   ...);
  return result;
}

template <class Params, class... Scores>
constexpr KernelArguments arguments_with_pre_post_of(
    std::array<char const*, sizeof...(Scores)> tokens = {}) {
  KernelArguments result = arguments_of<Params, Scores...>(tokens);
  result.launch_pre_post[0] = [](void const* params, KernelFacts const& facts) {
    return static_cast<Params const*>(params)->launch_before(facts);
  };
  result.launch_pre_post[1] = [](void const* params, KernelFacts const& facts) {
    return static_cast<Params const*>(params)->launch_after(facts);
  };
  return result;
}

// The first of the kernel's scores that fits the call; num_scores if none does.
inline int score_of(KernelArguments const& kernel, Problem const& problem) {
  int score = 0;
  while (score < kernel.num_scores && !kernel.scores[score].can_run(problem)) ++score;
  return score;
}

// Tokens at the end of the entry names of pre- and post-launch.
inline constexpr char const* kPrePostTokens[kNumPrePost] = {"before", "after"};

// A compiled instance: its facts, and its code for each score.
struct KernelUnit {
  // Runs a grid on the CPU, through simt.
  using HostCode = Status (*)(void const* params, Launch const&, RunOptions const&);

  KernelFacts facts;
  void const* device_code[kMaxScores];  // a __global__ function or a cudaKernel_t
  HostCode host_code[kMaxScores];
  void const* device_pre_post[kNumPrePost] = {};
  HostCode host_pre_post[kNumPrePost] = {};
  // Per score, one bit per device: set if the code is loaded there and may use facts.smem_bytes,
  // the most that Params::launch() may ask for.
  mutable std::atomic<uint64_t> loaded[kMaxScores] = {};
};

// Which launches of a call to run: all, those before the kernel, or the rest. prequantize.hpp runs
// parts.
enum class Part { kAll, kBefore, kRest };

// Launches the kernel with the first score that fits the call. The device is already current;
// `limits` are its limits.
Status launch(KernelArguments const& kernel, KernelUnit const& unit, Problem const& problem,
              DeviceLimits const& limits, RunOptions const& options, Part part = Part::kAll);

}  // namespace cutlass_attn
