#include "runtime/check_store.hpp"

#include <string>

#include "runtime/options.hpp"

namespace cutlass_attn {

Status check_tokens(Problem const& p) {
  if (!has_tokens(p)) return {};
  TokenFormat const format = format_of(p.k.dtype);
  std::string const is = std::string("k and v are ") + name_of(p.k.dtype) + ", and ";
  if (!has_latent_kv(p))
    return Status::invalid(is + "v is not k; allowed: one address and strides");
  struct {
    char const* name;
    int64_t given, allowed;
  } const numbers[] = {
      {"head_dim", p.head_dim, format.columns},
      {"head_dim_v", p.head_dim_v, format.columns_v},
      {"num_heads_kv", p.num_heads_kv, 1},
      {"the row stride", p.k.row_stride, format.row_bytes},
      {"the address modulo 4", int64_t(reinterpret_cast<uint64_t>(p.k.data) % 4), 0},
      {"the page stride modulo 4", p.k.batch_stride % 4, 0}};
  for (auto const& [name, given, allowed] : numbers) {
    if (given == allowed) continue;
    return Status::invalid(is + name + " is " + std::to_string(given) +
                           "; allowed: " + std::to_string(allowed));
  }
  bool const has_rows = p.seq_k.seqlen > 0 && p.kv.num_pages + p.batch > 0;
  if (has_rows && p.kv.page_size < (p.kv.has_pages() ? 1 : p.seq_k.seqlen)) {
    return Status::invalid(is + "page_size is " + std::to_string(p.kv.page_size) +
                           "; allowed: rows of a page, or without pages all rows of an entry");
  }
  if (p.k.scale || p.v.scale) {
    return Status::invalid(is + "k_scale or v_scale is given; allowed: None, tokens have scales");
  }
  if (p.seq_k.cu_seqlens || p.seq_k.leftpad) {
    return Status::invalid(is + "cu_seqlens_k or leftpad_k; allowed: none");
  }
  return {};
}

// A list does not say where a key is in its sequence, so masks by position are excluded.
Status check_indices(Problem const& p, Op op) {
  if (p.kv.indices == nullptr) return {};
  Mask const& mask = p.mask;
  bool const has_window = mask.window_left != kUnbounded || mask.window_right != kUnbounded;
  struct {
    bool is_given;
    char const *what, *allowed;
  } const others[] = {
      {op == Op::kBackward, "gradients are asked for", "a forward call"},
      {p.q.dtype == DType::kFloat64, "q is float64", "float16, bfloat16 or float32"},
      {p.seq_q.cu_seqlens || p.seq_q.is_padded(), "cu_seqlens_q, seqused_q or leftpad_q", "none"},
      {p.kv.block_table && !p.kv.list_seqlens, "block_table", "with list_seqlens"},
      {p.kv.list_seqlens && !p.kv.block_table, "list_seqlens", "with block_table"},
      {p.seq_k.cu_seqlens || p.seq_k.leftpad, "cu_seqlens_k or leftpad_k", "seqused_k"},
      {mask.causal, "causal is True", "False, as the list says which keys a query sees"},
      {has_window, "window", "None"},
      {mask.attention_chunk != 0, "attention_chunk", "None"},
      {bool(mask.elements), "a mask", "-1 in the list"},
      {p.logits.alibi_slopes != nullptr, "alibi_slopes", "None"},
      {bool(p.logits.bias), "bias", "None"},
      {p.dropout.p != 0.0f, "dropout_p", "0"},
      {p.quantize != Quantize::kNone, "quantize", "None"},
  };
  for (auto const& [is_given, what, allowed] : others) {
    if (!is_given) continue;
    return Status::invalid(std::string("indices are given, and ") + what + "; allowed: " + allowed);
  }
  if (p.num_heads_kv > 1) {
    return Status::invalid("num_heads_kv is " + std::to_string(p.num_heads_kv) +
                           ", allowed with indices: 1, as all heads of a query share its list");
  }
  return {};
}

}  // namespace cutlass_attn
