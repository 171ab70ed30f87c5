// Reasons why a variant cannot run a call, and their texts.
#pragma once

#include <algorithm>
#include <string>

#include "core/alignment.hpp"
#include "runtime/loaded.hpp"
#include "runtime/registry.hpp"

namespace cutlass_attn {

inline char const* name_of(Device device) {
  return device == Device::kCpu ? "the CPU" : "a CUDA device";
}

inline std::string capability(int value) {
  return std::to_string(value / 10) + "." + std::to_string(value % 10);
}

// First stride, in bytes, that is too large for TMA.
inline constexpr int64_t kMaxTmaStride = int64_t(1) << 40;

// Kinds of obstacles.
//   kKind:         the kernel is for another kind of call: device, dtype, accumulator, precision of
//                  the operands, larger head dims, number of rows
//   kRequest:      the request does not fit the kernel
//   kEnvironment:  the machine or the build lacks something that another may have
enum class Lack { kKind, kRequest, kEnvironment };

// Calls visit(name, operand, heads, rows) for every operand that the op reads or writes.
template <class Visit>
void for_operands(Problem const& p, Op op, Visit&& visit) {
  visit("q", p.q, p.num_heads_q, p.seq_q.rows());
  visit("k", p.k, p.num_heads_kv, p.seq_k.rows());
  visit("v", p.v, p.num_heads_kv, p.seq_k.rows());
  visit("out", p.o, p.num_heads_q, p.seq_q.rows());
  if (op != Op::kBackward) return;
  visit("grad_out", p.grad->o, p.num_heads_q, p.seq_q.rows());
  if (p.grad->q.data) visit("grad_q", p.grad->q, p.num_heads_q, p.seq_q.rows());
  if (p.grad->k.data) visit("grad_k", p.grad->k, p.num_heads_kv, p.seq_k.rows());
  if (p.grad->v.data) visit("grad_v", p.grad->v, p.num_heads_kv, p.seq_k.rows());
}

// Calls visit(dimension, stride) for every dimension of an operand that has more than one index.
template <class Visit>
void for_strides(Problem const& p, Operand const& ref, int heads, int rows, Visit&& visit) {
  bool const has_pages = p.kv.has_pages() && (&ref == &p.k || &ref == &p.v);
  if (p.batch > 1 || has_pages) visit(has_pages ? "page" : "batch", ref.batch_stride);
  if (heads > 1) visit("head", ref.head_stride);
  if (rows > 1) visit("row", ref.row_stride);
}

// Query rows that share K and V.
inline int64_t rows_of(Problem const& p) {
  int64_t const queries = p.kv.indices ? 1 : p.seq_q.seqlen;  // each has its own list of keys
  return queries * (p.num_heads_q / std::max(p.num_heads_kv, 1));
}

// Properties of a call that variants look at, computed once for all of them.
struct Call {
  Problem const& p;
  Op op;
  uint32_t options;
  uint64_t addresses;  // address_bits(); the lowest set bit is the alignment of all operands

  Call(Problem const& params, Op op)
      : p(params), op(op), options(options_of(params, op)), addresses(bits_of_addresses()) {}

  uint64_t bits_of_addresses() const {
    if (op == Op::kForward) return address_bits(p, element(), size_of(p.k.dtype));
    uint64_t bits = 0;
    for_operands(p, op, [&](char const*, Operand const& ref, int heads, int rows) {
      bits |= reinterpret_cast<uint64_t>(ref.data);
      for_strides(p, ref, heads, rows, [&](char const*, int64_t stride) {
        bits |= uint64_t(stride) * unsigned(element());
      });
    });
    return bits;
  }
  int element() const { return size_of(p.q.dtype); }
};

// The instance that would run; null if it is not compiled yet.
inline KernelUnit const* unit_of(Variant const& variant, int score, DeviceInfo const& device) {
  return is_left_out(variant, score) ? loaded(variant, score, device.compute_capability)
                                     : variant.unit;
}

// Calls lacks(reason) for each obstacle to reading the bias by TMA, which needs alignment to 16
// bytes and strides >= 0.
template <class Lacks>
void examine_bias(Problem const& p, Lacks&& lacks) {
  constexpr int64_t kElements = 8;  // of 16 bytes
  PerLogit const& bias = p.logits.bias;
  if (p.logits.bias_dtype != p.q.dtype) {
    return lacks([&] {
      return std::string("needs a bias of ") + name_of(p.q.dtype) + ", got " +
             name_of(p.logits.bias_dtype);
    });
  }
  if (reinterpret_cast<uint64_t>(bias.data) % 16 != 0) {
    lacks([] { return std::string("bias's address is not a multiple of 16 bytes"); });
  }
  if (p.seq_k.seqlen > 1 && bias.key_stride != 1) {
    lacks([&] {
      return "bias's key stride is " + std::to_string(bias.key_stride) + " elements, allowed: 1";
    });
  }
  struct {
    char const* name;
    int64_t count, stride;
  } const dims[] = {{"batch", p.batch, bias.batch_stride},
                    {"head", p.num_heads_q, bias.head_stride},
                    {"query", p.seq_q.seqlen, bias.row_stride}};
  for (auto const& [name, count, stride] : dims) {
    if (count <= 1 || (stride >= 0 && stride % kElements == 0 && stride < kMaxTmaStride / 2)) {
      continue;
    }
    lacks([&, name = name, stride = stride] {
      return std::string("bias's ") + name + " stride is " + std::to_string(stride) +
             " elements, allowed: multiples of " + std::to_string(kElements) + " from 0 on";
    });
  }
}

// Likewise for reading a bias or a mask for two keys at a time.
template <class Lacks>
void examine_pairs(Problem const& p, std::string const& name, PerLogit const& entries, int bytes,
                   Lacks&& lacks) {
  if (reinterpret_cast<uint64_t>(entries.data) % unsigned(2 * bytes) != 0) {
    lacks([&] {
      return name + "'s address is not a multiple of " + std::to_string(2 * bytes) + " bytes";
    });
  }
  if (p.seq_k.seqlen % 2 != 0) {
    lacks([&] {
      return "needs an even seqlen_k for its " + name + ", got " + std::to_string(p.seq_k.seqlen);
    });
  }
  if (entries.key_stride != 1) {
    lacks([&] {
      return name + "'s key stride is " + std::to_string(entries.key_stride) +
             " elements, allowed: 1";
    });
  }
  struct {
    char const* name;
    int64_t count, stride;
  } const dims[] = {{"batch", p.batch, entries.batch_stride},
                    {"head", p.num_heads_q, entries.head_stride},
                    {"query", p.seq_q.seqlen, entries.row_stride}};
  for (auto const& [dim, count, stride] : dims) {
    if (count <= 1 || stride % 2 == 0) continue;
    lacks([&, dim = dim, stride = stride] {
      return name + "'s " + dim + " stride is " + std::to_string(stride) +
             " elements, allowed: multiples of 2";
    });
  }
}

inline bool has_capability(Variant const& variant, DeviceInfo const& device) {
  auto const& [least, last] = variant.kernel->compute_capability;
  int const given = device.compute_capability;
  return variant.info.device != Device::kCuda || (least <= given && given <= last);
}

// Calls lacks(kind, reason) for each obstacle to running the call with `variant`. `reason` is a
// function that makes the text, so that no text is made on the way to a kernel that runs. If
// lacks() returns true, the examination ends early.
template <class Lacks>
void examine(Variant const& variant, Call const& call, DeviceInfo const& device, Lacks&& lacks) {
  VariantInfo const& info = variant.info;
  Problem const& p = call.p;
  if (info.device != device.device) {
    lacks(Lack::kKind, [&] {
      return std::string("needs operands on ") + name_of(info.device) + ", got them on " +
             name_of(device.device);
    });
    return;
  }
  if (info.dtype != p.q.dtype && lacks(Lack::kKind, [&] {
        return std::string("needs ") + name_of(info.dtype) + ", got " + name_of(p.q.dtype);
      })) {
    return;
  }
  // Backward passes exist in fp32 only, whatever accumulator the forward call used.
  bool const is_forward = call.op == Op::kForward;
  if (is_forward && info.accumulate != p.accumulate && lacks(Lack::kKind, [&] {
        return std::string("needs accumulate=\"") + name_of(info.accumulate) + "\", got \"" +
               name_of(p.accumulate) + "\"";
      })) {
    return;
  }
  if (is_forward && info.quantize != p.quantize && lacks(Lack::kKind, [&] {
        return "needs quantize=" + value_of(info.quantize) + ", got " + value_of(p.quantize);
      })) {
    return;
  }
  if (p.head_dim < variant.min_head_dim && lacks(
                                               Lack::kKind,
                                               [&] {
                                                 return "needs head_dim from " +
                                                        std::to_string(variant.min_head_dim) +
                                                        " on, got " + std::to_string(p.head_dim);
                                               })) {
    return;
  }
  if (info.head_dim != 0) {
    struct {
      char const* name;
      int needed, given;
    } const dims[] = {{"head_dim", info.head_dim, p.head_dim},
                      {"head_dim_v", info.head_dim_v, p.head_dim_v}};
    for (auto const& [name, needed, given] : dims) {
      int const multiple = info.head_dim_multiple;
      if (given == needed || (multiple && given < needed && given % multiple == 0)) continue;
      auto const reason = [&, name = name, needed = needed, given = given] {
        std::string text = std::string("needs ") + name;
        if (multiple > 1) text += " a multiple of " + std::to_string(multiple);
        if (multiple) text += " up to";
        return text + " " + std::to_string(needed) + ", got " + std::to_string(given);
      };
      if (lacks(Lack::kRequest, reason)) return;
      break;  // a wrong head_dim is reported alone
    }
  }
  // Kernels without latent_kv read V like any operand.
  uint32_t const missing = call.options & ~variant.kernel->options & ~uint32_t(option::latent_kv);
  if (missing != 0) {
    auto const reason = [&] {
      std::string text = "does not implement";
      for (std::string const& name : option_names(missing)) text += " " + name + ",";
      text.pop_back();
      return text;
    };
    if (lacks(Lack::kRequest, reason)) return;
  }
  if (uint32_t const missing = variant.kernel->needs & ~call.options) {
    auto const reason = [&] {
      std::string text = "runs only calls with";
      for (std::string const& name : option_names(missing)) text += " " + name + ",";
      text.pop_back();
      return text;
    };
    if (lacks(Lack::kKind, reason)) return;
  }
  int64_t const rows = rows_of(p);
  if (int const most = info.max_rows; most != 0 && rows > most) {
    auto const reason = [&] {
      return "needs seqlen_q times num_heads_q / num_heads_kv up to " + std::to_string(most) +
             ", got " + std::to_string(rows);
    };
    if (lacks(Lack::kKind, reason)) return;
  }
  unsigned const alignment = unsigned(variant.kernel->alignment);
  if (call.addresses % alignment != 0) {
    auto const bytes = [&] {
      return " is not a multiple of " + std::to_string(alignment) + " bytes";
    };
    for_operands(p, call.op, [&](char const* name, Operand const& ref, int, int) {
      if (reinterpret_cast<uint64_t>(ref.data) % alignment == 0) return;
      lacks(Lack::kRequest, [&] { return std::string(name) + "'s address" + bytes(); });
    });
    for_operands(p, call.op, [&](char const* name, Operand const& ref, int heads, int rows) {
      for_strides(p, ref, heads, rows, [&](char const* dim, int64_t stride) {
        if (uint64_t(stride) * unsigned(size_of(ref.dtype)) % alignment == 0) return;
        lacks(Lack::kRequest, [&] {
          return std::string(name) + "'s " + dim + " stride of " + std::to_string(stride) +
                 " elements" + bytes();
        });
      });
    });
  }
  if (variant.kernel->tma) {
    for_operands(p, call.op, [&](char const* name, Operand const& ref, int heads, int rows) {
      if (&ref == &p.o) return;  // not written through TMA
      for_strides(p, ref, heads, rows, [&](char const* dim, int64_t stride) {
        if (stride >= 0 && stride < kMaxTmaStride / call.element()) return;
        lacks(Lack::kRequest, [&] {
          return std::string(name) + "'s " + dim + " stride is " + std::to_string(stride) +
                 " elements, allowed: from 0 to " +
                 std::to_string(kMaxTmaStride / call.element() - 1);
        });
      });
    });
  }
  // A TMA box is whole swizzled groups of eight rows, all of one page.
  if (variant.kernel->tma && p.kv.block_table && p.kv.page_size % 8 != 0) {
    lacks(Lack::kRequest, [&] {
      return "needs pages of a multiple of 8 rows, got " + std::to_string(p.kv.page_size);
    });
  }
  if (variant.kernel->tma && (call.options & variant.kernel->options & option::bias)) {
    examine_bias(p, [&](auto&& reason) { lacks(Lack::kRequest, reason); });
  }
  if ((call.options & option::bias_grad) && p.grad->bias_dtype != DType::kFloat32 &&
      !(variant.kernel->tma && (variant.kernel->needs & option::bias_grad))) {
    lacks(Lack::kRequest, [&] {
      return std::string("computes the gradient of a bias in float32, not in ") +
             name_of(p.grad->bias_dtype);
    });
  }
  uint32_t const in_pairs = call.options & variant.kernel->pairs;
  if (in_pairs & option::bias) {
    examine_pairs(p, "bias", p.logits.bias, 2,
                  [&](auto&& reason) { lacks(Lack::kRequest, reason); });
    if (p.logits.bias_dtype != p.q.dtype) {
      lacks(Lack::kRequest, [&] {
        return std::string("needs a bias of ") + name_of(p.q.dtype) + ", got " +
               name_of(p.logits.bias_dtype);
      });
    }
  }
  if (in_pairs & option::mask) {
    examine_pairs(p, "mask", p.mask.elements, 1,
                  [&](auto&& reason) { lacks(Lack::kRequest, reason); });
  }
  if (!device.unavailable.empty()) {
    lacks(Lack::kEnvironment, [&] { return device.unavailable; });
    return;
  }
  if (!has_capability(variant, device)) {
    auto const& [least, last] = variant.kernel->compute_capability;
    lacks(Lack::kEnvironment, [&, least = least, last = last] {
      std::string const allowed = least == last ? capability(least) : ">= " + capability(least);
      return "needs compute capability " + allowed + ", the device has " +
             capability(device.compute_capability);
    });
  }
  KernelArguments const& arguments = variant.kernel->arguments;
  int const score = score_of(arguments, p);
  // No score fits the call: its options are among the reasons above, and no unit exists to examine.
  if (arguments.num_scores > 0 && score == arguments.num_scores) return;
  KernelUnit const* const unit = unit_of(variant, score, device);
  if (unit && info.device == Device::kCuda && unit->facts.smem_bytes > device.smem_per_block) {
    lacks(Lack::kEnvironment, [&] {
      return "needs " + std::to_string(unit->facts.smem_bytes) +
             " bytes of shared memory a block, the device has " +
             std::to_string(device.smem_per_block);
    });
  }
  if (p.logits.has_score_mod) {
    std::string const why_not =
        variant.is_simt ? "compiles a score_mod for GPUs only" : why_not_compiled(variant, score);
    if (!why_not.empty()) lacks(Lack::kEnvironment, [&] { return "score_mod: " + why_not; });
    // Three warpgroups have too few registers for a score_mod: at head dim 64, T5's table takes 208
    // bytes of local memory with 192x128x12, and 40 with 128x128x8.
    if (call.op == Op::kForward && variant.block_m > 128) {
      lacks(Lack::kRequest, [] { return std::string("has no registers left for a score_mod"); });
    }
    if (info.tier == "tuned") {
      lacks(Lack::kRequest, [] { return std::string("has no source for a score_mod"); });
    }
    return;
  }
  bool const can_be_compiled =
      is_left_out(variant, score) && why_not_compiled(variant, score).empty();
  if (unit == nullptr && !variant.kernel->function && !can_be_compiled) {
    lacks(Lack::kEnvironment, [&] {
      std::string options;
      bool const lacks_score = variant.unit != nullptr;  // and nothing else
      if (info.tier == "full" || lacks_score) options += " CUTLASS_ATTN_TIER=full";
      bool const can_be_built = info.tier != "tuned";
      if (variant.is_simt) options += " CUTLASS_ATTN_SIMT=ON";
      if (options.empty()) {
        options = " CUTLASS_ATTN_CUDA=ON";
        if (!info.arch.empty()) options += " and " + info.arch + " in CUTLASS_ATTN_ARCHS";
      }
      std::string text = "not compiled into this build (tier " + info.tier + "): ";
      if (lacks_score) text = "+" + std::string(arguments.scores[score].token) + " is " + text;
      if (variant.can_load)
        text += why_not_compiled(variant, score) + (can_be_built ? "; or " : "");
      return can_be_built || !variant.can_load ? text + "rebuild with" + options : text;
    });
  }
}

inline bool can_run(Variant const& variant, Call const& call, DeviceInfo const& device) {
  bool result = has_capability(variant, device);
  if (result) examine(variant, call, device, [&](Lack, auto&&) { return !(result = false); });
  return result;
}

}  // namespace cutlass_attn
