// The public interface, built from check, dispatch and device. CMake defines the CUTLASS_ATTN_*
// strings.
#include "cutlass_attn.hpp"

#include <cstdint>
#include <memory>
#include <new>
#include <optional>

#include "cpu/attention.hpp"
#include "mask_maps.hpp"
#include "prequantize.hpp"
#include "runtime/check_lengths.hpp"
#include "runtime/device.hpp"
#include "runtime/dispatch.hpp"
#include "runtime/kept.hpp"
#include "runtime/loaded.hpp"
#include "runtime/options.hpp"
#include "runtime/refusal.hpp"

namespace cutlass_attn {

namespace {

Status check(Problem const& problem, Op op, Device device) {
  if (device != Device::kCpu && device != Device::kCuda) {
    return Status::invalid("device is " + std::to_string(int(device)) +
                           ", allowed: 0 (CPU), 1 (CUDA)");
  }
  return check(problem, op);
}

Plan plan_of(Problem const& problem, Op op, DeviceInfo const& device, Variant const& variant) {
  Plan plan;
  plan.op = op;
  plan.device = device.device;
  plan.num_steps = 1;
  plan.steps[0] = &variant;
  if (variant.kernel->function == nullptr) {
    plan.workspace_bytes =
        variant.kernel->arguments.workspace_bytes(problem, device, facts_of(variant));
  }
  return plan;
}

// The instance of a variant with the score that fits the call; compiled now if needed.
Status provide(Variant const& variant, Problem const& problem, DeviceInfo const& device,
               RunOptions const& options, KernelUnit const*& unit) {
  int const score = score_of(variant.kernel->arguments, problem);
  std::string const mod = options.score_mod != nullptr ? options.score_mod->name : "";
  auto const find = [&] {
    return mod.empty() ? loaded(variant, score, device.compute_capability)
                       : loaded_with(variant, score, mod, device.compute_capability);
  };
  unit = variant.unit;
  if (mod.empty() && !is_left_out(variant, score)) return {};
  unit = find();
  if (unit != nullptr) return {};
  Status status = may_load(variant, score, mod, options.stream);
  if (status.ok()) status = compile(variant, score, mod, options.device_index);
  if (!status.ok()) return status;
  unit = find();
  if (unit == nullptr) {
    // set_compiler() or refuse_kernel() has reported that there will be none.
    std::string const& refusal = why_not_compiled(variant, score);
    std::string const key = entry_key(variant, score, mod);
    if (!refusal.empty()) return Status::no_kernel(key + ": " + refusal);
    return Status::device_error("the compiler did not provide " + key);
  }
  if (unit->facts.smem_bytes > device.smem_per_block) {
    std::string const why_not = std::to_string(unit->facts.smem_bytes) +
                                " bytes of shared memory are too many for this device";
    if (!mod.empty()) refuse(variant, score, why_not);
    return Status::no_kernel(variant.info.key + ": " + why_not);
  }
  return {};
}

Status run_step(Variant const& variant, Problem const& problem, DeviceInfo const& device,
                RunOptions const& options, Part part) {
  KernelArguments const& arguments = variant.kernel->arguments;
  if (part == Part::kBefore && !arguments.has_pre_post()) return {};
  if (variant.kernel->function) return variant.kernel->function(problem, options);
  KernelUnit const* unit = variant.unit;
  if (device.device == Device::kCuda) {
    Status const status = provide(variant, problem, device, options, unit);
    if (!status.ok()) return status;
  }
  return launch(arguments, *unit, problem, device, options, part);
}

// Whether there is nothing to compute. A backward pass without queries still clears the gradients
// of K and V.
bool is_empty(Problem const& p, Op op) {
  if (p.batch == 0 || p.num_heads_q == 0) return true;
  return p.seq_q.seqlen == 0 && (op == Op::kForward || p.seq_k.seqlen == 0);
}

Status run(Plan const& plan, Problem const& problem, DeviceInfo const& device,
           RunOptions const& options, Part part = Part::kAll) {
  // First, because a call that passes one length as two offsets looks like a call without
  // sequences.
  if (plan.device == Device::kCpu) {
    Status const status = check_lengths(problem);
    if (!status.ok()) return status;
  }
  if (is_empty(problem, plan.op)) return {};
  if (options.workspace.bytes < plan.workspace_bytes) {
    return Status::invalid("workspace has " + std::to_string(options.workspace.bytes) +
                           " bytes, the plan needs " + std::to_string(plan.workspace_bytes));
  }
  auto const address = reinterpret_cast<uintptr_t>(options.workspace.data);
  if (plan.workspace_bytes > 0 && address % kWorkspaceAlignment != 0) {
    return Status::invalid("workspace's address is " + std::to_string(address) +
                           ", allowed: multiples of " + std::to_string(kWorkspaceAlignment));
  }
  std::optional<DeviceGuard> guard;
  if (plan.device == Device::kCuda) {
    guard.emplace(options.device_index);
    if (!guard->status().ok()) return guard->status();
  }
  for (int i = 0; i < plan.num_steps; ++i) {
    Status status = run_step(*plan.steps[i], problem, device, options, part);
    if (!status.ok()) return status;
  }
  return {};
}

// Whether the plan's only launch is the one that uses its workspace. Then no launch of another
// thread on this stream can come between two launches of the plan.
bool is_one_launch(Plan const& plan) {
  return plan.num_steps == 1 && !plan.steps[0]->kernel->arguments.has_pre_post();
}

int max_launches_of(Plan const& plan) {
  if (plan.device != Device::kCuda) return 0;
  int launches = 0;
  for (int i = 0; i < plan.num_steps; ++i) {
    launches += plan.steps[i]->kernel->arguments.has_pre_post() ? 1 + kNumPrePost : 1;
  }
  return launches;
}

// Memory for a plan: the memory kept for its stream, memory from the caller's `allocate`, or host
// memory.
Status find_workspace(Plan const& plan, LaunchOptions const& options,
                      std::unique_ptr<char[]>& on_host, Workspace& workspace) {
  Workspace kept;
  if (plan.device == Device::kCuda && is_one_launch(plan)) {
    DeviceGuard const guard(options.device_index);
    if (!guard.status().ok()) return guard.status();
    kept = kept_workspace(options.device_index, options.stream, plan.workspace_bytes);
    if (kept.bytes >= plan.workspace_bytes) {
      workspace = kept;
      return {};
    }
  }
  if (options.allocate) {
    workspace = options.allocate(plan.workspace_bytes);
    if (workspace.zeros == nullptr) {
      workspace.zeros = kept.zeros;
      workspace.zeros_bytes = kept.zeros_bytes;
    }
    return {};
  }
  if (plan.device == Device::kCuda) {
    return Status::invalid("the call needs a workspace of " + std::to_string(plan.workspace_bytes) +
                           " bytes on the GPU; allowed: LaunchOptions::workspace of that size, or "
                           "allocate");
  }
  constexpr int64_t kAlignment = 256;
  on_host.reset(new (std::nothrow) char[size_t(plan.workspace_bytes + kAlignment)]);
  if (on_host == nullptr) {
    return Status::device_error("no memory for a workspace of " +
                                std::to_string(plan.workspace_bytes) + " bytes");
  }
  auto const address = reinterpret_cast<uintptr_t>(on_host.get());
  workspace = {on_host.get() + (kAlignment - address % kAlignment), plan.workspace_bytes};
  return {};
}

}  // namespace

Status plan(Problem const& problem, Op op, DeviceInfo const& device, std::string const& kernel,
            Plan& result) {
  result = {};
  Status status = check(problem, op, device.device);
  if (!status.ok()) return status;
  Variant const* const variant = select(problem, op, device, kernel, status);
  if (variant != nullptr) result = plan_of(problem, op, device, *variant);
  return status;
}

Status run(Plan const& plan, Problem const& problem, RunOptions const& options) {
  if (plan.num_steps < 1 || plan.num_steps > Plan::kMaxSteps) {
    return Status::invalid("the plan has " + std::to_string(plan.num_steps) +
                           " steps, allowed: a plan that plan() has made");
  }
  return run(plan, problem, device_info(plan.device, options.device_index), options);
}

std::string const& key_of(Variant const& step) { return step.info.key; }

namespace {

// Finds the key of the mask map that the plan's pre-launch makes. False if the plan makes none, or
// if the call cannot use a kept map. Sets the counters of the workspace.
bool find_map_key(Plan const& plan, Problem const& p, RunOptions const& options,
                  Workspace& workspace, MaskMapKey& key) {
  if (plan.num_steps != 1 || is_empty(p, plan.op)) return false;
  ManifestKernel const& kernel = *plan.steps[0]->kernel;
  bool const makes_map = plan.op == Op::kForward && kernel.arguments.has_pre_post() &&
                         (kernel.needs & option::mask) != 0 && kernel.quantize == Quantize::kNone;
  bool const is_dense = !p.seq_q.cu_seqlens && !p.seq_k.cu_seqlens && !p.seq_q.is_padded() &&
                        !p.seq_k.is_padded() && !p.kv.has_pages();
  if (!makes_map || !is_dense) return false;
  if (plan.device == Device::kCuda) {
    DeviceGuard const guard(options.device_index);
    if (!guard.status().ok()) return false;
    Workspace const kept = kept_workspace(options.device_index, options.stream, 0);
    if (kept.zeros == nullptr) return false;  // captured, or one stream too many
    workspace.zeros = kept.zeros;
    workspace.zeros_bytes = kept.zeros_bytes;
  }
  key = {plan.steps[0], options.device_index, workspace.zeros, p.mask,        p.batch,
         p.num_heads_q, p.num_heads_kv,       p.seq_q.seqlen,  p.seq_k.seqlen};
  return true;
}

Status run_with_map(Plan const& plan, Problem const& problem, DeviceInfo const& device,
                    RunOptions options, Workspace const& map) {
  alignas(16) char counters[Kept::kSlotDataBytes] = {};  // of a call on a CPU: calls share the map
  Workspace& workspace = options.workspace;
  bool const has_counters = workspace.zeros != nullptr;
  workspace = {map.data, map.bytes, has_counters ? workspace.zeros : counters,
               has_counters ? workspace.zeros_bytes : int64_t(sizeof counters)};
  return run(plan, problem, device, options, Part::kRest);
}

Status plan_and_run(Problem const& problem, Op op, LaunchOptions const& options,
                    Part part = Part::kAll, MaskMaps* maps = nullptr) {
  // The caller keeps the workspace of a part.
  bool const may_find = part == Part::kAll || (part == Part::kBefore && options.allocate);
  DeviceInfo const device = device_info(options.device, options.device_index);
  RunOptions where = options;
  std::unique_ptr<char[]> on_host;
  while (true) {
    Plan chosen;
    Status status = plan(problem, op, device, options.kernel, chosen);
    MaskMapKey key;
    bool const has_key = status.ok() && maps != nullptr &&
                         find_map_key(chosen, problem, options, where.workspace, key);
    Workspace const found = has_key ? maps->find(key) : Workspace{};
    bool const lacks_memory = where.workspace.bytes < chosen.workspace_bytes;
    if (found.bytes > 0) {
      status = run_with_map(chosen, problem, device, where, found);
    } else {
      if (status.ok() && lacks_memory && may_find && !is_empty(problem, op)) {
        status = find_workspace(chosen, options, on_host, where.workspace);
      }
      if (status.ok()) status = run(chosen, problem, device, where, part);
      if (status.ok() && has_key && !on_host) maps->keep(key, where.workspace);
    }
    if (status.code != StatusCode::kNoKernel || chosen.num_steps == 0) return status;
    // A kernel that turned out to be unavailable is not chosen again.
    if (why_not(*chosen.steps[0], problem, device).empty()) return status;
  }
}

}  // namespace

Status attention_forward(Problem const& problem, LaunchOptions const& options) {
  return plan_and_run(problem, Op::kForward, options);
}

Status attention_forward(Problem const& problem, LaunchOptions const& options, MaskMaps& maps) {
  return plan_and_run(problem, Op::kForward, options, Part::kAll, &maps);
}

bool mask_map_key(Problem const& problem, LaunchOptions const& options, MaskMapKey& key) {
  Plan chosen;
  Workspace workspace;
  DeviceInfo const device = device_info(options.device, options.device_index);
  return plan(problem, Op::kForward, device, options.kernel, chosen).ok() &&
         find_map_key(chosen, problem, options, workspace, key);
}

namespace {

// Predictions also depend on q. The launch that computes them is the one that a call with
// prequantized K and V omits.
Status refuse_limit(Problem const& problem) {
  if (problem.max_error == 0.0f) return {};
  return Status::invalid("max_error is " + value_of(problem.max_error) +
                         ", but K and V are prequantized; allowed: 0");
}

// Kernels that take these calls have one layout of the rounded k and v, whatever q is.
Problem prequantized(Problem problem) {
  problem.is_prequantized = true;
  return problem;
}

}  // namespace

Status prequantize(Problem const& problem, LaunchOptions const& options) {
  if (problem.quantize == Quantize::kNone) {
    return Status::invalid("quantize is None, so there is nothing to keep");
  }
  if (Status status = refuse_limit(problem); !status.ok()) return status;
  return plan_and_run(prequantized(problem), Op::kForward, options, Part::kBefore);
}

Status attention_prequantized(Problem const& problem, LaunchOptions const& options) {
  if (Status status = refuse_limit(problem); !status.ok()) return status;
  return plan_and_run(prequantized(problem), Op::kForward, options, Part::kRest);
}

bool gives_bias_grad(Problem const& problem, LaunchOptions const& options) {
  Plan chosen;
  Status const status =
      plan(problem, Op::kBackward, device_info(options.device, options.device_index),
           options.kernel, chosen);
  return status.ok() && (chosen.num_steps == 0 || !chosen.steps[0]->kernel->scalar);
}

Status predict_errors(Problem const& problem, LaunchOptions const& options, float* errors) {
  if (problem.quantize == Quantize::kNone) {
    return Status::invalid("quantize is None, so there is nothing to predict");
  }
  Status const status = check(problem, Op::kForward, Device::kCpu);
  return status.ok()
             ? cpu::predict_errors(problem, options, options.device == Device::kCuda, errors)
             : status;
}

Status attention_backward(Problem const& problem, LaunchOptions const& options) {
  Gradients const* const grad = problem.grad;
  bool const has_others =
      grad && (grad->q.data || grad->k.data || grad->v.data || grad->sinks != nullptr);
  // If only a scalar kernel can compute the gradient of the bias (deterministic, or without NVRTC),
  // it computes that gradient alone: a faster kernel computes the others.
  if (grad && grad->bias && has_others && options.device == Device::kCuda &&
      options.kernel == "auto") {
    Plan of_all;
    Status status = plan(problem, Op::kBackward, device_info(options.device, options.device_index),
                         options.kernel, of_all);
    if (!status.ok()) return status;
    if (!of_all.steps[0]->kernel->scalar) return plan_and_run(problem, Op::kBackward, options);
    Gradients others = *grad, of_bias = *grad;
    others.bias = {};
    of_bias.q.data = of_bias.k.data = of_bias.v.data = nullptr;
    of_bias.sinks = nullptr;
    for (Gradients const* part : {&others, &of_bias}) {
      Problem call = problem;
      call.grad = part;
      if (status.ok()) status = plan_and_run(call, Op::kBackward, options);
    }
    return status;
  }
  return plan_and_run(problem, Op::kBackward, options);
}

std::vector<VariantInfo> variants() {
  std::vector<VariantInfo> result;
  for (Variant const& variant : registry()) result.push_back(variant.info);
  return result;
}

Status explain(Problem const& problem, Op op, DeviceInfo const& device, std::string const& kernel,
               Explanation& result) {
  result = {};
  Status status = check(problem, op, device.device);
  if (status.ok()) status = check_name(kernel, op);
  if (!status.ok()) return status;
  Status none;
  Variant const* const chosen = select(problem, op, device, kernel, none);
  if (chosen != nullptr) result.plan = plan_of(problem, op, device, *chosen);
  result.passed_over = passed_over(problem, op, device, kernel, chosen);
  for (Variant const& variant : registry()) {
    if (variant.kernel->op != op) continue;
    Verdict verdict{variant.info.key, &variant == chosen, why_not(variant, problem, device)};
    if (!names(kernel, variant)) {
      if (!verdict.reason.empty()) verdict.reason += "; ";
      verdict.reason += kernel == "auto" ? "runs only when asked for by name"
                                         : "not asked for: kernel is \"" + kernel + "\"";
    } else if (verdict.reason.empty() && !verdict.chosen) {
      verdict.reason = why_preferred(*chosen, variant, problem, device);
    }
    if (verdict.chosen) {
      verdict.splits = splits_of(variant, problem, device);
      verdict.workspace_bytes = result.plan.workspace_bytes;
      KernelArguments const& arguments = variant.kernel->arguments;
      if (arguments.num_scores > 0) {
        int const score = score_of(arguments, problem);
        verdict.score = arguments.scores[score].token;
        verdict.at_first_use = is_left_out(variant, score) || problem.logits.has_score_mod;
      }
      verdict.max_launches = max_launches_of(result.plan);
    }
    result.verdicts.push_back(std::move(verdict));
  }
  return {};
}

BuildInfo build_info() {
  BuildInfo info;
  info.version = CUTLASS_ATTN_VERSION;
  info.tier = CUTLASS_ATTN_TIER;
  info.cuda = CUTLASS_ATTN_CUDA_VERSION;
  info.architectures = CUTLASS_ATTN_ARCHITECTURES;
  info.cutlass = CUTLASS_ATTN_CUTLASS_VERSION;
#if defined(__clang__)
  info.compiler = "clang " __clang_version__;
#else
  info.compiler = "g++ " __VERSION__;
#endif
  info.simt = CUTLASS_ATTN_SIMT;
  return info;
}

}  // namespace cutlass_attn
