// Which threads of a cluster are ready, what the others wait for, and who runs next: the order of
// the schedule. For worker.hpp only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "simt/crew.hpp"
#include "simt/wait.hpp"

namespace cutlass_attn::simt {
namespace {

// Threads are numbered within the cluster, as are warps.
class Turns {
 public:
  Turns(Schedule const& schedule, int threads)
      : schedule_(schedule), warps_(size_t(threads) / kWarpSize), waits_(size_t(threads)) {}

  int threads() const { return int(waits_.size()); }
  Warp& warp(int index) { return warps_[size_t(index)]; }
  WaitFor* waits(int warp) { return &waits_[size_t(warp) * kWarpSize]; }  // of its lanes

  // Makes all threads of the cluster with this index ready.
  void begin(int64_t cluster) {
    random_ = (schedule_.seed + 1) * 0x9e3779b97f4a7c15u ^ uint64_t(cluster + 1) << 20;
    wake_all();
  }

  void suspend(int id, WaitFor wait) {
    waits_[id] = wait;
    warps_[id / kWarpSize].ready &= ~(uint32_t(1) << id % kWarpSize);
  }

  // Makes these threads ready, each individually.
  void wake(std::vector<int> const& threads) {
    for (int const id : threads) {
      warps_[id / kWarpSize].ready |= uint32_t(1) << id % kWarpSize;
      waits_[id] = {};
    }
  }
  // Makes all lanes of the warp ready.
  void wake(int warp) {
    warps_[warp].ready = ~uint32_t(0);
    warps_[warp].arrived = 0;
    std::fill_n(waits(warp), kWarpSize, WaitFor{});
  }
  void wake_all() {
    for (int i = 0; i < int(warps_.size()); ++i) wake(i);
  }

  // First thread in the order of the schedule, when every thread is ready.
  int first() {
    bool const reverse = schedule_.order == FiberOrder::kReverse;
    return next_ready(reverse ? int(warps_.size()) - 1 : 0, reverse ? 0 : kWarpSize - 1);
  }
  // The next ready thread after this one in the order of the schedule; -1 if there is none.
  int next_after(int id) { return next_ready(id / kWarpSize, id % kWarpSize); }

  // Why no thread is ready: the first warp whose lanes wait for different operations ("" if there
  // is none), and what all threads wait for. `where`: what warps and threads are numbered in.
  std::string describe_divergence(char const* where) const {
    for (int warp = 0; warp < int(warps_.size()); ++warp) {
      WaitFor const* const waits = &waits_[warp * kWarpSize];
      // Lanes may wait for a phase individually.
      if (std::any_of(waits, waits + kWarpSize, [](WaitFor x) { return x.what == Wait::kPhase; })) {
        continue;
      }
      if (!std::all_of(waits, waits + kWarpSize, [&](WaitFor x) { return x == waits[0]; })) {
        return "warp " + std::to_string(warp) + where +
               " has diverged: " + describe(waits, kWarpSize, "lanes");
      }
    }
    return {};
  }
  std::string describe_deadlock(char const* where) const {
    return "deadlock: " + describe(waits_.data(), int(waits_.size()), "threads") + where;
  }

 private:
  // A warp runs as far as it can before the next warp runs.
  int next_ready(int warp, int lane) {
    int const warps = int(warps_.size());
    bool const reverse = schedule_.order == FiberOrder::kReverse;
    if (schedule_.order == FiberOrder::kRandom) {
      random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
      warp = int((random_ >> 33) % uint64_t(warps));
      lane = int(random_ >> 10) & (kWarpSize - 1);
    }
    for (int i = 0; i < warps; ++i) {
      if (uint32_t const ready = warps_[warp].ready) {
        // Rotated so that the nearest candidate is the lowest bit, or in reverse order the highest
        // bit.
        uint64_t const twice = uint64_t(ready) << 32 | ready;
        int const next = reverse ? lane - 1 - __builtin_clz(uint32_t(twice >> lane))
                                 : lane + 1 + __builtin_ctz(uint32_t(twice >> (lane + 1)));
        return warp * kWarpSize + (next & (kWarpSize - 1));
      }
      warp = reverse ? (warp == 0 ? warps : warp) - 1 : (warp + 1 == warps ? 0 : warp + 1);
      lane = reverse ? 0 : kWarpSize - 1;
    }
    return -1;
  }

  Schedule const& schedule_;
  uint64_t random_ = 1;
  std::vector<Warp> warps_;
  std::vector<WaitFor> waits_;  // by thread
};

}  // namespace
}  // namespace cutlass_attn::simt
