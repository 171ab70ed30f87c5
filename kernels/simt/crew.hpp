// The threads of a cluster on the CPU, as fibers, and the barriers of their warps. For worker.hpp
// only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "simt/block.hpp"
#include "simt/engine.hpp"
#include "simt/fiber.hpp"
#include "simt/wgmma.hpp"

namespace cutlass_attn::simt {
namespace {

struct AsyncCopy {
  char* to;
  char const* from;  // null: zeros
  int64_t group;     // index of its commit
};

class Worker;

// One thread of a cluster.
struct Fiber {
  Fiber(int id, char* stack);

  int id;          // in the cluster
  int thread = 0;  // in its block
  Block* block = nullptr;
  Worker* worker = nullptr;
  std::vector<AsyncCopy> copies;  // in flight, oldest first
  int64_t groups = 0;             // committed so far
  ThreadWgmma wgmma;
  Context context;
};

struct Warp {
  uint32_t ready = 0;  // lanes that can run
  int arrived = 0;     // lanes at a collective
  void* operands[kWarpSize];
  unsigned generation = 0;  // of sync_warp()
  char tokens[2] = {};      // as in Barrier
};

// The barrier of cluster_sync(), for all threads of the cluster.
struct ClusterBarrier {
  int arrived = 0;
  unsigned generation = 0;
  char tokens[2] = {};  // as in Barrier
};

thread_local Fiber* self = nullptr;

// Threads of clusters. A launch passes them on to the next launch that needs no more threads:
// creating them takes longer than a small grid does, especially under ThreadSanitizer.
struct Crew {
  explicit Crew(int threads) : stacks(threads) {
    for (int i = 0; i < threads; ++i) {
      fibers.push_back(std::make_unique<Fiber>(i, stacks.stack(i)));
    }
  }
  Stacks stacks;
  std::vector<std::unique_ptr<Fiber>> fibers;
};

class IdleCrews {
 public:
  static IdleCrews& instance() {
    static IdleCrews all;
    return all;
  }

  // With at least so many threads.
  std::unique_ptr<Crew> take(int threads) {
    std::lock_guard<std::mutex> const lock(mutex_);
    auto const found = std::find_if(crews_.begin(), crews_.end(), [&](auto const& crew) {
      return int(crew->fibers.size()) >= threads;
    });
    if (found == crews_.end()) {
      // ThreadSanitizer's barriers take time for each thread that exists.
      if (!crews_.empty()) crews_.pop_back();
      return std::make_unique<Crew>(threads);
    }
    std::unique_ptr<Crew> crew = std::move(*found);
    crews_.erase(found);
    return crew;
  }

  // All fibers of the crew must be at the end of a block.
  void leave(std::unique_ptr<Crew> crew) {
    constexpr size_t kMax = 8;
    std::lock_guard<std::mutex> const lock(mutex_);
    if (crews_.size() < kMax) crews_.push_back(std::move(crew));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Crew>> crews_;
};

}  // namespace
}  // namespace cutlass_attn::simt
