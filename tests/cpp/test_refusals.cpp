// Dispatch on its own table: rows that the build left out, and the texts of refusals.
#include <algorithm>
#include <string>
#include <vector>

#include "check.hpp"
#include "dispatch_table.hpp"
#include "runtime/dispatch.hpp"
#include "runtime/loaded.hpp"
#include "runtime/refusal.hpp"

using namespace cutlass_attn;

TEST(a_row_left_out_counts_while_there_is_a_compiler) {
  Problem const p = call(kF16, 48);
  CHECK_EQ(reason("late/f16/d48", p, kGpu),
           "not compiled into this build (tier full): no compiler is set: see set_compiler(); or "
           "rebuild with CUTLASS_ATTN_TIER=full");
  set_compiler([](std::string const&, int) { return Status::device_error("busy"); });
  CHECK_EQ(reason("late/f16/d48", p, kGpu), "");
  CHECK_EQ(reason("late/f16/d48", p, kOldGpu),
           "needs compute capability >= 8.0, the device has 7.5");
  CHECK_EQ(chosen(p, kGpu, "late"), "late/f16/d48");
  CHECK_EQ(compile(find("late/f16/d48"), 0, "", 0).message, "busy");
  CHECK(loaded(find("late/f16/d48"), 0, 89) == nullptr);

  set_compiler(nullptr, "no NVRTC");
  CHECK_EQ(reason("late/f16/d48", p, kGpu),
           "not compiled into this build (tier full): no NVRTC; or rebuild with "
           "CUTLASS_ATTN_TIER=full");
  CHECK_EQ(refusal(p, kGpu, "late/f16/d48", StatusCode::kNoKernel),
           "kernel \"late/f16/d48\" does not take this call:\n"
           "  late/f16/d48: not compiled into this build (tier full): no NVRTC; or rebuild with "
           "CUTLASS_ATTN_TIER=full\nkernel \"slow\" would take it");
  CHECK_EQ(compile(find("late/f16/d48"), 0, "", 0).message, "no NVRTC");
}

TEST(a_kernel_that_cannot_be_compiled_leaves_the_others) {
  Problem const p = call(kF16, 56), other = call(kF16, 48);
  set_compiler([](std::string const&, int) { return Status(); });
  CHECK_EQ(chosen(p, kGpu, "late"), "late/f16/d56/128x64x4");
  CHECK(refuse_kernel("late/f16/d56/128x64x4", "error: no").ok());
  CHECK_EQ(chosen(p, kGpu, "late"), "late/f16/d56/64x64x4");
  CHECK_EQ(reason("late/f16/d56/128x64x4", p, kGpu),
           "not compiled into this build (tier full): error: no; or rebuild with "
           "CUTLASS_ATTN_TIER=full");
  CHECK_EQ(compile(find("late/f16/d56/128x64x4"), 0, "", 0).message, "error: no");
  CHECK_EQ(chosen(other, kGpu, "late"), "late/f16/d48");
  CHECK(refuse_kernel("late/f16/d56/64x64x4", "error: no").ok());
  CHECK_EQ(chosen(p, kGpu, "auto"), "slow/f16");
  CHECK_EQ(refuse_kernel("fast/f16/d64", "no").message,
           "key is \"fast/f16/d64\", allowed: a GPU variant that this build left out, with or "
           "without \"+\" and a score, or a variant whose score this build left out");
  set_compiler(nullptr, "no NVRTC");
  CHECK_EQ(reason("late/f16/d48", other, kGpu),
           "not compiled into this build (tier full): no NVRTC; or rebuild with "
           "CUTLASS_ATTN_TIER=full");
}

TEST(a_score_left_out_counts_while_there_is_a_compiler) {
  Problem const p = call(kF16, 104);
  Problem capped = p;
  capped.logits.softcap = 3;
  Variant const& part = find("part/f16/d104");
  CHECK(!is_left_out(part, 0) && is_left_out(part, 1));
  set_compiler(nullptr, "no NVRTC");
  CHECK_EQ(chosen(p, kGpu, "auto"), "part/f16/d104");
  CHECK_EQ(chosen(capped, kGpu, "auto"), "slow/f16");
  CHECK_EQ(reason("part/f16/d104", capped, kGpu),
           "+softcap is not compiled into this build (tier core): no NVRTC; or rebuild with "
           "CUTLASS_ATTN_TIER=full");
  set_compiler([](std::string const& key, int) { return Status::device_error(key); });
  CHECK_EQ(chosen(capped, kGpu, "auto"), "part/f16/d104");
  CHECK_EQ(compile(part, 1, "", 0).message, "part/f16/d104+softcap");
  CHECK_EQ(int(refuse_kernel("part/f16/d104+identity", "no").code),
           int(StatusCode::kInvalidArgument));
  CHECK_EQ(chosen(capped, kGpu, "auto"), "part/f16/d104");
  CHECK(refuse_kernel("part/f16/d104", "error: no").ok());
  CHECK_EQ(chosen(capped, kGpu, "auto"), "slow/f16");
  CHECK_EQ(chosen(p, kGpu, "auto"), "part/f16/d104");
  set_compiler(nullptr, "no NVRTC");
}

TEST(all_reasons_are_given) {
  Problem p = call(kBF16, 80);
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
  // The request is valid; the build lacks the kernel.
  CHECK_EQ(refusal(call(kF16, 96), kGpu, "fast", StatusCode::kNoKernel),
           "kernel \"fast\" does not take this call:\n"
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
    CHECK_EQ(
        refusal(call(), device, "quick", StatusCode::kInvalidArgument),
        "kernel is \"quick\", allowed: \"auto\", \"fast\", \"many\", \"split\", \"narrow\", "
        "\"part\", \"slow\", \"gone\", "
        "\"host\", \"fast-simt\", \"half\", \"eight\", \"tiled\", \"late\", \"later\", \"hopper\", "
        "\"tma\", \"wide\", or a whole key such as "
        "\"fast/f16/d64\" (variants() lists "
        "them)");
  }
}

TEST(variants_with_one_reason_are_one_line) {
  int const count = int(std::count_if(registry().begin(), registry().end(),
                                      [](Variant const& v) { return v.info.kernel == "tiled"; }));
  CHECK(count > 1);
  CHECK_EQ(refusal(call(), kHost, "tiled", StatusCode::kInvalidArgument),
           "kernel \"tiled\" does not take this call:\n  tiled (" + std::to_string(count) +
               " variants): needs operands on a CUDA device, got them on the CPU\n"
               "kernel \"host\" would take it");
}

TEST(a_misspelt_name_is_answered_by_the_closest_ones) {
  auto const hint = [](std::string const& name) {
    std::string const text = refusal(call(), kGpu, name, StatusCode::kInvalidArgument);
    size_t const at = text.find("; did you mean");
    return at == std::string::npos ? "" : text.substr(at);
  };
  CHECK_EQ(hint("fat"), "; did you mean \"fast\"?");
  CHECK_EQ(hint("lates"), "; did you mean \"late\" or \"later\"?");
  CHECK_EQ(hint("slow/f1"), "; did you mean \"slow/f16\"?");
  CHECK_EQ(hint(""), "");
  CHECK_EQ(hint(std::string(5000, 'x')), "");
}

int main(int argc, char** argv) { return check::run(argc, argv); }
