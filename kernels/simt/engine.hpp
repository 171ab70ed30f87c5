// Runs GPU thread blocks on the CPU: every thread of a block is a fiber, the fibers of a cluster of
// blocks take turns on one OS thread, the clusters of a grid are spread over OS threads.
//
// Plain C++: the instructions on top are the host twins in arch/, a header for each family. It is
// meant to be stricter than a GPU. What hardware leaves undefined is either made visible in the
// results (as NaN) or reported as an error:
//
//   - shared memory starts as NaN (0xff bytes); bytes past its end are checked when a block ends;
//   - the destination of an asynchronous copy is NaN from its issue until the wait that covers it,
//     its source is read only then; a copy that no wait covers is an error;
//   - a warp collective needs all 32 lanes of a warp at the same kind of collective, a barrier all
//     of its threads: what can never happen any more is reported, with who waits where;
//   - a named barrier belongs to the warps that come to it first, until a barrier of the whole
//     block frees it: another warp, which a GPU could count in the wrong round, is reported; so is
//     a thread that arrives again before the others have come, or where they never come;
//   - the destination of a copy of TMA is NaN from its issue until a thread waits for the phase
//     that counts it; accumulators of wgmma are NaN until the wait that covers it, and only then is
//     read what it multiplies; what threads stored without a fence for it is reported, and so is a
//     copy of TMA over what it reads, before each warp has gone on from its wait;
//   - a barrier in shared memory that nobody made, that has more arrivals or bytes than its phase,
//     or whose phase can never end is reported;
//   - a copy of TMA in a grid that overlaps those before, of which no thread of the block has
//   waited
//     for them, is reported;
//   - shared memory of a block whose threads have exited is NaN to others of its cluster;
//   - addresses outside shared memory, or not on 16 bytes, are reported by thread.
#pragma once

#include <cstdint>
#include <functional>

#include "core/status.hpp"
#include "core/tensor_map.hpp"

namespace cutlass_attn::simt {

inline constexpr int kWarpSize = 32;

// Which of the threads that could go on does. A correct kernel cannot tell the difference.
enum class FiberOrder { kForward, kReverse, kRandom };

struct Schedule {
  int num_threads = 0;  // of the OS; 0: as many as cores this process may use
  FiberOrder order = FiberOrder::kForward;
  uint64_t seed = 0;  // for kRandom
  // false: what hardware leaves undefined takes a likely value instead of NaN. Shared memory starts
  // as zeros and keeps what it has until an asynchronous copy lands; rows of a wmma matrix may
  // overlap. It hides bugs: only to see what one would do on a GPU.
  bool poison = true;
  // Whether products of e4m3 are rounded to fp16 after the first half of them, the second, and with
  // the accumulator, as GPUs do that have none, or once. Results may be off by these roundings.
  bool halves_e4m3 = false;
};

struct Grid {
  int64_t blocks = 0;
  int threads = 0;  // per block, a multiple of kWarpSize
  int smem_bytes = 0;
  int cluster = 1;        // blocks that run together and see each other's shared memory
  bool overlaps = false;  // begins while grids before it may still run (Launch::overlaps)
};

// Calls body(smem) in every thread of every block, `smem` being the block's shared memory, aligned
// to 1024 bytes. Returns kDeviceError with block and thread numbers for what the kernel did wrong.
Status run_grid(Grid const& grid, Schedule const& schedule,
                std::function<void(char* smem)> const& body);

// How a unit's host code that this OS thread calls runs a grid: for tests to change. The number of
// threads comes from RunOptions.
Schedule& launch_schedule();

// The rest is for the body alone: every function acts for the calling GPU thread.
namespace engine {

int thread();
int block();

// __syncthreads
void sync();

// barrier.cluster: all threads of the calling one's cluster.
void cluster_sync();

// griddepcontrol.wait
void wait_for_grids_before();

// mapa: where block `rank` of the cluster has what the calling thread's block has at `address`.
void const* of_block(void const* address, int rank);

// bar.sync: `barrier` is 1 to 15; `threads`, a multiple of kWarpSize, how many make it up.
void sync(int barrier, int threads);

// bar.arrive: the same without waiting for the others.
void arrive(int barrier, int threads);

// __syncwarp
void sync_warp();

enum class MmaInput { kFloat16, kBFloat16 };

// mma.sync.m16n8k16 with fp32 accumulators: c += a b, fragments as in the PTX ISA.
void mma_m16n8k16(MmaInput input, float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]);

// mma.sync.m16n8k32 of int8 with int32 accumulators: d = a b + c; without a sign in A unless
// `is_signed`. A sum beyond an int32, which would wrap around, is an error.
void mma_m16n8k32_int8(bool is_signed, int32_t (&d)[4], uint32_t const (&a)[4],
                       uint32_t const (&b)[2], int32_t const (&c)[4]);

// mma.sync.m16n8k32 of e4m3 with fp16 accumulators: d = a b + c. Schedule::halves_e4m3 says how it
// rounds.
void mma_m16n8k32_e4m3(uint32_t (&d)[2], uint32_t const (&a)[4], uint32_t const (&b)[2],
                       uint32_t const (&c)[2]);

// Which element of a matrix of `size` elements, a power of 2, is number i of this lane in a wmma
// fragment.
int wmma_element(int i, int size);

// wmma.mma.sync.m16n16k16, m8n32k16 or m32n8k16: c += a b in fp16 with fp32 accumulators, each
// being the lane's elements of its matrix.
void wmma(int m, int n, float* c, uint16_t const* a, uint16_t const* b);

// What wmma.load and wmma.store ask of a matrix of `lines` rows, or columns, of `length` elements
// each: it begins on 32 bytes, in shared memory as all of it, its lines do not overlap and begin on
// 16 bytes.
void check_matrix(char const* what, void const* matrix, int ld, int lines, int length, int bytes);

// ldmatrix.x4[.trans]: `row` is the 16-byte row this lane supplies.
void load_matrix(bool transposed, void const* row, uint32_t (&d)[4]);

// movmatrix.trans: a pair of the matrix's row, and of the transposed matrix's.
uint32_t transpose_matrix(uint32_t pair);

// st.shared and ld.shared of 1, 2 or 4 words.
void store_shared(void* smem, uint32_t const* words, int count);
void load_shared(void const* smem, uint32_t* words, int count);

// shfl.sync.bfly over the whole warp.
uint64_t shuffle_xor(uint64_t value, int lane_mask);

// vote.sync.any over the whole warp.
bool any(bool predicate);

// cp.async of 16 bytes; without `predicate` it writes zeros and reads nothing.
void async_copy(void* smem, void const* global, bool predicate);
void async_copy_commit();
// Lands the copies of all but this thread's `pending` newest committed groups. Copies that were
// never committed stay in flight, also for 0, where cp.async.wait_all would include them.
void async_copy_wait(int pending);

// mbarrier: init, arrive with so many bytes to be waited for, and wait for a phase's parity.
void barrier_init(void* barrier, int arrivals);
void barrier_init_fence();
void barrier_arrive(void* barrier, int bytes);
void barrier_wait(void* barrier, int parity);

// cp.async.bulk.tensor of the box at these coordinates; `map` holds a TensorView.
void tma_load(void* to, TensorMap const& map, void* barrier,
              int32_t const (&at)[TensorView::kDims]);

// wgmma 64 x n x 16 with fp32 accumulators: A in registers and B by rows; or both by descriptor, A
// by rows and B by columns, or, where `is_transposed`, A by columns and B by rows.
struct WgmmaCall {
  MmaInput input;
  int n;
  bool accumulates;
  uint32_t const* a;  // (4); null: by descriptor
  uint64_t a_descriptor, b_descriptor;
  bool is_transposed = false;
};
void wgmma(WgmmaCall const& call, float* accumulator);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);
// What this thread stored in shared memory may be read by wgmma.
void async_proxy_fence();

// setmaxnreg
void set_registers(int registers);

// An address of shared memory, counted from its beginning.
uint32_t smem_offset(void const* address);

}  // namespace engine
}  // namespace cutlass_attn::simt
