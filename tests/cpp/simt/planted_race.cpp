// Kernels with one synchronisation missing, to see that ThreadSanitizer reports it with both
// places. ctest checks the report; see CMakeLists.txt.
#include <string>

#include "simt/host.hpp"

using namespace cutlass_attn::simt;

namespace {

__attribute__((noinline)) void write_own(int* slots) { slots[Host::thread()] = Host::thread(); }

__attribute__((noinline)) int read_next(int const* slots) {
  return slots[(Host::thread() + 1) % 64];
}

// Every thread reads what another one wrote, and nothing is between the two. A warp collective
// stands where the barrier should: it brings the warp together but orders no memory.
void missing_barrier(char* smem) {
  int* const slots = reinterpret_cast<int*>(smem);
  write_own(slots);
  Host::shuffle_xor(0, 1);
  if (read_next(slots) < 0) write_own(slots);
}

alignas(16) char const source[16] = {};

// The wait makes a copy visible to the thread that issued it, not to the others.
void missing_barrier_after_wait(char* smem) {
  uint32_t d[4];
  engine::async_copy(smem + 16 * Host::thread(), source, true);
  Host::async_copy_commit();
  Host::async_copy_wait<0>();
  engine::load_matrix(false, smem + 16 * ((Host::thread() + 1) % 32), d);
}

// The same two kernels with their barriers: no report.
void with_barriers(char* smem) {
  int* const slots = reinterpret_cast<int*>(smem);
  write_own(slots);
  Host::sync();
  if (read_next(slots) < 0) write_own(slots);
  Host::sync();
  uint32_t d[4];
  engine::async_copy(smem + 16 * Host::thread(), source, true);
  Host::async_copy_commit();
  Host::async_copy_wait<0>();
  Host::sync();
  engine::load_matrix(false, smem + 16 * ((Host::thread() + 1) % 64), d);
}

}  // namespace

int main(int argc, char** argv) {
  std::string const which = argc > 1 ? argv[1] : "";
  if (which == "barrier") return !run_grid({1, 64, 512}, {}, missing_barrier).ok();
  if (which == "wait") return !run_grid({1, 32, 512}, {}, missing_barrier_after_wait).ok();
  if (which == "none") return !run_grid({20, 64, 1024}, {}, with_barriers).ok();
  return 2;
}
