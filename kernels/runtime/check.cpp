// Whether a request is valid, whatever the device. Each message names the argument, what was given
// and what is allowed; messages are built only when something is wrong.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string>

#include "cutlass_attn.hpp"
#include "runtime/overlap.hpp"

namespace cutlass_attn {
namespace {

int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

char const* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      break;
  }
  return "float32";
}

// Memory of a call: elements at `data`, with strides in elements for as many dimensions as counts.
struct Operand {
  char const* name;
  void const* data;
  int64_t element;  // bytes
  int dims;
  int64_t strides[StridedRows::kDims];
  StridedRows rows;

  Operand(char const* name, void const* data, int64_t element,
          std::initializer_list<int64_t> strides_of_dims, std::initializer_list<int64_t> counts,
          int64_t row_elements)
      : name(name),
        data(data),
        element(element),
        dims(int(counts.size())),
        strides{},
        rows{reinterpret_cast<int64_t>(data), {}, {1, 1, 1, 1}, row_elements * element} {
    std::copy(strides_of_dims.begin(), strides_of_dims.end(), strides);
    std::copy(counts.begin(), counts.end(), rows.counts);
    for (int d = 0; d < dims; ++d) {
      // A stride that is never taken a step along may hold anything.
      if (rows.counts[d] > 1 && __builtin_mul_overflow(strides[d], element, &rows.strides[d])) {
        rows.strides[d] = INT64_MIN;
      }
    }
  }
};

Operand tensor(char const* name, TensorRef const& t, AttnParams const& p, int64_t heads,
               int64_t seqlen, int64_t head_dim) {
  return {name,
          t.data,
          size_of(p.dtype),
          {t.batch_stride, t.head_stride, t.row_stride},
          {p.batch, heads, seqlen},
          head_dim};
}

Operand per_logit(char const* name, LogitRef const& t, AttnParams const& p, int64_t element) {
  // Keys next to each other are a row: fewer dimensions to search for overlaps.
  bool const is_dense = t.key_stride == 1 && p.seqlen_k > 0;
  return {name,
          t.data,
          element,
          {t.batch_stride, t.head_stride, t.row_stride, t.key_stride},
          {p.batch, p.num_heads_q, p.seqlen_q, is_dense ? 1 : p.seqlen_k},
          is_dense ? p.seqlen_k : 1};
}

Status check_dimensions(AttnParams const& p) {
  struct {
    char const* name;
    int64_t value, least, most;
  } const dims[] = {
      {"batch", p.batch, 0, INT32_MAX},
      {"num_heads_q", p.num_heads_q, 0, INT32_MAX},
      {"num_heads_kv", p.num_heads_kv, 0, INT32_MAX},
      {"seqlen_q", p.seqlen_q, 0, kMaxSeqlen},
      {"seqlen_k", p.seqlen_k, 0, kMaxSeqlen},
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
  if (p.accumulate < Accumulate::kFloat32 || p.accumulate > Accumulate::kFloat16) {
    return Status::invalid("accumulate is " + std::to_string(int32_t(p.accumulate)) +
                           ", allowed: 0 (fp32), 1 (fp16_qk), 2 (fp16_pv), 3 (fp16)");
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
  if (p.bias && p.bias_dtype != p.dtype && p.bias_dtype != DType::kFloat32) {
    return Status::invalid(
        "bias_dtype is " + std::to_string(int32_t(p.bias_dtype)) + ", allowed: " +
        (p.dtype == DType::kFloat32
             ? std::string()
             : std::to_string(int32_t(p.dtype)) + " (" + name_of(p.dtype) + ", as q), ") +
        "2 (float32)");
  }
  if (!(p.dropout_p >= 0.0f && p.dropout_p <= 1.0f)) {
    return Status::invalid("dropout_p is " + std::to_string(p.dropout_p) +
                           ", allowed: a probability from 0 to 1");
  }
  if (p.dropout_p > 0.0f && p.rng_state == nullptr) {
    return Status::invalid("rng_state is null, but dropout_p is " + std::to_string(p.dropout_p) +
                           "; allowed: the address of a seed and an offset");
  }
  return {};
}

Status check_future(AttnParams const& p) {
  struct {
    char const* name;
    bool is_set;
  } const options[] = {
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

std::string joined(int64_t const* values, int count, char const* separator) {
  std::string text;
  for (int d = 0; d < count; ++d) text += (d ? separator : "") + std::to_string(values[d]);
  return text;
}

Status check_operand(Operand const& operand) {
  StridedRows const& r = operand.rows;
  if (std::count(r.counts, r.counts + StridedRows::kDims, 0) != 0) return {};
  if (operand.data == nullptr) {
    return Status::invalid(std::string(operand.name) + " is null, but it has " +
                           joined(r.counts, operand.dims, " x ") + " rows");
  }
  if (r.address % operand.element != 0) {
    return Status::invalid(std::string(operand.name) + "'s address is not a multiple of the " +
                           std::to_string(operand.element) + " bytes of an element");
  }
  if (!span_is_sane(r)) {
    return Status::invalid(std::string(operand.name) + "'s strides (" +
                           joined(operand.strides, operand.dims, ", ") +
                           ") reach further than any address space");
  }
  return {};
}

Status check_memory(AttnParams const& p) {
  Operand const o = tensor("out", p.o, p, p.num_heads_q, p.seqlen_q, p.head_dim_v);
  int64_t const lse_head = p.seqlen_q, lse_batch = lse_head * p.num_heads_q;
  Operand const lse("softmax_lse", p.softmax_lse, 4, {lse_batch, lse_head, 1},
                    {p.batch, p.num_heads_q, p.seqlen_q}, 1);
  auto const check_input = [&](Operand const& input) -> Status {
    if (Status status = check_operand(input); !status.ok()) return status;
    if (overlap(o.rows, input.rows)) {
      return Status::invalid(std::string("out overlaps ") + input.name +
                             "; the output needs memory that no input uses");
    }
    if (p.softmax_lse != nullptr && overlap(lse.rows, input.rows)) {
      return Status::invalid(std::string("softmax_lse overlaps ") + input.name +
                             "; it needs memory that no other operand uses");
    }
    return {};
  };
  Status status = check_operand(o);
  if (status.ok() && p.softmax_lse != nullptr) status = check_operand(lse);
  if (!status.ok()) return status;
  if (overlaps_itself(o.rows)) {
    return Status::invalid("the rows of out (strides " + joined(o.strides, o.dims, ", ") +
                           ") overlap each other; an output needs memory of its own for every row");
  }
  if (p.softmax_lse != nullptr && overlap(lse.rows, o.rows)) {
    return Status::invalid("softmax_lse overlaps out; it needs memory that no other operand uses");
  }
  status = check_input(tensor("q", p.q, p, p.num_heads_q, p.seqlen_q, p.head_dim));
  if (status.ok()) {
    status = check_input(tensor("k", p.k, p, p.num_heads_kv, p.seqlen_k, p.head_dim));
  }
  if (status.ok()) {
    status = check_input(tensor("v", p.v, p, p.num_heads_kv, p.seqlen_k, p.head_dim_v));
  }
  if (status.ok() && p.bias) {
    status = check_input(per_logit("bias", p.bias, p, size_of(p.bias_dtype)));
  }
  if (status.ok() && p.mask) status = check_input(per_logit("mask", p.mask, p, 1));
  if (status.ok() && p.alibi_slopes) {
    status = check_input(
        {"alibi_slopes", p.alibi_slopes, 4, {p.alibi_batch_stride}, {p.batch}, p.num_heads_q});
  }
  if (status.ok() && p.sinks) {
    status = check_input({"sinks", p.sinks, 4, {}, {}, p.num_heads_q});
  }
  if (status.ok() && p.dropout_p > 0.0f) {
    status = check_input({"rng_state", p.rng_state, 8, {}, {}, 2});
  }
  return status;
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
