// Dispatch on a table of its own: every reason, every refusal, and the order of preference.
#include <string>
#include <vector>

#include "check.hpp"
#include "runtime/dispatch.hpp"

using namespace cutlass_attn;

namespace {

Status launch(AttnParams const&, LaunchOptions const&) { return {}; }

Variant variant(std::string const& key, std::string const& kernel, Device device, DType dtype,
                int head_dim, std::string const& tier, bool compiled, bool automatic,
                int min_compute_capability, int alignment) {
  Variant v;
  v.info.key = key;
  v.info.kernel = kernel;
  v.info.device = device;
  v.info.dtype = dtype;
  v.info.head_dim = head_dim;
  v.info.tier = tier;
  v.info.compiled = compiled;
  v.info.automatic = automatic;
  v.min_compute_capability = min_compute_capability;
  v.alignment = alignment;
  v.launch = compiled ? launch : nullptr;
  return v;
}

constexpr Device kCuda = Device::kCuda, kCpu = Device::kCpu;
constexpr DType kF16 = DType::kFloat16, kBF16 = DType::kBFloat16, kF32 = DType::kFloat32;

DeviceInfo const kGpu{kCuda, 89, ""};
DeviceInfo const kOldGpu{kCuda, 75, ""};
DeviceInfo const kNoGpu{kCuda, 0, "no NVIDIA driver"};
DeviceInfo const kHost{kCpu, 0, ""};

AttnParams call(DType dtype = kF16, int head_dim = 64) {
  AttnParams p;
  p.dtype = dtype;
  p.batch = p.num_heads_q = p.num_heads_kv = 2;
  p.seqlen_q = p.seqlen_k = 4;
  p.head_dim = p.head_dim_v = head_dim;
  for (TensorRef* t : {&p.q, &p.k, &p.v, &p.o}) {
    *t = {reinterpret_cast<void*>(4096), 8 * head_dim, 4 * head_dim, head_dim};
  }
  return p;
}

Variant const& find(std::string const& key) {
  for (Variant const& v : registry()) {
    if (v.info.key == key) return v;
  }
  std::abort();
}

std::string reason(std::string const& key, AttnParams const& p, DeviceInfo const& device) {
  return why_not(find(key), p, device);
}

std::string chosen(AttnParams const& p, DeviceInfo const& device, std::string const& kernel) {
  Status status;
  Variant const* const v = select(p, device, kernel, status);
  CHECK_EQ(v == nullptr, !status.ok());
  return v == nullptr ? "" : v->info.key;
}

std::string refusal(AttnParams const& p, DeviceInfo const& device, std::string const& kernel,
                    StatusCode code) {
  Status status;
  CHECK(select(p, device, kernel, status) == nullptr);
  CHECK_EQ(int(status.code), int(code));
  return status.message;
}

}  // namespace

// Takes the place of the generated table.
std::vector<Variant> const& cutlass_attn::registry() {
  static std::vector<Variant> const table = {
      variant("fast/f16/d64", "fast", kCuda, kF16, 64, "core", true, true, 80, 16),
      variant("fast/f16/d96", "fast", kCuda, kF16, 96, "full", false, true, 80, 16),
      variant("slow/f16", "slow", kCuda, kF16, 0, "core", true, true, 0, 1),
      variant("slow/f32", "slow", kCuda, kF32, 0, "core", true, true, 0, 1),
      variant("gone/f16", "gone", kCuda, kF16, 0, "core", false, false, 0, 1),
      variant("host/f16", "host", kCpu, kF16, 0, "core", true, true, 0, 1),
      variant("fast-simt/f16/d64", "fast-simt", kCpu, kF16, 64, "core", true, false, 0, 16),
      variant("fast-simt/f16/d96", "fast-simt", kCpu, kF16, 96, "full", false, false, 0, 16),
  };
  return table;
}

TEST(the_first_that_can_run_is_taken) {
  CHECK_EQ(chosen(call(), kGpu, "auto"), "fast/f16/d64");
  CHECK_EQ(chosen(call(kF16, 80), kGpu, "auto"), "slow/f16");
  CHECK_EQ(chosen(call(kF16, 96), kGpu, "auto"), "slow/f16");
  CHECK_EQ(chosen(call(kF32), kGpu, "auto"), "slow/f32");
  CHECK_EQ(chosen(call(), kOldGpu, "auto"), "slow/f16");
  CHECK_EQ(chosen(call(), kHost, "auto"), "host/f16");
}

TEST(a_name_or_a_key_asks_for_a_kernel) {
  CHECK_EQ(chosen(call(), kGpu, "slow"), "slow/f16");
  CHECK_EQ(chosen(call(kF32), kGpu, "slow"), "slow/f32");
  CHECK_EQ(chosen(call(), kGpu, "slow/f16"), "slow/f16");
  CHECK_EQ(chosen(call(), kHost, "fast-simt"), "fast-simt/f16/d64");
}

TEST(every_reason) {
  CHECK_EQ(reason("fast/f16/d64", call(), kGpu), "");
  CHECK_EQ(reason("fast/f16/d64", call(), kHost),
           "needs operands on a CUDA device, got them on the CPU");
  CHECK_EQ(reason("host/f16", call(), kGpu),
           "needs operands on the CPU, got them on a CUDA device");
  CHECK_EQ(reason("slow/f16", call(kBF16), kGpu), "needs float16, got bfloat16");
  CHECK_EQ(reason("slow/f32", call(), kGpu), "needs float32, got float16");
  CHECK_EQ(reason("fast/f16/d64", call(kF16, 80), kGpu), "needs head_dim 64, got 80");
  CHECK_EQ(reason("fast/f16/d64", call(), kOldGpu),
           "needs compute capability >= 8.0, the device has 7.5");
  CHECK_EQ(reason("slow/f16", call(), kNoGpu), "no NVIDIA driver");
  CHECK_EQ(reason("gone/f16", call(), kGpu),
           "not compiled into this build (tier core): rebuild with CUTLASS_ATTN_CUDA=ON");
  CHECK_EQ(reason("fast/f16/d96", call(kF16, 96), kGpu),
           "not compiled into this build (tier full): rebuild with CUTLASS_ATTN_TIER=full");
  CHECK_EQ(reason("fast-simt/f16/d96", call(kF16, 96), kHost),
           "not compiled into this build (tier full): rebuild with CUTLASS_ATTN_TIER=full "
           "CUTLASS_ATTN_SIMT=ON");
}

TEST(head_dim_v) {
  AttnParams p = call();
  p.head_dim_v = 32;
  CHECK_EQ(reason("fast/f16/d64", p, kGpu), "needs head_dim_v 64, got 32");
  CHECK_EQ(reason("slow/f16", p, kGpu), "");
}

TEST(alignment) {
  AttnParams p = call();
  p.v.data = static_cast<char*>(p.v.data) + 8;
  CHECK_EQ(reason("fast/f16/d64", p, kGpu), "v's address is not a multiple of 16 bytes");
  CHECK_EQ(reason("slow/f16", p, kGpu), "");
  p = call();
  p.q.row_stride = 65;
  CHECK_EQ(reason("fast/f16/d64", p, kGpu),
           "q's row stride of 65 elements is not a multiple of 16 bytes");
  CHECK_EQ(chosen(p, kGpu, "auto"), "slow/f16");
  p = call();
  p.k.head_stride = -260;
  CHECK_EQ(reason("fast/f16/d64", p, kGpu),
           "k's head stride of -260 elements is not a multiple of 16 bytes");
  p = call();
  p.o.batch_stride = 516;
  CHECK_EQ(reason("fast/f16/d64", p, kGpu),
           "out's batch stride of 516 elements is not a multiple of 16 bytes");
  p.batch = 1;  // then the stride means nothing
  CHECK_EQ(reason("fast/f16/d64", p, kGpu), "");
}

TEST(all_reasons_are_given) {
  AttnParams p = call(kBF16, 80);
  p.k.row_stride = 81;
  CHECK_EQ(reason("fast/f16/d96", p, kOldGpu),
           "needs float16, got bfloat16; needs head_dim 96, got 80; k's row stride of 81 elements "
           "is not a multiple of 16 bytes; needs compute capability >= 8.0, the device has 7.5; "
           "not compiled into this build (tier full): rebuild with CUTLASS_ATTN_TIER=full");
}

TEST(refusals_say_what_each_candidate_lacked_and_what_would_do) {
  CHECK_EQ(refusal(call(kF16, 80), kGpu, "fast", StatusCode::kInvalidArgument),
           "kernel \"fast\" does not take this call:\n"
           "  fast/f16/d64: needs head_dim 64, got 80\n"
           "  fast/f16/d96: needs head_dim 96, got 80; not compiled into this build (tier full): "
           "rebuild with CUTLASS_ATTN_TIER=full\n"
           "kernel \"slow\" would take it");
  // The request is fine, the build lacks it.
  CHECK_EQ(refusal(call(kF16, 96), kGpu, "fast", StatusCode::kNoKernel),
           "kernel \"fast\" does not take this call:\n"
           "  fast/f16/d64: needs head_dim 64, got 96\n"
           "  fast/f16/d96: not compiled into this build (tier full): rebuild with "
           "CUTLASS_ATTN_TIER=full\n"
           "kernel \"slow\" would take it");
  CHECK_EQ(refusal(call(), kHost, "slow/f16", StatusCode::kInvalidArgument),
           "kernel \"slow/f16\" does not take this call:\n"
           "  slow/f16: needs operands on a CUDA device, got them on the CPU\n"
           "kernel \"host\" would take it");
  CHECK_EQ(refusal(call(kF32), kHost, "host", StatusCode::kInvalidArgument),
           "kernel \"host\" does not take this call:\n  host/f16: needs float16, got float32");
}

TEST(refusals_of_auto) {
  CHECK_EQ(refusal(call(kF32), kHost, "auto", StatusCode::kNoKernel),
           "no kernel takes this call on the CPU:\n  host/f16: needs float16, got float32");
  for (char const* kernel : {"auto", "slow", "fast/f16/d64"}) {
    CHECK_EQ(refusal(call(), kNoGpu, kernel, StatusCode::kDeviceError),
             "no kernel can run on a CUDA device: no NVIDIA driver");
  }
}

TEST(unknown_names_are_refused_with_the_known_ones) {
  for (DeviceInfo const& device : {kGpu, kNoGpu, kHost}) {
    CHECK_EQ(refusal(call(), device, "quick", StatusCode::kInvalidArgument),
             "kernel is \"quick\", allowed: \"auto\", \"fast\", \"slow\", \"gone\", \"host\", "
             "\"fast-simt\", or a whole key such as \"fast/f16/d64\" (variants() lists them)");
  }
}

int main(int argc, char** argv) { return check::run(argc, argv); }
