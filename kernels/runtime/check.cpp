// Whether a request is valid, whatever the device. Each message names the argument, what was given
// and what is allowed; messages are built only when something is wrong.
#include <cmath>
#include <string>

#include "cutlass_attn.hpp"
#include "runtime/overlap.hpp"

namespace cutlass_attn {
namespace {

int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

struct Operand {
  char const* name;
  TensorRef const& ref;
  StridedRows rows;
};

StridedRows rows_of(TensorRef const& t, int64_t batch, int64_t heads, int64_t seqlen,
                    int64_t head_dim, int64_t element) {
  // A stride that is never taken a step along may hold anything.
  auto const bytes = [&](int64_t stride, int64_t count) {
    int64_t product = 0;
    if (count > 1 && __builtin_mul_overflow(stride, element, &product)) product = INT64_MIN;
    return product;
  };
  return {reinterpret_cast<int64_t>(t.data),
          {bytes(t.batch_stride, batch), bytes(t.head_stride, heads), bytes(t.row_stride, seqlen)},
          {batch, heads, seqlen},
          head_dim * element};
}

Status check_dimensions(AttnParams const& p) {
  struct {
    char const* name;
    int64_t value, least, most;
  } const dims[] = {
      {"batch", p.batch, 0, INT32_MAX},
      {"num_heads_q", p.num_heads_q, 0, INT32_MAX},
      {"num_heads_kv", p.num_heads_kv, 0, INT32_MAX},
      {"seqlen_q", p.seqlen_q, 0, INT32_MAX},
      {"seqlen_k", p.seqlen_k, 0, INT32_MAX},
      {"head_dim", p.head_dim, 1, kMaxHeadDim},
      {"head_dim_v", p.head_dim_v, 1, kMaxHeadDim},
  };
  for (auto const& dim : dims) {
    if (dim.value < dim.least || dim.value > dim.most) {
      return Status::invalid(std::string(dim.name) + " is " + std::to_string(dim.value) +
                             ", allowed: " + std::to_string(dim.least) + " to " +
                             std::to_string(dim.most));
    }
  }
  bool const divides =
      p.num_heads_kv == 0 ? p.num_heads_q == 0 : p.num_heads_q % p.num_heads_kv == 0;
  if (!divides) {
    return Status::invalid("num_heads_q is " + std::to_string(p.num_heads_q) +
                           ", allowed: a multiple of num_heads_kv, which is " +
                           std::to_string(p.num_heads_kv));
  }
  return {};
}

Status check_options(AttnParams const& p) {
  if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat32) {
    return Status::invalid("dtype is " + std::to_string(int32_t(p.dtype)) +
                           ", allowed: 0 (float16), 1 (bfloat16), 2 (float32)");
  }
  if (!std::isfinite(p.softmax_scale)) {
    return Status::invalid("softmax_scale is " + std::to_string(p.softmax_scale) +
                           ", allowed: any finite number");
  }
  if (!std::isfinite(p.softcap) || p.softcap < 0.0f) {
    return Status::invalid("softcap is " + std::to_string(p.softcap) +
                           ", allowed: a finite number > 0, or 0 for no cap");
  }
  for (auto [name, window] :
       {std::pair("window_left", p.window_left), std::pair("window_right", p.window_right)}) {
    if (window < 0 && window != kUnbounded) {
      return Status::invalid(std::string(name) + " is " + std::to_string(window) +
                             ", allowed: a number of keys >= 0, or -1 for no limit");
    }
  }
  constexpr int64_t kMaxShift = int64_t(1) << 32;  // beyond every key: a larger one says no more
  if (p.diagonal_shift < -kMaxShift || p.diagonal_shift > kMaxShift) {
    return Status::invalid("diagonal_shift is " + std::to_string(p.diagonal_shift) +
                           ", allowed: -2^32 to 2^32");
  }
  return {};
}

Status check_future(AttnParams const& p) {
  struct {
    char const* name;
    bool is_set;
  } const options[] = {
      {"bias", p.bias != nullptr},
      {"mask", p.mask != nullptr},
      {"alibi_slopes", p.alibi_slopes != nullptr},
      {"sinks", p.sinks != nullptr},
      {"dropout_p", p.dropout_p != 0.0f},
      {"rng_state", p.rng_state != nullptr},
      {"cu_seqlens_q", p.cu_seqlens_q != nullptr},
      {"cu_seqlens_k", p.cu_seqlens_k != nullptr},
      {"block_table", p.block_table != nullptr},
      {"num_splits", p.num_splits != 1},
  };
  for (auto const& option : options) {
    if (option.is_set) {
      return Status::not_implemented(std::string(option.name) +
                                     " is set, but no kernel implements it yet");
    }
  }
  return {};
}

Status check_operand(Operand const& operand, int64_t element) {
  StridedRows const& r = operand.rows;
  bool const is_empty = r.counts[0] == 0 || r.counts[1] == 0 || r.counts[2] == 0;
  if (is_empty) return {};
  if (operand.ref.data == nullptr) {
    return Status::invalid(std::string(operand.name) + " is null, but it has " +
                           std::to_string(r.counts[0]) + " x " + std::to_string(r.counts[1]) +
                           " x " + std::to_string(r.counts[2]) + " rows");
  }
  if (r.address % element != 0) {
    return Status::invalid(std::string(operand.name) + "'s address is not a multiple of the " +
                           std::to_string(element) + " bytes of an element");
  }
  if (!span_is_sane(r)) {
    return Status::invalid(
        std::string(operand.name) + "'s strides (" + std::to_string(operand.ref.batch_stride) +
        ", " + std::to_string(operand.ref.head_stride) + ", " +
        std::to_string(operand.ref.row_stride) + ") reach further than any address space");
  }
  return {};
}

Status check_memory(AttnParams const& p) {
  int64_t const element = size_of(p.dtype);
  Operand const q{"q", p.q, rows_of(p.q, p.batch, p.num_heads_q, p.seqlen_q, p.head_dim, element)};
  Operand const k{"k", p.k, rows_of(p.k, p.batch, p.num_heads_kv, p.seqlen_k, p.head_dim, element)};
  Operand const v{"v", p.v,
                  rows_of(p.v, p.batch, p.num_heads_kv, p.seqlen_k, p.head_dim_v, element)};
  Operand const o{"out", p.o,
                  rows_of(p.o, p.batch, p.num_heads_q, p.seqlen_q, p.head_dim_v, element)};
  for (Operand const* operand : {&q, &k, &v, &o}) {
    if (Status status = check_operand(*operand, element); !status.ok()) return status;
  }
  if (overlaps_itself(o.rows)) {
    return Status::invalid("the rows of out (strides " + std::to_string(p.o.batch_stride) + ", " +
                           std::to_string(p.o.head_stride) + ", " + std::to_string(p.o.row_stride) +
                           ") overlap each other; an output needs memory of its own for every row");
  }
  for (Operand const* input : {&q, &k, &v}) {
    if (overlap(o.rows, input->rows)) {
      return Status::invalid(std::string("out overlaps ") + input->name +
                             "; the output needs memory that no input uses");
    }
  }
  if (p.softmax_lse == nullptr) return {};
  TensorRef const lse{p.softmax_lse, int64_t(p.num_heads_q) * p.seqlen_q, p.seqlen_q, 1};
  Operand const l{"softmax_lse", lse, rows_of(lse, p.batch, p.num_heads_q, p.seqlen_q, 1, 4)};
  if (Status status = check_operand(l, 4); !status.ok()) return status;
  for (Operand const* other : {&q, &k, &v, &o}) {
    if (overlap(l.rows, other->rows)) {
      return Status::invalid(std::string("softmax_lse overlaps ") + other->name +
                             "; it needs memory that no other operand uses");
    }
  }
  return {};
}

}  // namespace

Status check(AttnParams const& p) {
  Status status = check_dimensions(p);
  if (status.ok()) status = check_options(p);
  if (status.ok()) status = check_future(p);
  if (status.ok()) status = check_memory(p);
  return status;
}

}  // namespace cutlass_attn
