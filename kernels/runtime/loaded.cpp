// CMake defines CUTLASS_ATTN_CUDA as 0 or 1.
#include "runtime/loaded.hpp"

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/device.hpp"

#if CUTLASS_ATTN_CUDA
#include <cuda_runtime_api.h>
#endif

namespace cutlass_attn {
namespace {

#if CUTLASS_ATTN_CUDA && CUDART_VERSION < 12080
constexpr char const* kCannotLoad =
    "kernels are compiled at first use only by a build with CUDA 12.8 or later";
#else
constexpr char const* kCannotLoad = nullptr;
#endif

struct CompilerState {
  Compiler compile;
  std::string why_not;
};

std::atomic<CompilerState const*>& compiler_state() {
  static CompilerState const none{nullptr, "no compiler is set: see set_compiler()"};
  static std::atomic<CompilerState const*> state{&none};
  return state;
}

// Loaded instances of one variant, the newest first. Nodes are never removed, because other threads
// may be reading them.
struct Node {
  int compute_capability;
  KernelUnit unit;
  Node const* next;
};

std::atomic<Node const*>& head_of(Variant const& variant) {
  static std::vector<std::atomic<Node const*>> heads(registry().size());
  return heads[size_t(&variant - registry().data())];
}

// Why a score of a variant cannot be compiled, or null.
std::atomic<std::string const*>& refusal_of(Variant const& variant, int score) {
  static std::vector<std::atomic<std::string const*>> refusals(registry().size() * kMaxScores);
  return refusals[size_t(&variant - registry().data()) * kMaxScores + size_t(score)];
}

// The meaning of a key.
struct LeftOut {
  Variant const* variant = nullptr;  // null: names no kernel that this build left out
  int first = 0, last = 0;           // scores [first, last) of the variant
  std::string score_mod = {};        // name of the score_mod; empty: none
};

// Kernels with a user's score_mod, the newest first. Never removed either.
struct ModNode {
  Variant const* variant;
  int score;
  std::string score_mod;
  Node node;
  ModNode const* next;
};

std::atomic<ModNode const*>& mods() {
  static std::atomic<ModNode const*> head{nullptr};
  return head;
}

LeftOut find_left_out(std::string const& key, Status& status) {
  size_t const plus = key.find('+');
  for (Variant const& variant : registry()) {
    if (key.compare(0, plus, variant.info.key) != 0) continue;
    KernelArguments const& arguments = variant.kernel->arguments;
    size_t const second = plus == std::string::npos ? plus : key.find('+', plus + 1);
    for (int i = 0; second != std::string::npos && i < arguments.num_scores; ++i) {
      if (key.compare(plus + 1, second - plus - 1, arguments.scores[i].token) == 0) {
        return {&variant, i, i + 1, key.substr(second + 1)};
      }
    }
    if (!variant.can_load || second != std::string::npos) continue;
    int first = 0;
    while (!is_left_out(variant, first)) ++first;
    if (plus == std::string::npos) return {&variant, first, std::max(1, arguments.num_scores)};
    for (int i = first; i < arguments.num_scores; ++i) {
      if (key.compare(plus + 1, std::string::npos, arguments.scores[i].token) == 0) {
        return {&variant, i, i + 1};
      }
    }
  }
  status = Status::invalid("key is \"" + key +
                           "\", allowed: a GPU variant that this build left out, with or without "
                           "\"+\" and a score, or a variant whose score this build left out");
  return {};
}

}  // namespace

void set_compiler(Compiler compiler, std::string why_not) {
  static std::mutex mutex;
  // Never freed, because other threads may be reading it.
  static std::vector<std::unique_ptr<CompilerState const>> all;
  std::lock_guard const lock(mutex);
  if (kCannotLoad != nullptr) {
    compiler = nullptr;
    why_not = kCannotLoad;
  }
  if (compiler != nullptr) {
    why_not.clear();
  } else if (why_not.empty()) {
    why_not = "no compiler is set: see set_compiler()";
  }
  CompilerState const& now = *compiler_state().load();
  if (now.compile == compiler && now.why_not == why_not) return;
  all.push_back(std::make_unique<CompilerState const>(CompilerState{compiler, std::move(why_not)}));
  compiler_state().store(all.back().get());
}

void refuse(Variant const& variant, int score, std::string why_not) {
  static std::mutex mutex;
  // Never freed, because other threads may be reading it.
  static std::vector<std::unique_ptr<std::string const>> all;
  if (why_not.empty()) why_not = "refused";
  std::lock_guard const lock(mutex);
  all.push_back(std::make_unique<std::string const>(std::move(why_not)));
  refusal_of(variant, score).store(all.back().get());
}

Status refuse_kernel(std::string const& key, std::string why_not) {
  Status status;
  LeftOut const named = find_left_out(key, status);
  if (named.variant == nullptr) return status;
  for (int score = named.first; score < named.last; ++score) {
    refuse(*named.variant, score, why_not);
  }
  return {};
}

std::string entry_key(Variant const& variant, int score, std::string const& score_mod) {
  KernelArguments const& arguments = variant.kernel->arguments;
  if (score_mod.empty() && arguments.num_scores <= 1) return variant.info.key;
  std::string const key = variant.info.key + "+" + arguments.scores[score].token;
  return score_mod.empty() ? key : key + "+" + score_mod;
}

std::string const& why_not_compiled(Variant const& variant, int score) {
  std::string const* const refusal = refusal_of(variant, score).load();
  return refusal != nullptr ? *refusal : compiler_state().load()->why_not;
}

KernelUnit const* loaded(Variant const& variant, int score, int compute_capability) {
  for (Node const* node = head_of(variant).load(std::memory_order_acquire); node;
       node = node->next) {
    if (node->compute_capability == compute_capability && node->unit.device_code[score]) {
      return &node->unit;
    }
  }
  return nullptr;
}

KernelUnit const* loaded_with(Variant const& variant, int score, std::string const& score_mod,
                              int compute_capability) {
  for (ModNode const* mod = mods().load(std::memory_order_acquire); mod; mod = mod->next) {
    if (mod->variant == &variant && mod->score == score && mod->score_mod == score_mod &&
        mod->node.compute_capability == compute_capability) {
      return &mod->node.unit;
    }
  }
  return nullptr;
}

Status compile(Variant const& variant, int score, std::string const& score_mod, int device_index) {
  std::string const& why_not = why_not_compiled(variant, score);
  CompilerState const& state = *compiler_state().load();
  if (!why_not.empty() || state.compile == nullptr) return Status::device_error(why_not);
  return state.compile(entry_key(variant, score, score_mod), device_index);
}

#if CUTLASS_ATTN_CUDA

Status may_load(Variant const& variant, int score, std::string const& score_mod, void* stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t const error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture);
  if (error != cudaSuccess) return cuda_status(error, "cudaStreamIsCapturing");
  if (capture == cudaStreamCaptureStatusNone) return {};
  std::string const key = entry_key(variant, score, score_mod);
  return Status::device_error(
      "kernel " + key +
      " is compiled at first use, and cannot be loaded while its stream is captured into a CUDA "
      "graph: before that, make the call once, or " +
      (score_mod.empty() ? "cutlass_attn.warmup(names=\"" + key + "\")"
                         : "cutlass_attn.warmup() with its arguments"));
}

#else

Status may_load(Variant const&, int, std::string const&, void*) { return {}; }

#endif

#if CUTLASS_ATTN_CUDA && CUDART_VERSION >= 12080  // cudaLibraryLoadData

namespace {

// Copies to the host on a non-blocking stream. cudaMemcpy would use the legacy stream, which
// invalidates the capture of any stream that synchronises with it.
cudaError_t copy_to_host(void* to, void const* from, size_t bytes) {
  cudaStream_t stream;
  cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error != cudaSuccess) return error;
  error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  (void)cudaStreamDestroy(stream);
  return error;
}

// Reads the exported facts of the code, and its entries by score.
Status read_unit(LeftOut const& named, cudaLibrary_t library, KernelUnit& unit) {
  Variant const& variant = *named.variant;
  std::string const facts = variant.symbol + "__facts";
  void* address = nullptr;
  size_t bytes = 0;
  cudaError_t error = cudaLibraryGetGlobal(&address, &bytes, library, facts.c_str());
  if (error == cudaSuccess && bytes != sizeof(KernelFacts)) {
    return Status::device_error(facts + " has " + std::to_string(bytes) +
                                " bytes, allowed: " + std::to_string(sizeof(KernelFacts)));
  }
  if (error == cudaSuccess) error = copy_to_host(&unit.facts, address, sizeof(KernelFacts));
  if (error != cudaSuccess) return cuda_status(error, facts.c_str());
  KernelArguments const& arguments = variant.kernel->arguments;
  for (int i = named.first; i < named.last; ++i) {
    std::string entry = variant.symbol + "__" + arguments.scores[i].token;
    if (variant.plain_scores >> i & 1) entry.erase(0, std::string("cutlass_").size());
    cudaKernel_t kernel;
    error = cudaLibraryGetKernel(&kernel, library, entry.c_str());
    if (error != cudaSuccess) return cuda_status(error, entry.c_str());
    unit.device_code[i] = kernel;
  }
  for (int i = 0; arguments.has_pre_post() && i < kNumPrePost; ++i) {
    std::string const entry = variant.symbol + "__" + kPrePostTokens[i];
    cudaKernel_t kernel;
    error = cudaLibraryGetKernel(&kernel, library, entry.c_str());
    if (error != cudaSuccess) return cuda_status(error, entry.c_str());
    unit.device_pre_post[i] = kernel;
  }
  return {};
}

}  // namespace

Status load_kernel(std::string const& key, int device_index, void const* cubin) {
  Status status;
  LeftOut const named = find_left_out(key, status);
  if (named.variant == nullptr) return status;
  DeviceGuard const guard(device_index);
  if (!guard.status().ok()) return guard.status();
  RelaxedCapture const relaxed;
  if (!relaxed.status().ok()) return relaxed.status();

  cudaLibrary_t library;
  cudaError_t error =
      cudaLibraryLoadData(&library, cubin, nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (error != cudaSuccess) return cuda_status(error, "cudaLibraryLoadData");
  int const capability = device_info(Device::kCuda, device_index).compute_capability;
  if (!named.score_mod.empty()) {
    std::unique_ptr<ModNode> mod(new ModNode{
        named.variant, named.first, named.score_mod, {capability, {{}, {}, {}}, nullptr}, nullptr});
    status = read_unit(named, library, mod->node.unit);
    if (!status.ok()) {
      (void)cudaLibraryUnload(library);
      return status;
    }
    mod->next = mods().load();
    while (!mods().compare_exchange_weak(mod->next, mod.get(), std::memory_order_release)) {
    }
    (void)mod.release();
    return {};
  }
  std::unique_ptr<Node> node(new Node{capability, {{}, {}, {}}, nullptr});
  status = read_unit(named, library, node->unit);
  if (!status.ok()) {
    (void)cudaLibraryUnload(library);
    return status;
  }
  std::atomic<Node const*>& head = head_of(*named.variant);
  node->next = head.load();
  while (!head.compare_exchange_weak(node->next, node.get(), std::memory_order_release)) {
  }
  (void)node.release();  // the library stays loaded until the process ends
  return {};
}

#else

Status load_kernel(std::string const&, int, void const*) {
  return Status::device_error(kCannotLoad != nullptr ? kCannotLoad
                                                     : "this build has no CUDA kernels");
}

#endif

}  // namespace cutlass_attn
