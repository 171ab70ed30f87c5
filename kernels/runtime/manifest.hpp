// manifest.toml and tuned.toml as tables, written by generate.py.
#pragma once

#include <cstddef>
#include <type_traits>

#include "runtime/kernel.hpp"
#include "runtime/tile_cost.hpp"

namespace cutlass_attn {

inline constexpr float kUnlimited = __builtin_huge_valf();

// Ranges [from, below) of numbers of a call; manifest.toml defines them.
struct CallRanges {
  struct Range {
    float from = 0.0f, below = kUnlimited;
  };
  Range blocks_per_sm = {}, rows = {}, keys = {}, splits = {}, num_splits = {};
  Range head_dim = {}, fill = {}, repeats = {}, visible = {};
  char const* to = nullptr;  // the kernel that is to run the calls, if it can; null: any later one
};

// Most rows of a call, as in VariantInfo: Params::kMaxRows, if the kernel has such a limit.
template <class Params, class = void>
inline constexpr int max_rows_of = 0;
template <class Params>
inline constexpr int max_rows_of<Params, std::void_t<decltype(Params::kMaxRows)>> =
    Params::kMaxRows;

// A kernel of the manifest: its requirements of a call, and how it is launched.
struct ManifestKernel {
  static constexpr int kMaxAvoids = 4;

  char const* name;
  Op op = Op::kForward;
  char const* arch = "";  // as in VariantInfo
  uint32_t options = 0;   // bits of option:: that it implements
  uint32_t needs = 0;     // bits of option:: that a call must have
  // Bits of option:: whose operand it reads for two neighbouring keys at a time.
  uint32_t pairs = 0;
  int head_dim_multiple = 0;  // as in VariantInfo
  Accumulate accumulate = Accumulate::kFloat32;
  Quantize quantize = Quantize::kNone;
  int compute_capability[2] = {0, 0};  // first and last
  int alignment = 1;                   // of every operand address and stride, in bytes
  bool automatic = true;
  bool tma = false;                    // reads operands by TMA, which allows no negative strides
  bool scalar = false;                 // a GPU kernel without tensor cores
  CallRanges avoids[kMaxAvoids] = {};  // calls left to later kernels, if one of them can run
  int num_avoids = 0;                  // number of these
  int max_rows = 0;                    // as in VariantInfo
  KernelArguments arguments = {};      // for a GPU kernel
  // For the CPU's own kernel: computes a call that check() and why_not() accepted and that has at
  // least one query row.
  Status (*function)(Problem const&, RunOptions const&) = nullptr;
};

// A row of a kernel.
struct ManifestRow {
  char const* kernel;
  char const* key;
  DType dtype;
  int head_dim = 0, head_dim_v = 0;  // 0: any
  int min_head_dim = 0;              // of Q and K in the calls that it is for
  char const* tile = "";
  TileCost cost = {};
  char const* tier;
  bool is_simt = false;
  bool compiled = false;
  char const* symbol;                // prefix of the names of its entries
  int plain_scores = 0;              // bits of the scores whose entry names lack "cutlass_"
  KernelUnit const* unit = nullptr;  // for a compiled GPU kernel
};

// A rule of tuned.toml; equal to TileRule.
struct ManifestRule {
  int smem_kb;
  char const* kernel;
  int head_dim, head_dim_v;
  char const* tile;
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
