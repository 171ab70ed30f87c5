// Whether a request is valid on any device. Each message names the argument, what was given and
// what is allowed. Messages are built only if something is wrong.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <iterator>
#include <string>
#include <vector>

#include "core/key_splits.hpp"
#include "cutlass_attn.hpp"
#include "runtime/check_store.hpp"
#include "runtime/options.hpp"
#include "runtime/overlap.hpp"

namespace cutlass_attn {
namespace {

// Memory of a call: elements at `data`, with a count and a stride in elements per dimension.
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
      // A dimension of size 1 may have any stride.
      if (rows.counts[d] > 1 && __builtin_mul_overflow(strides[d], element, &rows.strides[d])) {
        rows.strides[d] = INT64_MIN;
      }
    }
  }
};

// All rows of an operand: of batch entries, packed, or in pages.
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

Memory keys(char const* name, Operand const& operand, Problem const& p, int64_t head_dim) {
  Operand t = operand;
  if (is_token_format(t.dtype)) {
    // All bytes of a page, as if its scales were in the rows.
    head_dim = t.row_stride = format_of(t.dtype).token_bytes;
  }
  if (p.kv.has_pages()) {
    return tensor(name, t, p.kv.num_pages, p.num_heads_kv, p.kv.page_size, head_dim);
  }
  bool const is_packed = p.seq_k.cu_seqlens != nullptr;
  return tensor(name, t, is_packed ? 1 : p.batch, p.num_heads_kv,
                is_packed ? p.seq_k.total : p.seq_k.seqlen, head_dim);
}

// Bytes of the LSE, a sink or a float32 gradient: see Problem.
int64_t bytes_of_number(Problem const& p) { return p.q.dtype == DType::kFloat64 ? 8 : 4; }

Memory per_query(char const* name, float const* lse, Problem const& p) {
  bool const is_packed = p.seq_q.cu_seqlens != nullptr;
  int64_t const head = is_packed ? p.seq_q.total : p.seq_q.seqlen;
  return {name,
          lse,
          bytes_of_number(p),
          {head * p.num_heads_q, head, 1},
          {is_packed ? 1 : p.batch, p.num_heads_q, head},
          1};
}

Memory per_logit(char const* name, PerLogit const& t, Problem const& p, int64_t element) {
  // Contiguous keys count as one row: fewer dimensions to search for overlaps.
  bool const is_dense = t.key_stride == 1 && p.seq_k.seqlen > 0;
  return {name,
          t.data,
          element,
          {t.batch_stride, t.head_stride, t.row_stride, t.key_stride},
          {p.batch, p.num_heads_q, p.seq_q.seqlen, is_dense ? 1 : p.seq_k.seqlen},
          is_dense ? p.seq_k.seqlen : 1};
}

Status check_split_size(Problem const& p) {
  constexpr int32_t kUnit = 64;
  std::string const given = "split_size is " + std::to_string(p.split_size);
  if (p.num_splits > 0) {
    return Status::invalid(given + " and num_splits " + std::to_string(p.num_splits) +
                           "; allowed: one of them");
  }
  if (p.split_size % kUnit != 0) {
    return Status::invalid(given + ", allowed: 0, or a multiple of " + std::to_string(kUnit));
  }
  bool const is_dense = !p.kv.indices && !p.seq_k.seqused;
  if (is_dense && !p.seq_q.cu_seqlens && !p.seq_k.cu_seqlens) {
    return Status::invalid(given + ", allowed: 0 where all sequences have equal lengths");
  }
  int32_t const splits = splits_of_size(p);
  if (splits <= KeySplits::kMax) return {};
  int64_t const keys = int64_t(splits) * p.split_size;
  int64_t const least = (keys / KeySplits::kMax + kUnit - 1) / kUnit * kUnit;
  return Status::invalid(given + ", so that up to " + std::to_string(keys) + " keys are " +
                         std::to_string(splits) + " splits; allowed: up to " +
                         std::to_string(KeySplits::kMax) + " splits, a split_size of " +
                         std::to_string(least) + " or more");
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
      // With packed sequences, kernels count the rows of all heads in 32 bits.
      {"seq_q.total x num_heads_q", p.seq_q.cu_seqlens ? int64_t(p.seq_q.total) * p.num_heads_q : 0,
       0, INT32_MAX},
      {"num_pages", p.kv.num_pages, 0, INT32_MAX},
      {"num_splits", p.num_splits, 0, INT32_MAX},
      {"split_size", p.split_size, 0, kMaxSeqlen},
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
  if (p.split_size > 0) {
    if (Status const status = check_split_size(p); !status.ok()) return status;
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

// "0 (first), 1 (second)" for the first `count` names.
template <int kCount>
std::string numbered(char const* const (&names)[kCount], int count = kCount) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    text += (i ? ", " : "") + std::to_string(i) + " (" + names[i] + ")";
  }
  return text;
}

struct Named {
  char const* name;
  Operand const& operand;
};

// Checks that all have the dtype of q.
Status check_dtypes(Problem const& p, std::initializer_list<Named> operands) {
  for (auto const& [name, operand] : operands) {
    DType const dtype = operand.dtype;
    bool const is_kv = &operand == &p.k || &operand == &p.v;  // may be stored in 8 bits
    int const known = is_kv ? int(std::size(facts::kDTypeNames)) : kNumDTypes;
    if (int32_t(dtype) < 0 || int32_t(dtype) >= known) {
      return Status::invalid(std::string(name) + "'s dtype is " + std::to_string(int32_t(dtype)) +
                             ", allowed: " + numbered(facts::kDTypeNames, known));
    }
    if (dtype != p.q.dtype) {
      return Status::invalid(std::string(name) + " is " + name_of(dtype) +
                             ", allowed: " + name_of(p.q.dtype) + " like q");
    }
  }
  return {};
}

// K and V have the dtype of q, or, in a forward call, are both float8_e4m3fn.
Status check_dtypes(Problem const& p, Op op) {
  if (!has_fp8_kv(p) && !has_tokens(p)) {
    return check_dtypes(p, {{"q", p.q}, {"k", p.k}, {"v", p.v}, {"out", p.o}});
  }
  Status const status = check_dtypes(p, {{"q", p.q}, {"out", p.o}});
  if (status.ok() && (op == Op::kBackward || p.q.dtype == DType::kFloat64)) {
    return Status::invalid(std::string("k and v are ") + name_of(p.k.dtype) + ", allowed " +
                           (op == Op::kBackward ? "in a backward pass" : "with q of float64") +
                           ": " + name_of(p.q.dtype) + " like q");
  }
  return status;
}

Status check_options(Problem const& p, Op op) {
  Status const status = check_dtypes(p, op);
  if (!status.ok()) return status;
  if (int32_t(p.accumulate) < 0 || int32_t(p.accumulate) >= kNumAccumulates) {
    return Status::invalid("accumulate is " + std::to_string(int32_t(p.accumulate)) +
                           ", allowed: " + numbered(facts::kAccumulateNames));
  }
  bool const is_float64 = p.q.dtype == DType::kFloat64;
  Float64Scalars const scalars = is_float64 && p.float64
                                     ? *p.float64
                                     : Float64Scalars{p.logits.softmax_scale, p.logits.softcap};
  if (!std::isfinite(scalars.softmax_scale)) {
    return Status::invalid("softmax_scale is " + value_of(scalars.softmax_scale) +
                           ", allowed: any finite number");
  }
  if (!std::isfinite(scalars.softcap) || scalars.softcap < 0.0) {
    return Status::invalid("softcap is " + value_of(scalars.softcap) +
                           ", allowed: a finite number > 0, or 0 for no cap");
  }
  if (p.logits.has_float64_slopes && !is_float64) {
    return Status::invalid(std::string("has_float64_slopes is set, but q is ") +
                           name_of(p.q.dtype) + "; allowed: with float64");
  }
  // Of what is computed in float32, tanh has an error of 1e-7, which the cap multiplies.
  constexpr float kMaxSoftcap = 4096.0f;
  if (p.logits.softcap > kMaxSoftcap && !is_float64) {
    return Status::invalid("softcap is " + value_of(p.logits.softcap) + ", allowed: up to " +
                           value_of(kMaxSoftcap) +
                           ", as logits have an error of 1e-7 of it, or 0 for no cap");
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
  // Beyond every key: a larger shift has no other effect.
  constexpr int64_t kMaxShift = int64_t(1) << 32;
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
    return Status::invalid("dropout_p is " + value_of(p.dropout.p) +
                           ", allowed: a probability from 0 to 1");
  }
  if (p.dropout.p > 0.0f && p.dropout.rng_state == nullptr) {
    return Status::invalid("rng_state is null, but dropout_p is " + value_of(p.dropout.p) +
                           "; allowed: the address of a seed and an offset");
  }
  return {};
}

// Checks what products in 8 bits can be combined with.
Status check_quantize(Problem const& p, Op op) {
  if (int32_t(p.quantize) < 0 || int32_t(p.quantize) >= kNumQuantizes) {
    return Status::invalid("quantize is " + std::to_string(int32_t(p.quantize)) +
                           ", allowed: " + numbered(facts::kQuantizeNames));
  }
  if (p.max_error != 0.0f) {
    std::string const is = "max_error is " + value_of(p.max_error) + ", ";
    if (!(p.max_error > 0.0f && p.max_error < kInf)) {
      return Status::invalid(is + "allowed: a finite number above 0, or 0 for none");
    }
    if (p.quantize == Quantize::kNone) {
      return Status::invalid(is + "but quantize is None; allowed: with products in 8 bits");
    }
  }
  if (p.quantize == Quantize::kNone) return {};
  auto const with = [&](std::string const& what) {
    return Status::invalid("quantize is " + value_of(p.quantize) + ", but " + what);
  };
  if (op == Op::kBackward) return with("gradients are asked for; allowed: quantize=None");
  if (size_of(p.q.dtype) != 2) {
    return with(std::string("q, k and v are ") + name_of(p.q.dtype) +
                "; allowed: float16 or bfloat16");
  }
  if (p.accumulate != Accumulate::kFloat32) {
    return with(std::string("accumulate is \"") + name_of(p.accumulate) + "\"; allowed: \"fp32\"");
  }
  if (p.dropout.p != 0.0f) {
    return with("dropout_p is " + value_of(p.dropout.p) + "; allowed: 0");
  }
  if (p.kv.block_table) {
    return with(
        "k and v are in pages (block_table); allowed: dense or packed ones, or quantize=None, with "
        "which pages may be of float8_e4m3fn");
  }
  bool const is_dense =
      !p.seq_q.cu_seqlens && !p.seq_k.cu_seqlens && !p.seq_q.is_padded() && !p.seq_k.is_padded();
  if (p.max_error != 0.0f && !is_dense) {
    return with("max_error is " + value_of(p.max_error) +
                " with packed sequences or sequences of different lengths; allowed: dense ones");
  }
  if (has_fp8_kv(p) || has_tokens(p)) {
    return with(std::string("k and v are ") + name_of(p.k.dtype) + "; allowed: of q's dtype");
  }
  if (p.k.scale || p.v.scale) return with("k_scale or v_scale is given; allowed: none, or 1");
  return {};
}

// Checks sequence lengths, pages and scales. The contents of the arrays are on the device and not
// read.
Status check_sequences(Problem const& p) {
  struct {
    char const* name;
    void const* data;
  } const arrays[] = {{"cu_seqlens_q", p.seq_q.cu_seqlens},
                      {"cu_seqlens_k", p.seq_k.cu_seqlens},
                      {"seqused_q", p.seq_q.seqused},
                      {"seqused_k", p.seq_k.seqused},
                      {"leftpad_q", p.seq_q.leftpad},
                      {"leftpad_k", p.seq_k.leftpad},
                      {"block_table", p.kv.block_table},
                      {"indices", p.kv.indices},
                      {"list_seqlens", p.kv.list_seqlens},
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
  if (p.kv.has_pages() && p.kv.page_size < 1) {
    return Status::invalid("page_size is " + std::to_string(p.kv.page_size) +
                           ", allowed: a number of keys >= 1");
  }
  for (auto const& [name, sequences] :
       {std::pair("leftpad_q", &p.seq_q), std::pair("leftpad_k", &p.seq_k)}) {
    if (sequences->leftpad == nullptr) continue;
    // A mask or a bias is indexed from row 0 of the operands, which includes padding.
    if (p.logits.bias || p.mask.elements) {
      return Status::invalid(std::string(name) + " is set, but there is a " +
                             (p.mask.elements ? "mask" : "bias") +
                             "; allowed: padding in the mask, or without mask and bias");
    }
    if (p.kv.block_table || sequences->cu_seqlens) {
      return Status::invalid(std::string(name) +
                             " is set, but sequences are packed or in pages; allowed: batch "
                             "entries of equal lengths");
    }
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

// Checks that an output's rows do not overlap each other.
Status check_rows(Memory const& output) {
  if (!overlaps_itself(output.rows)) return {};
  return Status::invalid(std::string("the rows of ") + output.name + " (strides " +
                         joined(output.strides, output.dims, ", ") +
                         ") overlap each other; an output needs memory of its own for every row");
}

// Calls visit(memory) for each input of a forward call, until one returns an error.
template <class Visit>
Status for_inputs(Problem const& p, Visit&& visit) {
  Status status = visit(queries("q", p.q, p, p.head_dim));
  if (status.ok()) status = visit(keys("k", p.k, p, p.head_dim));
  if (status.ok()) status = visit(keys("v", p.v, p, p.head_dim_v));
  if (status.ok() && p.logits.bias) {
    status = visit(per_logit("bias", p.logits.bias, p, size_of(p.logits.bias_dtype)));
  }
  if (status.ok() && p.mask.elements) status = visit(per_logit("mask", p.mask.elements, p, 1));
  if (status.ok() && p.logits.alibi_slopes) {
    status = visit({"alibi_slopes",
                    p.logits.alibi_slopes,
                    p.logits.has_float64_slopes ? 8 : 4,
                    {p.logits.alibi_batch_stride},
                    {p.batch},
                    p.num_heads_q});
  }
  if (status.ok() && p.logits.sinks) {
    status = visit({"sinks", p.logits.sinks, bytes_of_number(p), {}, {}, p.num_heads_q});
  }
  if (status.ok() && p.dropout.p > 0.0f) {
    status = visit({"rng_state", p.dropout.rng_state, 8, {}, {}, p.dropout.is_part ? 6 : 2});
  }
  return status;
}

Status check_memory(Problem const& p) {
  Memory const o = queries("out", p.o, p, p.head_dim_v);
  Memory const lse = per_query("softmax_lse", p.softmax_lse, p);
  Memory const max_logits = per_query("max_logits", p.max_logits, p);
  Memory const* const outputs[] = {&o, p.softmax_lse ? &lse : nullptr,
                                   p.max_logits ? &max_logits : nullptr};
  // Whether output i overlaps another operand.
  auto const check_overlap = [&](int i, Memory const& other) -> Status {
    if (!overlap(outputs[i]->rows, other.rows)) return {};
    return Status::invalid(std::string(outputs[i]->name) + " overlaps " + other.name +
                           (i == 0 ? "; the output needs memory that no input uses"
                                   : "; it needs memory that no other operand uses"));
  };
  Status status = check_operand(o);
  if (status.ok()) status = check_rows(o);
  for (int i = 1; i < 3; ++i) {
    if (!outputs[i]) continue;
    if (status.ok()) status = check_operand(*outputs[i]);
    for (int j = 0; j < i && status.ok(); ++j) {
      if (outputs[j]) status = check_overlap(i, *outputs[j]);
    }
  }
  if (!status.ok()) return status;
  return for_inputs(p, [&](Memory const& input) -> Status {
    Status status = check_operand(input);
    for (int i = 0; i < 3 && status.ok(); ++i) {
      if (outputs[i]) status = check_overlap(i, input);
    }
    return status;
  });
}

// The requested gradients.
std::vector<Memory> wanted(Problem const& p, Gradients const& grad) {
  std::vector<Memory> all;
  if (grad.q.data) all.push_back(queries("grad_q", grad.q, p, p.head_dim));
  if (grad.k.data) all.push_back(keys("grad_k", grad.k, p, p.head_dim));
  if (grad.v.data) all.push_back(keys("grad_v", grad.v, p, p.head_dim_v));
  if (grad.bias) {
    bool const is_short = grad.bias_dtype != DType::kFloat32;
    Memory bias = per_logit("grad_bias", grad.bias, p, is_short ? 2 : bytes_of_number(p));
    for (int d = 0; d < bias.dims; ++d) {
      if (bias.rows.strides[d] == 0)
        bias.rows.counts[d] = std::min<int64_t>(bias.rows.counts[d], 1);
    }
    all.push_back(bias);
  }
  if (grad.sinks) {
    all.push_back({"grad_sinks", grad.sinks, bytes_of_number(p), {}, {}, p.num_heads_q});
  }
  return all;
}

Status check_gradients(Problem const& p, Gradients const& grad) {
  std::vector<Memory> const outputs = wanted(p, grad);
  auto const check_overlap = [&](Memory const& other, size_t first) -> Status {
    for (size_t i = first; i < outputs.size(); ++i) {
      if (!overlap(outputs[i].rows, other.rows)) continue;
      return Status::invalid(std::string(outputs[i].name) + " overlaps " + other.name +
                             "; it needs memory that no other operand uses");
    }
    return {};
  };
  for (Memory const& output : outputs) {
    Status status = check_operand(output);
    if (status.ok()) status = check_rows(output);
    if (!status.ok()) return status;
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (Status status = check_overlap(outputs[i], i + 1); !status.ok()) return status;
  }
  auto const check_input = [&](Memory const& input) -> Status {
    Status const status = check_operand(input);
    return status.ok() ? check_overlap(input, 0) : status;
  };
  Status status = for_inputs(p, check_input);
  if (status.ok()) status = check_input(queries("out", p.o, p, p.head_dim_v));
  if (status.ok()) status = check_input(queries("grad_out", grad.o, p, p.head_dim_v));
  if (status.ok()) status = check_input(per_query("softmax_lse", p.softmax_lse, p));
  if (status.ok() && grad.softmax_lse) {
    status = check_input(per_query("grad_softmax_lse", grad.softmax_lse, p));
  }
  return status;
}

Status check_backward(Problem const& p) {
  if (p.grad == nullptr) {
    return Status::invalid("grad is null, allowed: the address of a backward pass's gradients");
  }
  Gradients const& grad = *p.grad;
  Status status = check_dtypes(p, {{"grad_out", grad.o}});
  for (Named const& output :
       {Named{"grad_q", grad.q}, Named{"grad_k", grad.k}, Named{"grad_v", grad.v}}) {
    if (status.ok() && output.operand.data) status = check_dtypes(p, {output});
  }
  if (!status.ok()) return status;
  if (grad.bias && !p.logits.bias) {
    return Status::invalid("grad_bias is wanted, but the call has no bias");
  }
  bool const is_short = p.q.dtype == DType::kFloat16 || p.q.dtype == DType::kBFloat16;
  if (grad.bias_dtype != DType::kFloat32 && !(is_short && grad.bias_dtype == p.q.dtype)) {
    return Status::invalid("grad_bias_dtype is " + std::to_string(int32_t(grad.bias_dtype)) +
                           ", allowed: " + std::to_string(int32_t(DType::kFloat32)) +
                           " (float32), or q's of 16 bits");
  }
  if (grad.sinks && !p.logits.sinks) {
    return Status::invalid("grad_sinks is wanted, but the call has no sinks");
  }
  if (p.kv.block_table) {
    return Status::invalid("block_table is set; allowed in a backward pass: keys without pages");
  }
  if (p.q.scale || p.k.scale || p.v.scale || p.o.scale) {
    return Status::invalid("an operand has a scale; allowed in a backward pass: none");
  }
  return check_gradients(p, grad);
}

}  // namespace

Status check(Problem const& p, Op op) {
  if (op != Op::kForward && op != Op::kBackward) {
    return Status::invalid("op is " + std::to_string(int(op)) +
                           ", allowed: 0 (forward), 1 (backward)");
  }
  Status status = check_dimensions(p);
  if (status.ok()) status = check_options(p, op);
  if (status.ok()) status = check_quantize(p, op);
  if (status.ok()) status = check_sequences(p);
  if (status.ok()) status = check_tokens(p);
  if (status.ok()) status = check_indices(p, op);
  if (status.ok()) status = op == Op::kBackward ? check_backward(p) : check_memory(p);
  return status;
}

}  // namespace cutlass_attn
