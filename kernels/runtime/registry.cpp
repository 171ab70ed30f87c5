// CMake defines CUTLASS_ATTN_CUDA as 0 or 1.
#include "runtime/registry.hpp"

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>
#include <string_view>

#include "sm80/tile_facts.hpp"

namespace cutlass_attn {
namespace {

ManifestKernel const& kernel_of(ManifestRow const& row) {
  for (ManifestKernel const& kernel : manifest_kernels()) {
    if (std::string_view(kernel.name) == row.kernel) return kernel;
  }
  __builtin_unreachable();  // generate.py ensures it
}

bool has_all_scores(ManifestKernel const& kernel, KernelUnit const* unit) {
  // The scores that a unit lacks are the last ones: see core_scores in manifest.toml.
  return unit != nullptr && unit->device_code[kernel.arguments.num_scores - 1] != nullptr;
}

// The numbers of a tile in a key, "64x128x8" or "32x32x2c4".
struct TileSize {
  int queries = 0, keys = 0, warps = 1, columns = 1;  // warps along M, and along N

  explicit TileSize(std::string const& tile) {
    std::sscanf(tile.c_str(), "%dx%dx%dc%d", &queries, &keys, &warps, &columns);
  }
  bool is_valid() const {
    constexpr int kMax = 4096;  // more fit no shared memory, and TileFacts may overflow
    for (int x : {queries, keys, warps, columns}) {
      if (x <= 0 || x > kMax) return false;
    }
    return true;
  }
  // Rows of a block's tile, and of the operand that it iterates over.
  int block_m(Op op) const { return op == Op::kBackward ? keys : queries; }
  int block_n(Op op) const { return op == Op::kBackward ? queries : keys; }
};

// `name` for another tile: replaces its last part.
std::string with_tile(std::string const& name, std::string const& old, std::string const& tile) {
  return name.substr(0, name.size() - old.size()) + tile;
}

Variant variant_of(ManifestRow const& row) {
  ManifestKernel const& kernel = kernel_of(row);
  bool const is_gpu = kernel.function == nullptr && !row.is_simt;
  TileSize const size(row.tile);
  Variant variant{{},
                  &kernel,
                  row.min_head_dim,
                  size.block_m(kernel.op),
                  size.block_n(kernel.op),
                  row.cost,
                  row.unit,
                  row.is_simt,
                  false,
                  row.symbol,
                  row.plain_scores};
  variant.can_load = CUTLASS_ATTN_CUDA && is_gpu && !has_all_scores(kernel, row.unit);
  VariantInfo& info = variant.info;
  info.key = row.key;
  info.kernel = std::string(kernel.name) + (row.is_simt ? "-simt" : "");
  info.op = kernel.op;
  info.device = is_gpu ? Device::kCuda : Device::kCpu;
  info.arch = kernel.arch;
  info.dtype = row.dtype;
  info.head_dim = row.head_dim;
  info.head_dim_v = row.head_dim_v;
  info.head_dim_multiple = kernel.head_dim_multiple;
  info.max_rows = kernel.max_rows;
  info.tile = row.tile;
  info.accumulate = kernel.accumulate;
  info.quantize = kernel.quantize;
  info.options = option_names(kernel.options);
  info.needs = option_names(kernel.needs);
  info.tier = row.tier;
  info.compiled = row.compiled;
  info.automatic = kernel.automatic && !row.is_simt;
  return variant;
}

// State that can change until registry() is called.
struct Tables {
  std::mutex mutex;
  bool is_final = false;
  std::vector<Variant> variants;
  std::vector<TileRule> rules;
  std::vector<TileRule> replaced;  // rules that prefer_tile() replaces
  std::map<std::pair<int, std::string>, std::string> failing;

  Tables() {
    for (ManifestRow const& row : manifest_rows()) variants.push_back(variant_of(row));
    for (ManifestRule const& rule : manifest_rules()) {
      rules.push_back(
          {rule.smem_kb, rule.kernel, rule.head_dim, rule.head_dim_v, rule.tile, rule.decode});
    }
  }
};

Tables& tables() {
  static Tables made;
  return made;
}

Status too_late() {
  return Status::invalid(
      "variants were already listed or a kernel chosen: add or prefer tiles before that");
}

// Checks a tile of a kernel that is sm80::Forward. Of other kernels nothing is known.
TileCheck check_tile(Variant const& like, TileSize const& size) {
  ManifestKernel const& kernel = *like.kernel;
  std::string_view const arch = kernel.arch;
  bool const is_mma = std::string_view(kernel.name).substr(0, 4) == "sm" + std::string(arch);
  bool const is_forward =
      kernel.op == Op::kForward && kernel.max_rows == 0 && (kernel.needs & option::latent_kv) == 0;
  if (!is_mma || !is_forward || arch == "90a") return {};
  sm80::TileFacts const facts = {like.info.head_dim,
                                 like.info.head_dim_v,
                                 size.queries,
                                 size.keys,
                                 size.warps,
                                 size.columns,
                                 (kernel.options & option::paged_kv) != 0,
                                 (kernel.needs & option::fp8_kv) != 0,
                                 kernel.quantize != Quantize::kNone,
                                 kernel.quantize == Quantize::kInt8,
                                 kernel.quantize == Quantize::kFp8};
  TileCheck check;
  if (char const* const why_not = facts.why_not()) {
    check.why_not = why_not;
  } else if (facts.buffer_bytes() >= facts.kMaxSmemBytes) {
    check.why_not = "needs " + std::to_string(facts.buffer_bytes()) +
                    " bytes of shared memory for Q, K and V alone; a block may have " +
                    std::to_string(facts.kMaxSmemBytes);
  } else {
    check.spills = facts.spills();
  }
  return check;
}

Status check_class(int smem_kb) {
  std::string allowed;
  for (int kb : facts::kSmemClassesKb) {
    if (smem_kb == kb) return {};
    allowed += (allowed.empty() ? "" : ", ") + std::to_string(kb);
  }
  return Status::invalid("smem_kb is " + std::to_string(smem_kb) + ", allowed: " + allowed);
}

template <class A, class B>  // AddedTile, TileRule or VariantInfo
bool is_alike(A const& a, B const& b) {
  return a.kernel == b.kernel && a.head_dim == b.head_dim && a.head_dim_v == b.head_dim_v;
}

template <class Tile>
std::string name_of(Tile const& tile) {
  std::string text = tile.kernel + " at head dim " + std::to_string(tile.head_dim);
  if (tile.head_dim_v != tile.head_dim) text += " and " + std::to_string(tile.head_dim_v);
  return text;
}

}  // namespace

Status add_tile(AddedTile const& tile) {
  Tables& all = tables();
  std::lock_guard const lock(all.mutex);
  if (all.is_final) return too_late();
  TileSize const size(tile.tile);
  if (!size.is_valid()) {
    return Status::invalid("tile is \"" + tile.tile + "\", allowed: one such as 64x64x4");
  }
  std::vector<Variant> rows;
  bool is_known = false;
  for (Variant const& like : all.variants) {
    VariantInfo const& info = like.info;
    if (!is_alike(info, tile) || info.device != Device::kCuda || info.tile.empty()) continue;
    is_known = true;
    if (TileCheck const check = check_tile(like, size); !check.why_not.empty()) {
      return Status::invalid(tile.tile + ": " + check.why_not);
    }
    std::string const key = with_tile(info.key, info.tile, tile.tile);
    auto const has_key = [&](Variant const& v) { return v.info.key == key; };
    if (std::any_of(all.variants.begin(), all.variants.end(), has_key)) continue;
    if (std::any_of(rows.begin(), rows.end(), has_key)) continue;
    Variant row = like;
    row.info.key = key;
    row.info.tile = tile.tile;
    row.info.tier = "tuned";
    row.info.compiled = false;
    row.block_m = size.block_m(info.op);
    row.block_n = size.block_n(info.op);
    row.cost = {};
    row.unit = nullptr;
    row.can_load = CUTLASS_ATTN_CUDA;
    row.symbol = with_tile(like.symbol, info.tile, tile.tile);
    row.plain_scores = 0;
    rows.push_back(std::move(row));
  }
  if (!is_known) return Status::invalid("no variant is of " + name_of(tile));
  for (Variant& row : rows) {
    // After the last row of its kernel.
    auto const last =
        std::find_if(all.variants.rbegin(), all.variants.rend(),
                     [&](Variant const& v) { return v.info.kernel == row.info.kernel; });
    all.variants.insert(last.base(), std::move(row));
  }
  return {};
}

TileCheck check_tile(AddedTile const& tile) {
  TileSize const size(tile.tile);
  if (!size.is_valid()) return {"a tile is such as 64x64x4"};
  for (Variant const& like : registry()) {
    bool const is_gpu = like.info.device == Device::kCuda && !like.info.tile.empty();
    if (is_gpu && is_alike(like.info, tile)) return check_tile(like, size);
  }
  return {"no variant is of " + name_of(tile)};
}

Status prefer_tile(TileRule const& rule) {
  Tables& all = tables();
  std::lock_guard const lock(all.mutex);
  if (all.is_final) return too_late();
  if (Status status = check_class(rule.smem_kb); !status.ok()) return status;
  std::vector<std::string> tiles;
  auto const has_tile = [&](std::string const& tile) {
    return std::find(tiles.begin(), tiles.end(), tile) != tiles.end();
  };
  for (Variant const& v : all.variants) {
    if (!is_alike(v.info, rule) || v.info.tile.empty()) continue;
    if (!has_tile(v.info.tile)) tiles.push_back(v.info.tile);
  }
  if (tiles.empty()) return Status::invalid("no variant is of " + name_of(rule));
  if (!has_tile(rule.tile)) {
    std::string text = "tile is \"" + rule.tile + "\", allowed for " + name_of(rule) + ":";
    for (std::string const& tile : tiles) text += " " + tile;
    return Status::invalid(text);
  }
  auto const replaces = [&](TileRule const& other) {
    return other.smem_kb == rule.smem_kb && other.decode == rule.decode && is_alike(other, rule);
  };
  if (std::none_of(all.replaced.begin(), all.replaced.end(), replaces)) {
    all.rules.erase(std::remove_if(all.rules.begin(), all.rules.end(), replaces), all.rules.end());
    all.replaced.push_back(rule);
  }
  all.rules.push_back(rule);
  return {};
}

Status mark_failing(int smem_kb, std::string const& key, std::string reason) {
  Tables& all = tables();
  std::lock_guard const lock(all.mutex);
  if (all.is_final) return too_late();
  if (Status status = check_class(smem_kb); !status.ok()) return status;
  if (std::none_of(all.variants.begin(), all.variants.end(),
                   [&](Variant const& v) { return v.info.key == key; })) {
    return Status::invalid("key is \"" + key + "\", allowed: the key of a variant");
  }
  all.failing[{smem_kb, key}] = std::move(reason);
  return {};
}

std::vector<Variant> const& registry() {
  static std::vector<Variant> const& table = []() -> std::vector<Variant> const& {
    Tables& all = tables();
    std::lock_guard const lock(all.mutex);
    all.is_final = true;
    return all.variants;
  }();
  return table;
}

std::vector<TileRule> const& rules_in_force() {
  registry();
  return tables().rules;
}

std::vector<TileRule> tile_rules() { return rules_in_force(); }

std::string const& why_failing(int smem_kb, std::string const& key) {
  static std::string const none;
  registry();
  auto const& failing = tables().failing;
  auto const found = failing.find({smem_kb, key});
  return found == failing.end() ? none : found->second;
}

}  // namespace cutlass_attn
