// Score functors and the functions of core/math.hpp: values in doubles, gradients by differences;
// each term of a logit alone.
#include "core/general_score.hpp"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <utility>
#include <vector>

#include "check.hpp"

using namespace cutlass_attn;

namespace {

Problem call(float scale, float softcap) {
  Problem p;
  p.logits.softmax_scale = scale;
  p.logits.softcap = softcap;
  return p;
}

SeqLens lens_of(Problem const& p) { return {p.seq_q.seqlen, p.seq_k.seqlen}; }

double logit(Problem const& p, double s) {
  double const x = double(p.logits.softmax_scale) * s;
  return p.logits.softcap > 0 ? p.logits.softcap * std::tanh(x / p.logits.softcap) : x;
}

// The softmax weight is 2^(score * log2_scale) = e^logit.
template <class Score>
void agrees_with_the_definition(Problem const& p) {
  Score const score(p, lens_of(p));
  CHECK(Score::can_run(p));
  CHECK(score.log2_scale() > 0);
  double const largest =
      p.logits.softcap > 0 ? p.logits.softcap : 200 * std::fabs(p.logits.softmax_scale);
  for (double s = -200; s <= 200; s += 0.37) {
    double const x = double(score(float(s), 0, 0, 0, 0)) * score.log2_scale() / double(kLog2e);
    CHECK_NEAR(x, logit(p, float(s)), 1e-6 * largest);
    double const h = 1e-4;
    double const slope = (logit(p, s + h) - logit(p, s - h)) / (2 * h);
    CHECK_NEAR(score.grad(float(s), 0, 0, 0, 0), slope, 2e-6 * std::fabs(p.logits.softmax_scale));
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

TEST(chunks_are_for_scores_that_know_them) {
  Problem p = call(0.125f, 0);
  CHECK(Score<Chunk>::can_run(p));
  p.mask.attention_chunk = 7;
  CHECK(!IdentityScore::can_run(p) && !SoftcapScore::can_run(p));
  CHECK(Score<Chunk>::can_run(p) && GeneralScore::can_run(p));
  CHECK((Score<Softcap, Chunk>::can_run(p)));
  agrees_with_the_definition<Score<Chunk>>(p);
  for (Problem other : {call(0.125f, 30), call(-0.125f, 0), call(0, 0)}) {
    other.mask.attention_chunk = 7;
    CHECK(!Score<Chunk>::can_run(other));
    CHECK((Score<Softcap, Chunk>::can_run(other)));
    agrees_with_the_definition<Score<Softcap, Chunk>>(other);
  }
  float const slope = 1;
  p.logits.alibi_slopes = &slope;
  CHECK(!Score<Chunk>::can_run(p));
  CHECK(!(Score<Softcap, Chunk>::can_run(p)));
}

TEST(a_score_takes_the_calls_whose_terms_it_has) {
  float const number = 1;
  uint8_t const byte = 1;
  Problem alibi = call(0.125f, 0), bias = call(0.125f, 0);
  alibi.logits.alibi_slopes = &number;
  bias.logits.bias.data = &number;
  CHECK(!Score<Softcap>::can_run(alibi) && !Score<TileBias>::can_run(alibi));
  CHECK(Score<Alibi>::can_run(alibi));
  CHECK((Score<Softcap, Alibi>::can_run(alibi)));
  CHECK(Score<TileBias>::can_run(bias) && !Score<Alibi>::can_run(bias));
  CHECK(!Score<TileBias>::can_run(call(0.125f, 0)));  // a kernel with a bias always reads one
  Problem capped = alibi;
  capped.logits.softcap = 3;
  CHECK(!Score<Alibi>::can_run(capped));
  CHECK((Score<Softcap, Alibi>::can_run(capped)));
  Problem negative = alibi;
  negative.logits.softmax_scale = -1;
  CHECK(Score<Alibi>::can_run(negative));
  Problem masked = alibi;
  masked.mask.elements.data = &byte;
  CHECK(!Score<Alibi>::can_run(masked) && GeneralScore::can_run(masked));
}

TEST(identity_takes_only_what_it_can) {
  CHECK(IdentityScore::can_run(call(0.125f, 0)));
  CHECK(!IdentityScore::can_run(call(0.125f, 30)));
  CHECK(!IdentityScore::can_run(call(-0.125f, 0)));
  CHECK(!IdentityScore::can_run(call(0, 0)));
}

TEST(identity_leaves_scales_to_others_that_a_sink_cannot_be_divided_by) {
  CHECK(IdentityScore::can_run(call(1e-20f, 0)));
  CHECK(!IdentityScore::can_run(call(1e-40f, 0)));
}

TEST(general_without_terms_is_softcap) {
  for (float cap : {0.0f, 30.0f}) {
    for (float scale : {0.125f, -0.25f, 0.0f}) {
      agrees_with_the_definition<GeneralScore>(call(scale, cap));
    }
  }
}

namespace {

// A call with one operand per logit; data[i] is element i of it.
Problem with_terms() {
  Problem p = call(0.5f, 0);
  p.batch = 2;
  p.num_heads_q = 3;
  p.seq_q.seqlen = 4;
  p.seq_k.seqlen = 5;
  return p;
}

// Calls body(b, h, q, k) for every logit.
template <class Body>
void for_each_logit(Problem const& p, Body const& body) {
  for (int b = 0; b < p.batch; ++b) {
    for (int h = 0; h < p.num_heads_q; ++h) {
      for (int q = 0; q < p.seq_q.seqlen; ++q) {
        for (int k = 0; k < p.seq_k.seqlen; ++k) body(b, h, q, k);
      }
    }
  }
}

}  // namespace

TEST(alibi_falls_off_on_both_sides_of_the_diagonal) {
  float const slopes[] = {0.5f, 0.25f, 2.0f, 9, 1.0f, 4.0f, 0.125f};
  for (int64_t shift : {0, -3, 2}) {
    for (int batch_stride : {0, 4}) {
      Problem p = with_terms();
      p.logits.alibi_slopes = slopes;
      p.logits.alibi_batch_stride = batch_stride;
      p.mask.diagonal_shift = shift;
      CHECK(!IdentityScore::can_run(p) && !SoftcapScore::can_run(p) && GeneralScore::can_run(p));
      GeneralScore const score(p, lens_of(p));
      for_each_logit(p, [&](int b, int h, int q, int k) {
        // The diagonal of query q is key q + 1 + shift.
        float const distance = std::fabs(float(q + 1 + int(shift) - k));
        CHECK_EQ(score(6, b, h, q, k), 3 - slopes[b * batch_stride + h] * distance);
        CHECK_EQ(score.grad(6, b, h, q, k), 0.5f);
      });
    }
  }
}

TEST(bias_comes_after_the_softcap_in_any_dtype_and_layout) {
  // Powers of two, which all formats can hold.
  std::vector<float> full(2 * 3 * 4 * 5 * 2);
  std::vector<uint16_t> half(full.size()), bfloat(full.size());
  for (size_t i = 0; i < full.size(); ++i) {
    int const exponent = int(i * 7 % 25) - 14;
    full[i] = std::ldexp(i % 2 ? -1.0f : 1.0f, exponent);
    half[i] = uint16_t(i % 2 << 15 | unsigned(exponent + 15) << 10);
    bfloat[i] = uint16_t(i % 2 << 15 | unsigned(exponent + 127) << 7);
  }
  PerLogit const layouts[] = {{nullptr, 60, 20, 5, 1}, {nullptr, 120, 40, 10, 2},
                              {nullptr, 5, 0, 0, 1},   {nullptr, 0, 0, 5, 1},
                              {nullptr, 0, 7, 0, 0},   {nullptr, 1, 2, 30, 6}};
  for (auto const& [dtype, data] : {std::pair<DType, void const*>(DType::kFloat32, full.data()),
                                    {DType::kFloat16, half.data()},
                                    {DType::kBFloat16, bfloat.data()}}) {
    for (PerLogit const& layout : layouts) {
      Problem p = with_terms();
      p.logits.softcap = 2;
      p.logits.bias = layout;
      p.logits.bias.data = data;
      p.logits.bias_dtype = dtype;
      CHECK(!IdentityScore::can_run(p) && !SoftcapScore::can_run(p));
      GeneralScore const score(p, lens_of(p));
      SoftcapScore const softcap(p);
      float const capped = p.logits.softcap * softcap(6, 0, 0, 0, 0);
      for_each_logit(p, [&](int b, int h, int q, int k) {
        int64_t const at = b * layout.batch_stride + h * layout.head_stride +
                           q * layout.row_stride + k * layout.key_stride;
        CHECK_EQ(score(6, b, h, q, k), capped + full[size_t(at)]);
      });
    }
  }
}

TEST(mask_hides_where_its_byte_is_zero_whatever_the_bias) {
  uint8_t bytes[2 * 3 * 4 * 5];
  for (size_t i = 0; i < sizeof bytes; ++i)
    bytes[i] = uint8_t(i % 3 == 0 ? 0 : i % 3 == 1 ? 1 : 255);
  float const bias[] = {std::nanf(""), 1, kInf, 2, -kInf};
  Problem p = with_terms();
  p.mask.elements = {bytes, 60, 20, 5, 1};
  p.logits.bias = {bias, 0, 0, 0, 1};
  p.logits.bias_dtype = DType::kFloat32;
  GeneralScore const score(p, lens_of(p));
  for_each_logit(p, [&](int b, int h, int q, int k) {
    float const x = score(6, b, h, q, k);
    float const shown = 3 + bias[k];
    bool const hidden = bytes[b * 60 + h * 20 + q * 5 + k] == 0;
    CHECK(hidden ? x == -kInf : x == shown || (std::isnan(x) && std::isnan(shown)));
  });
  p.logits.bias = {};
  CHECK(!IdentityScore::can_run(p) && !SoftcapScore::can_run(p));
}

// Tiles reach beyond the sequences: no other address may be read for positions out there.
TEST(beyond_the_sequences_the_last_terms_are_read) {
  float bias[4 * 5];
  uint8_t mask[4 * 5];
  for (int i = 0; i < 4 * 5; ++i) {
    bias[i] = float(i);
    mask[i] = i % 2;
  }
  Problem p = with_terms();
  p.logits.bias = {bias, 0, 0, 5, 1};
  p.logits.bias_dtype = DType::kFloat32;
  Problem with_mask = p;
  with_mask.mask.elements = {mask, 0, 0, 5, 1};
  GeneralScore const biased(p, lens_of(p)), masked(with_mask, lens_of(p));
  for (auto [q, k] : {std::pair(4, 2), {100, 3}, {1, 5}, {2, 100}, {70, 70}}) {
    int const at = std::min(q, 3) * 5 + std::min(k, 4);
    CHECK_EQ(biased(6, 1, 2, q, k), 3.0f + float(at));
    CHECK_EQ(masked(6, 1, 2, q, k), at % 2 ? 3.0f + float(at) : -kInf);
  }
}

// The logits of a thread, as kernels hold them, get the terms of each logit alone, whether or not
// the entries of two keys are read at once.
TEST(a_block_of_logits_has_the_terms_of_each) {
  struct Place {
    int heads[2] = {2, 0}, queries[2] = {3, 1}, keys[4] = {2, 3, 10, 11};
    int batch() const { return 1; }
    int head(int i) const { return heads[i]; }
    int query(int i) const { return queries[i]; }
    int key(int j) const { return keys[j]; }
  } const place;
  float const slopes[] = {0.5f, 0.25f, 2.0f};
  std::vector<float> full(2 * 3 * 4 * 12 * 2);
  std::vector<uint16_t> half(full.size());
  std::vector<uint8_t> mask(full.size());
  for (size_t i = 0; i < full.size(); ++i) {
    int const exponent = int(i * 7 % 25) - 14;
    full[i] = std::ldexp(1.0f, exponent);
    half[i] = uint16_t((exponent + 15) << 10);
    mask[i] = i % 7 != 0;
  }
  // 12 adjacent keys, in rows of 12 and of 13; every second of 12 keys; 11 keys, whose last one has
  // no neighbour.
  PerLogit const layouts[] = {{nullptr, 144, 48, 12, 1},
                              {nullptr, 156, 52, 13, 1},
                              {nullptr, 288, 96, 24, 2},
                              {nullptr, 144, 48, 12, 1},
                              {nullptr, 0, 0, 0, 1}};
  for (PerLogit const& layout : layouts) {
    for (DType dtype : {DType::kFloat32, DType::kFloat16}) {
      for (int seqlen_k : {12, 11}) {
        Problem p = with_terms();
        p.seq_k.seqlen = seqlen_k;
        p.logits.softcap = 3;
        p.logits.alibi_slopes = slopes;
        p.logits.bias = p.mask.elements = layout;
        p.logits.bias.data = dtype == DType::kFloat32 ? static_cast<void const*>(full.data())
                                                      : static_cast<void const*>(half.data());
        p.logits.bias_dtype = dtype;
        p.mask.elements.data = mask.data();
        GeneralScore const score(p, lens_of(p));
        float x[2][4];
        auto const at = [&](int i, int j) -> float& { return x[i][j]; };
        for (int i = 0; i < 2; ++i) {
          for (int j = 0; j < 4; ++j) x[i][j] = float(i - 2 * j);
        }
        score.scale<2, 4>(at);
        score.add_terms<2, 4>(at, place);
        for (int i = 0; i < 2; ++i) {
          for (int j = 0; j < 4 && place.keys[j] < seqlen_k; ++j) {
            CHECK_EQ(x[i][j],
                     score(float(i - 2 * j), 1, place.heads[i], place.queries[i], place.keys[j]));
          }
        }
      }
    }
  }
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
