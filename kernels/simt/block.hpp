// State shared by the threads of a GPU block on the CPU: memory, barriers, and asynchronous units.
// For worker.hpp only.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "simt/async.hpp"
#include "simt/engine.hpp"
#include "simt/fiber.hpp"
#include "simt/wgmma.hpp"

namespace cutlass_attn::simt {
namespace {

// A warpgroup whose warps wait for their wgmma.
struct Warpgroup {
  int arrived = 0;  // threads
  int pending = 0;  // groups that may stay in flight
  // Warps that have not resumed since: a GPU may still be executing their part of the products.
  // `lines`: the products' operands, as lines of shared memory.
  uint32_t waiting = 0;
  WgmmaLines lines;
};

struct Barrier {
  int threads = 0;     // threads of the barrier; 0: no thread has arrived yet
  uint32_t warps = 0;  // their warps
  int arrived = 0;
  uint32_t lanes[kWarpSize] = {};  // arrived lanes, by warp
  unsigned generation = 0;
  char tokens[2] = {};  // addresses that stand for an order of events to the race detector
};
constexpr int kBarriers = 16;  // barrier 0 is that of sync()

struct Block {
  static constexpr size_t kGuardBytes = 1024;  // on both sides of smem; also keeps its alignment

  int64_t index = 0;   // in the grid
  int first_warp = 0;  // in the cluster
  int threads = 0;
  int exited = 0;           // threads
  bool has_waited = false;  // whether a thread has executed griddepcontrol.wait
  Barrier barriers[kBarriers];
  std::vector<Warpgroup> warpgroups;
  std::vector<int> registers;  // registers per thread of each warp; 0: the initial number
  AsyncUnits units;
  std::unique_ptr<Pages> pages;
  char* smem = nullptr;
  int smem_bytes = 0;

  void begin(int64_t index_, Grid const& grid, bool poison) {
    index = index_;
    threads = grid.threads;
    exited = 0;
    has_waited = !grid.overlaps;
    for (Barrier& barrier : barriers) barrier = {};
    warpgroups.assign(size_t(threads + kWarpgroupSize - 1) / kWarpgroupSize, {});
    registers.assign(size_t(threads) / kWarpSize, 0);
    smem_bytes = grid.smem_bytes;
    // New pages for each block, so that the race detector forgets the accesses of the previous
    // block.
    pages = std::make_unique<Pages>(smem_bytes + 2 * kGuardBytes);
    std::memset(pages->data(), 0xff, smem_bytes + 2 * kGuardBytes);
    smem = pages->data() + kGuardBytes;
    if (!poison) std::memset(smem, 0, smem_bytes);
    race::Unseen const unseen;
    units.reset(smem, smem_bytes);
  }

  // When the last thread exits, the block's memory becomes NaN.
  void exit_thread(bool poison) {
    if (++exited < threads || !poison) return;
    race::Unseen const unseen;
    std::memset(smem, 0xff, smem_bytes);
  }

  // Describes unfinished operations, with which a block must not end.
  std::string what_is_left() const {
    if (units.copies_in_flight() > 0) {
      return "ends with " + std::to_string(units.copies_in_flight()) +
             " copies of TMA in flight that no thread waited for";
    }
    for (int i = 1; i < kBarriers; ++i) {
      if (int const arrived = barriers[i].arrived; arrived != 0) {
        return "ends with " + std::to_string(arrived) + " threads arrived at barrier " +
               std::to_string(i) + ", which wants " + std::to_string(barriers[i].threads);
      }
    }
    for (size_t i = 0; i < kGuardBytes; ++i) {
      if (smem[-1 - ptrdiff_t(i)] != char(0xff)) {
        return "shared memory was written " + std::to_string(i + 1) + " bytes before its start";
      }
      if (smem[smem_bytes + i] != char(0xff)) {
        return "shared memory was written " + std::to_string(i) + " bytes past its end, " +
               std::to_string(smem_bytes) + " bytes";
      }
    }
    return "";
  }
};

}  // namespace
}  // namespace cutlass_attn::simt
