// Whether a request is valid, whatever the device. Each message names the argument, what was given
// and what is allowed; messages are built only when something is wrong.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string>

#include "cutlass_attn.hpp"
#include "runtime/options.hpp"
#include "runtime/overlap.hpp"

namespace cutlass_attn {
namespace {

// Memory of a call: elements at `data`, with strides in elements for as many dimensions as counts.
struct Memory {
  char const* name;
  void const* data;
  int64_t element;  // bytes
  int dims;
  int64_t strides[StridedRows::kDims];
  StridedRows rows;

  Memory(char const* name, void const* data, int64_t element,
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

// All rows that there are: of batch entries, packed, or in pages.
Memory tensor(char const* name, Operand const& t, int64_t batch, int64_t heads, int64_t seqlen,
              int64_t head_dim) {
  return {name,
          t.data,
          size_of(t.dtype),
          {t.batch_stride, t.head_stride, t.row_stride},
          {batch, heads, seqlen},
          head_dim};
}

Memory queries(char const* name, Operand const& t, Problem const& p, int64_t head_dim) {
  bool const is_packed = p.seq_q.cu_seqlens != nullptr;
  return tensor(name, t, is_packed ? 1 : p.batch, p.num_heads_q,
                is_packed ? p.seq_q.total : p.seq_q.seqlen, head_dim);
}

Memory keys(char const* name, Operand const& t, Problem const& p, int64_t head_dim) {
  if (p.kv.block_table) {
    return tensor(name, t, p.kv.num_pages, p.num_heads_kv, p.kv.page_size, head_dim);
  }
  bool const is_packed = p.seq_k.cu_seqlens != nullptr;
  return tensor(name, t, is_packed ? 1 : p.batch, p.num_heads_kv,
                is_packed ? p.seq_k.total : p.seq_k.seqlen, head_dim);
}

Memory softmax_lse(Problem const& p) {
  bool const is_packed = p.seq_q.cu_seqlens != nullptr;
  int64_t const head = is_packed ? p.seq_q.total : p.seq_q.seqlen;
  return {"softmax_lse",
          p.softmax_lse,
          4,
          {head * p.num_heads_q, head, 1},
          {is_packed ? 1 : p.batch, p.num_heads_q, head},
          1};
}

Memory per_logit(char const* name, PerLogit const& t, Problem const& p, int64_t element) {
  // Keys next to each other are a row: fewer dimensions to search for overlaps.
  bool const is_dense = t.key_stride == 1 && p.seq_k.seqlen > 0;
  return {name,
          t.data,
          element,
          {t.batch_stride, t.head_stride, t.row_stride, t.key_stride},
          {p.batch, p.num_heads_q, p.seq_q.seqlen, is_dense ? 1 : p.seq_k.seqlen},
          is_dense ? p.seq_k.seqlen : 1};
}

Status check_dimensions(Problem const& p) {
  struct {
    char const* name;
    int64_t value, least, most;
  } const dims[] = {
      {"batch", p.batch, 0, INT32_MAX},
      {"num_heads_q", p.num_heads_q, 0, INT32_MAX},
      {"num_heads_kv", p.num_heads_kv, 0, INT32_MAX},
      {"seqlen_q", p.seq_q.seqlen, 0, kMaxSeqlen},
      {"seqlen_k", p.seq_k.seqlen, 0, kMaxSeqlen},
      {"seq_q.total", p.seq_q.total, 0, kMaxSeqlen},
      {"seq_k.total", p.seq_k.total, 0, kMaxSeqlen},
      {"num_pages", p.kv.num_pages, 0, INT32_MAX},
      {"num_splits", p.num_splits, 0, INT32_MAX},
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

// "0 (first), 1 (second)"
template <int kCount>
std::string numbered(char const* const (&names)[kCount]) {
  std::string text;
  for (int i = 0; i < kCount; ++i) {
    text += (i ? ", " : "") + std::to_string(i) + " (" + names[i] + ")";
  }
  return text;
}

Status check_options(Problem const& p) {
  struct {
    char const* name;
    DType dtype;
  } const dtypes[] = {{"q", p.q.dtype}, {"k", p.k.dtype}, {"v", p.v.dtype}, {"out", p.o.dtype}};
  for (auto const& [name, dtype] : dtypes) {
    if (int32_t(dtype) < 0 || int32_t(dtype) >= kNumDTypes) {
      return Status::invalid(std::string(name) + "'s dtype is " + std::to_string(int32_t(dtype)) +
                             ", allowed: " + numbered(facts::kDTypeNames));
    }
    if (dtype != p.q.dtype) {
      return Status::invalid(std::string(name) + " is " + name_of(dtype) +
                             ", allowed: " + name_of(p.q.dtype) + " like q");
    }
  }
  if (int32_t(p.accumulate) < 0 || int32_t(p.accumulate) >= kNumAccumulates) {
    return Status::invalid("accumulate is " + std::to_string(int32_t(p.accumulate)) +
                           ", allowed: " + numbered(facts::kAccumulateNames));
  }
  if (!std::isfinite(p.logits.softmax_scale)) {
    return Status::invalid("softmax_scale is " + std::to_string(p.logits.softmax_scale) +
                           ", allowed: any finite number");
  }
  if (!std::isfinite(p.logits.softcap) || p.logits.softcap < 0.0f) {
    return Status::invalid("softcap is " + std::to_string(p.logits.softcap) +
                           ", allowed: a finite number > 0, or 0 for no cap");
  }
  for (auto [name, window] : {std::pair("window_left", p.mask.window_left),
                              std::pair("window_right", p.mask.window_right)}) {
    if (window < 0 && window != kUnbounded) {
      return Status::invalid(std::string(name) + " is " + std::to_string(window) +
                             ", allowed: a number of keys >= 0, or -1 for no limit");
    }
  }
  if (p.mask.attention_chunk < 0 || p.mask.attention_chunk > kMaxAttentionChunk) {
    return Status::invalid("attention_chunk is " + std::to_string(p.mask.attention_chunk) +
                           ", allowed: 1 to " + std::to_string(kMaxAttentionChunk) +
                           " keys, or 0 for no chunks");
  }
  constexpr int64_t kMaxShift = int64_t(1) << 32;  // beyond every key: a larger one says no more
  if (p.mask.diagonal_shift < -kMaxShift || p.mask.diagonal_shift > kMaxShift) {
    return Status::invalid("diagonal_shift is " + std::to_string(p.mask.diagonal_shift) +
                           ", allowed: -2^32 to 2^32");
  }
  if (p.logits.bias && p.logits.bias_dtype != p.q.dtype && p.logits.bias_dtype != DType::kFloat32) {
    return Status::invalid(
        "bias_dtype is " + std::to_string(int32_t(p.logits.bias_dtype)) + ", allowed: " +
        (p.q.dtype == DType::kFloat32
             ? std::string()
             : std::to_string(int32_t(p.q.dtype)) + " (" + name_of(p.q.dtype) + ", as q), ") +
        std::to_string(int(DType::kFloat32)) + " (float32)");
  }
  if (!(p.dropout.p >= 0.0f && p.dropout.p <= 1.0f)) {
    return Status::invalid("dropout_p is " + std::to_string(p.dropout.p) +
                           ", allowed: a probability from 0 to 1");
  }
  if (p.dropout.p > 0.0f && p.dropout.rng_state == nullptr) {
    return Status::invalid("rng_state is null, but dropout_p is " + std::to_string(p.dropout.p) +
                           "; allowed: the address of a seed and an offset");
  }
  return {};
}

// Sequences of their own lengths, pages and scales. What the arrays hold is on the device, and not
// read.
Status check_sequences(Problem const& p) {
  struct {
    char const* name;
    void const* data;
  } const arrays[] = {{"cu_seqlens_q", p.seq_q.cu_seqlens},
                      {"cu_seqlens_k", p.seq_k.cu_seqlens},
                      {"seqused_q", p.seq_q.seqused},
                      {"seqused_k", p.seq_k.seqused},
                      {"block_table", p.kv.block_table},
                      {"q.scale", p.q.scale},
                      {"k.scale", p.k.scale},
                      {"v.scale", p.v.scale},
                      {"out.scale", p.o.scale}};
  for (auto const& [name, data] : arrays) {
    if (reinterpret_cast<uintptr_t>(data) % 4 != 0) {
      return Status::invalid(std::string(name) +
                             "'s address is not a multiple of the 4 bytes of an element");
    }
  }
  if (p.kv.block_table && p.kv.page_size < 1) {
    return Status::invalid("page_size is " + std::to_string(p.kv.page_size) +
                           ", allowed: a number of keys >= 1");
  }
  if (p.kv.block_table && p.seq_k.cu_seqlens) {
    return Status::invalid(
        "cu_seqlens_k is set, but block_table says where keys are; allowed: "
        "seqused_k for their number");
  }
  struct {
    char const* name;
    Sequences const& sequences;
    Operand const& operand;
  } const packed[] = {
      {"q", p.seq_q, p.q}, {"out", p.seq_q, p.o}, {"k", p.seq_k, p.k}, {"v", p.seq_k, p.v}};
  for (auto const& [name, sequences, operand] : packed) {
    if (sequences.cu_seqlens && operand.batch_stride != 0) {
      return Status::invalid(std::string(name) + "'s batch stride is " +
                             std::to_string(operand.batch_stride) +
                             ", allowed: 0 with cu_seqlens, which says where a batch entry begins");
    }
  }
  return {};
}

std::string joined(int64_t const* values, int count, char const* separator) {
  std::string text;
  for (int d = 0; d < count; ++d) text += (d ? separator : "") + std::to_string(values[d]);
  return text;
}

Status check_operand(Memory const& operand) {
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

Status check_memory(Problem const& p) {
  Memory const o = queries("out", p.o, p, p.head_dim_v), lse = softmax_lse(p);
  auto const check_input = [&](Memory const& input) -> Status {
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
  status = check_input(queries("q", p.q, p, p.head_dim));
  if (status.ok()) status = check_input(keys("k", p.k, p, p.head_dim));
  if (status.ok()) status = check_input(keys("v", p.v, p, p.head_dim_v));
  if (status.ok() && p.logits.bias) {
    status = check_input(per_logit("bias", p.logits.bias, p, size_of(p.logits.bias_dtype)));
  }
  if (status.ok() && p.mask.elements)
    status = check_input(per_logit("mask", p.mask.elements, p, 1));
  if (status.ok() && p.logits.alibi_slopes) {
    status = check_input({"alibi_slopes",
                          p.logits.alibi_slopes,
                          4,
                          {p.logits.alibi_batch_stride},
                          {p.batch},
                          p.num_heads_q});
  }
  if (status.ok() && p.logits.sinks) {
    status = check_input({"sinks", p.logits.sinks, 4, {}, {}, p.num_heads_q});
  }
  if (status.ok() && p.dropout.p > 0.0f) {
    status = check_input({"rng_state", p.dropout.rng_state, 8, {}, {}, 2});
  }
  return status;
}

}  // namespace

Status check(Problem const& p) {
  Status status = check_dimensions(p);
  if (status.ok()) status = check_options(p);
  if (status.ok()) status = check_sequences(p);
  if (status.ok()) status = check_memory(p);
  return status;
}

}  // namespace cutlass_attn
