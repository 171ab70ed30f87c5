#include "runtime/dispatch.hpp"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <iterator>
#include <unordered_map>

#include "core/scheduler.hpp"
#include "runtime/examine.hpp"
#include "runtime/refusal.hpp"

namespace cutlass_attn {
namespace {

// GPUs as tuned.toml tells them apart: the most shared memory of an SM, in KB.
constexpr auto const& kClasses = facts::kSmemClassesKb;

int class_of(DeviceInfo const& device) {
  int index = 0;
  for (int i = 1; i < int(std::size(kClasses)); ++i) {
    if (device.smem_per_sm >= kClasses[i] * 1024) index = i;
  }
  return index;
}

// Thread blocks that the call has for every SM of the device with tiles of block_m rows. Kernels
// with a choice of tiles pack heads.
float blocks_per_sm(Problem const& p, Op op, int block_m, DeviceInfo const& device) {
  if (op == Op::kBackward) {
    // A block has a tile of keys, block_m of them, of a KV head.
    bool const is_packed = p.seq_k.cu_seqlens != nullptr;
    int64_t const keys = p.seq_k.rows();
    int64_t const tiles = (keys + block_m - 1) / block_m * (is_packed ? 1 : p.batch);
    return float(tiles * p.num_heads_kv) / float(std::max(device.num_sms, 1));
  }
  int const heads = TileScheduler::heads_of_tile(p, block_m);
  int64_t const rows = p.seq_q.rows();
  int64_t const entries = p.seq_q.cu_seqlens != nullptr ? 1 : p.batch;
  int64_t const tiles = (rows * heads + block_m - 1) / block_m;
  return float(entries * (p.num_heads_q / heads) * tiles) / float(std::max(device.num_sms, 1));
}

// For the variant's kernel to be better than those after it in the manifest.
bool has_enough_blocks(Variant const& variant, Problem const& p, DeviceInfo const& device) {
  if (variant.kernel->only_split && splits_of(variant, p, device) == 1) return false;
  float const least = variant.kernel->min_blocks_per_sm;
  return least <= 0.0f || blocks_per_sm(p, variant.kernel->op, variant.block_m, device) >= least;
}

float cost_of(Variant const& variant, Problem const& p, DeviceInfo const& device) {
  return variant.cost.of_call(p, variant.block_m, device.num_sms);
}

bool is_decode(Problem const& p, Op op) {
  return op == Op::kForward && p.seq_q.seqlen <= kMaxDecodeQueries;
}

// A variant and when it is wanted among those of its group.
struct Choice {
  Variant const* variant;
  float min_blocks_per_sm;  // infinite: only if no other can run
};

// Variants of one kernel, dtype and head dims. They differ in their tile, and in whether they are
// compiled.
struct Group {
  std::vector<Variant const*> variants;
  std::vector<Choice> by_class[std::size(kClasses)][2];  // the second for decoding
  bool has_costs[std::size(kClasses)] = {};  // by which tiles are chosen, for want of rules

  bool is_like(Variant const& v) const {
    VariantInfo const &a = variants[0]->info, &b = v.info;
    return a.kernel == b.kernel && a.dtype == b.dtype && a.device == b.device &&
           a.head_dim == b.head_dim && a.head_dim_v == b.head_dim_v;
  }

  int padded_dims() const {
    VariantInfo const& info = variants[0]->info;
    return info.head_dim ? info.head_dim + info.head_dim_v : INT_MAX;
  }

  // The tuned tiles first, then all in the order of the manifest, then those that fail a gate.
  void choose_tiles() {
    for (size_t i = 0; i < std::size(kClasses); ++i) {
      for (bool const decode : {false, true}) {
        std::vector<Choice>& choices = by_class[i][decode];
        choices = choices_of(kClasses[i], decode);
        if (decode && choices.empty()) choices = choices_of(kClasses[i], false);
        bool const is_tuned = !choices.empty();
        has_costs[i] = !is_tuned && variants[0]->cost.is_known();
        for (Variant const* v : variants) choices.push_back({v, is_tuned ? kNever : 0.0f});
        auto const passes = [&](Choice const& choice) {
          return why_failing(kClasses[i], choice.variant->info.key).empty();
        };
        auto const failing = std::stable_partition(choices.begin(), choices.end(), passes);
        for (auto choice = failing; choice != choices.end(); ++choice) {
          choice->min_blocks_per_sm = kNever;
        }
      }
    }
  }

  // What the rules say, in their order.
  std::vector<Choice> choices_of(int smem_kb, bool decode) const {
    VariantInfo const& info = variants[0]->info;
    std::vector<Choice> choices;
    for (TileRule const& rule : rules_in_force()) {
      if (rule.smem_kb != smem_kb || rule.decode != decode || rule.kernel != info.kernel ||
          rule.head_dim != info.head_dim || rule.head_dim_v != info.head_dim_v) {
        continue;
      }
      for (Variant const* v : variants) {
        if (v->info.tile == rule.tile) choices.push_back({v, rule.min_blocks_per_sm});
      }
    }
    return choices;
  }

  Variant const* select(Call const& call, DeviceInfo const& device) const {
    int const device_class = class_of(device);
    auto const& choices = by_class[device_class][is_decode(call.p, call.op)];
    if (has_costs[device_class]) return least_cost(choices, call, device);
    Variant const* fallback = nullptr;
    for (Choice const& choice : choices) {
      bool const is_wanted = choice.min_blocks_per_sm <= 0.0f ||
                             (choice.min_blocks_per_sm < kNever &&
                              blocks_per_sm(call.p, call.op, choice.variant->block_m, device) >=
                                  choice.min_blocks_per_sm);
      if (!is_wanted && fallback != nullptr) continue;
      if (!can_run(*choice.variant, call, device)) continue;
      if (is_wanted) return choice.variant;
      fallback = choice.variant;
    }
    return fallback;
  }

  static constexpr float kNever = __builtin_huge_valf();

 private:
  // One that fails a gate if no other can run.
  static Variant const* least_cost(std::vector<Choice> const& choices, Call const& call,
                                   DeviceInfo const& device) {
    Variant const* best = nullptr;
    float least = 0.0f;
    for (Choice const& choice : choices) {
      if (best && choice.min_blocks_per_sm == kNever) break;
      float const cost = cost_of(*choice.variant, call.p, device);
      if ((best && cost >= least) || !can_run(*choice.variant, call, device)) continue;
      best = choice.variant, least = cost;
    }
    return best;
  }
};

constexpr int kDevices = 2;

// Groups of what a name stands for, in order of preference.
struct Shortlist {
  std::vector<Group> groups[kNumOps][kDevices][kNumDTypes];

  void add(Variant const& v) {
    auto& list = groups[int(v.kernel->op)][int(v.info.device)][int(v.info.dtype)];
    for (Group& group : list) {
      if (group.is_like(v)) {
        group.variants.push_back(&v);
        return;
      }
    }
    list.push_back({{&v}, {}});
  }

  void finish() {
    for (auto& of_op : groups) {
      for (auto& of_device : of_op) {
        for (auto& list : of_device) {
          for (auto begin = list.begin(); begin != list.end();) {
            std::string const& kernel = begin->variants[0]->info.kernel;
            auto const end = std::find_if(begin, list.end(), [&](Group const& group) {
              return group.variants[0]->info.kernel != kernel;
            });
            std::stable_sort(begin, end, [](Group const& a, Group const& b) {
              return a.padded_dims() < b.padded_dims();
            });
            begin = end;
          }
          for (Group& group : list) group.choose_tiles();
        }
      }
    }
  }
};

using Shortlists = std::unordered_map<std::string, Shortlist>;

// Every name that a caller may give. Built once: the registry does not change any more.
Shortlists const& shortlists() {
  static Shortlists const lists = [] {
    Shortlists made;
    for (Variant const& v : registry()) {
      if (v.info.automatic) made["auto"].add(v);
      made[v.info.kernel].add(v);
      made[v.info.key].add(v);
    }
    for (auto& [name, list] : made) list.finish();
    return made;
  }();
  return lists;
}

Shortlist const* shortlist(std::string const& kernel) {
  static Shortlist const* const of_auto = [] {
    auto const found = shortlists().find("auto");
    return found == shortlists().end() ? nullptr : &found->second;
  }();
  if (kernel == "auto") return of_auto;
  auto const found = shortlists().find(kernel);
  return found == shortlists().end() ? nullptr : &found->second;
}

Variant const* first(Call const& call, Op op, DeviceInfo const& device, std::string const& kernel) {
  Shortlist const* const list = shortlist(kernel);
  if (list == nullptr) return nullptr;
  Variant const *best = nullptr, *fallback = nullptr;
  ManifestKernel const* looked_at = nullptr;  // the last kernel that could run
  float least = 0.0f;
  for (Group const& group : list->groups[int(op)][int(device.device)][int(call.p.q.dtype)]) {
    Variant const& like = *group.variants[0];
    // More padding makes neither more blocks nor less work. Once a kernel with a cost can run, it
    // is a matter of costs.
    if (looked_at == like.kernel || (best && !like.cost.is_known())) continue;
    Variant const* const variant = group.select(call, device);
    if (variant == nullptr) continue;
    looked_at = variant->kernel;
    if (!has_enough_blocks(*variant, call.p, device)) {
      if (fallback == nullptr) fallback = variant;
      continue;
    }
    if (!variant->cost.is_known()) return variant;
    float const cost = cost_of(*variant, call.p, device);
    if (best == nullptr || cost < least) best = variant, least = cost;
  }
  return best ? best : fallback;
}

}  // namespace

std::string why_not(Variant const& variant, Problem const& problem, DeviceInfo const& device) {
  std::string reasons;
  examine(variant, Call(problem, variant.kernel->op), device, [&](Lack, auto&& reason) {
    if (!reasons.empty()) reasons += "; ";
    reasons += reason();
  });
  return reasons;
}

bool names(std::string const& kernel, Variant const& variant) {
  if (kernel == "auto") return variant.info.automatic;
  return kernel == variant.info.kernel || kernel == variant.info.key;
}

Variant const* select(Problem const& problem, Op op, DeviceInfo const& device,
                      std::string const& kernel, Status& status) {
  Variant const* const variant = first(Call(problem, op), op, device, kernel);
  if (variant == nullptr) status = refusal(problem, op, device, kernel);
  return variant;
}

KernelFacts facts_of(Variant const& variant) {
  KernelFacts facts;
  facts.block_m = variant.block_m;
  facts.block_n = variant.block_n;
  if (variant.unit) facts = variant.unit->facts;
  return facts;
}

int splits_of(Variant const& variant, Problem const& problem, DeviceInfo const& device) {
  if (variant.kernel->function || !variant.kernel->arguments.splits) return 1;
  return variant.kernel->arguments.splits(problem, device, facts_of(variant));
}

std::string why_preferred(Variant const& chosen, Variant const& other, Problem const& problem,
                          DeviceInfo const& device) {
  VariantInfo const &a = chosen.info, &b = other.info;
  Op const op = chosen.kernel->op;
  auto const blocks = [&](Variant const& variant) {
    char number[32];
    std::snprintf(number, sizeof number, "%.3g",
                  double(blocks_per_sm(problem, op, variant.block_m, device)));
    return number + std::string(" blocks an SM");
  };
  if (chosen.cost.is_known() && other.cost.is_known() &&
      has_enough_blocks(other, problem, device)) {
    float const ratio = cost_of(other, problem, device) / cost_of(chosen, problem, device);
    if (ratio > 1.0f) {
      char number[32];
      std::snprintf(number, sizeof number, "%.3g", double(ratio));
      return "could run; predicted to take " + std::string(number) + " times as long as " + a.key;
    }
  }
  if (a.kernel != b.kernel) {
    std::string const text = "could run; " + a.kernel + " is preferred";
    if (has_enough_blocks(other, problem, device)) return text;
    if (other.kernel->only_split) return text + " where " + b.kernel + " would not split the keys";
    return text + " for " + blocks(other);
  }
  if (a.head_dim != b.head_dim || a.head_dim_v != b.head_dim_v) {
    return "could run; " + a.key + " pads the head dims less";
  }
  int const smem_kb = kClasses[class_of(device)];
  std::string const& failing = why_failing(smem_kb, b.key);
  if (!failing.empty() && why_failing(smem_kb, a.key).empty()) {
    return "could run; fails a gate that " + a.tile + " does not: " + failing;
  }
  std::string const call = is_decode(problem, op) ? "decoding with " : "";
  return "could run; tile " + a.tile + " is preferred for " + call + blocks(chosen);
}

}  // namespace cutlass_attn
