// Score functors and the functions of core/math.hpp: values in doubles, gradients by differences.
#include "core/score.hpp"

#include <cmath>
#include <initializer_list>

#include "check.hpp"

using namespace cutlass_attn;

namespace {

AttnParams call(float scale, float softcap) {
  AttnParams p;
  p.softmax_scale = scale;
  p.softcap = softcap;
  return p;
}

double logit(AttnParams const& p, double s) {
  double const x = double(p.softmax_scale) * s;
  return p.softcap > 0 ? p.softcap * std::tanh(x / p.softcap) : x;
}

// The softmax weight is 2^(score * log2_scale) = e^logit.
template <class Score>
void agrees_with_the_definition(AttnParams const& p) {
  Score const score(p);
  CHECK(Score::takes(p));
  CHECK(score.log2_scale() > 0);
  double const largest = p.softcap > 0 ? p.softcap : 200 * std::fabs(p.softmax_scale);
  for (double s = -200; s <= 200; s += 0.37) {
    double const x = double(score(float(s), 0, 0, 0, 0)) * score.log2_scale() / double(kLog2e);
    CHECK_NEAR(x, logit(p, float(s)), 1e-6 * largest);
    double const h = 1e-4;
    double const slope = (logit(p, s + h) - logit(p, s - h)) / (2 * h);
    CHECK_NEAR(score.grad(float(s), 0, 0, 0, 0), slope, 2e-6 * std::fabs(p.softmax_scale));
  }
}

}  // namespace

TEST(identity_scales) {
  for (float scale : {0.125f, 1.0f, 3.0f})
    agrees_with_the_definition<IdentityScore>(call(scale, 0));
}

TEST(softcap_bends) {
  for (float scale : {0.125f, 1.0f, -0.25f, 0.0f}) {
    for (float cap : {1.0f, 30.0f, 50.0f}) {
      agrees_with_the_definition<SoftcapScore>(call(scale, cap));
    }
  }
}

TEST(softcap_without_a_cap_scales_by_any_number) {
  for (float scale : {0.125f, -0.25f, 0.0f}) {
    agrees_with_the_definition<SoftcapScore>(call(scale, 0));
  }
}

TEST(identity_takes_only_what_it_can) {
  CHECK(IdentityScore::takes(call(0.125f, 0)));
  CHECK(!IdentityScore::takes(call(0.125f, 30)));
  CHECK(!IdentityScore::takes(call(-0.125f, 0)));
  CHECK(!IdentityScore::takes(call(0, 0)));
}

TEST(exp2_is_within_two_ulp) {
  double worst = 0;
  for (float x = -124.9f; x < 127.9f; x += 0.00173f) {
    int exponent;
    double const exact = std::exp2(double(x));
    std::frexp(exact, &exponent);
    worst = std::fmax(worst, std::fabs(fast_exp2(x) - exact) / std::ldexp(1, exponent - 24));
  }
  CHECK(worst < 2);
  for (int n = -124; n < 128; ++n) CHECK_EQ(fast_exp2(float(n)), std::ldexp(1.0f, n));
}

TEST(exp2_at_the_edges) {
  CHECK_EQ(fast_exp2(-kInf), 0.0f);
  CHECK_EQ(fast_exp2(kInf), kInf);
  CHECK_EQ(fast_exp2(128.0f), kInf);
  CHECK_EQ(fast_exp2(1e30f), kInf);
  CHECK(fast_exp2(127.999f) < kInf);
  CHECK(std::isnan(fast_exp2(std::nanf(""))));
  for (float x : {-125.5f, -126.0f, -149.0f, -150.0f, -1000.0f, -1e30f}) {
    CHECK_NEAR(fast_exp2(x), 0, 0x1p-125);
  }
}

TEST(tanh_is_right_to_2e_7) {
  for (double x = -20; x < 20; x += 0.00037) {
    CHECK_NEAR(fast_tanh(float(x)), std::tanh(double(float(x))), 2e-7);
  }
  CHECK_EQ(fast_tanh(kInf), 1.0f);
  CHECK_EQ(fast_tanh(-kInf), -1.0f);
  CHECK_EQ(fast_tanh(1e30f), 1.0f);
  CHECK_EQ(fast_tanh(0.0f), 0.0f);
  CHECK(std::isnan(fast_tanh(std::nanf(""))));
}

int main(int argc, char** argv) { return check::run(argc, argv); }
