#include "runtime/dispatch.hpp"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <iterator>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "core/key_splits.hpp"
#include "core/scheduler.hpp"
#include "runtime/examine.hpp"
#include "runtime/refusal.hpp"
#include "sm90/params.hpp"

namespace cutlass_attn {
namespace {

// GPU classes of tuned.toml: largest shared memory of an SM, in KB.
constexpr auto const& kClasses = facts::kSmemClassesKb;

int class_of(DeviceInfo const& device) {
  int index = 0;
  for (int i = 1; i < int(std::size(kClasses)); ++i) {
    if (device.smem_per_sm >= kClasses[i] * 1024) index = i;
  }
  return index;
}

// Thread blocks per SM of the device, with tiles of block_m rows. Kernels with a choice of tiles
// pack heads.
float blocks_per_sm(Problem const& p, Op op, int block_m, DeviceInfo const& device) {
  if (op == Op::kBackward) {
    // A block has a tile of block_m keys of a KV head.
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

// The tiles of a KV head and a sequence, which is taken to have the mean length.
struct HeadTiles {
  static constexpr int kManyKeys = 512;

  // Share of the tiles' rows that exist. Many keys of sequences that are not packed make up for
  // rows that do not.
  float fill = 1.0f;
  float repeats = 1.0f;  // tiles, over those with packed heads

  // wgmma kernels pack heads only if their number divides the rows of a copy.
  HeadTiles(Variant const& variant, Problem const& p) {
    int const group = p.num_heads_q / std::max(p.num_heads_kv, 1), m = variant.block_m;
    bool const has_offsets = p.seq_q.cu_seqlens != nullptr;
    int64_t const queries = has_offsets ? p.seq_q.rows() / std::max(p.batch, 1) : p.seq_q.seqlen;
    auto const tiles_of = [&](int heads) { return (queries * heads + m - 1) / m; };
    int const packed = TileScheduler::heads_of_tile(p, m);
    bool const is_wgmma = std::string_view(variant.kernel->arch) == "90a";
    int const heads = is_wgmma && sm90::kBoxRows % packed != 0 ? 1 : packed;
    if (queries == 0 || group == 0) return;
    if (has_offsets || p.seq_k.seqlen < kManyKeys) {
      fill = float(queries * heads) / float(tiles_of(heads) * m);
    }
    repeats = float(tiles_of(heads) * (group / heads)) / float(tiles_of(packed) * (group / packed));
  }
};

// The share of the keys that a query sees by causality, window and chunk, in the mean: interpolated
// between the first, the middle two and the last query. Packed sequences are taken to have the mean
// length.
float visible_keys(Problem const& p) {
  auto const length_of = [&](Sequences const& s) {
    return s.cu_seqlens ? int32_t(s.rows() / std::max(p.batch, 1)) : s.seqlen;
  };
  SeqLens const lens{length_of(p.seq_q), length_of(p.seq_k)};
  if (lens.q < 1 || lens.k < 1) return 1.0f;
  IntervalMask const mask(p.mask, lens);
  int32_t const last = lens.q - 1;
  int64_t keys = 0;
  for (int32_t const query : {0, last / 2, (last + 1) / 2, last}) {
    TileRange const range = mask.tiles(query, query + 1, 1);
    keys += std::max(range.end - range.begin, 0);
  }
  return float(keys) / (4.0f * float(lens.k));
}

// A number of a call for which `avoids` of manifest.toml has ranges.
struct Counted {
  CallRanges::Range CallRanges::* range;
  char const* format;  // of the number, with its unit
  float (*count)(Variant const&, Problem const&, DeviceInfo const&);
};

constexpr Counted kCounts[] = {
    {&CallRanges::rows, "%s rows",
     [](Variant const&, Problem const& p, DeviceInfo const&) { return float(rows_of(p)); }},
    {&CallRanges::keys, "%s keys",
     [](Variant const&, Problem const& p, DeviceInfo const&) { return float(p.seq_k.seqlen); }},
    {&CallRanges::num_splits, "num_splits=%s",
     [](Variant const&, Problem const& p, DeviceInfo const&) {
       return float(p.split_size > 0 ? splits_of_size(p) : p.num_splits);
     }},
    {&CallRanges::blocks_per_sm, "%s blocks an SM",
     [](Variant const& v, Problem const& p, DeviceInfo const& device) {
       return blocks_per_sm(p, v.kernel->op, v.block_m, device);
     }},
    {&CallRanges::splits, "keys in %s split",
     [](Variant const& v, Problem const& p, DeviceInfo const& device) {
       return float(splits_of(v, p, device));
     }},
    {&CallRanges::head_dim, "head_dim %s",
     [](Variant const&, Problem const& p, DeviceInfo const&) { return float(p.head_dim); }},
    {&CallRanges::fill, "tiles that are full to %s",
     [](Variant const& v, Problem const& p, DeviceInfo const&) { return HeadTiles(v, p).fill; }},
    {&CallRanges::repeats, "keys that are read %s times",
     [](Variant const& v, Problem const& p, DeviceInfo const&) { return HeadTiles(v, p).repeats; }},
    {&CallRanges::visible, "%s of the keys visible",
     [](Variant const&, Problem const& p, DeviceInfo const&) { return visible_keys(p); }},
};

bool is_any(CallRanges::Range const& range) { return range.from <= 0 && range.below == kUnlimited; }

// The entry of the kernel's `avoids` that applies, or null. runs(name): whether that kernel can run
// the call.
template <class Runs>
CallRanges const* avoided(Variant const& variant, Problem const& p, DeviceInfo const& device,
                          Runs&& runs) {
  for (int i = 0; i < variant.kernel->num_avoids; ++i) {
    CallRanges const& ranges = variant.kernel->avoids[i];
    auto const holds = [&](Counted const& counted) {
      CallRanges::Range const& range = ranges.*counted.range;
      if (is_any(range)) return true;
      float const count = counted.count(variant, p, device);
      return range.from <= count && count < range.below;
    };
    bool const applies = std::all_of(std::begin(kCounts), std::end(kCounts), holds);
    if (applies && (ranges.to == nullptr || runs(ranges.to))) return &ranges;
  }
  return nullptr;
}

float cost_of(Variant const& variant, Problem const& p, DeviceInfo const& device) {
  return variant.cost.of_call(p, variant.block_m, device.num_sms);
}

// Whether a call has enough rows for a tile that is not the smallest. Packed sequences have to fill
// more than half of it, in the mean: 256 of 32 tokens, 16 heads of head dim 64, take 116 us with
// tiles of 128 rows and 77 with 64 (H200), 256 of 64 tokens 129 and 90.
bool has_enough_rows(Variant const& variant, Problem const& p, DeviceInfo const& device) {
  Op const op = variant.kernel->op;
  if (op == Op::kForward && p.seq_q.cu_seqlens && HeadTiles(variant, p).fill <= 0.5f) return false;
  return blocks_per_sm(p, op, variant.block_m, device) >= kMinTilesPerSm;
}

bool is_decode(Problem const& p, Op op) {
  return op == Op::kForward && p.seq_q.seqlen <= kMaxDecodeQueries;
}

// A variant in the order of preference.
struct Choice {
  Variant const* variant;
  bool has_cost;      // whether predicted times decide between this kernel and others with a cost
  int cost_group;     // predicted times decide between choices of one group
  bool needs_blocks;  // whether it is for calls of kMinTilesPerSm or more thread blocks per SM
};

// Order in which variants are tried, for a class of GPUs, for decoding or for other calls.
struct Order {
  std::vector<Choice> choices;
  size_t end_of_costs = 0;  // choices from here on have no cost

  void find_end_of_costs() {
    end_of_costs = choices.size();
    while (end_of_costs > 0 && !choices[end_of_costs - 1].has_cost) --end_of_costs;
  }

  // The first choice that can run. From the first choice with a cost on, the choice with the lowest
  // predicted cost. Choices of a kernel with more padding are used only if none with less padding
  // can run. A kernel runs a call that it avoids only if no other kernel can.
  Variant const* best(Call const& call, DeviceInfo const& device) const {
    struct {
      Variant const* variant = nullptr;
      float cost = 0.0f;
    } preferred, fallback;         // fallback: the kernel avoids the call
    Choice const* last = nullptr;  // the last choice that could run
    auto const runs = [&](std::string_view kernel) {
      return std::any_of(choices.begin(), choices.end(), [&](Choice const& choice) {
        return choice.variant->info.kernel == kernel && can_run(*choice.variant, call, device);
      });
    };
    char const* left_to = nullptr;  // the kernel to which others leave the call
    for (Choice const& choice : choices) {
      if (preferred.variant && &choice >= &choices[0] + end_of_costs) break;
      Variant const& variant = *choice.variant;
      if (left_to && variant.info.kernel != left_to) continue;
      bool const has_variant = last && last->variant->kernel == variant.kernel;
      if (has_variant && !(choice.has_cost && choice.cost_group == last->cost_group)) continue;
      if (preferred.variant && !choice.has_cost) continue;
      if (choice.needs_blocks && !has_enough_rows(variant, call.p, device)) continue;
      if (!can_run(variant, call, device)) continue;
      last = &choice;
      CallRanges const* const avoids = avoided(variant, call.p, device, runs);
      bool const is_avoided = avoids != nullptr;
      if (is_avoided && avoids->to) left_to = avoids->to;
      if (!is_avoided && !variant.cost.is_known()) return &variant;
      auto& found = is_avoided ? fallback : preferred;
      if (is_avoided && found.variant && found.variant->kernel != variant.kernel) continue;
      float const cost = variant.cost.is_known() ? cost_of(variant, call.p, device) : 0.0f;
      if (!found.variant || cost < found.cost) found = {&variant, cost};
    }
    return preferred.variant ? preferred.variant : fallback.variant;
  }
};

// Variants of one kernel, dtype and head dims. They differ in their tile, and in whether they are
// compiled.
struct Group {
  std::vector<Variant const*> variants;

  bool is_like(Variant const& v) const {
    VariantInfo const &a = variants[0]->info, &b = v.info;
    return a.kernel == b.kernel && a.dtype == b.dtype && a.device == b.device &&
           a.head_dim == b.head_dim && a.head_dim_v == b.head_dim_v;
  }

  int padded_dims() const {
    VariantInfo const& info = variants[0]->info;
    return info.head_dim ? info.head_dim + info.head_dim_v : INT_MAX;
  }

  // Appends the group's variants to an order: tiles in the order of the rules, then in the order of
  // the manifest, then those that fail a gate.
  void append_to(Order& order, int smem_kb, bool decode) const {
    int const last = order.choices.empty() ? 0 : order.choices.back().cost_group;
    std::vector<Choice> choices = choices_of(last, smem_kb, decode);
    if (decode && choices.empty()) choices = choices_of(last, smem_kb, false);
    int const untuned = last + int(choices.size()) + 1;
    for (Variant const* v : variants) choices.push_back({v, has_cost(), untuned, false});
    auto const passes = [&](Choice const& choice) {
      return why_failing(smem_kb, choice.variant->info.key).empty();
    };
    auto const failing = std::stable_partition(choices.begin(), choices.end(), passes);
    for (auto choice = failing; choice != choices.end(); ++choice) {
      *choice = {choice->variant, has_cost(), untuned + 1, false};
    }
    order.choices.insert(order.choices.end(), choices.begin(), choices.end());
  }

 private:
  bool has_cost() const { return variants[0]->cost.is_known(); }

  // Tiles of the rules, in order, each for calls of enough blocks; then from the last one on, for
  // all calls. Each is a group of its own, numbered from last + 1 on, so that costs do not compare
  // them.
  std::vector<Choice> choices_of(int last, int smem_kb, bool decode) const {
    VariantInfo const& info = variants[0]->info;
    std::vector<Choice> choices;
    for (TileRule const& rule : rules_in_force()) {
      if (rule.smem_kb != smem_kb || rule.decode != decode || rule.kernel != info.kernel ||
          rule.head_dim != info.head_dim || rule.head_dim_v != info.head_dim_v) {
        continue;
      }
      for (Variant const* v : variants) {
        if (v->info.tile != rule.tile) continue;
        choices.push_back({v, has_cost(), ++last, true});
      }
    }
    for (size_t i = choices.size(); i-- > 0;) {
      choices.push_back({choices[i].variant, has_cost(), ++last, false});
    }
    return choices;
  }
};

constexpr int kDevices = 2;

// All variants that a name stands for, for one op, device and dtype.
struct Candidates {
  std::vector<Group> groups;
  Order orders[std::size(kClasses)][2];  // by GPU class; [1]: for decoding

  void add(Variant const& v) {
    auto const is_like = [&](Group const& group) { return group.is_like(v); };
    auto const found = std::find_if(groups.begin(), groups.end(), is_like);
    if (found == groups.end()) {
      groups.push_back({{&v}});
    } else {
      found->variants.push_back(&v);
    }
  }

  void make_orders() {
    for (auto begin = groups.begin(); begin != groups.end();) {
      std::string const& kernel = begin->variants[0]->info.kernel;
      auto const end = std::find_if(begin, groups.end(), [&](Group const& group) {
        return group.variants[0]->info.kernel != kernel;
      });
      std::stable_sort(begin, end, [](Group const& a, Group const& b) {
        return a.padded_dims() < b.padded_dims();
      });
      begin = end;
    }
    for (size_t i = 0; i < std::size(kClasses); ++i) {
      for (bool const decode : {false, true}) {
        Order& order = orders[i][decode];
        for (Group const& group : groups) group.append_to(order, kClasses[i], decode);
        order.find_end_of_costs();
      }
    }
  }
};

struct Shortlist {
  std::unique_ptr<Candidates> candidates[kNumOps][kDevices][kNumDTypes];

  void add(Variant const& v) {
    auto& place = candidates[int(v.kernel->op)][int(v.info.device)][int(v.info.dtype)];
    if (place == nullptr) place = std::make_unique<Candidates>();
    place->add(v);
  }
};

using Shortlists = std::unordered_map<std::string, Shortlist>;

// Every name that a caller may pass. Built once, because the registry is final.
Shortlists const& shortlists() {
  static Shortlists const lists = [] {
    Shortlists made;
    for (Variant const& v : registry()) {
      if (v.info.automatic) made["auto"].add(v);
      made[v.info.kernel].add(v);
      made[v.info.key].add(v);
    }
    for (auto& [name, list] : made) {
      for (auto& of_op : list.candidates) {
        for (auto& of_device : of_op) {
          for (auto& candidates : of_device) {
            if (candidates) candidates->make_orders();
          }
        }
      }
    }
    return made;
  }();
  return lists;
}

Shortlist const* shortlist(std::string const& kernel) {
  auto const find = [](std::string const& name) {
    auto const found = shortlists().find(name);
    return found == shortlists().end() ? nullptr : &found->second;
  };
  static Shortlist const* const of_auto = find("auto");
  return kernel == "auto" ? of_auto : find(kernel);
}

}  // namespace

std::string why_not(Variant const& variant, Problem const& problem, DeviceInfo const& device) {
  std::string reasons;
  examine(variant, Call(problem, variant.kernel->op), device, [&](Lack, auto&& reason) {
    if (!reasons.empty()) reasons += "; ";
    reasons += reason();
    return false;
  });
  return reasons;
}

bool names(std::string const& kernel, Variant const& variant) {
  if (kernel == "auto") return variant.info.automatic;
  return kernel == variant.info.kernel || kernel == variant.info.key;
}

Variant const* select(Problem const& problem, Op op, DeviceInfo const& device,
                      std::string const& kernel, Status& status) {
  Shortlist const* const list = shortlist(kernel);
  Candidates const* const candidates =
      list ? list->candidates[int(op)][int(device.device)][int(problem.q.dtype)].get() : nullptr;
  Variant const* variant = nullptr;
  if (candidates) {
    Order const& order = candidates->orders[class_of(device)][is_decode(problem, op)];
    variant = order.best(Call(problem, op), device);
  }
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
  auto const number = [](float value) {
    char text[32];
    std::snprintf(text, sizeof text, value >= 1000.0f ? "%.0f" : "%.3g", double(value));
    return std::string(text);
  };
  auto const runs = [&](std::string_view kernel) { return kernel == a.kernel; };
  CallRanges const* const avoids = avoided(other, problem, device, runs);
  if (chosen.cost.is_known() && other.cost.is_known() && !avoids) {
    float const ratio = cost_of(other, problem, device) / cost_of(chosen, problem, device);
    if (ratio > 1.0f) {
      return "could run; predicted to take " + number(ratio) + " times as long as " + a.key;
    }
  }
  if (a.kernel != b.kernel) {
    std::string text = "could run; " + a.kernel + " is preferred", before = " for ";
    for (Counted const& counted : kCounts) {
      if (!avoids || is_any(avoids->*counted.range)) continue;
      char what[64];
      std::snprintf(what, sizeof what, counted.format,
                    number(counted.count(other, problem, device)).c_str());
      text += std::exchange(before, " and ") + what;
    }
    return text;
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
  return "could run; tile " + a.tile + " is preferred for " + call +
         number(blocks_per_sm(problem, op, chosen.block_m, device)) + " blocks an SM";
}

}  // namespace cutlass_attn
