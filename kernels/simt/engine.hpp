// Runs GPU thread blocks on the CPU: each thread of a block is a fiber, the fibers of a cluster of
// blocks take turns on one OS thread, and the clusters of a grid are spread over OS threads.
//
// Plain C++. The instructions on top of it are the host twins in arch/, one header per family.
// The engine is meant to be stricter than a GPU. Behaviour that hardware leaves undefined either
// becomes visible in the results (as NaN) or is reported as an error:
//
//   - shared memory starts as NaN (0xff bytes); bytes past its end are checked when a block ends;
//   - the destination of an asynchronous copy is NaN from its issue until the wait that covers it,
//     and its source is read only then; a copy that no wait covers is an error;
//   - a warp collective needs all 32 lanes of a warp at one kind of collective, and a barrier needs
//     all of its threads: a wait that can never end is reported, with the position of each thread;
//   - a named barrier belongs to the warps that reach it first, until a barrier of the whole block
//     frees it. Reported: another warp, which a GPU could count in the wrong round; a thread that
//     arrives twice before the others have arrived, or where they never arrive;
//   - the destination of a TMA copy is NaN from its issue until a thread waits for the phase that
//     counts it. A copy to another block of the cluster reads its source only then. Reported: a
//     source that threads stored without a proxy fence;
//   - accumulators of wgmma are NaN until the wait that covers it, and its operands are read only
//     then. Reported: operands that threads stored without a proxy fence; a TMA copy over operands
//     before every warp has resumed from its wait;
//   - reported: an mbarrier that was not initialised, that gets more arrivals or bytes than its
//     phase counts, or whose phase can never end;
//   - reported: a TMA copy in a grid that overlaps earlier grids, before any thread of the block
//     has executed griddepcontrol.wait;
//   - shared memory of a block whose threads have exited is NaN to the other blocks of its cluster.
//     Reported: a copy to such a block, or an arrival there;
//   - addresses outside shared memory, or not aligned to 16 bytes, are reported by thread.
#pragma once

#include <cstdint>
#include <functional>

#include "core/status.hpp"
#include "core/tensor_map.hpp"

namespace cutlass_attn::simt {

inline constexpr int kWarpSize = 32;

// Which ready thread runs next. A correct kernel cannot tell the difference.
enum class FiberOrder { kForward, kReverse, kRandom };

struct Schedule {
  int num_threads = 0;  // OS threads; 0: the cores that this process may use
  FiberOrder order = FiberOrder::kForward;
  uint64_t seed = 0;  // for kRandom
  // false: undefined behaviour yields a likely value instead of NaN. Shared memory starts as zeros
  // and keeps its contents until an asynchronous copy lands; rows of a wmma matrix may overlap.
  // This hides bugs: use it only to see the effect that a bug would have on a GPU.
  bool poison = true;
  // Rounding of e4m3 products. true: to fp16 after the first half of the products, after the second
  // half, and with the accumulator, as GPUs without native e4m3 products do. false: once. Results
  // may differ by these roundings.
  bool halves_e4m3 = false;
};

struct Grid {
  int64_t blocks = 0;
  int threads = 0;  // per block, a multiple of kWarpSize
  int smem_bytes = 0;
  int cluster = 1;        // blocks of a cluster
  bool overlaps = false;  // may begin before earlier grids end (Launch::overlaps)
};

// Calls body(smem) in every thread of every block. `smem` is the block's shared memory, aligned to
// 1024 bytes. Returns kDeviceError with block and thread numbers for errors of the kernel.
Status run_grid(Grid const& grid, Schedule const& schedule,
                std::function<void(char* smem)> const& body);

// The schedule that a unit's host code, called on this OS thread, runs a grid with. Tests may
// change it. RunOptions has the number of threads.
Schedule& launch_schedule();

// Only the body calls the functions below. Each acts for the calling GPU thread.
namespace engine {

// Constant while a body runs. The attribute lets g++ 12 call them once instead of in inner loops:
// the scalar backward pass takes a quarter of the time.
[[gnu::const]] int thread();
[[gnu::const]] int block();

// __syncthreads
void sync();

// barrier.cluster over all threads of the calling thread's cluster.
void cluster_sync();

// griddepcontrol.wait
void griddepcontrol_wait();

// Between two looks at global memory that blocks on other OS threads change. Ends this block if one
// of them has failed, which may be the one that is waited for.
void wait_for_other_blocks();

// mapa: the address in block `rank` of the cluster that corresponds to `address` in the calling
// thread's block.
void const* mapa(void const* address, int rank);

// bar.sync of barrier 1 to 15 with `threads` threads, a multiple of kWarpSize.
void sync(int barrier, int threads);

// bar.arrive: as bar.sync, without waiting.
void arrive(int barrier, int threads);

// __syncwarp
void sync_warp();

enum class MmaInput { kFloat16, kBFloat16, kInt8, kE4m3 };  // of 8 bits: wgmma alone

// mma.sync.m16n8k16 with fp32 accumulators: c += a b, fragments as in the PTX ISA.
void mma_m16n8k16(MmaInput input, float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]);

// mma.sync.m16n8k32 of int8 with int32 accumulators: d = a b + c. A is uint8 unless `is_signed`. An
// int32 overflow, which hardware wraps, is an error.
void mma_m16n8k32_int8(bool is_signed, int32_t (&d)[4], uint32_t const (&a)[4],
                       uint32_t const (&b)[2], int32_t const (&c)[4]);

// mma.sync.m16n8k32 of e4m3 with fp16 accumulators: d = a b + c. Rounded as in
// Schedule::halves_e4m3.
void mma_m16n8k32_e4m3(uint32_t (&d)[2], uint32_t const (&a)[4], uint32_t const (&b)[2],
                       uint32_t const (&c)[2]);

// Index of the matrix element that is element i of this lane's wmma fragment. The matrix has `size`
// elements, a power of 2.
int wmma_element(int i, int size);

// wmma.mma.sync.m16n16k16, m8n32k16 or m32n8k16: c += a b in fp16 with fp32 accumulators. a, b and
// c are the lane's elements of each matrix.
void wmma(int m, int n, float* c, uint16_t const* a, uint16_t const* b);

// Checks the requirements of wmma.load and wmma.store on a matrix of `lines` rows, or columns, of
// `length` elements each: it is aligned to 32 bytes; a matrix that begins in shared memory ends
// there; its lines do not overlap and are aligned to 16 bytes.
void check_matrix(char const* what, void const* matrix, int ld, int lines, int length, int bytes);

// ldmatrix.x4[.trans]: `row` is the address of the 16-byte row that this lane supplies.
void ldmatrix_x4(bool transposed, void const* row, uint32_t (&d)[4]);

// stmatrix.x4: `row` as for ldmatrix.
void stmatrix_x4(void* row, uint32_t const (&d)[4]);

// movmatrix.trans: takes a pair of a row of the matrix, returns a pair of a row of the transpose.
uint32_t movmatrix_trans(uint32_t pair);

// st.shared and ld.shared of 1, 2 or 4 words.
void store_shared(void* smem, uint32_t const* words, int count);
void load_shared(void const* smem, uint32_t* words, int count);

// shfl.sync.bfly over the whole warp.
uint64_t shuffle_xor(uint64_t value, int lane_mask);

// shfl.sync.idx over the whole warp. `source` may differ between lanes.
uint64_t shuffle(uint64_t value, int source);

// vote.sync.any over the whole warp.
bool any(bool predicate);

// cp.async of 16 bytes. Without `predicate` it reads nothing and writes zeros.
void cp_async(void* smem, void const* global, bool predicate);
void cp_async_commit_group();
// Lands the copies of all but this thread's `pending` newest committed groups. Copies that were
// never committed stay in flight, even for 0, where cp.async.wait_all would include them.
void cp_async_wait_group(int pending);

// mbarrier: init, arrive.expect_tx, and wait and test_wait for the parity of a phase.
void mbarrier_init(void* barrier, int arrivals);
void fence_mbarrier_init();
void mbarrier_arrive(void* barrier, int bytes);
// Of the corresponding barrier of block `rank` of the cluster.
void mbarrier_arrive_cluster(void* barrier, int rank);
void mbarrier_wait(void* barrier, int parity);
bool mbarrier_has_ended(void* barrier, int parity);

// cp.async.bulk.tensor of the box at these coordinates; `map` holds a TensorView. To the same place
// of the blocks of the cluster in the bit mask `blocks`, or, if that is 0, to this block alone.
void tma_load(void* to, TensorMap const& map, void* barrier, unsigned blocks,
              int32_t const (&at)[TensorView::kDims]);

// cp.async.bulk from the block's shared memory to the same place in block `rank` of the cluster,
// counted by the barrier there.
void cp_async_bulk(void const* from, int bytes, int rank, void* barrier);

// wgmma 64 x n x 16 with fp32 accumulators. Either A in registers and B row-major, or column-major
// if `is_transposed`; or both by descriptor: A row-major and B column-major, or, if
// `is_transposed`, A column-major and B row-major. In 8 bits 64 x n x 32, A row-major and B
// column-major; A in registers as for m16n8k32. Accumulators of int8 products are the bits of
// int32. Those of e4m3 products are cut to 13 bits of mantissa after each call, as the hardware's
// sums lose bits.
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
// fence.proxy.async: wgmma may now read what this thread stored in shared memory.
void fence_proxy_async();

// setmaxnreg
void setmaxnreg(int registers);

// Offset of an address in shared memory.
uint32_t smem_offset(void const* address);

}  // namespace engine
}  // namespace cutlass_attn::simt
