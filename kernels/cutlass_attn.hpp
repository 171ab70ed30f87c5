// The C++ interface of libcutlass_attn: fused attention on raw addresses, without torch or Python.
//
//   cutlass_attn::Problem p;            // operands, dimensions, options: see core/problem.hpp
//   ...
//   cutlass_attn::LaunchOptions where;  // device, stream, which kernel
//   where.device = cutlass_attn::Device::kCuda;
//   cutlass_attn::Status status = cutlass_attn::attention_forward(p, where);
//   if (!status.ok()) std::cerr << status.message;
//
// attention_forward() plans the call and runs the plan. plan() and run() are the two halves, for
// programs that keep a plan, or provide the workspace that it asks for.
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

// What is computed of a problem.
enum class Op : int32_t { kForward, kBackward };
inline constexpr int kNumOps = 2;

// A user's function of a logit: what a kernel is compiled with, and what that reads.
struct UserScoreMod {
  std::string name;                // by which the compiler knows its source
  void const* operands = nullptr;  // a struct Mod as core/terms/score_mod.hpp has it
  int32_t bytes = 0;               // of that, up to kMaxBytes

  static constexpr int32_t kMaxBytes = 1024;
};

// Where and how to run a plan.
struct RunOptions {
  int device_index = 0;    // CUDA ordinal; the caller's current device is left as it was
  void* stream = nullptr;  // cudaStream_t; null is the legacy default stream
  int num_threads = 0;     // CPU kernels: 0 means all cores this process may use
  Workspace workspace;     // of the plan's device, unused by others until the run is done
  UserScoreMod const* score_mod = nullptr;  // of a problem that has one
};

// In bytes, of the address of a workspace.
inline constexpr int64_t kWorkspaceAlignment = 16;

// The same of a call that is planned and run at once.
struct LaunchOptions : RunOptions {
  Device device = Device::kCpu;
  std::string kernel = "auto";  // "auto", a kernel ("sm80") or a whole key ("sm80/f16/d64/...")
  // Gives memory to a call whose plan needs more than `workspace` has, and than is kept for the
  // stream, aligned to kWorkspaceAlignment; it may throw. Without it a call on the GPU is then
  // refused, one on the CPU helps itself. Up to 4 MB are kept for the first 4 streams of a GPU that
  // need them, 256 bytes for the first 256 streams, none for others: a program that makes streams
  // as it goes has to allocate.
  std::function<Workspace(int64_t bytes)> allocate;
};

// One compiled (or compilable) kernel instance.
struct VariantInfo {
  std::string key;     // unique: kernel/dtype[/head dim/tile]
  std::string kernel;  // "sm80", "sm80-simt", "scalar/tiled", "cpu", ...
  Op op = Op::kForward;
  Device device = Device::kCpu;
  std::string arch;  // "80": code for any GPU that takes PTX of it; "90a": for that one alone
  DType dtype = DType::kFloat16;
  int head_dim = 0;           // the one it is compiled for; 0: any up to kMaxHeadDim
  int head_dim_v = 0;         // the same for V and O
  int head_dim_multiple = 0;  // takes multiples up to these head dims; 0: them alone
  int max_rows = 0;           // queries times query heads of a KV head; 0: any number
  std::string tile;           // "128x64x4": queries x keys x warps; empty where there is none;
                              // "32x32x2c4": of 2 x 4 warps, 4 of which share rows
  Accumulate accumulate = Accumulate::kFloat32;  // what it adds products up in
  Quantize quantize = Quantize::kNone;           // what it multiplies in 8 bits
  std::vector<std::string> options;  // what it implements of the options that a kernel may lack
  std::vector<std::string> needs;    // what of these a call has to ask for
  std::string tier;                  // "core", "full", or "tuned": added by add_tile()
  bool compiled = false;             // false: named by the manifest, left out of this build; true:
                                     // in it, perhaps with some of its scores alone
  bool automatic = false;            // false: runs only when asked for by name
};

struct Verdict {
  std::string key;
  bool chosen = false;
  std::string reason;           // why another one runs or none; empty if chosen
  int splits = 1;               // if chosen: how many thread blocks share the keys of a tile
  int64_t workspace_bytes = 0;  // if chosen: as in the plan
  int max_launches = 0;         // if chosen: of GPU kernels, 0 on a CPU; some may turn out empty
  std::string score;            // if chosen: terms of a GPU kernel's score, as softcap_alibi
  bool at_first_use = false;    // if chosen: whether this build left its kernel with that score out
};

// A kernel that dispatch prefers to the one that runs, for calls of this kind.
struct PassedOver {
  std::string kernel;
  std::string reason;  // of the first of its variants that come closest to running the call
  int count = 0;       // of these variants
};

// What dispatch looks at; filled from the present device, or by hand to ask about another one.
struct DeviceInfo : DeviceLimits {
  Device device = Device::kCpu;
  std::string unavailable;  // why nothing can run there, e.g. no driver; empty if it can
};

struct Variant;

// What runs a problem on a device: kernels, one after the other. It stays valid as long as the
// process, for problems of the same sizes, strides, alignment and options.
struct Plan {
  static constexpr int kMaxSteps = 4;

  Op op = Op::kForward;
  Device device = Device::kCpu;
  int num_steps = 0;
  Variant const* steps[kMaxSteps] = {};  // each is one launch; key_of() names it
  int64_t workspace_bytes = 0;           // that run() needs in RunOptions::workspace
};

// Which plan a problem has on a device, and why no other.
struct Explanation {
  Plan plan;  // no steps: the problem has none there
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
// The same as plan() and run(). Enqueues on options.stream (CUDA) or returns when done (CPU). Sizes
// of zero are valid: seqlen_k = 0 gives O = 0 and LSE = -inf.
CUTLASS_ATTN_API Status attention_forward(Problem const& problem, LaunchOptions const& options);

// Gradients of that by what Problem::grad names, from the output and the LSE of the forward call.
// Rows without a visible key have gradients of zero. Otherwise as attention_forward().
CUTLASS_ATTN_API Status attention_backward(Problem const& problem, LaunchOptions const& options);

// Whether a kernel that is not scalar gives problem.grad->bias in its bias_dtype. All kernels give
// it in float32.
CUTLASS_ATTN_API bool gives_bias_grad(Problem const& problem, LaunchOptions const& options);

// Writes new rows of K and V into a cache: see AppendProblem. Enqueues on options.stream (CUDA) or
// returns when done (CPU). The kernel is always the same one; options.kernel is not read.
CUTLASS_ATTN_API Status append_kv(AppendProblem const& problem, LaunchOptions const& options);

// Makes one result of those over two disjoint sets of keys: see MergeProblem. Otherwise as
// append_kv().
CUTLASS_ATTN_API Status merge_states(MergeProblem const& problem, LaunchOptions const& options);

// Whether the request is valid, regardless of device; attention_forward() and attention_backward()
// ask the same.
CUTLASS_ATTN_API Status check(Problem const& problem, Op op = Op::kForward);

// Chooses what runs a problem, by check() and the names that LaunchOptions::kernel takes. An error
// says what each kernel lacks. Nothing of the device is touched.
CUTLASS_ATTN_API Status plan(Problem const& problem, Op op, DeviceInfo const& device,
                             std::string const& kernel, Plan& result);

// Runs a plan: enqueues it (CUDA), or returns when it is done (CPU). A kernel that this build left
// out is compiled at its first run; if the compiler refuses it, the error is kNoKernel, and plan()
// then knows of that.
CUTLASS_ATTN_API Status run(Plan const& plan, Problem const& problem, RunOptions const& options);

// The key, as in variants(), of a step of a plan.
CUTLASS_ATTN_API std::string const& key_of(Variant const& step);

// Every variant of the manifest, of every op, in order of preference.
CUTLASS_ATTN_API std::vector<VariantInfo> variants();

// The plan of a problem, and for every variant of the op why it is passed over. A problem that no
// kernel takes is explained; an error means that check() refuses it.
CUTLASS_ATTN_API Status explain(Problem const& problem, Op op, DeviceInfo const& device,
                                std::string const& kernel, Explanation& result);

// The present device; `device_index` is the CUDA ordinal.
CUTLASS_ATTN_API DeviceInfo device_info(Device device, int device_index = 0);

// A GPU that need not be present: what a common product of this compute capability has.
CUTLASS_ATTN_API DeviceInfo typical_device(int compute_capability);

CUTLASS_ATTN_API BuildInfo build_info();

// Bytes of the GPU with this CUDA ordinal that the library keeps for calls, until the process ends:
// 18 MB at most, however many streams there were. Memory that `allocate` gave is not among them.
CUTLASS_ATTN_API int64_t kept_bytes(int device_index = 0);

// Provides a GPU variant of variants() that this build left out, for the GPU with this CUDA
// ordinal: compiles it and calls load_kernel(), or says why it cannot. It may also call
// refuse_kernel(), or set another compiler, or none; the kernel is then chosen anew. Called by
// whatever thread first wants it.
using Compiler = Status (*)(std::string const& key, int device_index);

// Of a score_mod the key is that of the variant, "+", the name of a score, "+", and the name of the
// function.
//
// Null: nothing is compiled at run time, and `why_not` is what dispatch answers. That is also how a
// program starts; cutlass_attn's Python package sets a compiler.
CUTLASS_ATTN_API void set_compiler(Compiler compiler, std::string why_not = "");

// Dispatch passes this variant over from now on, for `why_not`, unless load_kernel() provides it:
// the compiler cannot compile it.
CUTLASS_ATTN_API Status refuse_kernel(std::string const& key, std::string why_not);

// Makes a variant that this build left out run on GPUs of the same compute capability as this one.
// `cubin` is of the variant's source, compiled by NVRTC: it has an entry per score functor, and
// what the kernel says of itself.
CUTLASS_ATTN_API Status load_kernel(std::string const& key, int device_index, void const* cubin);

// --- Tuning: before any function above has chosen or listed variants -----------------------------

// A tile that the manifest does not list.
struct AddedTile {
  std::string kernel;  // of the manifest, with rows at these head dims
  int head_dim = 0, head_dim_v = 0;
  std::string tile;  // as in a key: it begins with the rows of a tile, "64x"
};

// Adds a variant with this tile for every dtype that the kernel has at these head dims, unless
// there is one. It is compiled at first use. An error names what is wrong and changes nothing.
CUTLASS_ATTN_API Status add_tile(AddedTile const& tile);

// Which tile of a kernel is for calls with at least min_blocks_per_sm thread blocks per SM, on GPUs
// with so much shared memory an SM (in KB): 100, 164 or 228. Of several rules the first holds.
// Those with `decode` are for calls of at most kMaxDecodeQueries queries; where a kernel has none
// for its head dims and class, the others are for those calls as well.
struct TileRule {
  int smem_kb = 0;
  std::string kernel;
  int head_dim = 0, head_dim_v = 0;
  std::string tile;
  float min_blocks_per_sm = 0.0f;
  bool decode = false;
};

// Adds a rule. The first for a kernel, head dims, class of GPUs and `decode` puts those of the
// build out of force. An error, such as a tile that no variant has, changes nothing.
CUTLASS_ATTN_API Status prefer_tile(TileRule const& rule);

// The rules that are in force.
CUTLASS_ATTN_API std::vector<TileRule> tile_rules();

// Notes that a variant fails a gate on such GPUs: tiles that fail none are chosen before it.
CUTLASS_ATTN_API Status mark_failing(int smem_kb, std::string const& key, std::string reason);

}  // namespace cutlass_attn
