// The online softmax state, against a softmax in doubles that sees all scores at once.
#include "core/softmax.hpp"

#include <cmath>
#include <random>
#include <vector>

#include "check.hpp"

using namespace cutlass_attn;

namespace {

constexpr float kScale = 0.7f;  // log2 units per score

// One row's state and one output column, as a kernel keeps them.
struct Row {
  SoftmaxRow softmax;
  float o = 0;

  // Processes a tile of scores, each with its value.
  void take(std::vector<float> const& scores, std::vector<float> const& values) {
    float best = -kInf;
    for (float x : scores) best = std::fmax(best, x);
    o *= softmax.update_max(best, kScale);
    for (size_t i = 0; i < scores.size(); ++i) {
      float const p = softmax.weight(scores[i], kScale);
      softmax.sum += p;
      o += p * values[i];
    }
  }

  void merge(Row const& other) {
    float factor;
    float const mine = softmax.merge(other.softmax, kScale, factor);
    o = o * mine + other.o * factor;
  }

  void add(float logit) { o *= softmax.add_logit(logit, kScale); }

  float result() const { return o * softmax.inverse_sum(); }
  float lse() const { return softmax.lse(kScale); }
};

struct Exact {
  double o = 0, lse = -INFINITY;
};

Exact exact(std::vector<float> const& scores, std::vector<float> const& values) {
  double best = -INFINITY, sum = 0, o = 0;
  for (float x : scores) best = std::fmax(best, x);
  for (size_t i = 0; i < scores.size(); ++i) {
    double const p = std::exp2((double(scores[i]) - best) * kScale);
    sum += p;
    o += p * values[i];
  }
  return {o / sum, (best * kScale + std::log2(sum)) * std::log(2.0)};
}

struct Sample {
  std::vector<float> scores, values;

  Sample(int n, double spread, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> score(0, float(spread)), value(0, 1);
    for (int i = 0; i < n; ++i) {
      scores.push_back(score(random));
      values.push_back(value(random));
    }
  }

  Row part(int begin, int end, int tile) const {
    Row row;
    for (int i = begin; i < end; i += tile) {
      int const stop = std::min(i + tile, end);
      row.take({scores.begin() + i, scores.begin() + stop},
               {values.begin() + i, values.begin() + stop});
    }
    return row;
  }
};

void expect(Row const& row, Exact const& right) {
  CHECK_NEAR(row.result(), right.o, 3e-6);
  CHECK_NEAR(row.lse(), right.lse, 3e-6 * (1 + std::fabs(right.lse)));
}

}  // namespace

TEST(tiles_of_any_size_give_the_softmax) {
  for (double spread : {0.1, 1.0, 30.0, 500.0}) {
    Sample const sample(200, spread, 1);
    for (int tile : {1, 7, 64, 200}) {
      expect(sample.part(0, 200, tile), exact(sample.scores, sample.values));
    }
  }
}

// A product of such a score and the scale is off by whole units of log2.
TEST(large_scores) {
  std::vector<float> const scores = {2e9f, 2e9f - 128, -2e9f}, values = {1, 2, 3};
  Row row;
  row.take(scores, values);
  CHECK_NEAR(row.result(), exact(scores, values).o, 3e-6);
}

TEST(merging_is_associative_and_takes_any_order) {
  Sample const sample(300, 20, 2);
  Exact const right = exact(sample.scores, sample.values);
  Row const a = sample.part(0, 90, 16), b = sample.part(90, 91, 16), c = sample.part(91, 300, 16);
  Row left = a, tail = b, other_order = c;
  left.merge(b);
  left.merge(c);
  tail.merge(c);
  Row folded = a;
  folded.merge(tail);
  other_order.merge(a);
  other_order.merge(b);
  expect(left, right);
  expect(folded, right);
  expect(other_order, right);
}

TEST(a_row_without_keys) {
  Row row;
  CHECK_EQ(row.result(), 0.0f);
  CHECK_EQ(row.lse(), -kInf);
  row.take({}, {});
  CHECK_EQ(row.result(), 0.0f);
  row.merge(Row());
  CHECK_EQ(row.result(), 0.0f);
  CHECK_EQ(row.lse(), -kInf);
}

TEST(masked_scores_weigh_nothing) {
  Row row;
  row.take({-kInf, -kInf}, {1, 2});  // a tile in which this row sees no key
  CHECK_EQ(row.result(), 0.0f);
  CHECK_EQ(row.lse(), -kInf);
  row.take({-kInf, 3, -kInf}, {5, 7, 9});
  CHECK_EQ(row.result(), 7.0f);
  CHECK_NEAR(row.lse(), 3 * kScale * std::log(2.0), 1e-6);
  row.take({-kInf}, {11});
  CHECK_EQ(row.result(), 7.0f);
}

// Like one more score with a value of 0. The logit is natural; a score has its own units.
TEST(a_logit_without_a_value_joins_the_denominator) {
  float const unit = float(kScale * std::log(2.0));  // logit per score
  for (double spread : {0.1, 1.0, 30.0}) {
    Sample const sample(100, spread, 4);
    for (float sink : {-200.0f, -3.0f, 0.0f, 3.0f, 60.0f, 200.0f}) {
      std::vector<float> scores = sample.scores, values = sample.values;
      scores.push_back(sink / unit);
      values.push_back(0);
      Row row = sample.part(0, 100, 16);
      row.add(sink);
      expect(row, exact(scores, values));
    }
  }
}

TEST(a_logit_and_a_row_without_keys) {
  Row row;
  row.add(2.5f);
  CHECK_EQ(row.result(), 0.0f);
  CHECK_NEAR(row.lse(), 2.5, 1e-6);
  Row hidden;
  hidden.take({-kInf, -kInf}, {1, 2});
  hidden.add(-1.5f);
  CHECK_EQ(hidden.result(), 0.0f);
  CHECK_NEAR(hidden.lse(), -1.5, 1e-6);
  Row nothing;
  nothing.add(-kInf);
  CHECK_EQ(nothing.result(), 0.0f);
  CHECK_EQ(nothing.lse(), -kInf);
}

TEST(a_logit_of_minus_infinity_changes_nothing) {
  Row const row = Sample(20, 1, 5).part(0, 20, 4);
  Row same = row;
  same.add(-kInf);
  CHECK_EQ(same.result(), row.result());
  CHECK_EQ(same.lse(), row.lse());
}

TEST(infinite_and_nan_logits_show) {
  for (float bad : {kInf, std::nanf("")}) {
    Row row = Sample(20, 1, 6).part(0, 20, 4), empty;
    row.add(bad);
    empty.add(bad);
    CHECK(std::isnan(row.result()) && std::isnan(row.lse()));
    CHECK(std::isnan(empty.lse()));
  }
  Row nan;
  nan.take({std::nanf("")}, {1});
  nan.add(3);
  CHECK(std::isnan(nan.result()) && std::isnan(nan.lse()));
}

TEST(merging_with_an_empty_row_changes_nothing) {
  Sample const sample(20, 1, 3);
  Row const full = sample.part(0, 20, 4);
  Row left = full, right;
  left.merge(Row());
  right.merge(full);
  CHECK_EQ(left.result(), full.result());
  CHECK_EQ(right.result(), full.result());
  CHECK_EQ(left.lse(), full.lse());
  CHECK_EQ(right.lse(), full.lse());
}

TEST(infinite_and_nan_scores_show) {
  for (float bad : {kInf, std::nanf("")}) {
    for (int where : {0, 1, 2}) {
      std::vector<float> scores{1, 2, 3};
      scores[size_t(where)] = bad;
      Row at_once, one_by_one, after;
      at_once.take(scores, {1, 1, 1});
      for (float x : scores) one_by_one.take({x}, {1});
      after.take({5}, {1});
      after.merge(at_once);
      CHECK(std::isnan(at_once.result()) && std::isnan(at_once.lse()));
      CHECK(std::isnan(one_by_one.result()) && std::isnan(one_by_one.lse()));
      CHECK(std::isnan(after.result()));
    }
  }
}

TEST(logits_far_from_zero_neither_overflow_nor_vanish) {
  for (float offset : {-1e4f, 1e4f, 1e6f, -1e6f}) {
    Row row;
    row.take({offset}, {2});
    row.take({offset}, {4});
    CHECK_NEAR(row.result(), 3, 1e-6);
    CHECK_NEAR(row.lse(), offset * kScale * std::log(2.0), 1e-7 * std::fabs(offset) + 1);
  }
}

TEST(many_tiles_do_not_drift) {
  for (float score : {-1433.21f, 0.3f, 77.7f, 1433.21f}) {
    Row row;
    for (int tile = 0; tile < 1000; ++tile) row.take({score}, {float(tile)});
    CHECK_NEAR(row.result(), 499.5, 1e-3);
    CHECK_NEAR(row.lse(), score * kScale * std::log(2.0) + std::log(1000.0), 2e-4);
  }
}

int main(int argc, char** argv) { return check::run(argc, argv); }
