// Dispatch on its own table: every reason, and the order of preference.
#include <algorithm>
#include <string>
#include <vector>

#include "check.hpp"
#include "core/alignment.hpp"
#include "dispatch_table.hpp"
#include "runtime/dispatch.hpp"
#include "runtime/loaded.hpp"
#include "runtime/refusal.hpp"

using namespace cutlass_attn;

TEST(a_tile_that_fails_a_gate_comes_after_the_others) {
  DeviceInfo device = kBigGpu;
  device.smem_per_sm = 164 * 1024;
  CHECK_EQ(chosen(call(kF16, 128), device, "tiled"), "tiled/f16/d128v128/64x64x4");
  CHECK_EQ(chosen(call(kF16, 128), device, "tiled/f16/d128v128/128x64x4"),
           "tiled/f16/d128v128/128x64x4");
  // If all fail the gate, they run as before: no other kernel, and no larger head dim.
  CHECK_EQ(chosen(call(kF16, 96), device, "tiled"), "tiled/f16/d96v96/64x64x4");
  Status status;
  Variant const* const best = select(call(kF16, 128), Op::kForward, device, "tiled", status);
  CHECK_EQ(why_preferred(*best, find("tiled/f16/d128v128/128x64x4"), call(kF16, 128), device),
           "could run; fails a gate that 64x64x4 does not: 32 %, >= 40 allowed");
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

TEST(a_kernel_has_capabilities_and_shared_memory_to_run_with) {
  Problem const p = call(kF16, 40);
  CHECK_EQ(reason("hopper/f16/d40", p, kBigGpu), "");
  CHECK_EQ(reason("hopper/f16/d40", p, kGpu),
           "needs compute capability 9.0, the device has 8.9; needs 163840 bytes of shared memory "
           "a block, the device has 101376");
  DeviceInfo next = kBigGpu;
  next.compute_capability = 100;
  CHECK_EQ(reason("hopper/f16/d40", p, next), "needs compute capability 9.0, the device has 10.0");
}

TEST(tma_takes_no_negative_strides) {
  Problem p = call(kF16, 40);
  CHECK_EQ(reason("tma/f16/d40", p, kBigGpu), "");
  p.k.row_stride = -40;
  CHECK_EQ(reason("tma/f16/d40", p, kBigGpu),
           "k's row stride is -40 elements, allowed: from 0 to 549755813887");
  CHECK_EQ(reason("hopper/f16/d40", p, kBigGpu), "");
  p.k.row_stride = 0;
  p.o.row_stride = -40;  // not written by TMA
  CHECK_EQ(reason("tma/f16/d40", p, kBigGpu), "");
  p.v.batch_stride = int64_t(1) << 39;
  CHECK_EQ(reason("tma/f16/d40", p, kBigGpu),
           "v's batch stride is 549755813888 elements, allowed: from 0 to 549755813887");
  p.batch = 1;  // then the stride has no meaning
  CHECK_EQ(reason("tma/f16/d40", p, kBigGpu), "");
}

TEST(a_kernel_of_few_blocks_comes_after_others) {
  Problem p = call(kF16, 48);
  p.seq_q.seqlen = 300;  // 5 tiles of 64 rows, of 4 heads
  DeviceInfo device = kBigGpu;
  device.num_sms = 40;
  CHECK_EQ(chosen(p, device, "auto"), "many/f16/d48");
  device.num_sms = 41;  // 0.488 per SM
  CHECK_EQ(chosen(p, device, "auto"), "slow/f16");
  CHECK_EQ(why_preferred(find("slow/f16"), find("many/f16/d48"), p, device),
           "could run; slow is preferred for 0.488 blocks an SM");
  CHECK_EQ(chosen(p, device, "many"), "many/f16/d48");
}

TEST(a_kernel_that_splits_keys_comes_after_others_where_it_would_not) {
  Problem p = call(kF16, 72);
  CHECK_EQ(chosen(p, kGpu, "auto"), "slow/f16");
  CHECK_EQ(why_preferred(find("slow/f16"), find("split/f16/d72"), p, kGpu),
           "could run; slow is preferred for keys in 1 split");
  CHECK_EQ(chosen(p, kGpu, "split"), "split/f16/d72");
  p.seq_k.seqlen = 512;
  CHECK_EQ(chosen(p, kGpu, "auto"), "split/f16/d72");
  CHECK_EQ(splits_of(find("split/f16/d72"), p, kGpu), 4);
  CHECK_EQ(splits_of(find("slow/f16"), p, kGpu), 1);
}

TEST(of_tiles_with_costs_the_least_is_chosen_whichever_the_kernel) {
  Problem p = call(kF16, 88);
  auto const chosen_for = [&](int heads, int seqlen, bool causal) {
    p.num_heads_q = p.num_heads_kv = heads, p.batch = 1;
    p.seq_q.seqlen = p.seq_k.seqlen = seqlen;
    p.mask.causal = causal;
    return chosen(p, kGpu, "auto");
  };
  // Ten SMs, and 16 steps of 1, 1.5 or 2 per tile: 10 tiles of 64 rows are a wave of 18, 20 tiles
  // are two.
  CHECK_EQ(chosen_for(10, 64, false), "narrow/f16/d88/64x64x4");
  CHECK_EQ(chosen_for(1, 640, false), "narrow/f16/d88/64x64x4");
  CHECK_EQ(chosen_for(1, 1024, false), "wide/f16/d88/128x64x4");
  CHECK_EQ(why_preferred(find("wide/f16/d88/128x64x4"), find("narrow/f16/d88/64x64x4"), p, kGpu),
           "could run; predicted to take 1.33 times as long as wide/f16/d88/128x64x4");
  CHECK_EQ(why_preferred(find("wide/f16/d88/128x64x4"), find("wide/f16/d88/256x64x4"), p, kGpu),
           "could run; predicted to take 1.41 times as long as wide/f16/d88/128x64x4");
  CHECK_EQ(chosen_for(10, 1024, false), "wide/f16/d88/256x64x4");
  // The last of 16 causal tiles takes 18, all together 168: more than 16.8 per SM. The last of
  // eight tiles that are twice as wide takes 27.
  CHECK_EQ(chosen_for(1, 1024, true), "narrow/f16/d88/64x64x4");
  // A kernel's name selects among its own tiles; a kernel without costs is unaffected.
  CHECK_EQ(chosen(p, kGpu, "wide"), "wide/f16/d88/128x64x4");
  CHECK_EQ(chosen(p, kGpu, "slow"), "slow/f16");
}

TEST(sequences_pages_and_scales_are_options) {
  static int32_t numbers[4];
  static float scale;
  Problem p = call();
  p.seq_q.cu_seqlens = numbers;
  CHECK_EQ(reason("fast/f16/d64", p, kGpu), "does not implement varlen");
  p = call();
  p.seq_k.seqused = numbers;
  p.kv.block_table = numbers;
  p.v.scale = &scale;
  CHECK_EQ(reason("fast/f16/d64", p, kGpu), "does not implement varlen, paged_kv, kv_scales");
  p = call();
  p.q.scale = &scale;
  CHECK_EQ(reason("fast/f16/d64", p, kGpu), "does not implement scales");
}

TEST(kernels_of_k_and_v_in_8_bits) {
  Problem p = call();
  Variant variant = find("fast/f16/d64");
  ManifestKernel kernel = *variant.kernel;
  kernel.options |= option::fp8_kv;
  kernel.needs = option::fp8_kv;
  variant.kernel = &kernel;
  CHECK_EQ(why_not(variant, p, kGpu), "runs only calls with fp8_kv");
  p.k.dtype = p.v.dtype = DType::kFloat8E4M3;
  CHECK_EQ(why_not(variant, p, kGpu), "");
  CHECK_EQ(reason("fast/f16/d64", p, kGpu), "does not implement fp8_kv");
  // Strides count elements, here bytes.
  p.v.row_stride = 72;
  CHECK_EQ(why_not(variant, p, kGpu),
           "v's row stride of 72 elements is not a multiple of 16 bytes");
  p.v.row_stride = 80;
  CHECK_EQ(why_not(variant, p, kGpu), "");
}

TEST(head_dim_v) {
  Problem p = call();
  p.head_dim_v = 32;
  CHECK_EQ(reason("fast/f16/d64", p, kGpu), "needs head_dim_v 64, got 32");
  CHECK_EQ(reason("slow/f16", p, kGpu), "");
}

TEST(options) {
  Problem p = call();
  p.logits.softcap = 5.0f;
  p.logits.bias.data = &p;
  CHECK_EQ(reason("fast/f16/d64", p, kGpu), "");
  p.logits.sinks = &p.logits.softcap;
  p.dropout.p = 0.5f;
  p.logits.softmax_scale = 0.0f;
  CHECK_EQ(reason("fast/f16/d64", p, kGpu), "does not implement negative_scale, sinks, dropout");
  p = call();
  p.logits.alibi_slopes = &p.logits.softcap;
  p.mask.elements.data = &p;
  CHECK_EQ(reason("host/f16", p, kHost), "does not implement alibi_slopes, mask");
  p.logits.softcap = 1.0f;
  CHECK_EQ(chosen(call(kF16, 80), kGpu, "tiled"), "tiled/f16/d96v96/32x64x4");
  CHECK_EQ(refusal(p, kGpu, "tiled/f16/d96v96/32x64x4", StatusCode::kInvalidArgument),
           "kernel \"tiled/f16/d96v96/32x64x4\" does not take this call:\n"
           "  tiled/f16/d96v96/32x64x4: does not implement softcap, alibi_slopes, mask");
}

// A kernel that only runs calls with an option: `ask` sets it, and refusals name it.
void check_asked_for(std::string const& kernel, std::string const& needs, std::string const& has,
                     void (*ask)(Problem&)) {
  std::string const key = kernel + "/f16/d64", fast = "fast/f16/d64";
  Problem p = call();
  CHECK_EQ(reason(key, p, kGpu), needs);
  CHECK_EQ(chosen(p, kGpu, kernel), "");
  p.set_dtype(kBF16);  // no kernel of the table takes it
  CHECK_EQ(refusal(p, kGpu, "auto", StatusCode::kNoKernel).find(kernel + "/"), std::string::npos);
  p.set_dtype(kF16);
  ask(p);
  CHECK_EQ(reason(key, p, kGpu), "");
  CHECK_EQ(reason(fast, p, kGpu), has);
  CHECK_EQ(chosen(p, kGpu, "auto"), key);
  CHECK_EQ(chosen(p, kHost, "auto"), "");
  CHECK_EQ(refusal(p, kGpu, fast, StatusCode::kInvalidArgument),
           "kernel \"" + fast + "\" does not take this call:\n  " + fast + ": " + has +
               "\nkernel \"" + kernel + "\" would take it");
}

TEST(sums_are_those_asked_for) {
  check_asked_for("half", "needs accumulate=\"fp16\", got \"fp32\"",
                  "needs accumulate=\"fp32\", got \"fp16\"",
                  [](Problem& p) { p.accumulate = Accumulate::kFloat16; });
  Problem p = call();
  p.accumulate = Accumulate::kFloat16Pv;
  CHECK_EQ(reason("half/f16/d64", p, kGpu), "needs accumulate=\"fp16\", got \"fp16_pv\"");
  CHECK_EQ(chosen(p, kGpu, "auto"), "");
}

TEST(products_are_those_asked_for) {
  check_asked_for("eight", "needs quantize=\"qk\", got None", "needs quantize=None, got \"qk\"",
                  [](Problem& p) { p.quantize = Quantize::kQk; });
}

TEST(head_dims_up_to_a_limit) {
  Problem p = call(kF16, 80);
  CHECK_EQ(reason("tiled/f16/d128v128/64x64x4", p, kGpu), "");
  p.head_dim = 84;
  CHECK_EQ(reason("tiled/f16/d128v128/64x64x4", p, kGpu),
           "needs head_dim a multiple of 8 up to 128, got 84");
  p.head_dim = 128;
  p.head_dim_v = 136;
  CHECK_EQ(reason("tiled/f16/d128v128/64x64x4", p, kGpu),
           "needs head_dim_v a multiple of 8 up to 128, got 136");
  CHECK_EQ(reason("tiled/f16/d192v128/64x64x4", p, kGpu),
           "needs head_dim_v a multiple of 8 up to 128, got 136");
}

TEST(head_dims_from_a_limit_on) {
  Variant variant = find("tiled/f16/d128v128/64x64x4");
  variant.min_head_dim = 80;
  CHECK_EQ(why_not(variant, call(kF16, 80), kGpu), "");
  CHECK_EQ(why_not(variant, call(kF16, 72), kGpu), "needs head_dim from 80 on, got 72");
}

TEST(the_least_padding_is_preferred) {
  struct {
    int head_dim, head_dim_v;
    std::string dims;
  } const cases[] = {{64, 64, "d96v96"},    {96, 96, "d96v96"},    {104, 104, "d128v128"},
                     {64, 128, "d128v128"}, {128, 64, "d128v128"}, {136, 128, "d192v128"}};
  for (auto const& [head_dim, head_dim_v, dims] : cases) {
    Problem p = call(kF16, head_dim);
    p.head_dim_v = head_dim_v;
    CHECK_EQ(chosen(p, kGpu, "tiled").substr(0, 10 + dims.size()), "tiled/f16/" + dims);
  }
}

TEST(tiles_follow_the_tuned_table) {
  Problem p = call(kF16, 128);
  p.num_heads_q = p.num_heads_kv = 1;
  p.batch = 10;  // as many as the GPUs here have multiprocessors
  for (auto [seqlen_q, tile] :
       {std::pair(129, "128x64x4"), {128, "32x64x4"}, {33, "32x64x4"}, {32, "64x64x4"}}) {
    p.seq_q.seqlen = seqlen_q;
    CHECK_EQ(chosen(p, kBigGpu, "tiled"), std::string("tiled/f16/d128v128/") + tile);
  }
  p.seq_q.seqlen = 128;
  for (auto [batch, tile] : {std::pair(15, "128x64x4"), {14, "32x64x4"}, {1, "64x64x4"}}) {
    p.batch = batch;
    CHECK_EQ(chosen(p, kBigGpu, "tiled"), std::string("tiled/f16/d128v128/") + tile);
  }
  // A few queries of heads that share K and V are one tile: one block per KV head.
  p.batch = 10;
  p.seq_q.seqlen = 1;
  p.num_heads_q = 32;
  for (auto [heads_kv, tile] : {std::pair(32, "128x64x4"), {2, "128x64x4"}, {1, "64x64x4"}}) {
    p.num_heads_kv = heads_kv;
    CHECK_EQ(chosen(p, kBigGpu, "tiled"), std::string("tiled/f16/d128v128/") + tile);
  }
  p.batch = p.num_heads_q = p.num_heads_kv = 1;
  // Head dims that the table does not name: the manifest's order.
  CHECK_EQ(chosen(p, kGpu, "tiled"), "tiled/f16/d128v128/128x64x4");
  // A tuned tile that cannot run is skipped; a tile that is not named comes last.
  p = call(kF16, 96);
  p.seq_q.seqlen = 4096;
  CHECK_EQ(chosen(p, kGpu, "tiled"), "tiled/f16/d96v96/32x64x4");
  CHECK_EQ(chosen(p, kGpu, "tiled/f16/d96v96/64x64x4"), "tiled/f16/d96v96/64x64x4");
  // So is the last one.
  p.batch = p.num_heads_q = p.num_heads_kv = 1;
  p.seq_q.seqlen = 17;
  CHECK_EQ(chosen(p, kGpu, "tiled"), "tiled/f16/d96v96/32x64x4");
}

// Without decode rules, decoding follows the general rules: the test before this one.
TEST(decoding_follows_rules_of_its_own) {
  Problem p = call(kF16, 96);
  p.num_heads_q = p.num_heads_kv = 1;
  p.batch = 80;  // 8 per multiprocessor
  for (auto [seqlen_q, tile] : {std::pair(1, "32x64x4"), {16, "32x64x4"}, {17, "64x64x4"}}) {
    p.seq_q.seqlen = seqlen_q;
    CHECK_EQ(chosen(p, kBigGpu, "tiled"), std::string("tiled/f16/d96v96/") + tile);
  }
  p.seq_q.seqlen = 1;
  Status status;
  CHECK_EQ(why_preferred(*select(p, Op::kForward, kBigGpu, "tiled", status),
                         find("tiled/f16/d96v96/64x64x4"), p, kBigGpu),
           "could run; tile 32x64x4 is preferred for decoding with 8 blocks an SM");
  p.batch = 10;
  CHECK_EQ(chosen(p, kBigGpu, "tiled"), "tiled/f16/d96v96/64x64x4");
}

TEST(why_another_one_is_preferred) {
  Problem p = call(kF16, 128);
  auto const text = [&](char const* other) {
    Status status;
    return why_preferred(*select(p, Op::kForward, kBigGpu, "tiled", status), find(other), p,
                         kBigGpu);
  };
  p.seq_q.seqlen = 640;
  CHECK_EQ(text("tiled/f16/d128v128/32x64x4"),
           "could run; tile 128x64x4 is preferred for 2 blocks an SM");
  CHECK_EQ(text("tiled/f16/d192v128/64x64x4"),
           "could run; tiled/f16/d128v128/128x64x4 pads the head dims less");
  CHECK_EQ(text("slow/f16"), "could run; tiled is preferred");
}

TEST(select_agrees_with_why_not) {
  for (int head_dim : {8, 64, 72, 96, 128, 192}) {
    for (int offset : {0, 2, 8}) {
      for (uint32_t bits : {0u, 1u, 2u}) {
        Problem p = call(kF16, head_dim);
        p.k.data = static_cast<char*>(p.k.data) + offset;
        p.logits.softcap = bits & 1u ? 1.0f : 0.0f;
        p.logits.sinks = bits & 2u ? &p.logits.softcap : nullptr;
        for (Variant const& v : registry()) {
          if (v.info.op != Op::kForward) continue;
          for (DeviceInfo const& device : {kGpu, kOldGpu, kNoGpu, kHost}) {
            Status status;
            bool const runs = select(p, Op::kForward, device, v.info.key, status) != nullptr;
            CHECK_EQ(runs, why_not(v, p, device).empty());
          }
        }
      }
    }
  }
}

TEST(alignment) {
  Problem p = call();
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
  p.batch = 1;  // then the stride has no meaning
  CHECK_EQ(reason("fast/f16/d64", p, kGpu), "");
  p = call();
  p.q.row_stride = 65;
  p.k.data = static_cast<char*>(p.k.data) + 2;
  CHECK_EQ(reason("later/f16", p, kGpu), "");  // it only requires a multiple of the element size
  p.set_dtype(kF32);                           // also of a larger element
  p.k.data = static_cast<char*>(p.k.data) + 1;
  CHECK_EQ(reason("later/f16", p, kGpu),
           "needs float16, got float32; k's address is not a multiple of 2 bytes");
}

TEST(rows_of_packed_sequences_are_stepped_along_however_short_they_are) {
  Problem p = call();
  p.seq_q.seqlen = 1, p.q.row_stride = 65;
  CHECK_EQ(reason("fast/f16/d64", p, kGpu), "");
  int32_t const cu_seqlens[] = {0, 1, 2};
  p.seq_q.cu_seqlens = cu_seqlens, p.seq_q.total = 2;
  CHECK_EQ(
      reason("fast/f16/d64", p, kGpu),
      "does not implement varlen; q's row stride of 65 elements is not a multiple of 16 bytes");
  p.q.row_stride = -64;
  CHECK_EQ(reason("tma/f16/d40", p, kBigGpu),
           "needs head_dim 40, got 64; does not implement varlen; q's row stride is -64 elements, "
           "allowed: from 0 to 549755813887");
}

TEST(address_bits_are_those_of_every_row) {
  CHECK_EQ(address_bits(call(), 2), 4096u | 64 * 2 | 256 * 2 | 512 * 2);
  for (Operand Problem::* operand : {&Problem::q, &Problem::k, &Problem::v, &Problem::o}) {
    Problem p = call();
    (p.*operand).data = reinterpret_cast<void*>(4098);
    CHECK_EQ(address_bits(p, 2) % 16, 2u);
    bool const is_of_keys = operand == &Problem::k || operand == &Problem::v;
    struct {
      int64_t Operand::* stride;
      int32_t& (*size)(Problem&, bool is_of_keys);
    } const dims[] = {
        {&Operand::batch_stride, [](Problem& p, bool) -> int32_t& { return p.batch; }},
        {&Operand::head_stride,
         [](Problem& p, bool of_keys) -> int32_t& {
           return of_keys ? p.num_heads_kv : p.num_heads_q;
         }},
        {&Operand::row_stride, [](Problem& p, bool of_keys) -> int32_t& {
           return of_keys ? p.seq_k.seqlen : p.seq_q.seqlen;
         }}};
    for (auto const& [stride, size] : dims) {
      p = call();
      p.*operand.*stride = -261;
      CHECK_EQ(address_bits(p, 2) % 16, 6u);
      CHECK_EQ(address_bits(p, 4) % 16, 12u);
      size(p, is_of_keys) = 1;
      CHECK_EQ(address_bits(p, 2) % 16, 0u);
    }
  }
}

TEST(kernels_passed_over_are_those_for_calls_of_this_kind) {
  Problem const p = call(kF16, 80);
  Status status;
  Variant const* const best = select(p, Op::kForward, kGpu, "auto", status);
  CHECK_EQ(best->info.key, "slow/f16");
  std::vector<PassedOver> const found = passed_over(p, Op::kForward, kGpu, "auto", best);
  CHECK(!found.empty());
  CHECK_EQ(found[0].kernel, "fast");
  CHECK_EQ(found[0].reason, "needs head_dim 64, got 80");
  CHECK_EQ(found[0].count, 2);
  for (PassedOver const& x : found) {
    CHECK(x.kernel != "slow" && x.kernel != "host" && x.kernel != "half" && x.kernel != "eight");
  }
  CHECK(passed_over(p, Op::kForward, kGpu, "slow", best).empty());
}

TEST(each_op_has_kernels_of_its_own) {
  Problem p = call();
  Gradients grad;
  for (Operand* t : {&grad.o, &grad.q, &grad.k, &grad.v}) *t = p.q;
  p.grad = &grad;
  Status status;
  auto const chosen_for_backward = [&](std::string const& kernel) -> std::string {
    Variant const* const v = select(p, Op::kBackward, kGpu, kernel, status);
    return v == nullptr ? "" : v->info.key;
  };
  CHECK_EQ(chosen(p, kGpu, "auto"), "fast/f16/d64");
  CHECK_EQ(chosen_for_backward("auto"), "back/f16");
  CHECK(refusal(p, kGpu, "back", StatusCode::kInvalidArgument).find("allowed: \"auto\"") !=
        std::string::npos);
  CHECK_EQ(chosen_for_backward("fast"), "");
  CHECK_EQ(status.message,
           "kernel is \"fast\", allowed: \"auto\", \"back\", or a whole key such as \"back/f16\" "
           "(variants() lists them)");

  grad.deterministic = true;
  CHECK_EQ(chosen_for_backward("auto"), "back/f16/ordered");
  CHECK_EQ(reason("back/f16", p, kGpu), "does not implement deterministic");
  grad.deterministic = false;

  // Operands of a backward pass must be aligned like those of the forward call.
  grad.k.row_stride += 1;
  CHECK_EQ(chosen_for_backward("auto"), "");
  CHECK_EQ(reason("back/f16", p, kGpu),
           "grad_k's row stride of 65 elements is not a multiple of 16 bytes");
  grad.k.data = nullptr;  // not wanted
  CHECK_EQ(chosen_for_backward("auto"), "back/f16");
}

int main(int argc, char** argv) { return check::run(argc, argv); }
