// The table of variants for tests of dispatch, in place of the generated tables, and devices and
// calls for it. Included by one file of a program.
#pragma once

#include <string>
#include <vector>

#include "check.hpp"
#include "runtime/dispatch.hpp"

using namespace cutlass_attn;

namespace {

constexpr Device kCuda = Device::kCuda, kCpu = Device::kCpu;
constexpr DType kF16 = DType::kFloat16, kBF16 = DType::kBFloat16, kF32 = DType::kFloat32;

KernelUnit const kUnit{{128, 48 * 1024, 64, 0}, {}, {}};
KernelUnit const kUnitInPart{{128, 48 * 1024, 64, 0}, {&kUnit}, {}};
KernelUnit const kLargeUnit{{128, 160 * 1024, 64, 0}, {}, {}};

// A kernel with these options; lives as long as the program.
ManifestKernel const* kernel(uint32_t options, int least, int last, int alignment) {
  ManifestKernel made{};
  made.name = "";
  made.options = options;
  made.compute_capability[0] = least;
  made.compute_capability[1] = last;
  made.alignment = alignment;
  return new ManifestKernel(made);
}

Variant variant(std::string const& key, std::string const& kernel_name, Device device, DType dtype,
                int head_dim, std::string const& tier, bool compiled, bool automatic,
                int min_compute_capability, int alignment) {
  Variant v{};
  v.info.key = key;
  v.info.kernel = kernel_name;
  v.info.device = device;
  v.info.dtype = dtype;
  v.info.head_dim = v.info.head_dim_v = head_dim;
  v.info.tier = tier;
  v.info.compiled = compiled;
  v.info.automatic = automatic;
  v.kernel = kernel(option::softcap | option::bias, min_compute_capability, 999, alignment);
  v.unit = compiled ? &kUnit : nullptr;
  v.is_simt = kernel_name.find("-simt") != std::string::npos;
  return v;
}

// A row that the build left out and that can be compiled at run time.
Variant left_out(std::string const& key, std::string const& kernel, int head_dim) {
  Variant v =
      variant(key, kernel, Device::kCuda, DType::kFloat16, head_dim, "full", false, true, 80, 16);
  v.can_load = true;
  return v;
}

// A row with two scores; the build has the first.
Variant in_part() {
  Variant v = variant("part/f16/d104", "part", kCuda, kF16, 104, "core", true, true, 80, 16);
  ManifestKernel made = *v.kernel;
  KernelArguments& arguments = made.arguments;
  arguments.num_scores = 2;
  arguments.scores[0] = {"identity", [](Problem const& p) { return p.logits.softcap == 0; }};
  arguments.scores[1] = {"softcap", [](Problem const&) { return true; }};
  v.kernel = new ManifestKernel(made);
  v.unit = &kUnitInPart;
  v.can_load = true;
  return v;
}

// A row with a tile, of a kernel that takes multiples of 8 up to its head dims.
Variant tiled(int head_dim, int head_dim_v, int block_m, bool compiled = true) {
  std::string const tile = std::to_string(block_m) + "x64x4";
  std::string const dims = std::to_string(head_dim) + "v" + std::to_string(head_dim_v);
  Variant v = variant("tiled/f16/d" + dims + "/" + tile, "tiled", Device::kCuda, DType::kFloat16,
                      head_dim, "full", compiled, true, 80, 16);
  v.info.head_dim_v = head_dim_v;
  v.info.head_dim_multiple = 8;
  v.info.tile = tile;
  v.block_m = block_m;
  v.kernel = kernel(0, 80, 999, 16);
  return v;
}

// Only for Hopper, with more shared memory than other GPUs have.
Variant hopper() {
  Variant v = variant("hopper/f16/d40", "hopper", kCuda, kF16, 40, "core", true, false, 80, 16);
  v.kernel = kernel(0, 90, 90, 16);
  v.unit = &kLargeUnit;
  return v;
}

// As hopper(), of a kernel that reads by TMA.
Variant with_tma() {
  Variant v = hopper();
  v.info.key = "tma/f16/d40", v.info.kernel = "tma";
  ManifestKernel made = *v.kernel;
  made.tma = true;
  v.kernel = new ManifestKernel(made);
  return v;
}

// A row of a kernel that requires half a tile of 64 rows per SM.
Variant of_many_blocks() {
  Variant v = variant("many/f16/d48", "many", kCuda, kF16, 48, "core", true, true, 90, 16);
  v.block_m = 64;
  ManifestKernel made = *v.kernel;
  made.avoids[made.num_avoids++].blocks_per_sm = {0.0f, 0.5f};
  v.kernel = new ManifestKernel(made);
  return v;
}

// A row of a kernel for calls whose keys it splits.
Variant of_splits() {
  Variant v = variant("split/f16/d72", "split", kCuda, kF16, 72, "core", true, true, 80, 16);
  ManifestKernel made = *v.kernel;
  made.avoids[made.num_avoids++].splits = {1.0f, 2.0f};
  made.arguments.splits = [](Problem const& p, DeviceLimits const&, KernelFacts const&) {
    return p.seq_k.seqlen >= 512 ? 4 : 1;
  };
  v.kernel = new ManifestKernel(made);
  return v;
}

// A row with a cost.
Variant of_cost(std::string const& kernel_name, int block_m, float tile_us, float step_us) {
  std::string const tile = std::to_string(block_m) + "x64x4";
  Variant v = variant(kernel_name + "/f16/d88/" + tile, kernel_name, kCuda, kF16, 88, "core", true,
                      true, 80, 16);
  v.info.tile = tile;
  v.block_m = block_m;
  v.cost = {64, tile_us, step_us};
  return v;
}

// A row of the backward op, which also implements an option of backward passes.
Variant of_backward(std::string const& key, uint32_t options) {
  Variant v = variant(key, "back", kCuda, kF16, 0, "core", true, true, 80, 16);
  ManifestKernel made = *v.kernel;
  made.op = v.info.op = Op::kBackward;
  made.options = options;
  v.kernel = new ManifestKernel(made);
  return v;
}

Variant with_sums(Variant v, Accumulate accumulate) {
  v.info.accumulate = accumulate;
  return v;
}

Variant with_products(Variant v, Quantize quantize) {
  v.info.quantize = quantize;
  return v;
}

DeviceInfo const kGpu{{89, 10, 100 * 1024, 99 * 1024}, kCuda, ""};
DeviceInfo const kBigGpu{{90, 10, 228 * 1024, 227 * 1024}, kCuda, ""};
DeviceInfo const kOldGpu{{75, 10, 64 * 1024, 63 * 1024}, kCuda, ""};
DeviceInfo const kNoGpu{{}, kCuda, "no NVIDIA driver"};
DeviceInfo const kHost{{}, kCpu, ""};

Problem call(DType dtype = kF16, int head_dim = 64) {
  Problem p;
  p.set_dtype(dtype);
  p.batch = p.num_heads_q = p.num_heads_kv = 2;
  p.seq_q.seqlen = p.seq_k.seqlen = 4;
  p.head_dim = p.head_dim_v = head_dim;
  for (Operand* t : {&p.q, &p.k, &p.v, &p.o}) {
    *t = {reinterpret_cast<void*>(4096), 8 * head_dim, 4 * head_dim, head_dim, dtype};
  }
  return p;
}

}  // namespace

// These replace the generated tables.
std::vector<Variant> const& cutlass_attn::registry() {
  static std::vector<Variant> const table = {
      variant("fast/f16/d64", "fast", kCuda, kF16, 64, "core", true, true, 80, 16),
      variant("fast/f16/d96", "fast", kCuda, kF16, 96, "full", false, true, 80, 16),
      of_many_blocks(),
      of_splits(),
      of_cost("narrow", 64, 2.0f, 1.0f),
      in_part(),
      variant("slow/f16", "slow", kCuda, kF16, 0, "core", true, true, 0, 1),
      variant("slow/f32", "slow", kCuda, kF32, 0, "core", true, true, 0, 1),
      variant("gone/f16", "gone", kCuda, kF16, 0, "core", false, false, 0, 1),
      variant("host/f16", "host", kCpu, kF16, 0, "core", true, true, 0, 1),
      variant("fast-simt/f16/d64", "fast-simt", kCpu, kF16, 64, "core", true, false, 0, 16),
      variant("fast-simt/f16/d96", "fast-simt", kCpu, kF16, 96, "full", false, false, 0, 16),
      with_sums(variant("half/f16/d64", "half", kCuda, kF16, 64, "core", true, true, 80, 16),
                Accumulate::kFloat16),
      with_products(variant("eight/f16/d64", "eight", kCuda, kF16, 64, "core", true, true, 80, 16),
                    Quantize::kQk),
      tiled(128, 128, 128),
      tiled(128, 128, 64),
      tiled(128, 128, 32),
      tiled(96, 96, 128, false),
      tiled(96, 96, 64),
      tiled(96, 96, 32),
      tiled(192, 128, 64),
      left_out("late/f16/d48", "late", 48),
      left_out("late/f16/d56/128x64x4", "late", 56),
      left_out("late/f16/d56/64x64x4", "late", 56),
      variant("later/f16", "later", kCuda, kF16, 0, "core", true, true, 0, 2),
      hopper(),
      with_tma(),
      of_cost("wide", 256, 6.0f, 2.0f),
      of_cost("wide", 128, 3.0f, 1.5f),
      of_backward("back/f16", 0),
      of_backward("back/f16/ordered", option::deterministic),
  };
  return table;
}

std::vector<TileRule> const& cutlass_attn::rules_in_force() {
  static std::vector<TileRule> const table = {
      {100, "tiled", 96, 96, "128x64x4"},      {100, "tiled", 96, 96, "32x64x4"},
      {100, "tiled", 96, 96, "128x64x4"},      {228, "tiled", 128, 128, "128x64x4"},
      {228, "tiled", 128, 128, "32x64x4"},     {228, "tiled", 128, 128, "64x64x4"},
      {228, "tiled", 96, 96, "32x64x4", true}, {228, "tiled", 96, 96, "64x64x4", true},
  };
  return table;
}

std::string const& cutlass_attn::why_failing(int smem_kb, std::string const& key) {
  static std::string const none, slow = "32 %, >= 40 allowed";
  bool const is_marked = (smem_kb == 164 && key == "tiled/f16/d128v128/128x64x4") ||
                         (smem_kb == 164 && key.find("tiled/f16/d96v96/") == 0);
  return is_marked ? slow : none;
}

namespace {

[[maybe_unused]] Variant const& find(std::string const& key) {
  for (Variant const& v : registry()) {
    if (v.info.key == key) return v;
  }
  std::abort();
}

[[maybe_unused]] std::string reason(std::string const& key, Problem const& p,
                                    DeviceInfo const& device) {
  return why_not(find(key), p, device);
}

[[maybe_unused]] std::string chosen(Problem const& p, DeviceInfo const& device,
                                    std::string const& kernel) {
  Status status;
  Variant const* const v = select(p, Op::kForward, device, kernel, status);
  CHECK_EQ(v == nullptr, !status.ok());
  return v == nullptr ? "" : v->info.key;
}

[[maybe_unused]] std::string refusal(Problem const& p, DeviceInfo const& device,
                                     std::string const& kernel, StatusCode code) {
  Status status;
  CHECK(select(p, Op::kForward, device, kernel, status) == nullptr);
  CHECK_EQ(int(status.code), int(code));
  return status.message;
}

}  // namespace
