// Cases of the backward kernels, by the features of a kernel.
#pragma once

#include <string>
#include <vector>

#include "backward_case.hpp"

namespace backward_case {

// For every kernel.
inline std::vector<Case> common_cases(int head_dim, int block_n) {
  std::vector<Case> cases = {
      {.name = "plain", .seqlen_q = 70, .seqlen_k = block_n + 9},
      {.name = "causal", .seqlen_q = 200, .seqlen_k = 200, .mask = causal()},
      {.name = "more queries", .seqlen_q = 150, .seqlen_k = 37, .mask = causal()},
      {.name = "more keys", .seqlen_q = 37, .seqlen_k = 150, .mask = causal()},
      {.name = "window", .seqlen_q = 180, .seqlen_k = 160, .mask = window(19, 3)},
      {.name = "groups", .batch = 2, .heads_q = 6, .heads_kv = 2, .seqlen_q = 33, .seqlen_k = 65},
      {.name = "one key", .seqlen_q = 5, .seqlen_k = 1},
      {.name = "one query", .seqlen_q = 1, .seqlen_k = 140},
      {.name = "LSE and sinks", .has_sinks = true, .has_grad_lse = true},
      {.name = "large", .scale = 1.0f, .magnitude = 8.0f},
  };
  Case narrow{.name = "narrow"};
  for (Case& c : cases) c.head_dim = head_dim;
  narrow.head_dim = head_dim - 8;
  narrow.head_dim_v = head_dim - 24;
  cases.push_back(narrow);
  return cases;
}

inline std::vector<Case> general_cases(int head_dim) {
  Mask chunks = causal();
  chunks.attention_chunk = 48;
  std::vector<Case> cases = {
      {.name = "bias and mask", .has_bias = true, .has_mask = true},
      {.name = "ALiBi", .mask = causal(), .has_alibi = true},
      {.name = "chunks", .seqlen_q = 130, .seqlen_k = 150, .mask = chunks},
      {.name = "softcap", .softcap = 1.5f, .has_bias = true},
      {.name = "negative scale", .scale = -0.2f, .has_mask = true},
      {.name = "dropout", .seqlen_q = 90, .seqlen_k = 140, .mask = causal(), .dropout = 0.3f},
      {.name = "dropout and softcap", .softcap = 2.0f, .dropout = 0.5f},
  };
  for (Case& c : cases) c.head_dim = head_dim;
  return cases;
}

// Scores composed for the call, with each option that they implement.
inline std::vector<Case> alibi_cases(int head_dim) {
  std::vector<Case> cases = {
      {.name = "ALiBi", .seqlen_q = 150, .seqlen_k = 137},
      {.name = "causal ALiBi", .seqlen_q = 137, .seqlen_k = 150, .mask = causal()},
      {.name = "ALiBi, more queries", .seqlen_q = 180, .seqlen_k = 70, .mask = window(90, 30)},
      {.name = "ALiBi of groups", .batch = 2, .heads_q = 6, .heads_kv = 2, .seqlen_k = 33},
      {.name = "ALiBi, one key", .seqlen_q = 5, .seqlen_k = 1},
      {.name = "ALiBi, large", .scale = 1.0f, .magnitude = 4.0f},
      {.name = "ALiBi, negative scale", .scale = -0.2f},
  };
  cases[1].has_grad_lse = true;
  for (Case& c : cases) {
    c.head_dim = head_dim;
    c.has_alibi = true;
  }
  for (int i : {0, 1, 3, 5}) {
    Case c = cases[i];
    c.name = "softcap and " + c.name;
    c.softcap = c.magnitude > 1.0f ? 30.0f : 1.5f;
    cases.push_back(c);
  }
  return cases;
}

// A bias and a mask that are read for two keys at a time.
inline std::vector<Case> pair_cases(int head_dim, bool has_bias, bool has_mask) {
  std::vector<Case> cases = {
      {.name = "pairs", .seqlen_q = 150, .seqlen_k = 138},
      {.name = "causal pairs", .seqlen_q = 137, .seqlen_k = 150, .mask = causal()},
      {.name = "pairs, more queries", .seqlen_q = 70, .seqlen_k = 36, .mask = window(30, 9)},
      {.name = "pairs of groups", .heads_q = 6, .heads_kv = 2, .seqlen_k = 34},
      {.name = "pairs, large", .scale = 1.0f, .magnitude = 4.0f},
      {.name = "pairs of keys", .batch = 2, .bias_of = {true, false, false, true}},
      {.name = "two keys", .seqlen_q = 5, .seqlen_k = 2},
  };
  for (int i : {0, 3}) {
    Case c = cases[i];
    c.softcap = 1.5f;
    for (bool alibi : {false, true}) {
      c.name = std::string(alibi ? "ALiBi, " : "") + "softcap and " + cases[i].name;
      c.has_alibi = alibi;
      cases.push_back(c);
    }
  }
  for (Case& c : cases) {
    c.head_dim = head_dim;
    c.has_bias = c.has_short_bias = has_bias;
    c.has_mask = has_mask;
  }
  return cases;
}

// Biases of each kind of shape, and the terms between a bias and its gradient.
inline std::vector<Case> bias_cases(int head_dim) {
  std::vector<Case> cases = {
      {.name = "bias", .batch = 2, .seqlen_k = 137, .bias_of = {true, true, true, true}},
      {.name = "bias of heads", .batch = 3, .heads_q = 4, .heads_kv = 2, .mask = causal()},
      {.name = "bias of batch entries", .batch = 2, .bias_of = {true, false, true, true}},
      {.name = "bias of logits",
       .batch = 2,
       .softcap = 1.5f,
       .bias_of = {false, false, true, true}},
      {.name = "bias of keys", .batch = 2, .seqlen_k = 77, .bias_of = {true, false, false, true}},
      {.name = "bias of queries", .dropout = 0.3f, .bias_of = {false, true, true, false}},
      {.name = "bias of one", .dropout = 0.3f, .bias_of = {false, false, false, false}},
  };
  cases[3].dropout = 0.5f;
  cases[5].mask = window(19, 3);
  for (Case& c : cases) {
    c.has_bias = c.has_sinks = c.has_grad_lse = true;
    c.head_dim = head_dim;
  }
  return cases;
}

// Masks with a query map. The first three cases are for mutants.
inline std::vector<Case> mask_cases(int head_dim) {
  std::vector<Case> cases = {
      {.name = "mask of each head",
       .batch = 2,
       .heads_q = 4,
       .heads_kv = 2,
       .seqlen_q = 90,
       .seqlen_k = 211,
       .mask_of = {true, true, true, true}},
      {.name = "window, more tiles of queries than a word has",
       .heads_q = 1,
       .seqlen_q = 2090,
       .seqlen_k = 230,
       .mask = window(100, 0),
       .mask_of = {false, false, true, true},
       .sees = [](int, int, int i, int j) { return (i / 3 + j) % 5 != 0; }},
      {.name = "blocks of which all is seen, and others; queries and keys that see none",
       .batch = 2,
       .heads_q = 1,
       .seqlen_q = 270,
       .seqlen_k = 600,
       .mask_of = {true, false, true, true},
       .sees = [](int b, int, int i, int j) { return (b + i / 130 + j / 200) % 3 != 0; }},
      {.name = "padding",
       .batch = 2,
       .heads_q = 2,
       .seqlen_q = 140,
       .seqlen_k = 400,
       .mask_of = {true, false, false, true},
       .sees = [](int b, int, int, int j) { return b == 0 ? j < 197 : j >= 203; }},
      {.name = "all seen",
       .seqlen_q = 130,
       .seqlen_k = 390,
       .sees = [](int, int, int, int) { return true; }},
      {.name = "NaN in tiles that nobody sees",
       .batch = 2,
       .seqlen_q = 130,
       .seqlen_k = 600,
       .mask_of = {true, false, false, true},
       .sees = [](int, int, int, int j) { return j < 384; },
       .nan_keys = 216},
      {.name = "nothing seen", .sees = [](int, int, int, int) { return false; }},
      {.name = "heads that see nothing",
       .heads_q = 6,
       .heads_kv = 2,
       .seqlen_k = 200,
       .sees = [](int, int h, int, int) { return h % 3 == 1; }},
      {.name = "causal", .seqlen_q = 200, .seqlen_k = 230, .mask = causal()},
      {.name = "window", .seqlen_q = 300, .seqlen_k = 260, .mask = window(70, 30)},
      {.name = "one key",
       .seqlen_q = 5,
       .seqlen_k = 1,
       .sees = [](int, int, int i, int) { return i != 2; }},
      {.name = "more queries", .seqlen_q = 150, .seqlen_k = 37, .mask = causal()},
      {.name = "rows",
       .seqlen_q = 140,
       .seqlen_k = 70,
       .mask_of = {false, true, true, false},
       .sees = [](int, int h, int i, int) { return (i + h) % 5 != 0; }},
      {.name = "a number",
       .batch = 2,
       .seqlen_q = 70,
       .mask_of = {true, true, false, false},
       .sees = [](int b, int h, int, int) { return b != h; }},
      {.name = "chunks", .seqlen_q = 250, .seqlen_k = 250, .mask = causal()},
      {.name = "large logits", .seqlen_q = 90, .seqlen_k = 211, .scale = 1.0f, .magnitude = 4.0f},
  };
  cases[14].mask.attention_chunk = 90;
  for (Case& c : cases) {
    c.head_dim = head_dim;
    c.has_mask = true;
    c.has_sinks = c.seqlen_q < 100 && c.magnitude == 1.0f;
    c.has_grad_lse = c.batch == 2;
  }
  return cases;
}

}  // namespace backward_case
