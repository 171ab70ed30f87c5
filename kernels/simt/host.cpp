// Runs grids on the CPU, and defines the functions that kernel bodies call (engine.hpp).
//
// To link this file into a ThreadSanitizer build, compile it without -fsanitize=thread and with
// CUTLASS_ATTN_SIMT_TSAN defined (fiber.hpp).
#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "simt/engine.hpp"
#include "simt/worker.hpp"

namespace cutlass_attn::simt {

Status run_grid(Grid const& grid, Schedule const& schedule,
                std::function<void(char* smem)> const& body) {
  if (grid.threads <= 0 || grid.threads % kWarpSize != 0 || grid.threads > 1024) {
    return Status::invalid("simt: blocks of " + std::to_string(grid.threads) +
                           " threads; allowed: multiples of 32 up to 1024");
  }
  if (grid.cluster < 1 || grid.blocks % grid.cluster != 0) {
    return Status::invalid("simt: clusters of " + std::to_string(grid.cluster) + " blocks in " +
                           std::to_string(grid.blocks));
  }
  if (grid.blocks > INT32_MAX) {
    return Status::invalid("simt: " + std::to_string(grid.blocks) +
                           " thread blocks; a grid holds 2147483647: split the batch");
  }
  int64_t const clusters = grid.blocks / grid.cluster;
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::string error;
  std::atomic<bool> has_failed{false};
  auto const work = [&] {
    std::string mine;
    try {
      Worker worker(grid, schedule, body, has_failed);
      for (int64_t i; mine.empty() && (i = next++) < clusters;) {
        mine = worker.run_cluster(schedule.order == FiberOrder::kReverse ? clusters - 1 - i : i);
      }
    } catch (std::bad_alloc const&) {
      mine = "simt: not enough memory for the stacks of " + std::to_string(grid.threads) +
             " threads and " + std::to_string(grid.smem_bytes) + " bytes of shared memory";
    }
    if (mine.empty()) return;
    next = clusters;  // the other threads stop after their present cluster
    std::lock_guard<std::mutex> const lock(mutex);
    if (error.empty()) error = std::move(mine);
    has_failed = true;
  };

  int64_t const wanted = schedule.num_threads > 0 ? schedule.num_threads
                                                  : int64_t(std::thread::hardware_concurrency());
  std::vector<std::thread> helpers;
  try {
    while (int64_t(helpers.size()) + 1 < std::min(wanted, clusters)) helpers.emplace_back(work);
  } catch (std::system_error const&) {
    // The system allows no more threads: the existing ones do all the work.
  }
  if (clusters > 0) work();
  for (std::thread& helper : helpers) helper.join();
  return error.empty() ? Status{} : Status::device_error(error);
}

Schedule& launch_schedule() {
  thread_local Schedule schedule;
  return schedule;
}

namespace engine {

int thread() { return self->thread; }
int block() { return int(self->block->index); }
void sync() { self->worker->sync(); }
void cluster_sync() { self->worker->cluster_sync(); }
void const* mapa(void const* address, int rank) { return self->worker->mapa(address, rank); }
void sync(int barrier, int threads) { self->worker->sync(barrier, threads); }
void arrive(int barrier, int threads) { self->worker->arrive(barrier, threads); }

void mma_m16n8k16(MmaInput input, float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
  MmaOperands operands{a, b, c};
  Wait const wait = input == MmaInput::kFloat16 ? Wait::kMmaFloat16 : Wait::kMmaBFloat16;
  self->worker->collective(WaitFor{wait}, operands,
                           [input](auto const& all) { warp_mma(input, all); });
}

void mma_m16n8k32_int8(bool is_signed, int32_t (&d)[4], uint32_t const (&a)[4],
                       uint32_t const (&b)[2], int32_t const (&c)[4]) {
  Mma8Operands operands{a, b, c, d};
  bool fits = true;
  self->worker->collective(WaitFor{is_signed ? Wait::kMmaInt8 : Wait::kMmaUint8}, operands,
                           [&](auto const& all) { fits = warp_mma_int8(is_signed, all); });
  if (!fits) self->worker->check("calls mma.m16n8k32 with a sum that overflows int32");
}

void mma_m16n8k32_e4m3(uint32_t (&d)[2], uint32_t const (&a)[4], uint32_t const (&b)[2],
                       uint32_t const (&c)[2]) {
  MmaE4m3Operands operands{a, b, c, d};
  bool const halves = self->worker->halves_e4m3();
  self->worker->collective(WaitFor{Wait::kMmaE4m3}, operands,
                           [=](auto const& all) { warp_mma_e4m3(halves, all); });
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

void ldmatrix_x4(bool transposed, void const* row, uint32_t (&d)[4]) {
  self->worker->check_shared("ldmatrix", row);
  race::read16(row, __builtin_return_address(0));
  LoadMatrixOperands operands{static_cast<char const*>(row), d};
  Wait const wait = transposed ? Wait::kLoadMatrixTrans : Wait::kLoadMatrix;
  self->worker->collective(WaitFor{wait}, operands,
                           [transposed](auto const& all) { warp_load_matrix(transposed, all); });
}

uint32_t movmatrix_trans(uint32_t pair) {
  self->worker->collective(WaitFor{Wait::kTransposeMatrix}, pair,
                           [](auto const& all) { warp_transpose_matrix(all); });
  return pair;
}

void store_shared(void* smem, uint32_t const* words, int count) {
  self->worker->check_shared("st.shared", smem, size_t(count) * 4);
  race::write(smem, count * 4, __builtin_return_address(0));
  std::memcpy(smem, words, size_t(count) * 4);
  race::Unseen const unseen;
  self->worker->units().store(smem, count * 4, self->thread);
}

void load_shared(void const* smem, uint32_t* words, int count) {
  self->worker->check_shared("ld.shared", smem, size_t(count) * 4);
  race::read(smem, count * 4, __builtin_return_address(0));
  std::memcpy(words, smem, size_t(count) * 4);
}

void stmatrix_x4(void* row, uint32_t const (&d)[4]) {
  self->worker->check_shared("stmatrix", row);
  int const lane = self->id % kWarpSize;
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint64_t const to = shuffle(reinterpret_cast<uintptr_t>(row), matrix * 8 + lane / 4);
    store_shared(reinterpret_cast<char*>(to) + lane % 4 * 4, &d[matrix], 1);
  }
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

uint64_t shuffle(uint64_t value, int source) {
  if (source < 0 || source >= kWarpSize) {
    self->worker->fail("calls shuffle with lane " + std::to_string(source) + "; allowed: 0 to 31");
  }
  ShuffleOperands operands{value, source};
  self->worker->collective(WaitFor{Wait::kShuffleIndex}, operands,
                           [](auto const& all) { warp_shuffle(all); });
  return operands.value;
}

bool any(bool predicate) {
  self->worker->collective(WaitFor{Wait::kAny}, predicate, [](auto const& all) { warp_any(all); });
  return predicate;
}

void cp_async(void* smem, void const* global, bool predicate) {
  self->worker->cp_async(smem, global, predicate, __builtin_return_address(0));
}
void cp_async_commit_group() { ++self->groups; }
void cp_async_wait_group(int pending) {
  self->worker->cp_async_wait_group(pending, __builtin_return_address(0));
}

void mbarrier_init(void* barrier, int arrivals) {
  race::Unseen const unseen;
  self->worker->check(self->worker->units().init(barrier, arrivals));
}
void fence_mbarrier_init() { self->worker->units().fence(); }
void mbarrier_arrive(void* barrier, int bytes) { self->worker->mbarrier_arrive(barrier, bytes); }
void mbarrier_arrive_cluster(void* barrier, int rank) {
  self->worker->mbarrier_arrive_cluster(barrier, rank);
}
void mbarrier_wait(void* barrier, int parity) { self->worker->mbarrier_wait(barrier, parity); }
bool mbarrier_has_ended(void* barrier, int parity) {
  return self->worker->mbarrier_has_ended(barrier, parity);
}
void griddepcontrol_wait() { self->worker->griddepcontrol_wait(); }
void wait_for_other_blocks() { self->worker->wait_for_other_blocks(); }
void tma_load(void* to, TensorMap const& map, void* barrier, unsigned blocks,
              int32_t const (&at)[TensorView::kDims]) {
  self->worker->tma_load(to, map, barrier, blocks, at);
}
void cp_async_bulk(void const* from, int bytes, int rank, void* barrier) {
  self->worker->cp_async_bulk(from, bytes, rank, barrier, __builtin_return_address(0));
}

void wgmma(WgmmaCall const& call, float* accumulator) {
  race::Unseen const unseen;
  self->worker->check(self->wgmma.issue(call, accumulator));
}
void wgmma_fence() { self->wgmma.fence(); }
void wgmma_commit() { self->wgmma.commit(); }
void wgmma_wait(int pending) { self->worker->wgmma_wait(pending); }
void fence_proxy_async() {
  race::Unseen const unseen;
  self->worker->units().proxy_fence(self->thread);
}

void setmaxnreg(int registers) { self->worker->setmaxnreg(registers); }
uint32_t smem_offset(void const* address) { return self->worker->units().offset(address); }

}  // namespace engine
}  // namespace cutlass_attn::simt
