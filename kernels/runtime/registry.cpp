// CUTLASS_ATTN_CUDA, 0 or 1, comes from CMake.
#include "runtime/registry.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "core/score.hpp"

#define CA_LAUNCHER(symbol)                               \
  namespace cutlass_attn {                                \
  Status symbol(AttnParams const&, LaunchOptions const&); \
  }
#define CA_FACTS(symbol)           \
  namespace cutlass_attn {         \
  extern KernelFacts const symbol; \
  }
#include "registry_launchers.inc"
#undef CA_LAUNCHER
#undef CA_FACTS

namespace cutlass_attn {
namespace {

// What can still change, until registry() is called.
struct Tables {
  std::mutex mutex;
  bool is_final = false;
  std::vector<Variant> variants;
  std::vector<TileRule> rules;
  std::vector<TileRule> replaced;  // which stand for those that rules of prefer_tile() replace
  std::map<std::pair<int, std::string>, std::string> failing;
  std::vector<std::unique_ptr<KernelFacts const>> facts;  // of added variants

  Tables() {
    variants = {
#define CA_VARIANT(launch, facts, kernel, key, device, dtype, head_dim, head_dim_v,               \
                   head_dim_multiple, accumulate, options, block_m, tile, tier, compiled,         \
                   automatic, min_compute_capability, alignment)                                  \
  Variant{{key, kernel, device, dtype, head_dim, head_dim_v, head_dim_multiple, tile, accumulate, \
           option_names(options), tier, compiled, automatic},                                     \
          options,                                                                                \
          min_compute_capability,                                                                 \
          alignment,                                                                              \
          block_m,                                                                                \
          launch,                                                                                 \
          facts},
#include "registry_table.inc"
#undef CA_VARIANT
    };
    rules = {
#define CA_TUNED(smem_kb, kernel, head_dim, head_dim_v, tile, min_blocks_per_sm, decode) \
  {smem_kb, kernel, head_dim, head_dim_v, tile, min_blocks_per_sm, decode},
#include "tuned_table.inc"
#undef CA_TUNED
    };
  }
};

Tables& tables() {
  static Tables made;
  return made;
}

KernelFacts scores_of(std::string const& kernel) {
#define CA_SCORES(name, ...) \
  if (kernel == name) return facts_of_scores<__VA_ARGS__>();
#include "score_table.inc"
#undef CA_SCORES
  return {};
}

Status too_late() {
  return Status::invalid(
      "variants have been listed or a kernel chosen already: tiles are added and preferred before");
}

Status check_class(int smem_kb) {
  if (smem_kb == 100 || smem_kb == 164 || smem_kb == 228) return {};
  return Status::invalid("smem_kb is " + std::to_string(smem_kb) + ", allowed: 100, 164, 228");
}

template <class A, class B>  // an AddedTile, a TileRule or a VariantInfo
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
  std::vector<Variant> rows;
  bool is_known = false;
  for (Variant const& like : all.variants) {
    VariantInfo const& info = like.info;
    if (!is_alike(info, tile) || info.device != Device::kCuda || info.tile.empty()) continue;
    is_known = true;
    std::string const key = info.key.substr(0, info.key.size() - info.tile.size()) + tile.tile;
    auto const has_key = [&](Variant const& v) { return v.info.key == key; };
    if (std::any_of(all.variants.begin(), all.variants.end(), has_key)) continue;
    if (std::any_of(rows.begin(), rows.end(), has_key)) continue;
    Variant row = like;
    row.info.key = key;
    row.info.tile = tile.tile;
    row.info.tier = "tuned";
    row.info.compiled = false;
    row.block_m = tile.block_m;
    row.launch = nullptr;
    rows.push_back(std::move(row));
  }
  if (!is_known) return Status::invalid("no variant is of " + name_of(tile));
  if (tile.block_m <= 0 || tile.threads <= 0 || tile.threads > 1024 || tile.smem_bytes < 0) {
    return Status::invalid("tile " + tile.tile + " has block_m " + std::to_string(tile.block_m) +
                           ", " + std::to_string(tile.threads) + " threads and " +
                           std::to_string(tile.smem_bytes) + " bytes of shared memory");
  }
  for (Variant& row : rows) {
    KernelFacts facts = scores_of(row.info.kernel);
    facts.threads = tile.threads;
    facts.smem_bytes = tile.smem_bytes;
    facts.block_m = tile.block_m;
    facts.packs_heads = true;
    all.facts.push_back(std::make_unique<KernelFacts const>(facts));
    row.facts = CUTLASS_ATTN_CUDA ? all.facts.back().get() : nullptr;
    // Behind the last one of its kernel.
    auto const last =
        std::find_if(all.variants.rbegin(), all.variants.rend(),
                     [&](Variant const& v) { return v.info.kernel == row.info.kernel; });
    all.variants.insert(last.base(), std::move(row));
  }
  return {};
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
    return Status::invalid("key is \"" + key + "\", allowed: that of a variant");
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
