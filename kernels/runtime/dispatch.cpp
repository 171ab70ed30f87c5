#include "runtime/dispatch.hpp"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <iterator>
#include <unordered_map>

#include "core/alignment.hpp"
#include "core/scheduler.hpp"
#include "runtime/loaded.hpp"

namespace cutlass_attn {
namespace {

char const* name_of(Device device) { return device == Device::kCpu ? "the CPU" : "a CUDA device"; }

std::string capability(int value) {
  return std::to_string(value / 10) + "." + std::to_string(value % 10);
}

// In bytes, what TMA does not take any more.
constexpr int64_t kMostTmaStride = int64_t(1) << 40;

// What a variant can lack. A request is at odds with the kernel; the rest is up to the machine or
// the build, where the same call could work on another one.
enum class Lack { kRequest, kEnvironment };

// Calls visit(name, operand, heads, rows) for every operand that the op reads or writes.
template <class Visit>
void for_operands(Problem const& p, Op op, Visit&& visit) {
  visit("q", p.q, p.num_heads_q, p.seq_q.rows());
  visit("k", p.k, p.num_heads_kv, p.seq_k.rows());
  visit("v", p.v, p.num_heads_kv, p.seq_k.rows());
  visit("out", p.o, p.num_heads_q, p.seq_q.rows());
  if (op != Op::kBackward) return;
  visit("grad_out", p.grad->o, p.num_heads_q, p.seq_q.rows());
  if (p.grad->q.data) visit("grad_q", p.grad->q, p.num_heads_q, p.seq_q.rows());
  if (p.grad->k.data) visit("grad_k", p.grad->k, p.num_heads_kv, p.seq_k.rows());
  if (p.grad->v.data) visit("grad_v", p.grad->v, p.num_heads_kv, p.seq_k.rows());
}

// Calls visit(dimension, stride) for every stride of an operand that a step is taken along.
template <class Visit>
void for_strides(Problem const& p, Operand const& ref, int heads, int rows, Visit&& visit) {
  bool const has_pages = p.kv.block_table && (&ref == &p.k || &ref == &p.v);
  if (p.batch > 1 || has_pages) visit(has_pages ? "page" : "batch", ref.batch_stride);
  if (heads > 1) visit("head", ref.head_stride);
  if (rows > 1) visit("row", ref.row_stride);
}

// What variants look at of a call, found out once for all of them.
struct Call {
  Problem const& p;
  Op op;
  uint32_t options;
  uint64_t addresses;  // address_bits(): operands are aligned to as many bytes as the lowest says

  Call(Problem const& params, Op op)
      : p(params), op(op), options(options_of(params, op)), addresses(bits_of_addresses()) {}

  uint64_t bits_of_addresses() const {
    if (op == Op::kForward) return address_bits(p, element(), size_of(p.k.dtype));
    uint64_t bits = 0;
    for_operands(p, op, [&](char const*, Operand const& ref, int heads, int rows) {
      bits |= reinterpret_cast<uint64_t>(ref.data);
      for_strides(p, ref, heads, rows, [&](char const*, int64_t stride) {
        bits |= uint64_t(stride) * unsigned(element());
      });
    });
    return bits;
  }
  int element() const { return size_of(p.q.dtype); }
};

// The instance that would run; null if it has yet to be compiled.
KernelUnit const* unit_of(Variant const& variant, DeviceInfo const& device) {
  return variant.can_load ? loaded(variant, device.compute_capability) : variant.unit;
}

// Calls lacks(reason) for what keeps TMA from reading the bias: 16 bytes at a time, by strides that
// are no less than 0.
template <class Lacks>
void examine_bias(Problem const& p, Lacks&& lacks) {
  constexpr int64_t kElements = 8;  // of 16 bytes
  PerLogit const& bias = p.logits.bias;
  if (p.logits.bias_dtype != p.q.dtype) {
    return lacks([&] {
      return std::string("needs a bias of ") + name_of(p.q.dtype) + ", got " +
             name_of(p.logits.bias_dtype);
    });
  }
  if (reinterpret_cast<uint64_t>(bias.data) % 16 != 0) {
    lacks([] { return std::string("bias's address is not a multiple of 16 bytes"); });
  }
  if (p.seq_k.seqlen > 1 && bias.key_stride != 1) {
    lacks([&] {
      return "bias's key stride is " + std::to_string(bias.key_stride) + " elements, allowed: 1";
    });
  }
  struct {
    char const* name;
    int64_t count, stride;
  } const dims[] = {{"batch", p.batch, bias.batch_stride},
                    {"head", p.num_heads_q, bias.head_stride},
                    {"query", p.seq_q.seqlen, bias.row_stride}};
  for (auto const& [name, count, stride] : dims) {
    if (count <= 1 || (stride >= 0 && stride % kElements == 0 && stride < kMostTmaStride / 2)) {
      continue;
    }
    lacks([&, name = name, stride = stride] {
      return std::string("bias's ") + name + " stride is " + std::to_string(stride) +
             " elements, allowed: multiples of " + std::to_string(kElements) + " from 0 on";
    });
  }
}

// Calls lacks(kind, reason) for everything that keeps `variant` from running the call. `reason` is
// a function that makes the text: on the way to a kernel that runs, none is made.
template <class Lacks>
void examine(Variant const& variant, Call const& call, DeviceInfo const& device, Lacks&& lacks) {
  VariantInfo const& info = variant.info;
  Problem const& p = call.p;
  if (info.device != device.device) {
    return lacks(Lack::kRequest, [&] {
      return std::string("needs operands on ") + name_of(info.device) + ", got them on " +
             name_of(device.device);
    });
  }
  if (info.dtype != p.q.dtype) {
    lacks(Lack::kRequest, [&] {
      return std::string("needs ") + name_of(info.dtype) + ", got " + name_of(p.q.dtype);
    });
  }
  // Of a backward pass nothing but fp32 is to be had, whatever the forward call accumulated in.
  if (call.op == Op::kForward && info.accumulate != p.accumulate) {
    lacks(Lack::kRequest, [&] {
      return std::string("needs accumulate=\"") + name_of(info.accumulate) + "\", got \"" +
             name_of(p.accumulate) + "\"";
    });
  }
  if (call.op == Op::kForward && info.quantize != p.quantize) {
    lacks(Lack::kRequest, [&] {
      return "needs quantize=" + value_of(info.quantize) + ", got " + value_of(p.quantize);
    });
  }
  if (info.head_dim != 0) {
    struct {
      char const* name;
      int needed, given;
    } const dims[] = {{"head_dim", info.head_dim, p.head_dim},
                      {"head_dim_v", info.head_dim_v, p.head_dim_v}};
    for (auto const& [name, needed, given] : dims) {
      int const multiple = info.head_dim_multiple;
      if (given == needed || (multiple && given < needed && given % multiple == 0)) continue;
      lacks(Lack::kRequest, [&, name = name, needed = needed, given = given] {
        std::string text = std::string("needs ") + name;
        if (multiple > 1) text += " a multiple of " + std::to_string(multiple);
        if (multiple) text += " up to";
        return text + " " + std::to_string(needed) + ", got " + std::to_string(given);
      });
      break;  // a wrong head_dim alone says it
    }
  }
  if (uint32_t const missing = call.options & ~variant.kernel->options) {
    lacks(Lack::kRequest, [&] {
      std::string text = "does not implement";
      for (std::string const& name : option_names(missing)) text += " " + name + ",";
      text.pop_back();
      return text;
    });
  }
  if (uint32_t const missing = variant.kernel->needs & ~call.options) {
    lacks(Lack::kRequest, [&] {
      std::string text = "is for calls with";
      for (std::string const& name : option_names(missing)) text += " " + name + ",";
      text.back() = ' ';
      return text + "alone";
    });
  }
  int64_t const rows = int64_t(p.seq_q.seqlen) * (p.num_heads_q / std::max(p.num_heads_kv, 1));
  if (int const most = info.max_rows; most != 0 && rows > most) {
    lacks(Lack::kRequest, [&] {
      return "needs seqlen_q times num_heads_q / num_heads_kv up to " + std::to_string(most) +
             ", got " + std::to_string(rows);
    });
  }
  unsigned const alignment = unsigned(variant.kernel->alignment);
  if (call.addresses % alignment != 0) {
    auto const bytes = [&] {
      return " is not a multiple of " + std::to_string(alignment) + " bytes";
    };
    for_operands(p, call.op, [&](char const* name, Operand const& ref, int, int) {
      if (reinterpret_cast<uint64_t>(ref.data) % alignment == 0) return;
      lacks(Lack::kRequest, [&] { return std::string(name) + "'s address" + bytes(); });
    });
    for_operands(p, call.op, [&](char const* name, Operand const& ref, int heads, int rows) {
      for_strides(p, ref, heads, rows, [&](char const* dim, int64_t stride) {
        if (uint64_t(stride) * unsigned(size_of(ref.dtype)) % alignment == 0) return;
        lacks(Lack::kRequest, [&] {
          return std::string(name) + "'s " + dim + " stride of " + std::to_string(stride) +
                 " elements" + bytes();
        });
      });
    });
  }
  if (variant.kernel->tma) {
    for_operands(p, call.op, [&](char const* name, Operand const& ref, int heads, int rows) {
      if (&ref == &p.o) return;  // which is written otherwise
      for_strides(p, ref, heads, rows, [&](char const* dim, int64_t stride) {
        if (stride >= 0 && stride < kMostTmaStride / call.element()) return;
        lacks(Lack::kRequest, [&] {
          return std::string(name) + "'s " + dim + " stride is " + std::to_string(stride) +
                 " elements, allowed: from 0 to " +
                 std::to_string(kMostTmaStride / call.element() - 1);
        });
      });
    });
  }
  if (variant.kernel->tma && (call.options & variant.kernel->options & option::bias)) {
    examine_bias(p, [&](auto&& reason) { lacks(Lack::kRequest, reason); });
  }
  if (!device.unavailable.empty()) {
    return lacks(Lack::kEnvironment, [&] { return device.unavailable; });
  }
  auto const& [least, last] = variant.kernel->compute_capability;
  if (info.device == Device::kCuda &&
      (device.compute_capability < least || device.compute_capability > last)) {
    lacks(Lack::kEnvironment, [&, least = least, last = last] {
      std::string const allowed = least == last ? capability(least) : ">= " + capability(least);
      return "needs compute capability " + allowed + ", the device has " +
             capability(device.compute_capability);
    });
  }
  KernelUnit const* const unit = unit_of(variant, device);
  if (unit && info.device == Device::kCuda && unit->facts.smem_bytes > device.smem_per_block) {
    lacks(Lack::kEnvironment, [&] {
      return "needs " + std::to_string(unit->facts.smem_bytes) +
             " bytes of shared memory a block, the device has " +
             std::to_string(device.smem_per_block);
    });
  }
  bool const can_be_compiled = variant.can_load && why_not_compiled(variant).empty();
  if (unit == nullptr && !variant.kernel->function && !can_be_compiled) {
    lacks(Lack::kEnvironment, [&] {
      std::string options;
      if (info.tier == "full") options += " CUTLASS_ATTN_TIER=full";
      bool const can_be_built = info.tier != "tuned";
      if (variant.is_simt) options += " CUTLASS_ATTN_SIMT=ON";
      if (options.empty()) {
        options = " CUTLASS_ATTN_CUDA=ON";
        if (!info.arch.empty()) options += " and " + info.arch + " in CUTLASS_ATTN_ARCHS";
      }
      std::string text = "not compiled into this build (tier " + info.tier + "): ";
      if (variant.can_load) text += why_not_compiled(variant) + (can_be_built ? "; or " : "");
      return can_be_built || !variant.can_load ? text + "rebuild with" + options : text;
    });
  }
}

bool can_run(Variant const& variant, Call const& call, DeviceInfo const& device) {
  bool result = true;
  examine(variant, call, device, [&](Lack, auto&&) { result = false; });
  return result;
}

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
    auto const& choices = by_class[class_of(device)][is_decode(call.p, call.op)];
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
  Variant const* fallback = nullptr;
  for (Group const& group : list->groups[int(op)][int(device.device)][int(call.p.q.dtype)]) {
    // More padding makes no more of a kernel that has too few blocks.
    if (fallback && fallback->kernel == group.variants[0]->kernel) continue;
    Variant const* const variant = group.select(call, device);
    if (variant == nullptr) continue;
    if (has_enough_blocks(*variant, call.p, device)) return variant;
    if (fallback == nullptr) fallback = variant;
  }
  return fallback;
}

Status unknown(std::string const& kernel, Op op) {
  std::string message = "kernel is \"" + kernel + "\", allowed: \"auto\"";
  std::string last, example;
  for (Variant const& variant : registry()) {
    if (variant.kernel->op != op) continue;
    if (variant.info.kernel != last) message += ", \"" + variant.info.kernel + "\"";
    last = variant.info.kernel;
    if (example.empty()) example = variant.info.key;
  }
  return Status::invalid(message + ", or a whole key such as \"" + example +
                         "\" (variants() lists them)");
}

Status refusal(Problem const& problem, Op op, DeviceInfo const& device, std::string const& kernel) {
  Call const call(problem, op);
  std::string lines;
  bool is_named = false, is_request_at_fault = true;
  for (Variant const& variant : registry()) {
    if (variant.kernel->op != op || !names(kernel, variant)) continue;
    is_named = true;
    // "auto" means one for this device; others would only repeat that they are not.
    if (kernel == "auto" && variant.info.device != device.device) continue;
    // Nobody who has not asked for fp16 accumulation, or 8 bits, looks for a kernel that has it.
    bool const is_fp16 = variant.info.accumulate != Accumulate::kFloat32;
    bool const is_8_bit = variant.info.quantize != Quantize::kNone;
    if (kernel == "auto" && op == Op::kForward &&
        ((is_fp16 && problem.accumulate == Accumulate::kFloat32) ||
         (is_8_bit && problem.quantize == Quantize::kNone))) {
      continue;
    }
    bool lacks_request = false;
    examine(variant, call, device,
            [&](Lack lack, auto&&) { lacks_request |= lack == Lack::kRequest; });
    is_request_at_fault &= lacks_request;
    lines += "\n  " + variant.info.key + ": " + why_not(variant, problem, device);
  }
  if (!is_named) return unknown(kernel, op);
  if (!device.unavailable.empty()) {
    return Status::device_error(std::string("no kernel can run on ") + name_of(device.device) +
                                ": " + device.unavailable);
  }
  if (kernel == "auto") {
    return Status::no_kernel(std::string("no kernel takes this call on ") + name_of(device.device) +
                             ":" + lines);
  }
  std::string message = "kernel \"" + kernel + "\" does not take this call:" + lines;
  if (Variant const* other = first(call, op, device, "auto")) {
    message += "\nkernel \"" + other->info.kernel + "\" would take it";
  }
  return is_request_at_fault ? Status::invalid(message) : Status::no_kernel(message);
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
