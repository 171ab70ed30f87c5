// Scheduler of the CPU engine: see engine.hpp for what it promises.
//
// Compile this file without -fsanitize=thread, with CUTLASS_ATTN_SIMT_TSAN defined, to link it into
// a ThreadSanitizer build: see fiber.hpp.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "simt/engine.hpp"
#include "simt/fiber.hpp"
#include "simt/wait.hpp"
#include "simt/warp_ops.hpp"

namespace cutlass_attn::simt {
namespace {

struct AsyncCopy {
  char* to;
  char const* from;  // null: zeros
  int64_t group;     // index of the commit that it belongs to
};

class Worker;

// One thread of a GPU block.
struct Fiber {
  Fiber(int id, char* stack);

  int id;
  Worker* worker = nullptr;
  std::vector<AsyncCopy> copies;  // in flight, oldest first
  int64_t groups = 0;             // committed so far
  Context context;
};

struct Warp {
  uint32_t ready = 0;  // lanes that can go on
  int arrived = 0;     // lanes at a collective
  void* operands[kWarpSize];
  unsigned generation = 0;  // of sync_warp()
  char tokens[2] = {};      // as those of Barrier
};

struct Barrier {
  int threads = 0;     // that it brings together; 0: nobody has come to it yet
  uint32_t warps = 0;  // the warps that they are of
  int arrived = 0;
  unsigned generation = 0;
  char tokens[2] = {};  // addresses that stand for an order of events to the race detector
};
constexpr int kBarriers = 16;  // barrier 0 is that of sync()

thread_local Fiber* self = nullptr;

// The threads of a block. A launch leaves those it had to the next one of as many threads: to make
// them takes longer than a small grid does, under ThreadSanitizer most of all.
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

  std::unique_ptr<Crew> take(int threads) {
    std::lock_guard<std::mutex> const lock(mutex_);
    auto const found = std::find_if(crews_.begin(), crews_.end(), [&](auto const& crew) {
      return int(crew->fibers.size()) == threads;
    });
    if (found == crews_.end()) return std::make_unique<Crew>(threads);
    std::unique_ptr<Crew> crew = std::move(*found);
    crews_.erase(found);
    return crew;
  }

  // All of its fibers have to be at the end of a block.
  void leave(std::unique_ptr<Crew> crew) {
    constexpr size_t kMost = 8;
    std::lock_guard<std::mutex> const lock(mutex_);
    if (crews_.size() < kMost) crews_.push_back(std::move(crew));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Crew>> crews_;
};

constexpr size_t kCopyBytes = 16;
constexpr size_t kGuardBytes = 128;  // on both sides of shared memory; also keeps its alignment

// Runs one block after the other on one OS thread.
class Worker {
 public:
  Worker(Grid const& grid, Schedule const& schedule, std::function<void(char*)> const& body)
      : grid_(grid),
        schedule_(schedule),
        body_(body),
        warps_(grid.threads / kWarpSize),
        waits_(grid.threads),
        crew_(IdleCrews::instance().take(grid.threads)),
        fibers_(crew_->fibers) {
    for (auto const& fiber : fibers_) fiber->worker = this;
  }
  ~Worker() {
    join();
    if (error_.empty()) IdleCrews::instance().leave(std::move(crew_));
  }

  // Empty, or what went wrong; then this worker can run no further block.
  std::string run_block(int64_t block) {
    block_ = block;
    random_ = (schedule_.seed + 1) * 0x9e3779b97f4a7c15u ^ uint64_t(block + 1) << 20;
    exited_ = 0;
    for (int i = 0; i < int(warps_.size()); ++i) wake(i);
    free_named_barriers();
    // New pages for each block, so that the race detector forgets the accesses of the one before.
    Pages const pages(grid_.smem_bytes + 2 * kGuardBytes);
    std::memset(pages.data(), 0xff, grid_.smem_bytes + 2 * kGuardBytes);
    smem_ = pages.data() + kGuardBytes;
    if (!schedule_.poison) std::memset(smem_, 0, grid_.smem_bytes);

    race::release(&launched_);
    self = fibers_[first()].get();
    root_.switch_to(self->context);
    self = nullptr;
    if (!error_.empty()) join();

    if (error_.empty() && exited_ < grid_.threads) error_ = describe_stuck();
    if (error_.empty()) error_ = check_guards();
    return error_.empty() ? "" : "simt: block " + std::to_string(block_) + ": " + error_;
  }

  // The life of every fiber: one run of the body for each block, of whatever worker.
  static void fiber_main() {
    for (;;) run_body();
  }

  int64_t block() const { return block_; }

  void sync() {
    barriers_[0].threads = grid_.threads;
    barriers_[0].warps = ~uint32_t(0);
    arrive(barriers_[0], {Wait::kBarrier});
  }

  void sync(int number, int threads) {
    if (number < 1 || number >= kBarriers || threads < kWarpSize || threads % kWarpSize != 0 ||
        threads > grid_.threads) {
      fail("calls " + call_of_sync(number, threads) +
           "; allowed: barriers 1 to 15, multiples of 32 threads up to the block's " +
           std::to_string(grid_.threads));
    }
    Barrier& barrier = barriers_[number];
    if (barrier.threads != 0 && barrier.threads != threads) {
      fail("calls " + call_of_sync(number, threads) + " where others call " +
           call_of_sync(number, barrier.threads));
    }
    uint32_t const warp = uint32_t(1) << self->id / kWarpSize;
    // The warps of the barrier's earlier rounds count, so that no schedule hides one too many.
    if (__builtin_popcount(barrier.warps | warp) * kWarpSize > threads) {
      std::string others;
      for (int i = 0; i < int(warps_.size()); ++i) {
        if (barrier.warps >> i & 1) others += (others.empty() ? "" : ", ") + std::to_string(i);
      }
      fail("calls " + call_of_sync(number, threads) + " after warps " + others +
           " with no barrier of the whole block in between; allowed: " +
           std::to_string(threads / kWarpSize) + " warps");
    }
    barrier.threads = threads;
    barrier.warps |= warp;
    arrive(barrier, {Wait::kNamedBarrier, uint8_t(number), uint16_t(threads)});
  }

  void sync_warp() {
    Warp& warp = warps_[self->id / kWarpSize];
    void* const token = &warp.tokens[warp.generation & 1];
    race::release(token);
    collective(WaitFor{Wait::kSyncWarp}, warp, [](auto const& all) { ++all[0]->generation; });
    race::acquire(token);
  }

  // Waits for the other lanes of the warp; the last to arrive calls complete(operands of all).
  template <class Operands, class Complete>
  void collective(WaitFor wait, Operands& operands, Complete const& complete) {
    Warp& warp = warps_[self->id / kWarpSize];
    WaitFor* const waits = &waits_[self->id / kWarpSize * kWarpSize];
    int const lane = self->id % kWarpSize;
    warp.operands[lane] = &operands;
    waits[lane] = wait;
    bool const together =
        ++warp.arrived == kWarpSize &&
        std::all_of(waits, waits + kWarpSize, [&](WaitFor x) { return x == wait; });
    if (!together) return leave(wait);  // for good, where a warp has diverged
    Operands* all[kWarpSize];
    for (int i = 0; i < kWarpSize; ++i) all[i] = static_cast<Operands*>(warp.operands[i]);
    complete(all);
    wake(self->id / kWarpSize);
  }

  void async_copy(void* smem, void const* global, bool predicate, void* place) {
    check_shared("cp.async", smem);
    if (predicate && uintptr_t(global) % kCopyBytes != 0) {
      fail("cp.async reads from an address that is not aligned to 16 bytes");
    }
    race::write16(smem, place);
    if (schedule_.poison) std::memset(smem, 0xff, kCopyBytes);
    self->copies.push_back({static_cast<char*>(smem),
                            predicate ? static_cast<char const*>(global) : nullptr, self->groups});
  }

  void async_copy_wait(int pending, void* place) {
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

  // A 16-byte access to shared memory.
  void check_shared(char const* what, void const* address) {
    uintptr_t const offset = uintptr_t(address) - uintptr_t(smem_);
    if (offset >= uintptr_t(grid_.smem_bytes) ||
        offset + kCopyBytes > uintptr_t(grid_.smem_bytes)) {
      fail(std::string(what) + " at an address outside the " + std::to_string(grid_.smem_bytes) +
           " bytes of shared memory");
    }
    if (offset % kCopyBytes != 0) {
      fail(std::string(what) + " at offset " + std::to_string(offset) +
           " of shared memory, which is not aligned to 16 bytes");
    }
  }

  void check_matrix(char const* what, void const* matrix, int ld, int lines, int length,
                    int bytes) {
    intptr_t const offset = intptr_t(matrix) - intptr_t(smem_);
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

  // Ends the block; the calling fiber never runs again.
  [[noreturn]] void fail(std::string const& message) {
    error_ = "thread " + std::to_string(self->id) + " " + message;
    self->context.switch_to(root_);
    __builtin_unreachable();
  }

 private:
  // Not inlined: the next block may be on another OS thread, with a `self` at another address.
  [[gnu::noinline]] static void run_body() {
    Worker& worker = *self->worker;
    race::acquire(&worker.launched_);
    worker.body_(worker.smem_);
    if (!worker.schedule_.poison) self->copies.clear();
    if (!self->copies.empty()) {
      worker.fail("exits with " + std::to_string(self->copies.size()) +
                  " asynchronous copies in flight that no wait covers");
    }
    ++worker.exited_;
    worker.leave({Wait::kExited});
  }

  // To the race detector: all that the fibers did comes before what follows here.
  void join() {
    for (auto const& fiber : fibers_) root_.join(fiber->context);
  }

  // The calling fiber has to wait: runs another, or ends the block where none is ready.
  void leave(WaitFor wait) {
    int const id = self->id;
    waits_[id] = wait;
    warps_[id / kWarpSize].ready &= ~(uint32_t(1) << id % kWarpSize);
    int const next = next_ready(id / kWarpSize, id % kWarpSize);
    if (next < 0) {
      self->context.switch_to(root_);
    } else {
      resume(next);
    }
  }

  void resume(int id) {
    Fiber* const from = self;
    if (from->id == id) return;
    self = fibers_[id].get();
    from->context.switch_to(self->context);
  }

  void arrive(Barrier& barrier, WaitFor wait) {
    void* const token = &barrier.tokens[barrier.generation & 1];
    race::release(token);
    if (++barrier.arrived == barrier.threads) {
      barrier.arrived = 0;
      // Tokens alternate, or an early thread's next arrival would order more than this barrier.
      ++barrier.generation;
      for (int i = 0; i < int(warps_.size()); ++i) {
        if (barrier.warps >> i & 1) wake(i);
      }
      if (barrier.threads == grid_.threads) free_named_barriers();
      resume(first());
    } else {
      leave(wait);
    }
    race::acquire(token);
  }

  // For any warps to use: at this point nobody waits at one.
  void free_named_barriers() {
    for (Barrier& barrier : barriers_) barrier.threads = barrier.warps = 0;
  }

  // All lanes of the warp can go on.
  void wake(int warp) {
    warps_[warp].ready = ~uint32_t(0);
    warps_[warp].arrived = 0;
    std::fill_n(&waits_[warp * kWarpSize], kWarpSize, WaitFor{});
  }

  // Where the order begins when every thread is ready.
  int first() {
    bool const reverse = schedule_.order == FiberOrder::kReverse;
    return next_ready(reverse ? int(warps_.size()) - 1 : 0, reverse ? 0 : kWarpSize - 1);
  }

  // The ready thread after (warp, lane) in the order of the schedule, -1 if there is none: a warp
  // runs as far as it can before the next one does.
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
        // Rotated so that the nearest candidate is the lowest, or the highest, bit.
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

  std::string describe_stuck() const {
    for (int warp = 0; warp < int(warps_.size()); ++warp) {
      WaitFor const* const waits = &waits_[warp * kWarpSize];
      if (!std::all_of(waits, waits + kWarpSize, [&](WaitFor x) { return x == waits[0]; })) {
        return "warp " + std::to_string(warp) +
               " has diverged: " + describe(waits, kWarpSize, "lanes");
      }
    }
    return "deadlock: " + describe(waits_.data(), grid_.threads, "threads");
  }

  std::string check_guards() const {
    for (size_t i = 0; i < kGuardBytes; ++i) {
      if (smem_[-1 - ptrdiff_t(i)] != char(0xff)) {
        return "shared memory was written " + std::to_string(i + 1) + " bytes before its start";
      }
      if (smem_[grid_.smem_bytes + i] != char(0xff)) {
        return "shared memory was written " + std::to_string(i) + " bytes past its end, " +
               std::to_string(grid_.smem_bytes) + " bytes";
      }
    }
    return "";
  }

  Grid const& grid_;
  Schedule const& schedule_;
  std::function<void(char*)> const& body_;

  int64_t block_ = 0;
  char* smem_ = nullptr;
  std::string error_;
  uint64_t random_ = 1;

  int exited_ = 0;
  std::vector<Warp> warps_;
  std::vector<WaitFor> waits_;  // by thread

  Barrier barriers_[kBarriers];
  char launched_ = 0;  // stands for an order of events to the race detector

  Context root_;
  std::unique_ptr<Crew> crew_;
  std::vector<std::unique_ptr<Fiber>> const& fibers_;  // of the crew, by thread
};

Fiber::Fiber(int id_, char* stack)
    : id(id_),
      context(stack, Stacks::kBytes, &Worker::fiber_main,
              ("GPU thread " + std::to_string(id_)).c_str()) {}

}  // namespace

Status run_grid(Grid const& grid, Schedule const& schedule,
                std::function<void(char* smem)> const& body) {
  if (grid.threads <= 0 || grid.threads % kWarpSize != 0 || grid.threads > 1024) {
    return Status::invalid("simt: blocks of " + std::to_string(grid.threads) +
                           " threads; allowed: multiples of 32 up to 1024");
  }
  if (grid.blocks > INT32_MAX) {
    return Status::invalid("simt: " + std::to_string(grid.blocks) +
                           " thread blocks; a grid holds 2147483647: split the batch");
  }
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::string error;
  auto const work = [&] {
    std::string mine;
    try {
      Worker worker(grid, schedule, body);
      for (int64_t i; mine.empty() && (i = next++) < grid.blocks;) {
        mine = worker.run_block(schedule.order == FiberOrder::kReverse ? grid.blocks - 1 - i : i);
      }
    } catch (std::bad_alloc const&) {
      mine = "simt: not enough memory for the stacks of " + std::to_string(grid.threads) +
             " threads and " + std::to_string(grid.smem_bytes) + " bytes of shared memory";
    }
    if (mine.empty()) return;
    next = grid.blocks;  // the others stop after their current block
    std::lock_guard<std::mutex> const lock(mutex);
    if (error.empty()) error = std::move(mine);
  };

  int64_t const wanted = schedule.num_threads > 0 ? schedule.num_threads
                                                  : int64_t(std::thread::hardware_concurrency());
  std::vector<std::thread> helpers;
  try {
    while (int64_t(helpers.size()) + 1 < std::min(wanted, grid.blocks)) helpers.emplace_back(work);
  } catch (std::system_error const&) {
    // The system grants no more threads: those there are do all the work.
  }
  if (grid.blocks > 0) work();
  for (std::thread& helper : helpers) helper.join();
  return error.empty() ? Status{} : Status::device_error(error);
}

Schedule& launch_schedule() {
  thread_local Schedule schedule;
  return schedule;
}

namespace engine {

int thread() { return self->id; }
int block() { return int(self->worker->block()); }
void sync() { self->worker->sync(); }
void sync(int barrier, int threads) { self->worker->sync(barrier, threads); }

void mma_m16n8k16(MmaInput input, float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
  MmaOperands operands{a, b, c};
  Wait const wait = input == MmaInput::kFloat16 ? Wait::kMmaFloat16 : Wait::kMmaBFloat16;
  self->worker->collective(WaitFor{wait}, operands,
                           [input](auto const& all) { warp_mma(input, all); });
}

void sync_warp() { self->worker->sync_warp(); }

int wmma_element(int i, int size) { return wmma_element_of(self->id % kWarpSize, i, size); }

void wmma(int m, int n, float* c, uint16_t const* a, uint16_t const* b) {
  WmmaOperands operands{a, b, c};
  self->worker->collective(WaitFor{Wait::kWmma, uint8_t(m)}, operands,
                           [m, n](auto const& all) { warp_wmma(m, n, all); });
}

void check_matrix(char const* what, void const* matrix, int ld, int lines, int length, int bytes) {
  self->worker->check_matrix(what, matrix, ld, lines, length, bytes);
}

void load_matrix(bool transposed, void const* row, uint32_t (&d)[4]) {
  self->worker->check_shared("ldmatrix", row);
  race::read16(row, __builtin_return_address(0));
  LoadMatrixOperands operands{static_cast<char const*>(row), d};
  Wait const wait = transposed ? Wait::kLoadMatrixTrans : Wait::kLoadMatrix;
  self->worker->collective(WaitFor{wait}, operands,
                           [transposed](auto const& all) { warp_load_matrix(transposed, all); });
}

void store_shared(void* smem, uint32_t const (&words)[4]) {
  self->worker->check_shared("st.shared", smem);
  race::write16(smem, __builtin_return_address(0));
  std::memcpy(smem, words, sizeof(words));
}

uint64_t shuffle_xor(uint64_t value, int lane_mask) {
  if (lane_mask < 0 || lane_mask >= kWarpSize) {
    self->worker->fail("calls shuffle_xor with lane mask " + std::to_string(lane_mask) +
                       "; allowed: 0 to 31");
  }
  self->worker->collective(WaitFor{Wait::kShuffle, uint8_t(lane_mask)}, value,
                           [lane_mask](auto const& all) { warp_shuffle_xor(lane_mask, all); });
  return value;
}

bool any(bool predicate) {
  self->worker->collective(WaitFor{Wait::kAny}, predicate, [](auto const& all) { warp_any(all); });
  return predicate;
}

void async_copy(void* smem, void const* global, bool predicate) {
  self->worker->async_copy(smem, global, predicate, __builtin_return_address(0));
}
void async_copy_commit() { ++self->groups; }
void async_copy_wait(int pending) {
  self->worker->async_copy_wait(pending, __builtin_return_address(0));
}

}  // namespace engine
}  // namespace cutlass_attn::simt
