// Runs the clusters of a grid one after the other, fiber by fiber (turns.hpp), and reports errors
// (listed in engine.hpp). For host.cpp only.
#pragma once

#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "simt/async.hpp"
#include "simt/crew.hpp"
#include "simt/turns.hpp"
#include "simt/warp_ops.hpp"

namespace cutlass_attn::simt {
namespace {

constexpr size_t kCopyBytes = 16;

// Runs clusters on one OS thread, one after the other. The blocks of a cluster take turns, as their
// threads do.
class Worker {
 public:
  // has_failed: set as soon as a block of any worker has failed.
  Worker(Grid const& grid, Schedule const& schedule, std::function<void(char*)> const& body,
         std::atomic<bool> const& has_failed)
      : grid_(grid),
        schedule_(schedule),
        body_(body),
        has_failed_(has_failed),
        blocks_(size_t(grid.cluster)),
        turns_(schedule, grid.cluster * grid.threads),
        crew_(IdleCrews::instance().take(grid.cluster * grid.threads)) {
    for (int i = 0; i < turns_.threads(); ++i) fibers_.push_back(crew_->fibers[i].get());
    for (Fiber* const fiber : fibers_) {
      fiber->worker = this;
      fiber->block = &blocks_[size_t(fiber->id / grid.threads)];
      fiber->thread = fiber->id % grid.threads;
    }
    int warp = 0;
    for (Block& block : blocks_) {
      block.first_warp = warp;
      warp += grid.threads / kWarpSize;
    }
  }
  ~Worker() {
    join();
    if (error_.empty()) IdleCrews::instance().leave(std::move(crew_));
  }

  // Returns an error message or an empty string. After an error, this worker can run no further
  // cluster.
  std::string run_cluster(int64_t cluster) {
    turns_.begin(cluster);
    cluster_ = {};
    int64_t index = cluster * grid_.cluster;
    for (Block& block : blocks_) block.begin(index++, grid_, schedule_.poison);
    {
      race::Unseen const unseen;
      for (Fiber* const fiber : fibers_) fiber->wgmma.reset();
    }

    race::release(&launched_);
    self = fibers_[turns_.first()];
    root_.switch_to(self->context);
    self = nullptr;
    if (!error_.empty()) join();

    bool const all_exited = std::all_of(blocks_.begin(), blocks_.end(), [&](Block const& block) {
      return block.exited == grid_.threads;
    });
    if (error_.empty() && !all_exited) fail_with(blocks_[0], describe_stuck());
    for (Block& block : blocks_) {
      if (error_.empty()) fail_with(block, block.what_is_left());
      block.pages.reset();
    }
    return error_;
  }

  // The main loop of every fiber: runs the body once per block, for any worker.
  static void fiber_main() {
    for (;;) run_body();
  }

  void sync() {
    Barrier& barrier = self->block->barriers[0];
    barrier.threads = grid_.threads;
    barrier.warps = ~uint32_t(0);
    sync(barrier, {Wait::kBarrier});
  }

  void cluster_sync() {
    void* const token = &cluster_.tokens[cluster_.generation & 1];
    race::release(token);
    if (++cluster_.arrived == turns_.threads()) {
      cluster_.arrived = 0;
      ++cluster_.generation;
      turns_.wake_all();
      resume(turns_.first());
    } else {
      leave({Wait::kCluster});
    }
    race::acquire(token);
  }

  void const* mapa(void const* address, int rank) {
    return block_of(address, rank).smem + self->block->units.offset(address);
  }

  // Block `rank` of the cluster, whose shared memory the calling thread asks for.
  Block& block_of(void const* address, int rank) {
    if (rank < 0 || rank >= grid_.cluster) {
      fail("asks for shared memory of block " + std::to_string(rank) +
           " of its cluster; allowed: 0 to " + std::to_string(grid_.cluster - 1));
    }
    check_shared("mapa", address, 1);
    Block& block = blocks_[size_t(rank)];
    if (block.exited == grid_.threads) {
      fail("asks for shared memory of block " + std::to_string(rank) +
           " of its cluster, which has exited");
    }
    return block;
  }

  void sync(int number, int threads) {
    sync(named_barrier(number, threads), {Wait::kNamedBarrier, uint8_t(number), uint16_t(threads)});
  }

  void arrive(int number, int threads) {
    arrive(named_barrier(number, threads),
           {Wait::kNamedBarrier, uint8_t(number), uint16_t(threads)});
  }

  // The named barrier that the calling thread is about to reach.
  Barrier& named_barrier(int number, int threads) {
    if (number < 1 || number >= kBarriers || threads < kWarpSize || threads % kWarpSize != 0 ||
        threads > grid_.threads) {
      fail("calls " + call_of_sync(number, threads) +
           "; allowed: barriers 1 to 15, multiples of 32 threads up to the block's " +
           std::to_string(grid_.threads));
    }
    Barrier& barrier = self->block->barriers[number];
    if (barrier.threads != 0 && barrier.threads != threads) {
      fail("calls " + call_of_sync(number, threads) + " where others call " +
           call_of_sync(number, barrier.threads));
    }
    uint32_t const warp = uint32_t(1) << self->thread / kWarpSize;
    // Warps of earlier rounds of the barrier count as well: otherwise some schedules would hide
    // that there is one warp too many.
    if (__builtin_popcount(barrier.warps | warp) * kWarpSize > threads) {
      std::string others;
      for (int i = 0; i < grid_.threads / kWarpSize; ++i) {
        if (barrier.warps >> i & 1) others += (others.empty() ? "" : ", ") + std::to_string(i);
      }
      fail("calls " + call_of_sync(number, threads) + " after warps " + others +
           " with no barrier of the whole block in between; allowed: " +
           std::to_string(threads / kWarpSize) + " warps");
    }
    barrier.threads = threads;
    barrier.warps |= warp;
    uint32_t& lanes = barrier.lanes[self->thread / kWarpSize];
    uint32_t const lane = uint32_t(1) << self->thread % kWarpSize;
    if (lanes & lane) {
      fail("comes to " + call_of_sync(number, threads) + " a second time before the others have");
    }
    lanes |= lane;
    return barrier;
  }

  bool halves_e4m3() const { return schedule_.halves_e4m3; }

  void sync_warp() {
    Warp& warp = turns_.warp(self->id / kWarpSize);
    void* const token = &warp.tokens[warp.generation & 1];
    race::release(token);
    collective(WaitFor{Wait::kSyncWarp}, warp, [](auto const& all) { ++all[0]->generation; });
    race::acquire(token);
  }

  // Waits for the other lanes of the warp; the last to arrive calls complete(operands of all).
  template <class Operands, class Complete>
  void collective(WaitFor wait, Operands& operands, Complete const& complete) {
    Warp& warp = turns_.warp(self->id / kWarpSize);
    WaitFor* const waits = turns_.waits(self->id / kWarpSize);
    int const lane = self->id % kWarpSize;
    warp.operands[lane] = &operands;
    waits[lane] = wait;
    bool const together =
        ++warp.arrived == kWarpSize &&
        std::all_of(waits, waits + kWarpSize, [&](WaitFor x) { return x == wait; });
    if (!together) return leave(wait);  // forever, if the warp has diverged
    Operands* all[kWarpSize];
    for (int i = 0; i < kWarpSize; ++i) all[i] = static_cast<Operands*>(warp.operands[i]);
    complete(all);
    turns_.wake(self->id / kWarpSize);
  }

  void cp_async(void* smem, void const* global, bool predicate, void* place) {
    check_shared("cp.async", smem);
    if (predicate && uintptr_t(global) % kCopyBytes != 0) {
      fail("cp.async reads from an address that is not aligned to 16 bytes");
    }
    race::write16(smem, place);
    if (schedule_.poison) std::memset(smem, 0xff, kCopyBytes);
    self->copies.push_back({static_cast<char*>(smem),
                            predicate ? static_cast<char const*>(global) : nullptr, self->groups});
  }

  void cp_async_wait_group(int pending, void* place) {
    auto& copies = self->copies;
    auto const landed = std::find_if(copies.begin(), copies.end(), [&](AsyncCopy const& copy) {
      return copy.group >= self->groups - pending;
    });
    std::for_each(copies.begin(), landed, [&](AsyncCopy const& copy) {
      race::write16(copy.to, place);
      if (copy.from) {
        race::read16(copy.from, place);
        std::memcpy(copy.to, copy.from, kCopyBytes);
      } else {
        std::memset(copy.to, 0, kCopyBytes);
      }
    });
    copies.erase(copies.begin(), landed);
  }

  // --- mbarriers and TMA -------------------------------------------------------------------------

  AsyncUnits& units() { return self->block->units; }
  void check(std::string const& wrong) {
    if (!wrong.empty()) fail(wrong);
  }

  void mbarrier_arrive(void* address, int bytes) { arrive(units(), address, bytes); }
  void mbarrier_arrive_cluster(void* address, int rank) {
    Block& block = block_of(address, rank);
    arrive(block.units, block.smem + units().offset(address), 0);
  }
  void arrive(AsyncUnits& units, void* address, int bytes) {
    AsyncUnits::Barrier* const barrier = units.find(address);
    if (barrier != nullptr) race::release(&barrier->token);
    race::Unseen const unseen;
    std::vector<int> woken;
    check(units.arrive(address, bytes, woken));
    turns_.wake(woken);
  }

  void mbarrier_wait(void* address, int parity) {
    AsyncUnits::Barrier& barrier = initialised(address);
    while (!has_ended(barrier, address, parity)) {
      {
        race::Unseen const unseen;
        barrier.waiters.push_back(self->id);
      }
      leave({Wait::kPhase, uint8_t(parity), uint16_t(units().offset(address) / 8)});
    }
    race::acquire(&barrier.token);
  }
  bool mbarrier_has_ended(void* address, int parity) {
    AsyncUnits::Barrier& barrier = initialised(address);
    bool const ended = has_ended(barrier, address, parity);
    if (ended) race::acquire(&barrier.token);
    return ended;
  }

  AsyncUnits::Barrier& initialised(void* address) {
    AsyncUnits::Barrier* const barrier = units().find(address);
    if (barrier == nullptr) {
      fail("waits at " + AsyncUnits::name(units().offset(address)) + ", which is not initialised");
    }
    return *barrier;
  }
  bool has_ended(AsyncUnits::Barrier const& barrier, void* address, int parity) {
    race::Unseen const unseen;
    std::vector<int> woken;
    check(units().land(address, woken));
    turns_.wake(woken);
    return AsyncUnits::has_ended(barrier, parity);
  }

  void wait_for_other_blocks() {
    if (has_failed_) fail("waits for other blocks, of which one has failed");
    std::this_thread::yield();
  }

  void griddepcontrol_wait() {
    race::Unseen const unseen;
    self->block->has_waited = true;
  }

  void tma_load(void* to, TensorMap const& map, void* barrier, unsigned blocks,
                AsyncUnits::Coordinates const& at) {
    race::Unseen const unseen;
    if (!self->block->has_waited) {
      fail(
          "has TMA copy data that earlier grids may still write, without a "
          "griddepcontrol_wait()");
    }
    TensorView view;
    std::memcpy(&view, &map, sizeof(view));
    auto const copy_to = [&](Block& block) {
      char* const there = block.smem + units().offset(to);
      void* const counts = block.smem + units().offset(barrier);
      check(block.units.copy(view, there, counts, at, schedule_.poison));
      check_copy(block, units().offset(to), uint32_t(units().bytes_of(view)));
      wake_waiters(block.units, counts);
    };
    if (blocks == 0) copy_to(*self->block);
    for (int rank = 0; blocks >> rank != 0; ++rank) {
      if (blocks >> rank & 1) copy_to(block_of(to, rank));
    }
  }

  void cp_async_bulk(void const* from, int bytes, int rank, void* barrier, void* place) {
    check_shared("cp.async.bulk", from);
    Block& block = block_of(from, rank);
    uint32_t const at = units().offset(from);
    for (int i = 0; i < bytes; i += int(kCopyBytes)) {
      race::read16(static_cast<char const*>(from) + i, place);
    }
    race::Unseen const unseen;
    if (units().has_unseen(at, bytes)) {
      fail("has a bulk copy read what was stored without an fence_proxy_async()");
    }
    void* const counts = block.smem + units().offset(barrier);
    check(
        block.units.copy_from(static_cast<char const*>(from), at, bytes, counts, schedule_.poison));
    check_copy(block, at, uint32_t(bytes));
    wake_waiters(block.units, counts);
  }

  // Checks that no warp of the block may still multiply what a copy overwrites.
  void check_copy(Block const& block, uint32_t begin, uint32_t bytes) {
    for (Warpgroup const& group : block.warpgroups) {
      if (group.waiting == 0 || !group.lines.has_any(begin, bytes)) continue;
      fail("has TMA copy to byte " + std::to_string(begin) +
           " of shared memory, which wgmma reads for a warp that has not resumed from its wait");
    }
  }
  // Threads that already wait for a copy get the data at once.
  void wake_waiters(AsyncUnits& units, void const* barrier) {
    AsyncUnits::Barrier* const counts = units.find(barrier);
    if (counts->waiters.empty()) return;
    std::vector<int> woken;
    std::swap(woken, counts->waiters);
    turns_.wake(woken);
  }

  // --- wgmma -------------------------------------------------------------------------------------

  // Waits for all threads of the warpgroup; the last thread to arrive executes the products.
  void wgmma_wait(int pending) {
    int const index = self->thread / kWarpgroupSize;
    if ((index + 1) * kWarpgroupSize > grid_.threads) {
      fail("calls wgmma_wait() in a warpgroup of less than 128 threads");
    }
    Warpgroup& group = self->block->warpgroups[size_t(index)];
    if (group.arrived > 0 && group.pending != pending) {
      fail("calls wgmma_wait<" + std::to_string(pending) + ">() where others call wgmma_wait<" +
           std::to_string(group.pending) + ">()");
    }
    group.pending = pending;
    int const warp = self->thread % kWarpgroupSize / kWarpSize;
    if (++group.arrived < kWarpgroupSize) {
      leave({Wait::kWgmmaWait, uint8_t(pending)});
    } else {
      group.arrived = 0;
      group.waiting = (1u << kWarpgroupSize / kWarpSize) - 1;
      int const first = self->id - self->thread + index * kWarpgroupSize;
      multiply(first, pending, group.lines);
      for (int i = 0; i < kWarpgroupSize / kWarpSize; ++i) turns_.wake(first / kWarpSize + i);
    }
    group.waiting &= ~(1u << warp);
  }

  void setmaxnreg(int registers) {
    if (registers % 8 != 0 || registers < 24 || registers > 256) {
      fail("calls setmaxnreg with " + std::to_string(registers) +
           " registers; allowed: multiples of 8 from 24 to 256");
    }
    std::vector<int>& all_registers = self->block->registers;
    all_registers[size_t(self->thread) / kWarpSize] = registers;
    int total = 0;
    for (int const of_warp : all_registers) total += of_warp * kWarpSize;
    // Register file of a block: 64 K divided by its threads, rounded down to a multiple of 8 each.
    int const all = 64 * 1024 / grid_.threads / 8 * 8 * grid_.threads;
    if (total > all) {
      fail("calls setmaxnreg with " + std::to_string(registers) + " registers, which makes " +
           std::to_string(total) + " with those of other warps; a block of " +
           std::to_string(grid_.threads) + " threads has " + std::to_string(all));
    }
  }

  // Checks an access to shared memory.
  void check_shared(char const* what, void const* address, size_t bytes = kCopyBytes) {
    uintptr_t const offset = uintptr_t(address) - uintptr_t(self->block->smem);
    if (offset >= uintptr_t(grid_.smem_bytes) || offset + bytes > uintptr_t(grid_.smem_bytes)) {
      fail(std::string(what) + " at an address outside the " + std::to_string(grid_.smem_bytes) +
           " bytes of shared memory");
    }
    if (offset % bytes != 0) {
      fail(std::string(what) + " at offset " + std::to_string(offset) +
           " of shared memory, which is not aligned to " + std::to_string(bytes) + " bytes");
    }
  }

  void check_matrix(char const* what, void const* matrix, int ld, int lines, int length,
                    int bytes) {
    intptr_t const offset = intptr_t(matrix) - intptr_t(self->block->smem);
    if (offset < 0 ||
        offset + (int64_t(lines - 1) * ld + length) * bytes > int64_t(grid_.smem_bytes)) {
      fail(std::string(what) + " of a matrix beyond the " + std::to_string(grid_.smem_bytes) +
           " bytes of shared memory");
    }
    if (offset % 32 != 0) {
      fail(std::string(what) + " at offset " + std::to_string(offset) +
           " of shared memory, which is not aligned to 32 bytes");
    }
    if ((ld < length && schedule_.poison) || ld * bytes % 16 != 0) {
      fail(std::string(what) + " with leading dimension " + std::to_string(ld) +
           "; allowed: from " + std::to_string(length) + ", multiples of " +
           std::to_string(16 / bytes));
    }
  }

  // Ends the cluster; the calling fiber never runs again.
  [[noreturn]] void fail(std::string const& message) {
    fail_with(*self->block, "thread " + std::to_string(self->thread) + " " + message);
    self->context.switch_to(root_);
    __builtin_unreachable();
  }

 private:
  void fail_with(Block const& block, std::string const& wrong) {
    if (wrong.empty()) return;
    error_ = "simt: block " + std::to_string(block.index) + ": " + wrong;
  }

  // Not inlined: the next block may be on another OS thread, with a `self` at another address.
  [[gnu::noinline]] static void run_body() {
    Worker& worker = *self->worker;
    race::acquire(&worker.launched_);
    worker.body_(self->block->smem);
    if (!worker.schedule_.poison) self->copies.clear();
    if (self->wgmma.in_flight() > 0) {
      worker.fail("exits with " + std::to_string(self->wgmma.in_flight()) +
                  " wgmma in flight that no wait covers");
    }
    if (!self->copies.empty()) {
      worker.fail("exits with " + std::to_string(self->copies.size()) +
                  " asynchronous copies in flight that no wait covers");
    }
    self->block->exit_thread(worker.schedule_.poison);
    worker.leave({Wait::kExited});
  }

  // The last thread to wait reads the operands, which other threads stored, on behalf of all
  // threads.
  void multiply(int first, int pending, WgmmaLines& lines) {
    of_threads_.clear();
    do_products(first, pending, lines);
    for (uint32_t const word : of_threads_) {
      race::read(self->block->smem + word * AsyncUnits::kWord, AsyncUnits::kWord,
                 __builtin_return_address(0));
    }
  }
  void do_products(int first, int pending, WgmmaLines& lines) {
    race::Unseen const unseen;
    lines.clear(grid_.smem_bytes);
    size_t const count = fibers_[first]->wgmma.covered(pending);
    for (int t = 0; t < kWarpgroupSize; ++t) {
      if (fibers_[first + t]->wgmma.covered(pending) == count) continue;
      fail("waits for another number of wgmma than thread " + std::to_string(first + t));
    }
    for (size_t i = 0; i < count; ++i) {
      ThreadWgmma::Call const* calls[kWarpgroupSize];
      float* values[kWarpgroupSize];
      for (int t = 0; t < kWarpgroupSize; ++t) {
        ThreadWgmma& wgmma = fibers_[first + t]->wgmma;
        calls[t] = &wgmma.call(i);
        values[t] = wgmma.values(calls[t]->accumulator);
      }
      check(warpgroup_mma(self->block->smem, grid_.smem_bytes, units(), of_threads_, lines, calls,
                          values));
    }
    for (int t = 0; t < kWarpgroupSize; ++t) check(fibers_[first + t]->wgmma.finish(count));
  }

  // For the race detector: everything that the fibers did happens before everything that follows.
  void join() {
    for (Fiber* const fiber : fibers_) root_.join(fiber->context);
  }

  // Suspends the calling fiber: runs another one, or ends the block with an error if none is ready.
  void leave(WaitFor wait) {
    turns_.suspend(self->id, wait);
    int const next = turns_.next_after(self->id);
    if (next < 0) {
      self->context.switch_to(root_);
    } else {
      resume(next);
    }
  }

  void resume(int id) {
    Fiber* const from = self;
    if (from->id == id) return;
    self = fibers_[id];
    from->context.switch_to(self->context);
  }

  // Returns whether the calling thread was the last to arrive; if so, wakes the others.
  bool arrive(Barrier& barrier, WaitFor wait) {
    race::release(&barrier.tokens[barrier.generation & 1]);
    if (++barrier.arrived != barrier.threads) return false;
    barrier.arrived = 0;
    std::fill_n(barrier.lanes, kWarpSize, 0u);
    // Tokens alternate: otherwise an early thread's next arrival would order more than this
    // barrier.
    ++barrier.generation;
    int const first_warp = self->block->first_warp;
    for (int i = 0; i < grid_.threads / kWarpSize; ++i) {
      WaitFor const* const waits = turns_.waits(first_warp + i);
      // Threads that called arrive() are not waiting here.
      bool const has_waiting =
          std::any_of(waits, waits + kWarpSize, [&](WaitFor x) { return x == wait; });
      if (barrier.warps >> i & 1 && has_waiting) turns_.wake(first_warp + i);
    }
    if (barrier.threads == grid_.threads) free_named_barriers();
    return true;
  }

  void sync(Barrier& barrier, WaitFor wait) {
    void* const token = &barrier.tokens[barrier.generation & 1];
    if (arrive(barrier, wait)) {
      resume(turns_.first());
    } else {
      leave(wait);
    }
    race::acquire(token);
  }

  // Frees named barriers for any warps to use. No thread waits at one when this is called.
  void free_named_barriers() {
    for (Barrier& barrier : self->block->barriers) {
      if (barrier.arrived == 0) barrier.threads = barrier.warps = 0;
    }
  }

  std::string describe_stuck() const {
    char const* const where = grid_.cluster > 1 ? " of the cluster" : "";
    std::string text = turns_.describe_divergence(where);
    if (!text.empty()) return text;
    text = turns_.describe_deadlock(where);
    for (Block const& block : blocks_) text += block.units.describe();
    return text;
  }

  Grid const& grid_;
  Schedule const& schedule_;
  std::function<void(char*)> const& body_;
  std::atomic<bool> const& has_failed_;

  std::string error_;

  std::vector<Block> blocks_;  // of the cluster
  Turns turns_;
  ClusterBarrier cluster_;
  std::vector<uint32_t> of_threads_;  // words that wgmma reads and that threads stored

  char launched_ = 0;  // stands for an order of events to the race detector

  Context root_;
  std::unique_ptr<Crew> crew_;
  std::vector<Fiber*> fibers_;  // of the crew, by thread
};

Fiber::Fiber(int id_, char* stack)
    : id(id_),
      context(stack, Stacks::bytes(id_), &Worker::fiber_main,
              ("GPU thread " + std::to_string(id_)).c_str()) {}

}  // namespace
}  // namespace cutlass_attn::simt
