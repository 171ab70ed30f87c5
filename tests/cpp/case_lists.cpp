#include <string>
#include <utility>
#include <vector>

#include "attention_case.hpp"

namespace attention_case {

std::vector<Case> few_cases(int head_dim) {
  Case causal{"causal, ragged, three tiles of keys, two heads", 100, 170};
  causal.num_heads_q = causal.num_heads_kv = 2;
  causal.causal = true;
  Case window{"window on both sides, GQA", 20, 140};
  window.num_heads_q = 4;
  window.num_heads_kv = 2;
  window.window_left = 70;
  window.window_right = 9;
  Case whole{"whole tiles", 64, 192};
  Case nothing{"rows that see nothing, whole tiles of them too", 150, 20};
  nothing.causal = true;
  // Later tiles of keys have scores far above earlier ones, in few rows and few keys.
  Case peaks{"references that few keys raise", 40, 300};
  peaks.magnitude = 8;
  std::vector<Case> list{causal, window, whole, nothing, peaks};
  for (Case& x : list) x.head_dim = head_dim;
  return list;
}

std::vector<Case> cases(int head_dim) {
  std::vector<Case> list = few_cases(head_dim);
  auto const add = [&](char const* name, int seqlen_q, int seqlen_k) -> Case& {
    Case x{name, seqlen_q, seqlen_k};
    x.head_dim = head_dim;
    list.push_back(x);
    return list.back();
  };
  add("one query, one key", 1, 1);
  add("one query", 1, 150);
  add("one key", 70, 1);
  add("one key, causal", 70, 1).causal = true;
  add("no key", 70, 0);
  add("no key, causal", 3, 0).causal = true;
  add("ragged", 65, 127);
  add("causal, square", 128, 128).causal = true;
  add("causal, ragged", 129, 129).causal = true;
  add("causal, more keys", 40, 200).causal = true;
  add("causal, more queries", 200, 90).causal = true;
  {
    Case& x = add("causal, top-left aligned", 90, 200);
    x.causal = true;
    x.diagonal_shift = 90 - 200;
  }
  {
    Case& x = add("causal, diagonal beyond the keys", 70, 70);
    x.causal = true;
    x.diagonal_shift = int64_t(1) << 33;
  }
  {
    Case& x = add("causal, diagonal before the keys", 70, 70);
    x.causal = true;
    x.diagonal_shift = -(int64_t(1) << 33);
  }
  add("window to the left", 150, 150).window_left = 20;
  add("window to the right", 150, 150).window_right = 70;
  {
    Case& x = add("window of one key", 130, 130);
    x.window_left = x.window_right = 0;
  }
  {
    Case& x = add("causal window", 150, 200);
    x.causal = true;
    x.window_left = 64;
  }
  {
    Case& x = add("window beside all keys", 150, 30);
    x.window_left = x.window_right = 3;
  }
  {
    Case& x = add("batch, GQA", 70, 70);
    x.batch = 2;
    x.num_heads_q = 6;
    x.num_heads_kv = 2;
  }
  {
    Case& x = add("MQA, transposed layout", 70, 90);
    x.batch = 2;
    x.num_heads_q = 3;
    x.layout = Layout::kTransposed;
    x.causal = true;
  }
  {
    Case& x = add("contiguous layout", 70, 90);
    x.batch = 2;
    x.num_heads_q = x.num_heads_kv = 2;
    x.layout = Layout::kContiguous;
  }
  {
    Case& x = add("softcap", 70, 130);
    x.softcap = 5;
    x.magnitude = 8;
    x.causal = true;
  }
  {
    Case& x = add("negative scale", 30, 130);
    x.softmax_scale = -0.25f;
  }
  add("large magnitudes", 70, 130).magnitude = 100;
  add("many tiles of keys", 17, 1100);
  {
    Case& x = add("NaN in a key reaches the rows that see it", 90, 90);
    x.causal = true;
    x.nan_key = 50;
  }
  return list;
}

std::vector<Case> decode_cases(int head_dim) {
  std::vector<Case> list;
  auto const add = [&](char const* name, int seqlen_q, int seqlen_k, int heads) -> Case& {
    Case x{name, seqlen_q, seqlen_k};
    x.head_dim = head_dim;
    x.num_heads_q = 2 * heads;
    x.num_heads_kv = 2;
    x.batch = 2;
    list.push_back(x);
    return list.back();
  };
  add("decode, heads share a tile, many tiles a warp", 1, 1230, 4);
  {
    Case& x = add("decode, two tiles of rows, causal", 5, 290, 4);
    x.causal = true;
    x.layout = Layout::kTransposed;
  }
  // Later keys have scores far above earlier ones, so row maxima of warps and splits differ.
  add("decode, a row max that few keys raise", 3, 500, 1).magnitude = 8;
  {
    Case& x = add("decode, all options", 4, 260, 2);
    x.causal = true;
    x.window_left = 150;
    x.softcap = 8;
    x.bias = "bhqk";
    x.mask = "bk";
    x.alibi = "h";
    x.sinks = true;
  }
  add("decode, fewer tiles of keys than warps", 2, 20, 3);
  {
    Case& x = add("decode, a window", 2, 400, 3);
    x.window_left = 40;
    x.causal = true;
  }
  add("decode, no key", 2, 0, 3);
  {
    Case& x = add("decode, softcap and sinks", 1, 300, 8);
    x.softcap = 5;
    x.sinks = true;
  }
  {
    Case& x = add("decode, NaN in a key", 2, 200, 1);
    x.nan_key = 150;
  }
  add("decode, large magnitudes", 1, 130, 2).magnitude = 100;
  return list;
}

std::vector<Case> few_option_cases(int head_dim) {
  Case padding{"bias and padding mask, broadcast over heads and queries", 20, 140};
  padding.batch = 2;
  padding.bias = "k";
  padding.mask = "bk";
  Case all{"all options together, the general score", 70, 100};
  all.batch = 2;
  all.num_heads_q = 4;
  all.num_heads_kv = 2;
  all.causal = true;
  all.window_left = 60;
  all.softcap = 8;
  all.magnitude = 4;
  all.bias = "bhqk";
  all.bias_is_fp32 = true;
  all.mask = "bhqk";
  all.alibi = "bh";
  all.sinks = true;
  all.dropout_p = 0.25f;
  all.layout = Layout::kTransposed;
  Case sinks{"sinks and rows that see nothing", 70, 20};
  sinks.num_heads_q = 4;
  sinks.num_heads_kv = 2;
  sinks.causal = true;
  sinks.sinks = true;
  // The mask excludes scores that only take aligned operands.
  Case unaligned{"rows at odd addresses, three tiles of keys, heads in one tile", 20, 170};
  unaligned.batch = 2;
  unaligned.num_heads_q = 4;
  unaligned.num_heads_kv = 2;
  unaligned.causal = true;
  unaligned.mask = "bk";
  unaligned.unaligned = "qkvo";
  Case chunks{"attention chunks", 70, 150};
  chunks.attention_chunk = 37;
  Case causal_chunks = chunks;
  causal_chunks.name = "attention chunks, causal";
  causal_chunks.causal = true;
  std::vector<Case> list{all, padding, sinks, unaligned, chunks, causal_chunks};
  for (Case& x : list) x.head_dim = head_dim;
  return list;
}

std::vector<Case> few_alibi_cases(int head_dim) {
  // More rows than a tile has, which beyond a head dim of 256 are at most 64.
  int const rows = head_dim > 256 ? 70 : 150;
  Case left{"ALiBi, causal, groups, four tiles left of the diagonal", rows, 330};
  left.num_heads_q = 4;
  left.num_heads_kv = left.batch = 2;
  left.alibi = "bh";
  left.causal = true;
  Case both{"ALiBi on both sides of the diagonal, softcap, sinks", 70, 400};
  both.num_heads_q = both.num_heads_kv = 2;
  both.alibi = "h";
  both.diagonal_shift = -170;
  both.softcap = 30;
  both.sinks = true;
  Case large{"ALiBi, logits around the softcap", 40, 90};
  large.alibi = "h";
  large.softcap = 3;
  large.magnitude = 4;
  Case heads = left;
  heads.name = "ALiBi, heads in one tile, window";
  heads.seqlen_q = 20;
  heads.window_left = 180;
  std::vector<Case> list{left, both, large, heads};
  for (Case& x : list) x.head_dim = head_dim;
  return list;
}

std::vector<Case> few_dropout_cases(int head_dim) {
  Case some{"dropout of some, causal, groups", 70, 90};
  some.num_heads_q = 4;
  some.num_heads_kv = 2;
  some.causal = true;
  some.dropout_p = 0.25f;
  Case most{"dropout of most, sinks", 150, 100};
  most.dropout_p = 0.9f;
  most.sinks = true;
  Case raised{"dropout, a row max that later keys raise", 40, 140};
  raised.dropout_p = 0.5f;
  raised.magnitude = 20;
  std::vector<Case> list{some, most, raised};
  for (Case& x : list) x.head_dim = head_dim;
  return list;
}

std::vector<Case> few_dropout_term_cases(int head_dim) {
  std::vector<Case> list = few_dropout_cases(head_dim);
  for (Case& x : list) {
    x.name += ", softcap, ALiBi";
    x.softcap = 3;
    x.alibi = "h";
  }
  return list;
}

std::vector<Case> few_bias_cases(int head_dim) {
  Case shared{"bias that batch entries share, causal, five tiles of keys, large scores", 200, 264};
  shared.bias = "hqk";
  shared.batch = shared.num_heads_q = shared.num_heads_kv = 2;
  shared.causal = true;
  shared.magnitude = 40;
  Case packed{"bias, heads in one tile, ragged", 20, 330};
  packed.bias = "bhqk";
  packed.num_heads_q = 8;
  packed.num_heads_kv = packed.batch = 2;
  Case of_keys{"bias that queries share, window", 130, 200};
  of_keys.bias = "bhk";
  of_keys.batch = of_keys.num_heads_q = of_keys.num_heads_kv = 2;
  of_keys.window_left = 70;
  Case others{"bias, softcap, ALiBi to both sides, chunks", 150, 264};
  others.bias = "hqk";
  others.alibi = "h";
  others.softcap = 3;
  others.attention_chunk = 100;
  others.num_heads_q = others.num_heads_kv = 2;
  std::vector<Case> list{shared, packed, of_keys, others};
  for (Case& x : list) {
    x.head_dim = head_dim;
    x.layout = Layout::kContiguous;
  }
  return list;
}

std::vector<Case> few_any_bias_cases(int head_dim) {
  std::vector<Case> list = few_bias_cases(head_dim);
  list[0].name = "float32 " + list[0].name;
  list[0].bias_is_fp32 = true;
  list[1].name += ", an odd number of keys";
  list[1].seqlen_k = 331;
  list[2].name = "float32 " + list[2].name + ", at odd places";
  list[2].bias_is_fp32 = true;
  list[2].layout = Layout::kPadded;
  list[3].name += ", queries side by side";
  list[3].layout = Layout::kTransposed;
  return list;
}

std::vector<Case> few_mask_cases(int head_dim) {
  Case shared{"mask of all heads and entries, rows without keys, ragged", 200, 333};
  shared.mask = "qk";
  shared.batch = shared.num_heads_q = shared.num_heads_kv = 2;
  shared.magnitude = 40;
  Case padding{"padding mask, heads in one tile, causal", 50, 400};
  padding.mask = "bk";
  padding.num_heads_q = 8;
  padding.num_heads_kv = padding.batch = 2;
  padding.causal = true;
  padding.layout = Layout::kContiguous;
  Case own{"mask of each head, heads in one tile", 40, 256};
  own.mask = "bhqk";
  own.num_heads_q = 8;
  own.num_heads_kv = own.batch = 2;
  own.layout = Layout::kContiguous;
  Case blocks{"mask, tiles of which all, some, or no keys are seen", 300, 650};
  blocks.mask = "bqk";
  blocks.mask_block = 200;
  blocks.batch = 2;
  blocks.magnitude = 40;
  Case corner{"mask, three rows that see a tile of keys; an entry without keys", 128, 131};
  corner.mask = "bqk";
  corner.mask_block = 1000;
  corner.batch = 2;
  corner.causal = true;
  Case slopes = blocks;
  slopes.name = "mask, such tiles, ALiBi";
  slopes.batch = 1;
  slopes.alibi = "h";
  Case many{"mask, 35 tiles of keys, window: words of the map without tiles", 130, 2200};
  many.mask = "qk";
  many.window_left = 150;
  many.window_right = 100;
  Case terms{"mask, softcap, ALiBi to both sides, chunks", 150, 264};
  terms.mask = "hqk";
  terms.alibi = "h";
  terms.softcap = 3;
  terms.attention_chunk = 100;
  terms.num_heads_q = terms.num_heads_kv = 2;
  std::vector<Case> list{shared, padding, own, blocks, corner, slopes, many, terms};
  for (Case& x : list) x.head_dim = head_dim;
  return list;
}

std::vector<Case> few_bias_mask_cases(int head_dim) {
  std::vector<Case> list = few_mask_cases(head_dim);
  std::vector<Case> chosen{list[1], list[3], list[7]};
  char const* const bias[] = {"bhqk", "k", "hqk"};
  for (size_t i = 0; i < chosen.size(); ++i) {
    chosen[i].name = "bias and " + chosen[i].name;
    chosen[i].bias = bias[i];
    chosen[i].layout = Layout::kContiguous;
  }
  return chosen;
}

std::vector<Case> few_max_logit_cases(int head_dim) {
  Case large{"largest logits, large scores", 70, 300};
  large.magnitude = 40;
  Case causal{"largest logits, causal, rows without keys, sinks above them", 150, 90};
  causal.causal = causal.sinks = true;
  causal.magnitude = 0.01f;
  Case packed{"largest logits, packed heads, negative scale", 5, 200};
  packed.num_heads_q = 8, packed.num_heads_kv = 2;
  packed.softmax_scale = -0.125f;
  Case window{"largest logits, window, softcap", 130, 260};
  window.window_left = 100, window.window_right = 3;
  window.softcap = 3;
  std::vector<Case> list{large, causal, packed, window};
  for (Case& x : list) {
    x.head_dim = head_dim;
    x.max_logits = true;
  }
  return list;
}

std::vector<Case> option_cases(int head_dim) {
  std::vector<Case> list = few_option_cases(head_dim);
  auto const add = [&](std::string name, int seqlen_q, int seqlen_k) -> Case& {
    Case x{std::move(name), seqlen_q, seqlen_k};
    x.head_dim = head_dim;
    x.batch = 2;
    x.num_heads_q = 4;
    x.num_heads_kv = 2;
    list.push_back(x);
    return list.back();
  };
  for (char const* dims : {"bhqk", "hqk", "bqk", "qk", "bhk", "bk", "hk", "k", "bhq", "b", ""}) {
    for (Layout layout : {Layout::kPadded, Layout::kTransposed}) {
      Case& x =
          add(std::string("bias along \"") + dims + "\", layout " + std::to_string(int(layout)), 40,
              70);
      x.bias = dims;
      x.bias_is_fp32 = layout == Layout::kTransposed;
      x.layout = layout;
    }
  }
  for (char const* dims : {"bhqk", "hqk", "bqk", "qk", "bk", "k", "q", "h"}) {
    for (Layout layout : {Layout::kContiguous, Layout::kTransposed}) {
      Case& x =
          add(std::string("mask along \"") + dims + "\", layout " + std::to_string(int(layout)), 40,
              70);
      x.mask = dims;
      x.layout = layout;
      x.causal = layout == Layout::kTransposed;
    }
  }
  add("ALiBi, causal", 40, 70).alibi = "h";
  list.back().causal = true;
  add("ALiBi on both sides, slopes per batch", 40, 70).alibi = "bh";
  add("ALiBi from another diagonal", 40, 70).alibi = "h";
  list.back().diagonal_shift = -13;
  add("ALiBi, negative scale", 40, 70).alibi = "h";
  list.back().softmax_scale = -0.125f;
  for (Case const& x : few_alibi_cases(head_dim)) list.push_back(x);
  list.push_back(few_mask_cases(head_dim)[4]);       // rows that see a tile of keys
  list.push_back(few_bias_mask_cases(head_dim)[2]);  // softcap, ALiBi, chunks
  add("sinks", 40, 70).sinks = true;
  add("sinks and no key", 5, 0).sinks = true;
  add("sinks and rows hidden by a mask", 40, 70).sinks = true;
  list.back().mask = "q";
  add("sinks above a softcap", 40, 70).sinks = true;
  list.back().softcap = 0.5f;
  add("sinks, negative scale", 40, 70).sinks = true;
  list.back().softmax_scale = -0.125f;
  for (float p : {0.1f, 0.5f, 1.0f}) {
    add("dropout " + std::to_string(p), 40, 100).dropout_p = p;
    Case& x = add("dropout and sinks, window, " + std::to_string(p), 40, 100);
    x.dropout_p = p;
    x.sinks = true;
    x.window_left = 30;
    x.window_right = 50;
    x.layout = Layout::kTransposed;
  }
  for (char const* operands : {"q", "k", "v", "o", "qkvo"}) {
    for (Layout layout : {Layout::kPadded, Layout::kTransposed, Layout::kContiguous}) {
      Case& x = add(std::string("odd addresses of \"") + operands + "\", layout " +
                        std::to_string(int(layout)),
                    layout == Layout::kPadded ? 20 : 70, 130);
      x.unaligned = operands;
      x.layout = layout;
      x.causal = layout != Layout::kContiguous;
    }
  }
  {
    Case& x = add("odd addresses, whole tiles", 64, 128);
    x.unaligned = "qkvo";
  }
  {
    Case& x = add("odd addresses, one query and one key", 1, 1);
    x.unaligned = "qkvo";
  }
  {
    Case& x = add("odd addresses, a narrower head_dim, of V one narrower still", 70, 90);
    x.head_dim = 40;
    x.head_dim_v = 24;
    x.unaligned = "qkvo";
  }
  Case again = list[0];
  again.name = "all options together, bias and mask of other shapes";
  again.bias = "hqk";
  again.bias_is_fp32 = false;
  again.mask = "bk";
  again.causal = false;
  again.window_right = 20;
  again.layout = Layout::kPadded;
  list.push_back(again);
  return list;
}

std::vector<Case> logit_cases(int head_dim) {
  std::vector<Case> list;
  for (auto* of : {&few_bias_cases, &few_mask_cases, &few_bias_mask_cases}) {
    for (Case const& x : of(head_dim)) list.push_back(x);
  }
  return list;
}

std::vector<Case> odd_head_dims() {
  std::vector<Case> list;
  for (auto const& [head_dim, head_dim_v] :
       {std::pair{1, 1}, {40, 24}, {65, 130}, {256, 256}, {320, 512}}) {
    Case x{"head_dim " + std::to_string(head_dim) + ", of V " + std::to_string(head_dim_v), 40,
           130};
    x.head_dim = head_dim;
    x.head_dim_v = head_dim_v;
    x.causal = true;
    list.push_back(x);
  }
  return list;
}

}  // namespace attention_case
