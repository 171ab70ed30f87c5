// Runs the wgmma forward kernels on the engine and compares them to fp64, in three thread orders.
#pragma once

#include <string>
#include <vector>

#include "attention_case.hpp"
#include "check.hpp"
#include "core/alignment.hpp"
#include "core/vector.hpp"
#include "runtime/options.hpp"
#include "simt/packed.hpp"
#include "simt/pages.hpp"
#include "simt/sanitized.hpp"
#include "simt/unit_of.hpp"
#include "sm90/forward.hpp"
#include "sm90/quantized/forward.hpp"

namespace sm90_case {

using namespace cutlass_attn;
using attention_case::Case;
using attention_case::SolvedCase;

// Rows of heads are adjacent, as TMA reads them in models.
inline std::vector<Case> with_head_dims(std::vector<Case> list, int head_dim, int head_dim_v) {
  for (Case& what : list) {
    what.head_dim = head_dim, what.head_dim_v = head_dim_v;
    what.layout = attention_case::Layout::kTransposed;
  }
  return list;
}

// Dense calls. Sizes relative to tiles of 128 rows, in warpgroups of 64, and of 64 to 128 keys.
inline std::vector<Case> dense_cases() {
  std::vector<Case> list(14);
  list[0].name = "whole tiles", list[0].seqlen_q = 128, list[0].seqlen_k = 256;
  list[1].name = "ragged, grouped heads", list[1].seqlen_q = 200, list[1].seqlen_k = 333;
  list[1].num_heads_q = 4, list[1].num_heads_kv = 2, list[1].batch = 2;
  list[2].name = "causal", list[2].seqlen_q = 270, list[2].seqlen_k = 400, list[2].causal = true;
  list[3].name = "rows without keys", list[3].seqlen_q = 300, list[3].seqlen_k = 100;
  list[3].causal = true;
  list[4].name = "window, warpgroups of other keys than each other", list[4].seqlen_q = 330;
  list[4].seqlen_k = 700, list[4].window_left = 150, list[4].window_right = 30;
  list[5].name = "packed heads", list[5].seqlen_q = 5, list[5].seqlen_k = 200;
  list[5].num_heads_q = 8, list[5].num_heads_kv = 2, list[5].sinks = true;
  list[6].name = "large scores", list[6].seqlen_q = 128, list[6].seqlen_k = 512;
  list[6].magnitude = 40;
  list[7].name = "no warpgroup for the last rows", list[7].seqlen_q = 132, list[7].seqlen_k = 900;
  list[7].window_left = 300, list[7].window_right = 0;
  list[8].name = "several tiles of a block", list[8].seqlen_q = 260, list[8].seqlen_k = 260;
  list[8].batch = 2, list[8].num_heads_q = list[8].num_heads_kv = 2, list[8].causal = true;
  list[9].name = "chunks, several in a tile of rows", list[9].seqlen_q = 300;
  list[9].seqlen_k = 500, list[9].attention_chunk = 70, list[9].causal = true;
  list[10].name = "chunks, several tiles of keys each, softcap", list[10].seqlen_q = 270;
  list[10].seqlen_k = 700, list[10].attention_chunk = 300, list[10].softcap = 3;
  list[11].name = "warpgroups without rows, more tiles of keys than buffers";
  list[11].seqlen_q = 256, list[11].seqlen_k = 1000;
  list[12].name = "ALiBi, causal, grouped heads", list[12].seqlen_q = 200, list[12].causal = true;
  list[12].seqlen_k = 333, list[12].num_heads_q = 4, list[12].num_heads_kv = 2;
  list[12].alibi = "h";
  list[13].name = "ALiBi on both sides, slopes per batch, packed heads, sinks";
  list[13].seqlen_q = 21, list[13].seqlen_k = 300, list[13].batch = 2;
  list[13].num_heads_q = 8, list[13].num_heads_kv = 2, list[13].alibi = "bh";
  list[13].sinks = true;
  return list;
}

template <class... Scores>
struct ScoreList {};
template <class Kernel, class... Params>
constexpr bool has_params = (std::is_same_v<typename Kernel::Params, Params> || ...);
template <class Kernel>
constexpr bool has_bias = has_params<Kernel, BiasTmaParams, BiasMaskTmaParams>;
template <class Kernel>
constexpr bool has_mask = has_params<Kernel, MaskTmaParams, BiasMaskTmaParams>;
template <class Kernel>
using ScoresOf = std::conditional_t<
    has_bias<Kernel>,
    std::conditional_t<has_mask<Kernel>, ScoreList<Score<Softcap, Alibi, TileBias, MaskBits>>,
                       ScoreList<Score<TileBias>, Score<Softcap, Alibi, TileBias, Chunk>>>,
    std::conditional_t<
        has_mask<Kernel>, ScoreList<Score<MaskBits>, Score<Softcap, Alibi, MaskBits>>,
        ScoreList<Score<>, Score<Alibi>, Score<Softcap, Chunk>, Score<Softcap, Alibi, Chunk>>>>;

// On this many multiprocessors; 0: one block per tile.
template <class Kernel, class... Scores>
Status launch(Problem const& problem, int num_sms, ScoreList<Scores...>) {
  static KernelUnit const unit = simt::unit_of<Kernel, Scores...>();
  constexpr KernelArguments arguments = simt::arguments_of_kernel<Kernel, Scores...>();
  DeviceLimits limits;
  limits.num_sms = num_sms;
  std::vector<int32_t> zeros(16);
  // A workspace of garbage, of the size that is reported before a kernel is compiled.
  KernelFacts known;
  known.block_m = Kernel::kBlockM, known.block_n = Kernel::kBlockN;
  std::vector<Vector16> workspace(
      size_t(arguments.workspace_bytes(problem, limits, known) + 15) / 16,
      Vector16{0xaaaaaaaaaaaaaaaa, 0xaaaaaaaaaaaaaaaa});
  RunOptions options;
  options.num_threads = 1;
  options.workspace.data = workspace.data();
  options.workspace.bytes = int64_t(workspace.size()) * 16;
  options.workspace.zeros = zeros.data();
  options.workspace.zeros_bytes = 64;
  Status const status = cutlass_attn::launch(arguments, unit, problem, limits, options);
  if (status.ok() && zeros != std::vector<int32_t>(16)) {
    return Status::device_error("the counter is not left at 0");
  }
  return status;
}

template <class Kernel>
Status launch(Problem const& problem, int num_sms) {
  return launch<Kernel>(problem, num_sms, ScoresOf<Kernel>{});
}

template <class Kernel>
bool takes(Problem const& p) {
  uint32_t known = option::negative_scale | option::sinks | option::softcap | option::alibi_slopes |
                   option::attention_chunk;
  if (has_bias<Kernel>) known |= option::bias;
  if (has_mask<Kernel>) known |= option::mask;
  if (Kernel::Config::kDrops) known |= option::dropout;
  return (options_of(p, Op::kForward) & ~known) == 0 &&
         (p.logits.bias.data != nullptr) == has_bias<Kernel> &&
         (p.mask.elements.data != nullptr) == has_mask<Kernel> && address_bits(p, 2) % 16 == 0 &&
         p.head_dim % 8 == 0;
}

using Order = simt::FiberOrder;
struct Run {
  int num_sms;
  Order order;
};
// With one multiprocessor per tile, with one, and with three.
inline std::vector<Run> const kRuns{
    {0, Order::kForward}, {1, Order::kReverse}, {3, Order::kRandom}};

// Compares the calls of these cases, which are one call of the kernel: launch_all(num_sms).
template <class Launch>
void check_calls(std::string const& name, std::vector<SolvedCase>& cases, Launch const& launch_all,
                 int& runs, std::vector<Run> const& list = kRuns) {
  std::vector<char> first;
  int last_sms = -1;
  for (auto const [num_sms, order] : list) {
    if (is_under_tsan() && num_sms == last_sms) continue;
    last_sms = num_sms;
    simt::launch_schedule() = {1, order};
    for (SolvedCase& one : cases) one.call();  // fills the outputs with garbage
    Status const status = launch_all(num_sms);
    std::string error = status.message;
    std::vector<char> outputs;
    for (SolvedCase const& one : cases) {
      if (error.empty()) error = one.verdict();
      for (char byte : one.outputs()) outputs.push_back(byte);
    }
    if (first.empty()) first = outputs;
    if (error.empty() && outputs != first) error = "results depend on the schedule";
    if (!error.empty()) {
      check::fail(__FILE__, __LINE__,
                  name + ", " + std::to_string(num_sms) + " multiprocessors: " + error);
      return;
    }
  }
  ++runs;
}

template <class Kernel>
void check_case(Case const& what, DType dtype, int& runs) {
  std::vector<SolvedCase> cases{SolvedCase(what, dtype)};
  Problem const problem = cases[0].call();
  if (!takes<Kernel>(problem)) return;
  check_calls(
      what.name, cases, [&](int num_sms) { return launch<Kernel>(problem, num_sms); }, runs);
}

// Cases that differ only in their lengths, as packed sequences of one call.
template <class Kernel>
void check_packed(std::vector<Case> const& list, DType dtype, int gap, int& runs) {
  std::vector<SolvedCase> cases;
  for (Case const& what : list) cases.emplace_back(what, dtype);
  std::vector<Problem> problems;
  for (SolvedCase& one : cases) problems.push_back(one.call());
  packed::Packed call(problems, gap);
  auto const run = [&](int num_sms) {
    Status const status = launch<Kernel>(call.problem, num_sms);
    call.give_back();
    return status;
  };
  check_calls(list[0].name + ", packed", cases, run, runs);
}

// As packed sequences with keys in pages.
template <class Kernel>
void check_pages(std::vector<Case> const& list, DType dtype, packed::PageLayout layout, int& runs) {
  std::vector<SolvedCase> cases;
  for (Case const& what : list) cases.emplace_back(what, dtype);
  std::vector<Problem> problems;
  for (SolvedCase& one : cases) problems.push_back(one.call());
  packed::Packed call(problems);
  packed::Paged const pages(call.problem, layout);
  auto const run = [&](int num_sms) {
    Status const status = launch<Kernel>(pages.problem, num_sms);
    call.give_back();
    return status;
  };
  std::string const of_size = ", pages of " + std::to_string(layout.page_size);
  check_calls(list[0].name + of_size, cases, run, runs);
}

}  // namespace sm90_case
