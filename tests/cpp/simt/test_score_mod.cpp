// Kernels with a user's score_mod, whose C++ cutlass_attn/_mods writes: results and gradients equal
// those of the terms that the functions reimplement.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "score_mod_case.hpp"
#include "sm80/backward.hpp"
#include "sm80/forward.hpp"
#include "sm90/forward.hpp"

using namespace score_mod_case;

namespace {

constexpr float kCap = 2.5f;

// A call with terms, and the call with a function in place of the terms.
struct WithMod : Solved<half_t> {
  // keeps_mask: for a kernel that has both.
  explicit WithMod(Case const& what, bool keeps_mask = false) : Solved(what, false) {
    p.logits.softcap = 0.0f;
    p.logits.alibi_slopes = nullptr;
    p.logits.bias = {};
    if (!keeps_mask) p.mask.elements = {};
    p.logits.has_score_mod = true;
  }
  auto slopes() const { return captured(alibi.data(), {int32_t(c.heads_q)}); }
  auto table() const { return of_logits(bias.data()); }
  auto seen() const { return of_logits(reinterpret_cast<bool const*>(visible.data())); }

 private:
  template <class T>
  mods::Captured<T, 3> of_logits(T const* data) const {
    return captured(data, {int32_t(c.heads_q), int32_t(c.seqlen_q), int32_t(c.seqlen_k)});
  }
};

mods::Capped make(WithMod const&, mods::Capped*) { return {{kCap}}; }
mods::Slopes make(WithMod const& s, mods::Slopes*) { return {s.slopes(), {kOffset}}; }
mods::Table make(WithMod const& s, mods::Table*) { return {s.table()}; }
mods::Steep make(WithMod const& s, mods::Steep*) { return {{kOffset, int32_t(s.c.seqlen_q)}}; }
mods::All make(WithMod const& s, mods::All*) {
  return {s.seen(), s.slopes(), s.table(), {kOffset}, {kCap}};
}

Case case_of(mods::Capped*, Case c) { return c.softcap = kCap, c; }
Case case_of(mods::Slopes*, Case c) { return c.has_alibi = true, c; }
Case case_of(mods::Table*, Case c) { return c.has_bias = true, c; }
Case case_of(mods::Steep*, Case c) { return c; }
Case case_of(mods::All*, Case c) {
  c.softcap = kCap, c.has_alibi = c.has_bias = c.has_mask = true;
  return c;
}

template <class Kernel, class Mod, class... Terms>
void check_forward(Case const& what) {
  constexpr bool kHasMask = sizeof...(Terms) > 0;
  WithMod solved(case_of(static_cast<Mod*>(nullptr), what), kHasMask);
  std::vector<half_t> const due = solved.o;
  std::vector<float> const due_lse = solved.lse;
  std::memset(static_cast<void*>(solved.o.data()), 0xff, solved.o.size() * sizeof(half_t));
  std::fill(solved.lse.begin(), solved.lse.end(), NAN);
  Mod const mod = make(solved, static_cast<Mod*>(nullptr));
  using Mine = ScoreOf<Kernel, Mod, Terms...>;
  Memory memory(1 << 16, mod);
  Status status;
  if constexpr (kHasMask) {
    status = simt::launch_with_pre_post_on_host<Kernel, Mine>(solved.p, memory.options);
  } else {
    status = simt::launch_on_host<Kernel, Mine>(solved.p, memory.options);
  }
  if (!status.ok()) check::fail(__FILE__, __LINE__, what.name + ": " + status.message);
  double error = 0.0, size = 0.0;
  for (size_t i = 0; i < due.size(); ++i) {
    double const x = double(float(solved.o[i])), y = double(float(due[i]));
    error += (x - y) * (x - y), size += y * y;
  }
  double const relative = std::sqrt(error / size);
  if (!(relative < 1e-3)) check::fail(__FILE__, __LINE__, what.name + std::to_string(relative));
  for (size_t i = 0; i < due_lse.size(); ++i) CHECK_NEAR(solved.lse[i], due_lse[i], 1e-3);
}

template <class Kernel, class Mod>
void check_backward(Case const& what) {
  WithMod solved(case_of(static_cast<Mod*>(nullptr), what));
  Mod const mod = make(solved, static_cast<Mod*>(nullptr));
  Memory memory(Kernel::Params::workspace_bytes(solved.p, {}, {}), mod);
  Status const status =
      simt::launch_with_pre_post_on_host<Kernel, ScoreOf<Kernel, Mod>>(solved.p, memory.options);
  std::string const error = status.ok() ? solved.verdict() : status.message;
  if (!error.empty()) check::fail(__FILE__, __LINE__, what.name + ": " + error);
}

using Sm80 = sm80::Forward<half_t, TileShape<64, 64, 64, 64, 4>>;
using Sm90 = sm90::Forward<half_t, TileShape<64, 64, 128, 128, 8>>;
using Masked = sm90::Forward<half_t, TileShape<64, 64, 128, 128, 8>, with::Mask>;
using Backward = sm80::Backward<half_t, TileShape<64, 64, 64, 128, 4>>;

template <class Mod>
void check_all() {
  for (Case const& what : {plain(), masked()}) {
    check_forward<Sm80, Mod>(what);
    check_forward<Sm90, Mod>(what);
    check_backward<Backward, Mod>(what);
  }
}

}  // namespace

TEST(capped) { check_all<mods::Capped>(); }
TEST(slopes) { check_all<mods::Slopes>(); }
TEST(table) { check_all<mods::Table>(); }
TEST(all) { check_all<mods::All>(); }

TEST(infinite_where_masked) {
  check_forward<Sm80, mods::Steep>(masked());
  check_forward<Sm90, mods::Steep>(masked());
  check_backward<Backward, mods::Steep>(masked());
}

// Weights near 1 times derivatives are up to 4e6 here, while dP - delta is near 0.
TEST(derivatives_beyond_float16) {
  Case what = plain();
  what.heads_q = 2, what.heads_kv = 1;  // with 4 heads, 1 / s^2 is up to 5e10
  what.mask = backward_case::causal();
  WithMod solved(what);
  mods::Inverse const mod;
  static_assert(mod.kGradIsSteep && !ScoreOf<Backward, mods::Capped>::kModIsSteep);
  Memory memory(Backward::Params::workspace_bytes(solved.p, {}, {}), mod);
  Status status =
      simt::launch_on_host<Sm80, ScoreOf<Sm80, mods::Inverse>>(solved.p, memory.options);
  CHECK(status.ok());
  status = simt::launch_with_pre_post_on_host<Backward, ScoreOf<Backward, mods::Inverse>>(
      solved.p, memory.options);
  CHECK(status.ok());
  for (auto const* grad : {&solved.grad_q, &solved.grad_k, &solved.grad_v}) {
    auto const is_finite = [](half_t x) { return std::isfinite(float(x)); };
    CHECK_EQ(std::count_if(grad->begin(), grad->end(), is_finite), int64_t(grad->size()));
  }
}

TEST(no_keys) {
  check_forward<Sm80, mods::Capped>(rows_without_keys());
  check_forward<Sm90, mods::Capped>(rows_without_keys());
  check_backward<Backward, mods::Capped>(rows_without_keys());
}

TEST(beside_a_mask) {
  Case what = masked();
  what.has_mask = true, what.seqlen_q = 200, what.seqlen_k = 200 + kOffset;
  check_forward<Masked, mods::Capped, MaskBits>(what);
  check_forward<Masked, mods::Slopes, MaskBits>(what);
}

TEST(problem_and_options_agree) {
  WithMod solved(plain());
  mods::Capped const mod{{kCap}};
  Memory memory(4096, mod);
  memory.options.score_mod = nullptr;
  CHECK(!(simt::launch_on_host<Sm80, ScoreOf<Sm80, mods::Capped>>(solved.p, memory.options).ok()));
}

int main(int argc, char** argv) { return check::run(argc, argv); }
