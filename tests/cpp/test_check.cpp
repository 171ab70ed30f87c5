// check(): which calls it rejects, and with which words.
#include <cmath>
#include <limits>
#include <string>

#include "check.hpp"
#include "check_call.hpp"
#include "cutlass_attn.hpp"

using namespace cutlass_attn;

namespace {

using P = Problem;

}  // namespace

TEST(a_valid_call_passes) {
  CHECK_EQ(message([](P&) {}), "");
  CHECK_EQ(message([](P& p) { p.softmax_lse = nullptr; }), "");
  CHECK_EQ(message([](P& p) { p.head_dim_v = 3; }), "");
  CHECK_EQ(message([](P& p) { p.logits.softmax_scale = -2; }), "");
  CHECK_EQ(message([](P& p) { p.mask.causal = true, p.mask.window_right = 3; }), "");
  CHECK_EQ(message([](P& p) { p.mask.diagonal_shift = -(int64_t(1) << 32); }), "");
}

TEST(dimensions) {
  CHECK_EQ(message([](P& p) { p.batch = -1; }), "batch is -1, allowed: 0 to 2147483647");
  CHECK_EQ(message([](P& p) { p.seq_q.seqlen = -2; }), "seqlen_q is -2, allowed: 0 to 1073741824");
  CHECK_EQ(message([](P& p) { p.seq_k.seqlen = -3; }), "seqlen_k is -3, allowed: 0 to 1073741824");
  CHECK_EQ(message([](P& p) { p.num_heads_q = -4; }),
           "num_heads_q is -4, allowed: 0 to 2147483647");
  CHECK_EQ(message([](P& p) { p.num_heads_kv = -5; }),
           "num_heads_kv is -5, allowed: 0 to 2147483647");
  CHECK_EQ(message([](P& p) { p.head_dim = 577; }), "head_dim is 577, allowed: 1 to 576");
  CHECK_EQ(message([](P& p) { p.head_dim = 0; }), "head_dim is 0, allowed: 1 to 576");
  CHECK_EQ(message([](P& p) { p.head_dim_v = 600; }), "head_dim_v is 600, allowed: 1 to 576");
  CHECK_EQ(message([](P& p) { p.num_heads_kv = 3; }),
           "num_heads_q is 4, allowed: a multiple of num_heads_kv, which is 3");
  CHECK_EQ(message([](P& p) { p.num_heads_kv = 0; }),
           "num_heads_q is 4, allowed: a multiple of num_heads_kv, which is 0");
}

TEST(options) {
  float const inf = INFINITY, nan = std::nanf("");
  CHECK_EQ(message([](P& p) { p.set_dtype(DType(4)); }),
           "q's dtype is 4, allowed: 0 (float16), 1 (bfloat16), 2 (float32), 3 (float64)");
  CHECK_EQ(message([](P& p) { p.accumulate = Accumulate(4); }),
           "accumulate is 4, allowed: 0 (fp32), 1 (fp16_qk), 2 (fp16_pv), 3 (fp16)");
  CHECK_EQ(message([=](P& p) { p.logits.softmax_scale = inf; }),
           "softmax_scale is inf, allowed: any finite number");
  CHECK_EQ(message([=](P& p) { p.logits.softmax_scale = nan; }),
           "softmax_scale is nan, allowed: any finite number");
  CHECK_EQ(message([](P& p) { p.logits.softcap = -1; }),
           "softcap is -1, allowed: a finite number > 0, or 0 for no cap");
  CHECK_EQ(message([=](P& p) { p.logits.softcap = nan; }),
           "softcap is nan, allowed: a finite number > 0, or 0 for no cap");
  CHECK_EQ(message([](P& p) { p.logits.softcap = 5000; }),
           "softcap is 5000, allowed: up to 4096, as logits have an error of 1e-7 of it, or 0 for "
           "no cap");
  // The scalars of a float64 call replace those of Logits.
  static Float64Scalars scalars;
  auto const in_float64 = [](P& p, Float64Scalars given) {
    scalars = given;
    p.float64 = &scalars;
    p.set_dtype(DType::kFloat64);
  };
  CHECK_EQ(message([=](P& p) { in_float64(p, {1.0, -1e-60}); }),
           "softcap is -1e-60, allowed: a finite number > 0, or 0 for no cap");
  CHECK_EQ(message([=](P& p) { in_float64(p, {nan, 0.0}); }),
           "softmax_scale is nan, allowed: any finite number");
  std::string const of_large_cap = message([=](P& p) {
    in_float64(p, {1.0, 5000.0});
    p.logits.softcap = nan;
  });
  CHECK(of_large_cap.find("softcap") == std::string::npos);
  CHECK_EQ(message([](P& p) { p.logits.has_float64_slopes = true; }),
           "has_float64_slopes is set, but q is float32; allowed: with float64");
  CHECK_EQ(message([](P& p) { p.mask.window_left = -2; }),
           "window_left is -2, allowed: a number of keys >= 0, or -1 for no limit");
  CHECK_EQ(message([](P& p) { p.mask.window_right = -9; }),
           "window_right is -9, allowed: a number of keys >= 0, or -1 for no limit");
  CHECK_EQ(message([](P& p) { p.mask.attention_chunk = 3; }), "");
  CHECK_EQ(message([](P& p) { p.mask.attention_chunk = -1; }),
           "attention_chunk is -1, allowed: 1 to 268435456 keys, or 0 for no chunks");
  CHECK_EQ(message([](P& p) { p.mask.diagonal_shift = (int64_t(1) << 32) + 1; }),
           "diagonal_shift is 4294967297, allowed: -2^32 to 2^32");
}

TEST(products_in_8_bits_go_without_some) {
  CHECK_EQ(message([](P& p) { p.quantize = Quantize(kNumQuantizes); }),
           "quantize is 4, allowed: 0 (none), 1 (qk), 2 (int8), 3 (fp8)");
  CHECK_EQ(message([](P& p) { p.quantize = Quantize::kQk; }),
           "quantize is \"qk\", but q, k and v are float32; allowed: float16 or bfloat16");
  auto const with = [](auto const& change) {
    return message([&](P& p) {
      p.set_dtype(DType::kBFloat16);
      p.quantize = Quantize::kQk;
      change(p);
    });
  };
  static uint64_t const rng_state[2] = {1, 2};
  static int32_t const lengths[3] = {0, 1, 2};
  CHECK_EQ(with([](P&) {}), "");
  CHECK_EQ(with([](P& p) { p.accumulate = Accumulate::kFloat16Pv; }),
           "quantize is \"qk\", but accumulate is \"fp16_pv\"; allowed: \"fp32\"");
  CHECK_EQ(with([](P& p) { p.dropout = {0.5f, rng_state}; }),
           "quantize is \"qk\", but dropout_p is 0.5; allowed: 0");
  CHECK_EQ(with([](P& p) { p.seq_k.seqused = lengths; }), "");
  CHECK_EQ(with([](P& p) { p.kv = {lengths, 1, 1, 3}; }),
           "quantize is \"qk\", but k and v are in pages (block_table); allowed: dense or packed "
           "ones, or quantize=None, with which pages may be of float8_e4m3fn");
  CHECK_EQ(with([](P& p) { p.k.dtype = p.v.dtype = DType::kFloat8E4M3; }),
           "quantize is \"qk\", but k and v are float8_e4m3fn; allowed: of q's dtype");
  static float const scale = 2.0f;
  CHECK_EQ(with([](P& p) { p.v.scale = &scale; }),
           "quantize is \"qk\", but k_scale or v_scale is given; allowed: none, or 1");
  CHECK_EQ(with([](P& p) { p.max_error = 0.02f; }), "");
  CHECK_EQ(with([](P& p) { p.max_error = 0.02f, p.seq_k.seqused = lengths; }),
           "quantize is \"qk\", but max_error is 0.02 with packed sequences or sequences of "
           "different lengths; allowed: dense ones");
  CHECK_EQ(message([](P& p) { p.max_error = 0.5f; }),
           "max_error is 0.5, but quantize is None; allowed: with products in 8 bits");
  for (auto [wrong, text] :
       {std::pair(-1e-8f, "-1e-08"), {-1.0f, "-1"}, {INFINITY, "inf"}, {NAN, "nan"}}) {
    CHECK_EQ(
        with([wrong = wrong](P& p) { p.max_error = wrong; }),
        std::string("max_error is ") + text + ", allowed: a finite number above 0, or 0 for none");
  }
}

// Memory for the options, and calls that use it correctly.
struct Terms {
  float bias[2 * 4 * 5 * 7], slopes[2 * 4], sinks[4];
  uint8_t mask[2 * 4 * 5 * 7];
  uint64_t rng_state[2];
};

TEST(terms_sinks_and_dropout_pass) {
  static Terms t;
  CHECK_EQ(message([](P& p) {
             p.logits.bias = {t.bias, 140, 35, 7, 1};
             p.logits.bias_dtype = DType::kFloat32;
             p.mask.elements = {t.mask, 140, 35, 7, 1};
             p.logits.alibi_slopes = t.slopes;
             p.logits.alibi_batch_stride = 4;
             p.logits.sinks = t.sinks;
             p.dropout.p = 0.5f;
             p.dropout.rng_state = t.rng_state;
           }),
           "");
  // Broadcast, negative strides, keys not adjacent.
  CHECK_EQ(message([](P& p) {
             p.logits.bias = {t.bias, 7, 0, 0, 1};
             p.logits.bias_dtype = DType::kFloat32;
             p.mask.elements = {t.mask + 6, 0, 0, 0, -1};
           }),
           "");
  CHECK_EQ(message([](P& p) { p.mask.elements = {t.mask, 1, 2, 8, 40}; }), "");
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    for (DType bias_dtype : {dtype, DType::kFloat32}) {
      CHECK_EQ(message([=](P& p) {
                 p.set_dtype(dtype);
                 p.logits.bias = {t.bias, 0, 0, 0, 1};
                 p.logits.bias_dtype = bias_dtype;
               }),
               "");
    }
  }
  for (float p : {0.0f, 1.0f}) {
    CHECK_EQ(message([=](P& q) { q.dropout.p = p, q.dropout.rng_state = t.rng_state; }), "");
  }
}

TEST(terms_sinks_and_dropout_that_are_wrong) {
  static Terms t;
  auto const bias = [](DType dtype, DType bias_dtype) {
    return message([=](P& p) {
      p.set_dtype(dtype);
      p.logits.bias = {t.bias, 0, 0, 0, 1};
      p.logits.bias_dtype = bias_dtype;
    });
  };
  CHECK_EQ(bias(DType::kFloat16, DType::kBFloat16),
           "bias_dtype is 1, allowed: 0 (float16, as q), 2 (float32)");
  CHECK_EQ(bias(DType::kBFloat16, DType::kFloat16),
           "bias_dtype is 0, allowed: 1 (bfloat16, as q), 2 (float32)");
  CHECK_EQ(bias(DType::kFloat32, DType::kFloat16), "bias_dtype is 0, allowed: 2 (float32)");
  CHECK_EQ(bias(DType::kFloat32, DType(7)), "bias_dtype is 7, allowed: 2 (float32)");
  float const inf = INFINITY, nan = std::nanf("");
  for (auto [p, text] : {std::pair(-0.5f, "-0.5"), {1.5f, "1.5"}, {inf, "inf"}, {nan, "nan"}}) {
    CHECK_EQ(message([p = p](P& q) { q.dropout.p = p, q.dropout.rng_state = t.rng_state; }),
             std::string("dropout_p is ") + text + ", allowed: a probability from 0 to 1");
  }
  CHECK_EQ(message([](P& p) { p.dropout.p = 0.25f; }),
           "rng_state is null, but dropout_p is 0.25; allowed: the address of a seed and an "
           "offset");

  // Addresses.
  auto const shifted = [](auto* address, int bytes) {
    return reinterpret_cast<decltype(address)>(reinterpret_cast<char*>(address) + bytes);
  };
  CHECK_EQ(message([=](P& p) {
             p.logits.bias = {shifted(t.bias, 2), 0, 0, 0, 1};
             p.logits.bias_dtype = DType::kFloat32;
           }),
           "bias's address is not a multiple of the 4 bytes of an element");
  CHECK_EQ(message([=](P& p) {
             p.set_dtype(p.logits.bias_dtype = DType::kFloat16);
             p.logits.bias = {shifted(t.bias, 1), 0, 0, 0, 1};
           }),
           "bias's address is not a multiple of the 2 bytes of an element");
  CHECK_EQ(message([=](P& p) { p.mask.elements = {t.mask + 1, 0, 0, 0, 1}; }), "");
  CHECK_EQ(message([=](P& p) { p.logits.alibi_slopes = shifted(t.slopes, 2); }),
           "alibi_slopes's address is not a multiple of the 4 bytes of an element");
  CHECK_EQ(message([=](P& p) { p.logits.sinks = shifted(t.sinks, 1); }),
           "sinks's address is not a multiple of the 4 bytes of an element");
  CHECK_EQ(
      message([=](P& p) { p.dropout.p = 0.1f, p.dropout.rng_state = shifted(t.rng_state, 4); }),
      "rng_state's address is not a multiple of the 8 bytes of an element");

  // Strides.
  int64_t const far = int64_t(1) << 60;
  CHECK_EQ(
      message([=](P& p) { p.mask.elements = {t.mask, 0, 0, 0, far}; }),
      "mask's strides (0, 0, 0, " + std::to_string(far) + ") reach further than any address space");
  CHECK_EQ(
      message([=](P& p) { p.logits.alibi_slopes = t.slopes, p.logits.alibi_batch_stride = far; }),
      "alibi_slopes's strides (" + std::to_string(far) + ") reach further than any address space");
  CHECK_EQ(message([=](P& p) { p.seq_k.seqlen = 1, p.mask.elements = {t.mask, 0, 0, 0, far}; }),
           "");
}

TEST(outputs_share_no_memory_with_terms) {
  auto const overlaps = [](std::string const& input, auto const& set) {
    auto const on = [&](auto const& output) { return message([&](P& p) { set(p, output(p)); }); };
    CHECK_EQ(on([](P& p) { return static_cast<float*>(p.o.data) + 319; }),
             "out overlaps " + input + "; the output needs memory that no input uses");
    CHECK_EQ(on([](P& p) { return p.softmax_lse + 38; }),
             "softmax_lse overlaps " + input + "; it needs memory that no other operand uses");
  };
  // `at`: within the output's last elements.
  overlaps("bias", [](P& p, float* at) {
    p.logits.bias = {at, 0, 0, 0, 1};
    p.logits.bias_dtype = DType::kFloat32;
  });
  overlaps("bias", [](P& p, float* at) {
    p.logits.bias = {at, 0, 0, 0, -1};
    p.logits.bias_dtype = DType::kFloat32;
  });
  overlaps("mask", [](P& p, float* at) { p.mask.elements = {at, 0, 0, 7, 1}; });
  overlaps("alibi_slopes", [](P& p, float* at) { p.logits.alibi_slopes = at; });
  overlaps("sinks", [](P& p, float* at) { p.logits.sinks = at; });
  overlaps("rng_state", [](P& p, float* at) {
    p.dropout.p = 0.5f;
    p.dropout.rng_state =
        reinterpret_cast<uint64_t*>(reinterpret_cast<uintptr_t>(at) & ~uintptr_t(7));
  });
}

TEST(operands_are_of_one_dtype) {
  CHECK_EQ(message([](P& p) { p.k.dtype = DType::kFloat16; }),
           "k is float16, allowed: float32 like q");
  CHECK_EQ(message([](P& p) { p.o.dtype = DType::kBFloat16; }),
           "out is bfloat16, allowed: float32 like q");
  CHECK_EQ(message([](P& p) { p.v.dtype = DType(-1); }),
           "v's dtype is -1, allowed: 0 (float16), 1 (bfloat16), 2 (float32), 3 (float64), "
           "4 (float8_e4m3fn), 5 (ds_mla), 6 (ds_mla_v4)");
}

TEST(k_and_v_may_be_stored_in_8_bits) {
  auto const store = [](P& p) { p.k.dtype = p.v.dtype = DType::kFloat8E4M3; };
  CHECK_EQ(message(store), "");
  CHECK_EQ(message([](P& p) { p.v.dtype = DType::kFloat8E4M3; }),
           "v is float8_e4m3fn, allowed: float32 like q");
  CHECK_EQ(message([=](P& p) { store(p), p.o.dtype = DType::kFloat8E4M3; }),
           "out's dtype is 4, allowed: 0 (float16), 1 (bfloat16), 2 (float32), 3 (float64)");
  CHECK_EQ(message([=](P& p) { p.set_dtype(DType::kFloat64), store(p); }),
           "k and v are float8_e4m3fn, allowed with q of float64: float64 like q");
}

TEST(k_and_v_may_be_tokens_in_bytes) {
  auto const store = [](P& p) {
    p.num_heads_kv = 1;
    p.head_dim = 576;
    p.head_dim_v = 512;
    p.q.row_stride = p.o.row_stride = 1024;
    p.k.dtype = DType::kDsMla;
    p.k.row_stride = 656;
    p.k.batch_stride = 656 * p.seq_k.seqlen;
    p.v = p.k;
    p.kv.page_size = p.seq_k.seqlen;
  };
  auto const with = [&](auto&& change) { return message([&](P& p) { store(p), change(p); }); };
  CHECK_EQ(with([](P& p) { p.v.row_stride = 512; }),
           "k and v are ds_mla, and v is not k; allowed: one address and strides");
  CHECK_EQ(with([](P& p) { p.k.row_stride = p.v.row_stride = 672; }),
           "k and v are ds_mla, and the row stride is 672; allowed: 656");
  CHECK_EQ(with([](P& p) { p.head_dim_v = 448; }),
           "k and v are ds_mla, and head_dim_v is 448; allowed: 512");
  CHECK_EQ(with([](P& p) { p.kv.page_size = 0; }),
           "k and v are ds_mla, and page_size is 0; allowed: rows of a page, or without pages all "
           "rows of an entry");
  static float const scale = 2.0f;
  CHECK_EQ(
      with([](P& p) { p.k.scale = &scale; }),
      "k and v are ds_mla, and k_scale or v_scale is given; allowed: None, tokens have scales");
}

TEST(sequences_and_pages) {
  static int32_t numbers[8];
  auto const odd = reinterpret_cast<int32_t*>(reinterpret_cast<char*>(numbers) + 2);
  auto const pack = [](P& p) {
    p.seq_q.cu_seqlens = p.seq_k.cu_seqlens = numbers;
    p.seq_q.total = 5, p.seq_k.total = 7;
    for (Operand* t : {&p.q, &p.k, &p.v, &p.o}) t->batch_stride = 0;
  };
  CHECK_EQ(message(pack), "");
  CHECK_EQ(message([=](P& p) { pack(p), p.v.batch_stride = 5; }),
           "v's batch stride is 5, allowed: 0 with cu_seqlens, which says where a batch entry "
           "begins");
  CHECK_EQ(message([=](P& p) { p.seq_q.cu_seqlens = numbers, p.q.batch_stride = 0; }),
           "out's batch stride is 160, allowed: 0 with cu_seqlens, which says where a batch entry "
           "begins");
  // Everything else in a packed call is checked as in any call.
  CHECK_EQ(message([=](P& p) {
             pack(p);
             p.softmax_lse = reinterpret_cast<float*>(reinterpret_cast<char*>(p.softmax_lse) + 1);
           }),
           "softmax_lse's address is not a multiple of the 4 bytes of an element");
  CHECK_EQ(message([=](P& p) { pack(p), p.logits.sinks = reinterpret_cast<float const*>(odd); }),
           "sinks's address is not a multiple of the 4 bytes of an element");
  CHECK_EQ(message([=](P& p) { p.k.scale = reinterpret_cast<float const*>(odd); }),
           "k.scale's address is not a multiple of the 4 bytes of an element");
  CHECK_EQ(message([](P& p) { p.seq_k.seqused = numbers; }), "");
  CHECK_EQ(message([](P& p) { p.seq_k.leftpad = numbers; }), "");
  CHECK_EQ(message([](P& p) {
             p.seq_q.leftpad = numbers;
             p.mask.elements.data = numbers;
           }),
           "leftpad_q is set, but there is a mask; allowed: padding in the mask, or without mask "
           "and bias");
  CHECK_EQ(
      message([](P& p) { p.kv = {numbers, 4, 16}, p.seq_k.leftpad = numbers; }),
      "leftpad_k is set, but sequences are packed or in pages; allowed: batch entries of equal "
      "lengths");
  CHECK_EQ(message([](P& p) { p.kv = {numbers, 4, 16}; }), "");
  CHECK_EQ(message([=](P& p) { p.seq_q.cu_seqlens = odd; }),
           "cu_seqlens_q's address is not a multiple of the 4 bytes of an element");
  CHECK_EQ(message([=](P& p) { p.seq_k.seqused = odd; }),
           "seqused_k's address is not a multiple of the 4 bytes of an element");
  CHECK_EQ(message([](P& p) { p.kv = {numbers, 4, 0}; }),
           "page_size is 0, allowed: a number of keys >= 1");
  CHECK_EQ(message([](P& p) { p.kv = {numbers, 4, 16}, p.seq_k.cu_seqlens = numbers; }),
           "cu_seqlens_k is set, but block_table says where keys are; allowed: seqused_k for their "
           "number");
  CHECK_EQ(message([=](P& p) { pack(p), p.seq_k.total = 9, p.v.data = nullptr; }),
           "v is null, but it has 1 x 2 x 9 rows");
  CHECK_EQ(message([=](P& p) { p.kv = {numbers, 4, 16, 3}, p.v.data = nullptr; }),
           "v is null, but it has 3 x 2 x 16 rows");
  CHECK_EQ(message([](P& p) { p.seq_q.total = -1; }),
           "seq_q.total is -1, allowed: 0 to 1073741824");
  // Packed rows of all heads are counted in 32 bits.
  auto const rows = [=](int32_t total) {
    return message([=](P& p) {
      pack(p);
      p.num_heads_q = 4, p.seq_q.total = total, p.o.data = nullptr;
    });
  };
  CHECK_EQ(rows(1 << 29), "seq_q.total x num_heads_q is 2147483648, allowed: 0 to 2147483647");
  CHECK_EQ(rows((1 << 29) - 1), "out is null, but it has 1 x 4 x 536870911 rows");
  CHECK_EQ(message([](P& p) { p.num_splits = -1; }), "num_splits is -1, allowed: 0 to 2147483647");
  CHECK_EQ(message([](P& p) { p.split_size = 96; }),
           "split_size is 96, allowed: 0, or a multiple of 64");
  CHECK_EQ(message([](P& p) { p.split_size = 64, p.num_splits = 2; }),
           "split_size is 64 and num_splits 2; allowed: one of them");
  CHECK_EQ(message([](P& p) { p.split_size = 64; }),
           "split_size is 64, allowed: 0 where all sequences have equal lengths");
  // Outputs are compared to inputs over all rows.
  CHECK_EQ(message([=](P& p) {
             pack(p);
             p.seq_q.total = p.seq_k.total = 3;
             p.o.data = p.q.data;
           }),
           "out overlaps q; the output needs memory that no input uses");
}

// Arrays on the host are read before a call on the CPU runs.
TEST(lengths_and_pages) {
  float rows[64] = {}, out[64];
  auto const run = [&](auto const& change) {
    P p;
    p.set_dtype(DType::kFloat32);
    p.batch = 2;
    p.num_heads_q = p.num_heads_kv = p.head_dim = p.head_dim_v = 1;
    p.q = p.k = p.v = {rows, 0, 0, 1, DType::kFloat32};
    p.o = {out, 0, 0, 1, DType::kFloat32};
    p.seq_q.seqlen = p.seq_k.seqlen = p.seq_q.total = p.seq_k.total = 8;
    change(p);
    return attention_forward(p, {}).message;
  };
  int32_t const cu[] = {0, 3, 8};
  auto const packed = [&](int32_t const(&q)[3], int32_t const(&k)[3]) {
    return run([&](P& p) { p.seq_q.cu_seqlens = q, p.seq_k.cu_seqlens = k; });
  };
  CHECK_EQ(packed(cu, cu), "");
  CHECK_EQ(packed({0, 0, 0}, {2, 2, 8}), "");
  CHECK_EQ(packed({-1, 3, 8}, cu), "cu_seqlens_q[0] is -1, allowed: 0 or more");
  CHECK_EQ(packed(cu, {0, 4, 3}),
           "cu_seqlens_k[2] is 3, allowed: 4 or more, as the offset before it");
  CHECK_EQ(packed({0, 4, 9}, cu), "cu_seqlens_q[2] is 9, but q has 8 rows");
  CHECK_EQ(run([&](P& p) {
             p.seq_q.cu_seqlens = p.seq_k.cu_seqlens = cu;
             p.seq_q.seqlen = 4;
           }),
           "entry 1 of cu_seqlens_q has 5 rows, but seqlen_q, the maximum, is 4");
  auto const used = [&](int32_t const(&k)[2]) {
    return run([&](P& p) {
      p.o.batch_stride = 8;
      p.seq_k.seqused = k;
    });
  };
  CHECK_EQ(used({8, 0}), "");
  CHECK_EQ(used({8, 9}), "seqused_k[1] is 9, but k has 8 rows for that entry");
  CHECK_EQ(used({-1, 9}), "seqused_k[0] is -1, but k has 8 rows for that entry");
  auto const padded = [&](int32_t const(&left)[2], int32_t const(&k)[2]) {
    return run([&](P& p) {
      p.o.batch_stride = 8;
      p.seq_k.seqused = k, p.seq_k.leftpad = left;
    });
  };
  CHECK_EQ(padded({8, 0}, {8, 0}), "");
  CHECK_EQ(padded({8, 1}, {8, 0}),
           "leftpad_k[1] is 1, allowed: 0 to 0, the end of the valid rows of k in that entry");
  CHECK_EQ(padded({-1, 1}, {8, 0}),
           "leftpad_k[0] is -1, allowed: 0 to 8, the end of the valid rows of k in that entry");
  auto const pages = [&](int32_t const(&table)[4], int32_t const(&k)[2]) {
    return run([&](P& p) {
      p.o.batch_stride = 8;
      p.k.batch_stride = p.v.batch_stride = 4;
      p.seq_k.seqused = k;
      p.kv = {table, 2, 4, 3};
    });
  };
  CHECK_EQ(pages({0, 2, 1, -1}, {8, 4}), "");
  CHECK_EQ(pages({0, 2, 1, -1}, {8, 5}),
           "block_table[1, 1] is -1, allowed: 0 to 2, the pages of the cache");
  CHECK_EQ(pages({0, 3, 1, -1}, {8, 4}),
           "block_table[0, 1] is 3, allowed: 0 to 2, the pages of the cache");
  CHECK_EQ(pages({0, 2, 1, -1}, {9, 4}),
           "seqused_k[0] is 9, but block_table has 8 rows for that entry");
}

TEST(addresses_and_strides) {
  CHECK_EQ(message([](P& p) { p.k.data = nullptr; }), "k is null, but it has 2 x 2 x 7 rows");
  CHECK_EQ(message([](P& p) { p.o.data = nullptr; }), "out is null, but it has 2 x 4 x 5 rows");
  CHECK_EQ(message([](P& p) { p.v.data = static_cast<char*>(p.v.data) + 2; }),
           "v's address is not a multiple of the 4 bytes of an element");
  CHECK_EQ(message([](P& p) {
             p.softmax_lse = reinterpret_cast<float*>(reinterpret_cast<char*>(p.softmax_lse) + 2);
           }),
           "softmax_lse's address is not a multiple of the 4 bytes of an element");
  for (int64_t stride : {std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(),
                         int64_t(1) << 58}) {
    CHECK_EQ(
        message([=](P& p) { p.q.batch_stride = stride; }),
        "q's strides (" + std::to_string(stride) + ", 40, 8) reach further than any address space");
  }
  // The stride of a dimension of size 1 has no meaning.
  CHECK_EQ(message([](P& p) { p.batch = 1, p.q.batch_stride = INT64_MIN, p.o.batch_stride = 0; }),
           "");
}

TEST(empty_operands_need_no_memory) {
  CHECK_EQ(message([](P& p) { p.seq_k.seqlen = 0, p.k.data = p.v.data = nullptr; }), "");
  CHECK_EQ(message([](P& p) {
             p.seq_q.seqlen = 0, p.q.data = p.o.data = nullptr, p.softmax_lse = nullptr;
           }),
           "");
  CHECK_EQ(message([](P& p) { p.batch = 0, p.q.data = p.k.data = p.v.data = p.o.data = nullptr; }),
           "");
  CHECK_EQ(message([](P& p) {
             p.num_heads_q = p.num_heads_kv = 0;
             p.q.data = p.k.data = p.v.data = p.o.data = nullptr;
           }),
           "");
}

int main(int argc, char** argv) { return check::run(argc, argv); }
