#include "runtime/refusal.hpp"

#include <algorithm>
#include <climits>
#include <numeric>
#include <tuple>
#include <utility>

#include "runtime/dispatch.hpp"
#include "runtime/examine.hpp"

namespace cutlass_attn {
namespace {

// Distance of a variant from running a call: the kind of call counts before the request.
struct Distance {
  int kinds = 0, requests = 0;

  bool operator==(Distance const& other) const {
    return kinds == other.kinds && requests == other.requests;
  }
  bool operator<(Distance const& other) const {
    return std::tie(kinds, requests) < std::tie(other.kinds, other.requests);
  }
};

Distance distance_of(Variant const& variant, Call const& call, DeviceInfo const& device) {
  Distance distance;
  examine(variant, call, device, [&](Lack lack, auto&&) {
    distance.kinds += lack == Lack::kKind;
    distance.requests += lack == Lack::kRequest;
    return false;
  });
  return distance;
}

// The variants of a kernel that are closest to the call.
struct Nearest {
  std::string kernel;
  Distance distance;
  std::vector<Variant const*> variants;
};

void add(std::vector<Nearest>& kernels, Variant const& variant, Distance const& distance) {
  auto const same = [&](Nearest const& x) { return x.kernel == variant.info.kernel; };
  auto const found = std::find_if(kernels.begin(), kernels.end(), same);
  if (found == kernels.end()) {
    kernels.push_back({variant.info.kernel, distance, {&variant}});
  } else if (distance < found->distance) {
    *found = {found->kernel, distance, {&variant}};
  } else if (distance == found->distance) {
    found->variants.push_back(&variant);
  }
}

// Variants that share a reason.
struct Reason {
  std::string text;
  std::string key;  // of the first variant
  int count;
};

template <class Why>
std::vector<Reason> reasons_of(Nearest const& kernel, Why const& why) {
  std::vector<Reason> reasons;
  for (Variant const* variant : kernel.variants) {
    std::string text = why(*variant);
    auto const same = [&](Reason const& x) { return x.text == text; };
    auto const found = std::find_if(reasons.begin(), reasons.end(), same);
    if (found == reasons.end()) {
      reasons.push_back({std::move(text), variant->info.key, 1});
    } else {
      ++found->count;
    }
  }
  return reasons;
}

// Levenshtein distance: the number of characters to insert, remove or replace.
int edits_between(std::string const& a, std::string const& b) {
  std::vector<int> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = std::exchange(row[0], int(i));
    for (size_t j = 1; j <= b.size(); ++j) {
      int const replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
}

bool starts_with(std::string const& text, std::string const& start) {
  return text.compare(0, start.size(), start) == 0;
}

bool ends_with(std::string const& text, std::string const& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// "; did you mean ...?" with up to three names; empty if no name is spelt like `given`.
std::string did_you_mean(std::string const& given, std::vector<std::string> const& names) {
  constexpr size_t kMaxHints = 3, kMaxCharacters = 100;
  if (given.empty() || given.size() > kMaxCharacters) return "";
  int const most = std::max(1, int(given.size()) / 4);
  std::vector<std::pair<int, std::string>> close;
  for (std::string const& name : names) {
    bool const is_part = starts_with(name, given + "/") || ends_with(name, "/" + given);
    int const edits = is_part ? 0 : edits_between(given, name);
    if (edits <= most) close.push_back({edits, name});
  }
  std::stable_sort(close.begin(), close.end(),
                   [](auto const& a, auto const& b) { return a.first < b.first; });
  std::string text;
  for (size_t i = 0; i < std::min(close.size(), kMaxHints); ++i) {
    if (close[i].first > close[0].first) break;
    text += (i == 0 ? "; did you mean \"" : "\" or \"") + close[i].second;
  }
  return text.empty() ? text : text + "\"?";
}

// Lists the names. Names with a "/" are grouped by the part before it, with the size of the group.
std::string families(std::vector<std::string> const& kernels) {
  std::string text;
  std::vector<std::string> named;
  for (std::string const& kernel : kernels) {
    size_t const slash = kernel.find('/');
    std::string const family = kernel.substr(0, slash == std::string::npos ? slash : slash + 1);
    if (std::find(named.begin(), named.end(), family) != named.end()) continue;
    named.push_back(family);
    auto const is_member = [&](std::string const& x) { return starts_with(x, family); };
    auto const count = std::count_if(kernels.begin(), kernels.end(), is_member);
    bool const is_group = slash != std::string::npos && count > 1;
    text += ", \"" + (is_group ? family + "...\" (" + std::to_string(count) + ")" : kernel + "\"");
  }
  return text;
}

Status unknown(std::string const& kernel, Op op) {
  std::vector<std::string> kernels, keys;
  for (Variant const& variant : registry()) {
    if (variant.kernel->op != op) continue;
    std::string const& name = variant.info.kernel;
    if (std::find(kernels.begin(), kernels.end(), name) == kernels.end()) kernels.push_back(name);
    keys.push_back(variant.info.key);
  }
  std::string hint = did_you_mean(kernel, kernels);
  if (hint.empty()) hint = did_you_mean(kernel, keys);
  std::string const example = keys.empty() ? "" : keys[0];
  return Status::invalid("kernel is \"" + kernel + "\", allowed: \"auto\"" + families(kernels) +
                         ", or a whole key such as \"" + example + "\" (variants() lists them)" +
                         hint);
}

std::string lines_of(std::vector<Nearest> const& kernels, Problem const& problem,
                     DeviceInfo const& device) {
  std::string lines;
  for (Nearest const& kernel : kernels) {
    auto const why = [&](Variant const& x) { return why_not(x, problem, device); };
    for (Reason const& reason : reasons_of(kernel, why)) {
      std::string const variants = " (" + std::to_string(reason.count) + " variants)";
      lines +=
          "\n  " + (reason.count == 1 ? reason.key : kernel.kernel + variants) + ": " + reason.text;
    }
  }
  return lines;
}

}  // namespace

Status check_name(std::string const& kernel, Op op) {
  for (Variant const& variant : registry()) {
    if (variant.kernel->op == op && names(kernel, variant)) return {};
  }
  return unknown(kernel, op);
}

Status refusal(Problem const& problem, Op op, DeviceInfo const& device, std::string const& kernel) {
  if (Status const status = check_name(kernel, op); !status.ok()) return status;
  Call const call(problem, op);
  bool const is_auto = kernel == "auto";
  bool is_request_at_fault = true;
  std::vector<Nearest> kernels;
  for (Variant const& variant : registry()) {
    if (variant.kernel->op != op || !names(kernel, variant)) continue;
    // For "auto", kernels of another device would all give that one reason.
    if (is_auto && variant.info.device != device.device) continue;
    // Skips kernels with fp16 accumulation or 8 bits if the caller did not request these.
    bool const is_fp16 = variant.info.accumulate != Accumulate::kFloat32;
    bool const is_8_bit = variant.info.quantize != Quantize::kNone;
    if (is_auto && op == Op::kForward &&
        ((is_fp16 && problem.accumulate == Accumulate::kFloat32) ||
         (is_8_bit && problem.quantize == Quantize::kNone))) {
      continue;
    }
    Distance const distance = distance_of(variant, call, device);
    is_request_at_fault &= distance.kinds + distance.requests > 0;
    add(kernels, variant, distance);
  }
  if (!device.unavailable.empty()) {
    return Status::device_error(std::string("no kernel can run on ") + name_of(device.device) +
                                ": " + device.unavailable);
  }
  if (is_auto) {
    // Kernels for other kinds of calls are listed only if there is none for this kind.
    int least = INT_MAX;
    for (Nearest const& x : kernels) least = std::min(least, x.distance.kinds);
    auto const is_far = [&](Nearest const& x) { return x.distance.kinds > least; };
    kernels.erase(std::remove_if(kernels.begin(), kernels.end(), is_far), kernels.end());
    return Status::no_kernel(std::string("no kernel takes this call on ") + name_of(device.device) +
                             ":" + lines_of(kernels, problem, device));
  }
  std::string message =
      "kernel \"" + kernel + "\" does not take this call:" + lines_of(kernels, problem, device);
  Status none;
  if (Variant const* other = select(problem, op, device, "auto", none)) {
    message += "\nkernel \"" + other->info.kernel + "\" would take it";
  }
  return is_request_at_fault ? Status::invalid(message) : Status::no_kernel(message);
}

std::vector<PassedOver> passed_over(Problem const& problem, Op op, DeviceInfo const& device,
                                    std::string const& kernel, Variant const* chosen) {
  Call const call(problem, op);
  std::vector<Nearest> kernels;
  for (Variant const& variant : registry()) {
    if (chosen != nullptr && variant.kernel == chosen->kernel) break;
    if (variant.kernel->op != op || !names(kernel, variant)) continue;
    add(kernels, variant, distance_of(variant, call, device));
  }
  std::vector<PassedOver> result;
  for (Nearest const& nearest : kernels) {
    if (nearest.distance.kinds > 0) continue;
    std::vector<Reason> const reasons = reasons_of(nearest, [&](Variant const& variant) {
      std::string text = why_not(variant, problem, device);
      return text.empty() ? why_preferred(*chosen, variant, problem, device) : text;
    });
    result.push_back({nearest.kernel, reasons[0].text, int(nearest.variants.size())});
  }
  return result;
}

}  // namespace cutlass_attn
