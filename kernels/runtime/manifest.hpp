// manifest.toml and tuned.toml as tables, which generate.py writes.
#pragma once

#include <cstddef>

#include "runtime/kernel.hpp"
#include "runtime/tile_cost.hpp"

namespace cutlass_attn {

inline constexpr float kUnlimited = __builtin_huge_valf();

// Ranges [from, below) of what dispatch counts in a call: manifest.toml has their meaning.
struct CallRanges {
  struct Range {
    float from = 0.0f, below = kUnlimited;
  };
  Range blocks_per_sm = {}, rows = {}, keys = {}, splits = {}, num_splits = {};
};

// A kernel of the manifest: what it asks of a call, and how it is launched.
struct ManifestKernel {
  static constexpr int kMaxAvoids = 3;

  char const* name;
  Op op = Op::kForward;
  char const* arch = "";  // as VariantInfo's
  uint32_t options = 0;   // bits of option:: that it implements
  uint32_t needs = 0;     // and those without which it takes no call
  uint32_t pairs = 0;     // and those whose operand it reads for two neighbouring keys at a time
  int head_dim_multiple = 0;  // as VariantInfo's
  Accumulate accumulate = Accumulate::kFloat32;
  Quantize quantize = Quantize::kNone;
  int compute_capability[2] = {0, 0};  // the least and the last that it runs on
  int alignment = 1;                   // bytes: of every operand address and stride
  bool automatic = true;
  int max_rows = 0;     // as VariantInfo's
  bool tma = false;     // reads operands through TMA, which takes no negative strides
  bool scalar = false;  // a GPU kernel without tensor cores
  CallRanges avoids[kMaxAvoids] = {};  // calls for which a later kernel is preferred that can run
  int num_avoids = 0;                  // of these
  KernelArguments arguments = {};      // of a GPU kernel
  // The CPU's own kernel instead: computes calls that check() and why_not() have passed, with at
  // least one query row.
  Status (*function)(Problem const&, RunOptions const&) = nullptr;
};

// One of its rows.
struct ManifestRow {
  char const* kernel;
  char const* key;
  DType dtype;
  int head_dim = 0, head_dim_v = 0;  // 0: any
  char const* tile = "";
  TileCost cost = {};
  char const* tier;
  bool is_simt = false;
  bool compiled = false;
  char const* symbol;    // what the names of its entries begin with
  int plain_scores = 0;  // bits of the scores whose entries' names lack "cutlass_" there
  KernelUnit const* unit = nullptr;  // of a compiled GPU kernel
};

// A rule of tuned.toml; the same as TileRule.
struct ManifestRule {
  int smem_kb;
  char const* kernel;
  int head_dim, head_dim_v;
  char const* tile;
  float min_blocks_per_sm;
  bool decode;
};

template <class T>
struct Table {
  T const* first;
  size_t size;

  T const* begin() const { return first; }
  T const* end() const { return first + size; }
};

Table<ManifestKernel> manifest_kernels();
Table<ManifestRow> manifest_rows();  // in order of preference
Table<ManifestRule> manifest_rules();

}  // namespace cutlass_attn
