// The C++ interface of libcutlass_attn: fused attention on raw addresses, without torch or Python.
//
//   cutlass_attn::Problem p;            // operands, dimensions, options: see core/problem.hpp
//   ...
//   cutlass_attn::LaunchOptions where;  // device, stream, which kernel
//   where.device = cutlass_attn::Device::kCuda;
//   cutlass_attn::Status status = cutlass_attn::attention_forward(p, where);
//   if (!status.ok()) std::cerr << status.message;
//
// attention_forward() plans the call and runs the plan. Programs that keep a plan, or provide its
// workspace, call the two halves, plan() and run().
//
// All functions are thread-safe. None of them synchronises a CUDA stream.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/append.hpp"
#include "core/launch.hpp"
#include "core/merge.hpp"
#include "core/problem.hpp"
#include "core/status.hpp"

#define CUTLASS_ATTN_API __attribute__((visibility("default")))

namespace cutlass_attn {

enum class Device : int32_t { kCpu, kCuda };

// Operation on a problem.
enum class Op : int32_t { kForward, kBackward };
inline constexpr int kNumOps = 2;

// A user's function of a logit, with which a kernel is compiled, and its operands.
struct UserScoreMod {
  std::string name;                // by which the compiler finds its source
  void const* operands = nullptr;  // a struct Mod (core/terms/score_mod.hpp)
  int32_t bytes = 0;               // size of the operands, up to kMaxBytes

  static constexpr int32_t kMaxBytes = 1024;
};

// Where and how to run a plan.
struct RunOptions {
  int device_index = 0;    // CUDA ordinal; the caller's current device stays current
  void* stream = nullptr;  // cudaStream_t; null is the legacy default stream
  int num_threads = 0;     // CPU kernels: 0 means all cores this process may use
  Workspace workspace;     // on the plan's device; not used by others until the run is done
  UserScoreMod const* score_mod = nullptr;  // set if the problem has a score_mod
};

// Alignment of a workspace, in bytes.
inline constexpr int64_t kWorkspaceAlignment = 16;

// Options of a call that is planned and run at once.
struct LaunchOptions : RunOptions {
  Device device = Device::kCpu;
  std::string kernel = "auto";  // "auto", a kernel ("sm80") or a whole key ("sm80/f16/d64/...")
  // Allocates memory for a call whose plan needs more than `workspace` has and more than is kept
  // for the stream. The memory must be aligned to kWorkspaceAlignment; the function may throw.
  // Without it, a call on the GPU then fails, and a call on the CPU allocates by itself. The
  // library keeps up to 4 MB for each of the first 4 streams of a GPU that need them, and 256 bytes
  // for each of the first 256 streams. A program that creates streams continually has to allocate.
  std::function<Workspace(int64_t bytes)> allocate;
};

// One compiled (or compilable) kernel instance.
struct VariantInfo {
  std::string key;     // unique: kernel/dtype[/head dim/tile]
  std::string kernel;  // "sm80", "sm80-simt", "scalar/tiled", "cpu", ...
  Op op = Op::kForward;
  Device device = Device::kCpu;
  std::string arch;  // "80": runs on every GPU that can run its PTX; "90a": only on sm_90
  DType dtype = DType::kFloat16;
  int head_dim = 0;    // head dim that it is compiled for; 0: any up to kMaxHeadDim
  int head_dim_v = 0;  // likewise for V and O
  // Also takes smaller head dims that are multiples of this; 0: only its own.
  int head_dim_multiple = 0;
  int max_rows = 0;  // limit of queries times query heads per KV head; 0: none
  std::string tile;  // "128x64x4": queries x keys x warps; "32x32x2c4": 2 x 4 warps, 4 of
                     // which share rows; empty: no tile
  Accumulate accumulate = Accumulate::kFloat32;  // accumulator of products
  Quantize quantize = Quantize::kNone;           // products in 8 bits
  std::vector<std::string> options;  // options that it implements, of those that a kernel may lack
  std::vector<std::string> needs;    // options that a call must use
  std::string tier;                  // "core", "full", or "tuned": added by add_tile()
  bool compiled = false;             // false: left out of this build; true: compiled in, possibly
                                     // with some of its scores only
  bool automatic = false;            // false: runs only if requested by name
};

struct Verdict {
  std::string key;
  bool chosen = false;
  std::string reason;           // why another variant or none runs; empty if chosen
  int splits = 1;               // if chosen: thread blocks that share the keys of a tile
  int64_t workspace_bytes = 0;  // if chosen: as in the plan
  int max_launches = 0;         // if chosen: GPU kernels launched, 0 on a CPU; some may be empty
  std::string score = {};       // if chosen: terms of a GPU kernel's score, such as softcap_alibi
  bool at_first_use = false;  // if chosen: whether the kernel with this score is not in this build
};

// A kernel that dispatch prefers to the chosen one, for calls of this kind.
struct PassedOver {
  std::string kernel;
  std::string reason;  // reason of the first of the variants that come closest to running the call
  int count = 0;       // number of these variants
};

// Properties of a device that dispatch depends on. Filled from the present device, or by hand to
// ask about another one.
struct DeviceInfo : DeviceLimits {
  Device device = Device::kCpu;
  std::string unavailable;  // why nothing can run there, such as a missing driver; empty if it can
};

struct Variant;

// The kernels that run a problem on a device, one after the other. Valid until the process ends,
// for problems of equal sizes, strides, alignment and options.
struct Plan {
  static constexpr int kMaxSteps = 4;

  Op op = Op::kForward;
  Device device = Device::kCpu;
  int num_steps = 0;
  Variant const* steps[kMaxSteps] = {};  // key_of() names a step
  int64_t workspace_bytes = 0;           // required size of RunOptions::workspace
};

// The plan of a problem on a device, and why the other variants are not in it.
struct Explanation {
  Plan plan;  // without steps: no kernel can run the problem there
  std::vector<Verdict> verdicts;
  std::vector<PassedOver> passed_over;  // in order of preference
};

struct BuildInfo {
  std::string version;
  std::string tier;           // "core" or "full"
  std::string cuda;           // toolkit version, empty for a CPU-only build
  std::string architectures;  // "compute_80,sm_89"
  std::string cutlass;        // version of the headers
  std::string compiler;       // host compiler
  std::string simt;           // "all", "scalar" or "none": kernels also compiled for the CPU
};

// O = softmax(score(Q K^T) + mask) V for every (batch, query head); see Problem for the operands.
// Equal to plan() and run(). Enqueues on options.stream (CUDA) or returns when done (CPU). Sizes of
// zero are valid: seqlen_k = 0 gives O = 0 and LSE = -inf.
CUTLASS_ATTN_API Status attention_forward(Problem const& problem, LaunchOptions const& options);

// Gradients of attention_forward() with respect to the operands named in Problem::grad, from the
// output and the LSE of the forward call. Rows without a visible key have zero gradients. Otherwise
// as attention_forward().
CUTLASS_ATTN_API Status attention_backward(Problem const& problem, LaunchOptions const& options);

// Whether a kernel that is not scalar writes problem.grad->bias in its bias_dtype. All kernels can
// write it in float32.
CUTLASS_ATTN_API bool gives_bias_grad(Problem const& problem, LaunchOptions const& options);

// Writes new rows of K and V into a cache: see AppendProblem. Enqueues on options.stream (CUDA) or
// returns when done (CPU). There is one kernel, so options.kernel is not read.
CUTLASS_ATTN_API Status append_kv(AppendProblem const& problem, LaunchOptions const& options);

// Merges the results over two disjoint sets of keys: see MergeProblem. Otherwise as append_kv().
CUTLASS_ATTN_API Status merge_states(MergeProblem const& problem, LaunchOptions const& options);

// Whether the request is valid on any device. attention_forward() and attention_backward() make the
// check themselves.
CUTLASS_ATTN_API Status check(Problem const& problem, Op op = Op::kForward);

// Chooses the kernels that run a problem. Applies check(). `kernel`: a name as in
// LaunchOptions::kernel. The error says what each kernel lacks. Does not access the device.
CUTLASS_ATTN_API Status plan(Problem const& problem, Op op, DeviceInfo const& device,
                             std::string const& kernel, Plan& result);

// Runs a plan: enqueues it (CUDA), or returns when it is done (CPU). A kernel that this build left
// out is compiled at its first run. If the compiler cannot compile it, the error is kNoKernel, and
// plan() does not choose it again.
CUTLASS_ATTN_API Status run(Plan const& plan, Problem const& problem, RunOptions const& options);

// The key of a step of a plan, as in variants().
CUTLASS_ATTN_API std::string const& key_of(Variant const& step);

// Every variant of the manifest, of every op, in order of preference.
CUTLASS_ATTN_API std::vector<VariantInfo> variants();

// The plan of a problem, and for every variant of the op why it is not chosen, also if none can run
// it. An error: check() rejects the problem, or no variant has the kernel's name.
CUTLASS_ATTN_API Status explain(Problem const& problem, Op op, DeviceInfo const& device,
                                std::string const& kernel, Explanation& result);

// The present device; `device_index` is the CUDA ordinal.
CUTLASS_ATTN_API DeviceInfo device_info(Device device, int device_index = 0);

// A GPU that need not be present: typical properties of a product of this compute capability.
CUTLASS_ATTN_API DeviceInfo typical_device(int compute_capability);

CUTLASS_ATTN_API BuildInfo build_info();

// GPU memory that the library keeps for calls until the process ends, in bytes, on the GPU with
// this CUDA ordinal: at most 18 MB, however many streams there were. Memory from `allocate` is not
// included.
CUTLASS_ATTN_API int64_t kept_bytes(int device_index = 0);

// Provides a GPU variant of variants() that this build left out, for the GPU with this CUDA
// ordinal: compiles it and calls load_kernel(), or returns why it cannot. It may also call
// refuse_kernel(), or set another compiler or none; a kernel is then chosen again. Called by the
// thread that first needs the variant.
using Compiler = Status (*)(std::string const& key, int device_index);

// For a score_mod the key is that of the variant, "+", the name of a score, "+", and the name of
// the function.
//
// Null: nothing is compiled at run time, and `why_not` is the reason that dispatch reports. This is
// the initial state; the Python package cutlass_attn sets a compiler.
CUTLASS_ATTN_API void set_compiler(Compiler compiler, std::string why_not = "");

// For a variant that the compiler cannot compile: from now on dispatch does not choose it, with the
// reason `why_not`, unless load_kernel() provides it.
CUTLASS_ATTN_API Status refuse_kernel(std::string const& key, std::string why_not);

// Makes a variant that this build left out available on GPUs with the compute capability of this
// one. `cubin`: the variant's source, compiled by NVRTC. It has an entry per score functor, and the
// facts that the kernel exports.
CUTLASS_ATTN_API Status load_kernel(std::string const& key, int device_index, void const* cubin);

// --- Tuning: before any function above has chosen or listed variants -----------------------------

// A tile that the manifest does not list.
struct AddedTile {
  std::string kernel;  // of the manifest, with rows for these head dims
  int head_dim = 0, head_dim_v = 0;
  std::string tile;  // as in a key; begins with the rows of a tile, "64x"
};

// Whether a kernel can have a tile, before it is compiled. Only known of mma.sync forward kernels.
struct TileCheck {
  std::string why_not;  // empty if it can
  bool spills = false;  // whether a thread certainly has more values than registers
};
CUTLASS_ATTN_API TileCheck check_tile(AddedTile const& tile);

// Adds a variant with this tile for every dtype that the kernel has at these head dims, unless it
// exists. It is compiled at first use. If there is an error, such as a tile that the kernel cannot
// have, nothing changes.
CUTLASS_ATTN_API Status add_tile(AddedTile const& tile);

// A preferred tile of a kernel, on GPUs with this shared memory per SM in KB: 100, 164 or 228. The
// first rule of a kernel is used whose tile gives the call at least kMinTilesPerSm thread blocks
// per SM, else the last rule. Rules with `decode` are for calls of at most kMaxDecodeQueries
// queries. If a kernel has no such rule for its head dims and class, the other rules apply to these
// calls as well.
struct TileRule {
  int smem_kb = 0;
  std::string kernel;
  int head_dim = 0, head_dim_v = 0;
  std::string tile;
  bool decode = false;
};

// Adds a rule. The first rule for a kernel, head dims, GPU class and `decode` replaces the rules of
// the build. If there is an error, such as a tile that no variant has, nothing changes.
CUTLASS_ATTN_API Status prefer_tile(TileRule const& rule);

// The rules in force.
CUTLASS_ATTN_API std::vector<TileRule> tile_rules();

// Records that a variant fails a gate on this class of GPUs. Tiles that fail none are chosen before
// it.
CUTLASS_ATTN_API Status mark_failing(int smem_kb, std::string const& key, std::string reason);

}  // namespace cutlass_attn
