// The kernel with a limit for the error: what it predicts of each head, against plain loops in
// fp64, and that heads are bitwise those of the kernel in 8 bits, or of that in 16. Also what the
// mutants run.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "simt/host_unit.hpp"
#include "sm80/limited.hpp"

using namespace cutlass_attn;
using cutlass::half_t;

namespace {

using Limited = sm80::Limited<half_t, 64, 64, 64, 64, 4, int32_t>;
using Params = Limited::Params;

struct Sizes {
  int batch, heads_kv, group, seqlen_q, seqlen_k;
  int head_dim = 64;
  bool unaligned = false;
};

struct Call {
  Sizes sizes;
  std::vector<half_t> q, k, v, o;
  std::vector<char> workspace;
  Problem p;

  // peaked(batch, query head): q is that many times as large.
  template <class Peaked>
  Call(Sizes const& s, Peaked&& peaked) : sizes(s) {
    int const heads = s.heads_kv * s.group;
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    int const stride = s.head_dim + (s.unaligned ? 1 : 0);
    auto const fill = [&](std::vector<half_t>& x, int all_heads, int rows, auto&& factor) {
      for (int h = 0; h < s.batch * all_heads; ++h) {
        for (int i = 0; i < rows * stride; ++i) x.push_back(half_t(normal(random) * factor(h)));
      }
      x.resize(x.size() + 8);
    };
    fill(q, heads, s.seqlen_q, [&](int h) { return peaked(h / heads, h % heads); });
    fill(k, s.heads_kv, s.seqlen_k, [](int h) { return 1.0f + 0.125f * float(h); });
    fill(v, s.heads_kv, s.seqlen_k, [](int) { return 1.0f; });
    // Some values are far larger than others of their tile.
    for (size_t i = 0; i + 8 < v.size(); i += size_t(37 * stride)) v[i] = half_t(20.0f);
    o.assign(size_t(s.batch * heads * s.seqlen_q * s.head_dim), half_t(-1.0f));
    p.batch = s.batch;
    p.num_heads_q = heads;
    p.num_heads_kv = s.heads_kv;
    p.head_dim = p.head_dim_v = s.head_dim;
    p.seq_q.seqlen = s.seqlen_q;
    p.seq_k.seqlen = s.seqlen_k;
    auto const operand = [&](half_t* x, int all_heads, int rows, int row_stride) {
      return Operand{x, int64_t(all_heads) * rows * row_stride, int64_t(rows) * row_stride,
                     row_stride, DType::kFloat16};
    };
    p.q = operand(q.data(), heads, s.seqlen_q, stride);
    p.k = operand(k.data(), s.heads_kv, s.seqlen_k, stride);
    p.v = operand(v.data(), s.heads_kv, s.seqlen_k, stride);
    p.o = operand(o.data(), heads, s.seqlen_q, s.head_dim);
    p.logits.softmax_scale = 0.125f;
    p.quantize = Quantize::kInt8;
  }

  // Runs it, with garbage in what the kernels share and in the result.
  std::vector<half_t> run(float max_error) {
    std::fill(o.begin(), o.end(), half_t(-1.0f));
    p.max_error = max_error;
    workspace.assign(size_t(Params::workspace_bytes(p, {}, {})), char(0xff));
    RunOptions options;
    options.workspace = {workspace.data(), int64_t(workspace.size())};
    Status status;
    if (max_error != 0.0f && sizes.unaligned) {
      status = simt::launch_with_asides_on_host<Limited, GeneralScore>(p, options);
    } else if (max_error != 0.0f) {
      status = simt::launch_with_asides_on_host<Limited, IdentityScore>(p, options);
    } else if (p.quantize == Quantize::kNone) {
      status = simt::launch_on_host<Limited::Wide, IdentityScore>(p, options);
    } else {
      status = simt::launch_with_asides_on_host<Limited::Narrow, IdentityScore>(p, options);
    }
    CHECK_EQ(status.message, "");
    return o;
  }

  float predicted(int batch, int head) const {
    float error;
    size_t const first = workspace.size() - size_t(p.batch * p.num_heads_q) * 4;
    std::memcpy(&error, workspace.data() + first + size_t(batch * p.num_heads_q + head) * 4, 4);
    return error;
  }

  double at(Operand const& t, int batch, int head, int row, int d) const {
    auto const* const x = static_cast<half_t const*>(t.data);
    return float(x[batch * t.batch_stride + head * t.head_stride + row * t.row_stride + d]);
  }

  // What core/predict.hpp describes.
  double expected(int batch, int head) const {
    int const head_kv = head / sizes.group, dim = sizes.head_dim, sq = sizes.seqlen_q;
    int const sk = sizes.seqlen_k, all_tiles = (sk + 63) / 64, tiles = std::min(all_tiles, 8);
    std::vector<double> shift(size_t(dim), 0.0);
    int const samples = std::min(sk, 64);
    for (int i = 0; i < samples; ++i) {
      for (int d = 0; d < dim; ++d) {
        shift[size_t(d)] += at(p.k, batch, head_kv, i * sk / samples, d) / samples;
      }
    }
    struct Key {
      int number, tile;
      double step, folded, of_value, values;
    };
    std::vector<Key> keys;
    double k2 = 0, dk2 = 0, q2 = 0, dq2 = 0;
    for (int t = 0; t < tiles; ++t) {
      int const first = t * all_tiles / tiles * 64, end = std::min(first + 64, sk);
      double of_keys = 0, of_tile = 0;
      std::vector<double> amax;
      for (int j = first; j < end; ++j) {
        double value = 0, values = 0;
        for (int d = 0; d < dim; ++d) {
          double const x = at(p.k, batch, head_kv, j, d) - shift[size_t(d)];
          double const y = at(p.v, batch, head_kv, j, d);
          k2 += x * x;
          of_keys = std::max(of_keys, std::fabs(x));
          value = std::max(value, std::fabs(y));
          values += y * y;
        }
        of_tile = std::max(of_tile, value);
        amax.push_back(value);
        keys.push_back({j, t, 0, 0, 0, values});
      }
      for (int j = first; j < end; ++j) {
        Key& key = keys[keys.size() - size_t(end - j)];
        key.folded = std::max(amax[size_t(j - first)] / of_tile, 1.0 / 32);
        key.of_value = of_tile / 127;
        dk2 += of_keys / 127 * of_keys / 127;
      }
    }
    int const queries = std::min(sq, 256);
    std::vector<int> looked_at;
    for (int i = 0; i < queries; ++i) {
      looked_at.push_back(int(int64_t(i) * sq / queries));
      double largest = 0;
      for (int d = 0; d < dim; ++d) {
        double const x = at(p.q, batch, head, looked_at.back(), d);
        q2 += x * x;
        largest = std::max(largest, std::fabs(x));
      }
      dq2 += largest / 127 * largest / 127;
    }
    double const scale = p.logits.softmax_scale;
    double variance =
        scale * scale / 12 * (q2 * dk2 + k2 * dq2) / (double(queries) * double(keys.size()));
    int const weighed = std::min(queries, 16);
    double error = 0, size = 0;
    for (int i = 0; i < weighed; ++i) {
      int const query = looked_at[size_t(i * queries / weighed)];
      std::vector<double> w;
      for (Key const& key : keys) {
        double sum = 0;
        for (int d = 0; d < dim; ++d) {
          sum += at(p.q, batch, head, query, d) *
                 (at(p.k, batch, head_kv, key.number, d) - shift[size_t(d)]);
        }
        w.push_back(sum * scale);
      }
      double const max = *std::max_element(w.begin(), w.end());
      double of_tile[8] = {};
      for (size_t j = 0; j < keys.size(); ++j) {
        w[j] = std::exp(w[j] - max);
        double& largest = of_tile[keys[j].tile];
        largest = std::max(largest, w[j] * keys[j].folded);
      }
      for (size_t j = 0; j < keys.size(); ++j) {
        double const step_v = keys[j].folded * keys[j].of_value;
        double const step_p = of_tile[keys[j].tile] / 255 / keys[j].folded;
        error += w[j] * w[j] * dim * step_v * step_v + step_p * step_p * keys[j].values;
        size += w[j] * w[j] * keys[j].values;
      }
    }
    return std::sqrt(variance + error / 12 / size);
  }

  void check_predictions() const {
    for (int b = 0; b < p.batch; ++b) {
      for (int h = 0; h < p.num_heads_q; ++h) {
        double const due = expected(b, h), found = predicted(b, h);
        CHECK(std::fabs(found - due) < 2e-4 * due);
        if (!(std::fabs(found - due) < 2e-4 * due)) {
          std::printf("batch %d, head %d: %g, expected %g\n", b, h, found, due);
        }
      }
    }
  }

  // Whether the results of a query head are the same, bit by bit.
  bool is_same(std::vector<half_t> const& a, std::vector<half_t> const& b, int head) const {
    size_t const size = size_t(sizes.seqlen_q * sizes.head_dim), first = size_t(head) * size;
    return std::memcmp(a.data() + first, b.data() + first, size * sizeof(half_t)) == 0;
  }
};

float same(int, int) { return 1.0f; }

TEST(predictions) {
  for (Sizes const& sizes : {Sizes{2, 2, 2, 33, 150}, Sizes{1, 1, 1, 300, 64},
                             Sizes{1, 2, 1, 5, 1300, 56}, Sizes{1, 1, 3, 1, 1}}) {
    Call call(sizes, [](int b, int h) { return 1.0f + 0.5f * float(b) + 0.25f * float(h); });
    call.run(0.02f);
    call.check_predictions();
  }
}

TEST(predictions_of_any_strides) {
  Call call({1, 2, 2, 20, 70, 64, true}, same);
  call.run(0.02f);
  call.check_predictions();
}

// One KV head of each batch entry, another one, has a peaked query head, and one that is not.
TEST(heads_are_those_of_one_kernel_or_the_other) {
  for (int seqlen_q : {9, 150}) {  // heads share tiles, or do not
    Call call({2, 2, 2, seqlen_q, 150},
              [](int b, int h) { return h == (b == 0 ? 2 : 1) ? 4.0f : 1.0f; });
    std::vector<half_t> const narrow = call.run(0.0f);
    call.p.quantize = Quantize::kNone;
    std::vector<half_t> const wide = call.run(0.0f);
    call.p.quantize = Quantize::kInt8;
    std::vector<half_t> const both = call.run(0.022f);
    for (int head = 0; head < 8; ++head) {
      bool const is_wide = (head / 2 == 1) || (head / 2 == 2);
      CHECK(!call.is_same(narrow, wide, head));
      CHECK(call.is_same(both, is_wide ? wide : narrow, head));
    }
    CHECK(call.run(10.0f) == narrow);
    CHECK(call.run(1e-4f) == wide);
  }
}

// What the device decides by is read anew, wherever the host had the call planned before.
TEST(the_same_memory_with_other_numbers) {
  Call call({1, 2, 1, 40, 100}, same);
  std::vector<half_t> const before = call.run(0.025f);
  call.p.quantize = Quantize::kNone;
  std::vector<half_t> const wide = call.run(0.0f);
  call.p.quantize = Quantize::kInt8;
  CHECK(!call.is_same(before, wide, 1));
  for (int i = 0; i < 40 * 64; ++i)
    call.q[40 * 64 + size_t(i)] = half_t(4 * float(call.q[40 * 64 + size_t(i)]));
  std::vector<half_t> const after = call.run(0.025f);
  CHECK(call.is_same(after, before, 0) && !call.is_same(after, before, 1));
  call.p.quantize = Quantize::kNone;
  CHECK(call.is_same(after, call.run(0.0f), 1));
}

TEST(what_is_not_finite_runs_in_16_bits) {
  for (int place = 0; place < 3; ++place) {
    Call call({1, 2, 1, 20, 70}, same);
    std::vector<half_t>& x = place == 0 ? call.q : place == 1 ? call.k : call.v;
    x[5] = half_t(NAN);
    call.run(0.02f);
    CHECK(!quantize::is_within(call.predicted(0, 0), 0.02f));
    CHECK(quantize::is_within(call.predicted(0, 1), 0.02f));
  }
}

TEST(no_keys) {
  Call call({1, 2, 1, 20, 0}, same);
  for (half_t x : call.run(0.02f)) CHECK_EQ(float(x), 0.0f);
  CHECK_EQ(call.predicted(0, 1), 0.0f);
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
