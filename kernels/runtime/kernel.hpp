// What the host knows of kernels: of one of the manifest, whatever its tile, and of one compiled
// instance, whoever compiled it: nvcc or g++ with the library, or NVRTC when it was needed first.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>

#include "core/launch.hpp"
#include "cutlass_attn.hpp"

namespace cutlass_attn {

inline constexpr int kMaxScores = 4;

// How a kernel's arguments are made, and which score functors it is compiled with. `Params`, the
// kernel's own struct of arguments, supplies
//
//   static Params prepare(Problem const&, Workspace const&, DeviceLimits const&,
//                         KernelFacts const&);
//   static int64_t workspace_bytes(Problem const&, DeviceLimits const&, KernelFacts const&);
//   Launch launch(KernelFacts const&) const;
//
// The facts are those of the instance that runs. workspace_bytes() is also asked before that is
// compiled, when block_m alone is known.
struct KernelArguments {
  static constexpr int kMaxBytes = 2048;  // of Params

  void (*prepare)(Problem const&, Workspace const&, DeviceLimits const&, KernelFacts const&,
                  void* params) = nullptr;
  int64_t (*workspace_bytes)(Problem const&, DeviceLimits const&, KernelFacts const&) = nullptr;
  Launch (*launch)(void const* params, KernelFacts const&) = nullptr;

  int num_scores = 0;
  struct {
    char const* token;
    bool (*takes)(Problem const&);
  } scores[kMaxScores] = {};
};

template <class Params, class... Scores>
constexpr KernelArguments arguments_of() {
  static_assert(sizeof...(Scores) <= kMaxScores);
  static_assert(sizeof(Params) <= KernelArguments::kMaxBytes && alignof(Params) <= 64);
  KernelArguments result;
  result.prepare = [](Problem const& p, Workspace const& workspace, DeviceLimits const& device,
                      KernelFacts const& facts, void* params) {
    new (params) Params(Params::prepare(p, workspace, device, facts));
  };
  result.workspace_bytes = &Params::workspace_bytes;
  result.launch = [](void const* params, KernelFacts const& facts) {
    return static_cast<Params const*>(params)->launch(facts);
  };
  ((result.scores[result.num_scores++] = {Scores::kToken, &Scores::takes}), ...);
  return result;
}

// A compiled instance: what it says of itself, and its code by score functor.
struct KernelUnit {
  // Runs a grid on the CPU, through simt.
  using HostCode = Status (*)(void const* params, Launch const&, RunOptions const&);

  KernelFacts facts;
  void const* device_code[kMaxScores];  // a __global__ function, or a cudaKernel_t
  HostCode host_code[kMaxScores];
  // By score, a bit per device on which the code may use facts.smem_bytes, the most that
  // Params::launch() may ask for.
  mutable std::atomic<uint64_t> opted_in[kMaxScores] = {};
};

// Launches the first of the scores that takes the call. The device is current already; `limits` are
// its own.
Status launch(KernelArguments const& kernel, KernelUnit const& unit, Problem const& problem,
              DeviceLimits const& limits, RunOptions const& options);

}  // namespace cutlass_attn
