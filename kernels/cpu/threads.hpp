// Runs the independent items of a call on several threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "core/status.hpp"
#include "cutlass_attn.hpp"

namespace cutlass_attn::cpu {

// Calls run(index, scratch) for every index below `count`. `scratch`: `bytes` of memory private to
// the thread, aligned to 64. `work`: multiply-adds of all items, which determine the number of
// threads. If an item throws, no further item is started, and the first exception reaches the
// caller once all threads have ended.
template <class Run>
Status run_items(int64_t count, double work, size_t bytes, RunOptions const& options,
                 Run const& run) {
  if (count == 0) return {};
  // Starting a thread costs about as much as this many multiply-adds.
  constexpr double kWorkPerThread = 1 << 21;
  static int const cores = std::max(1, int(std::thread::hardware_concurrency()));
  int64_t const wanted = options.num_threads > 0 ? options.num_threads : cores;
  int64_t const threads =
      std::min({wanted, count, int64_t(std::min(work / kWorkPerThread, 1e6)) + 1});

  constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(char* scratch) const { ::operator delete[](scratch, kAlignment); }
  };
  size_t const size = (bytes + 63) / 64 * 64;
  std::unique_ptr<char[], Free> const scratch(
      new (kAlignment, std::nothrow) char[size * size_t(threads)]);
  if (scratch == nullptr) {
    return Status::device_error("no memory for " + std::to_string(size * size_t(threads)) +
                                " bytes of scratch space");
  }

  std::atomic<int64_t> next{0};
  std::atomic<bool> has_failed{false};
  std::exception_ptr failure;  // the first one, written by the thread that sets has_failed
  // An exception that leaves a thread, or that destroys a thread not yet joined, ends the process.
  auto const run_some = [&](int64_t thread) noexcept {
    try {
      while (!has_failed.load(std::memory_order_relaxed)) {
        int64_t const index = next.fetch_add(1, std::memory_order_relaxed);
        if (index >= count) return;
        run(index, scratch.get() + size * size_t(thread));
      }
    } catch (...) {
      if (!has_failed.exchange(true)) failure = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  try {
    others.reserve(size_t(threads - 1));
    for (int64_t t = 1; t < threads; ++t) others.emplace_back(run_some, t);
  } catch (std::exception const&) {
    // The system allows no more threads; the started ones do the work.
  }
  run_some(0);
  for (std::thread& other : others) other.join();
  if (failure != nullptr) std::rethrow_exception(failure);
  return {};
}

}  // namespace cutlass_attn::cpu
