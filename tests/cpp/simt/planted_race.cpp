// Kernels with one synchronisation missing, to check that ThreadSanitizer reports it with both
// positions. ctest checks the report; see CMakeLists.txt.
#include <string>

#include "arch/sm80.hpp"

using namespace cutlass_attn::simt;
using cutlass_attn::arch::Sm80;

namespace {

__attribute__((noinline)) void write_own(int* slots) { slots[Sm80::thread()] = Sm80::thread(); }

__attribute__((noinline)) int read_next(int const* slots) {
  return slots[(Sm80::thread() + 1) % 64];
}

// Every thread reads a value of another thread without synchronisation in between. A warp
// collective is in place of the barrier: it converges the warp but orders no memory.
void missing_barrier(char* smem) {
  int* const slots = reinterpret_cast<int*>(smem);
  write_own(slots);
  Sm80::shuffle_xor(0, 1);
  if (read_next(slots) < 0) write_own(slots);
}

alignas(16) char const source[16] = {};

// The wait makes a copy visible to the thread that issued it, but not to the others.
void missing_barrier_after_wait(char* smem) {
  uint32_t d[4];
  engine::cp_async(smem + 16 * Sm80::thread(), source, true);
  Sm80::cp_async_commit_group();
  Sm80::cp_async_wait_group<0>();
  engine::ldmatrix_x4(false, smem + 16 * ((Sm80::thread() + 1) % 32), d);
}

// Warps 0 and 1 are one group, warps 2 and 3 the other. Reads what the other warp of the caller's
// group wrote.
__attribute__((noinline)) int read_partner(int const* slots) { return slots[Sm80::thread() ^ 32]; }
int group() { return Sm80::thread() / 64; }

// Each warp waits at its own barrier, so nothing orders the two warps of a group.
void missing_named_barrier(char* smem) {
  int* const slots = reinterpret_cast<int*>(smem);
  write_own(slots);
  Sm80::sync(1 + Sm80::thread() / 32, 32);
  if (read_partner(slots) < 0) write_own(slots);
}

// Each group waits at its own barrier, which orders nothing between the groups. The group that runs
// last reads: an engine in which one barrier orders another would report nothing.
void missing_barrier_between_groups(char* smem) {
  int* const slots = reinterpret_cast<int*>(smem);
  write_own(slots);
  Sm80::sync(1 + group(), 64);
  if (group() == 1 && slots[Sm80::thread() ^ 64] < 0) write_own(slots);
}

// These kernels with their barriers: no report.
void with_barriers(char* smem) {
  int* const slots = reinterpret_cast<int*>(smem);
  write_own(slots);
  Sm80::sync();
  if (read_next(slots) < 0) write_own(slots);
  Sm80::sync();
  uint32_t d[4];
  engine::cp_async(smem + 16 * Sm80::thread(), source, true);
  Sm80::cp_async_commit_group();
  Sm80::cp_async_wait_group<0>();
  Sm80::sync();
  engine::ldmatrix_x4(false, smem + 16 * ((Sm80::thread() + 1) % 64), d);
}

void with_named_barriers(char* smem) {
  int* const slots = reinterpret_cast<int*>(smem);
  for (int round = 0; round < 3 + group(); ++round) {
    write_own(slots);
    Sm80::sync(1 + group(), 64);
    if (read_partner(slots) < 0) write_own(slots);
    Sm80::sync(1 + group(), 64);
  }
  Sm80::sync();
  if (slots[Sm80::thread() ^ 64] < 0) write_own(slots);
}

}  // namespace

int main(int argc, char** argv) {
  std::string const which = argc > 1 ? argv[1] : "";
  if (which == "barrier") return !run_grid({1, 64, 512}, {}, missing_barrier).ok();
  if (which == "wait") return !run_grid({1, 32, 512}, {}, missing_barrier_after_wait).ok();
  if (which == "named_barrier") return !run_grid({1, 128, 512}, {}, missing_named_barrier).ok();
  if (which == "groups") return !run_grid({1, 128, 512}, {}, missing_barrier_between_groups).ok();
  if (which == "none") {
    return !run_grid({20, 64, 1024}, {}, with_barriers).ok() ||
           !run_grid({20, 128, 512}, {}, with_named_barriers).ok();
  }
  return 2;
}
