// Views of a problem that only some kernels can run: packed sequences, entries with ignored rows,
// pages, and scales. Each result equals that of the equivalent dense calls: bit by bit, except for
// scales, which round.
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "cutlass_attn.hpp"

using namespace cutlass_attn;

namespace {

constexpr int kHeadsQ = 4, kHeadsKv = 2, kDim = 8;

std::vector<float> normal(size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw;
  std::vector<float> x(size);
  for (float& value : x) value = draw(random);
  return x;
}

// Rows of all heads are adjacent: (row, head, column).
Operand rows_of(std::vector<float>& x, int heads, int64_t batch_stride) {
  return {x.data(), batch_stride, kDim, int64_t(heads) * kDim, DType::kFloat32};
}

Problem problem(int batch, int seqlen_q, int seqlen_k) {
  Problem p;
  p.batch = batch;
  p.num_heads_q = kHeadsQ;
  p.num_heads_kv = kHeadsKv;
  p.head_dim = p.head_dim_v = kDim;
  p.seq_q.seqlen = seqlen_q;
  p.seq_k.seqlen = seqlen_k;
  p.logits.softmax_scale = 0.5f;
  p.mask.causal = true;
  p.mask.window_left = 5;
  return p;
}

// The kernel that a test runs.
char const* g_kernel = nullptr;

void run_kernel(Problem const& p) {
  LaunchOptions options;
  options.kernel = g_kernel;
  CHECK_EQ(attention_forward(p, options).message, "");
}

template <class Body>
void for_each_kernel(Body const& body) {
  for (char const* kernel : {"scalar/minimal-simt", "cpu"}) {
    g_kernel = kernel;
    body();
  }
}

// O and LSE of one dense sequence whose rows begin at these addresses.
struct Dense {
  std::vector<float> o, lse;

  Dense(std::vector<float> q, std::vector<float> k, std::vector<float> v, int seqlen_q,
        int seqlen_k)
      : o(size_t(seqlen_q) * kHeadsQ * kDim), lse(size_t(seqlen_q) * kHeadsQ) {
    Problem p = problem(1, seqlen_q, seqlen_k);
    p.q = rows_of(q, kHeadsQ, 0), p.k = rows_of(k, kHeadsKv, 0);
    p.v = rows_of(v, kHeadsKv, 0), p.o = rows_of(o, kHeadsQ, 0);
    p.softmax_lse = lse.data();
    run_kernel(p);
  }
};

std::vector<float> rows(std::vector<float> const& x, int heads, int first, int count) {
  auto const begin = x.begin() + int64_t(first) * heads * kDim;
  return {begin, begin + int64_t(count) * heads * kDim};
}

void packed_sequences() {
  std::vector<int32_t> const cu_q = {0, 3, 3, 10, 11}, cu_k = {0, 7, 9, 9, 200};
  int const total_q = cu_q.back(), total_k = cu_k.back();
  std::vector<float> q = normal(total_q * kHeadsQ * kDim, 1);
  std::vector<float> k = normal(total_k * kHeadsKv * kDim, 2), v = normal(k.size(), 3);
  std::vector<float> o(q.size(), -1.0f), lse(size_t(total_q) * kHeadsQ, -1.0f);
  Problem p = problem(4, 8, 200);  // the maximum, or more
  p.q = rows_of(q, kHeadsQ, 0), p.k = rows_of(k, kHeadsKv, 0);
  p.v = rows_of(v, kHeadsKv, 0), p.o = rows_of(o, kHeadsQ, 0);
  p.softmax_lse = lse.data();
  p.seq_q.cu_seqlens = cu_q.data();
  p.seq_k.cu_seqlens = cu_k.data();
  p.seq_q.total = total_q, p.seq_k.total = total_k;
  run_kernel(p);
  for (int b = 0; b < 4; ++b) {
    int const seqlen_q = cu_q[b + 1] - cu_q[b], seqlen_k = cu_k[b + 1] - cu_k[b];
    Dense const one(rows(q, kHeadsQ, cu_q[b], seqlen_q), rows(k, kHeadsKv, cu_k[b], seqlen_k),
                    rows(v, kHeadsKv, cu_k[b], seqlen_k), seqlen_q, seqlen_k);
    CHECK(rows(o, kHeadsQ, cu_q[b], seqlen_q) == one.o);
    for (int h = 0; h < kHeadsQ; ++h) {
      for (int i = 0; i < seqlen_q; ++i) {
        CHECK_EQ(lse[size_t(h * total_q + cu_q[b] + i)], one.lse[size_t(h * seqlen_q + i)]);
      }
    }
  }
}

void rows_that_do_not_count() {
  std::vector<int32_t> const used_q = {2, 0, 5}, used_k = {6, 3, 0};
  std::vector<int32_t> const left_q = {0, 0, 2}, left_k = {4, 0, 0};
  std::vector<float> q = normal(3 * 5 * kHeadsQ * kDim, 4);
  std::vector<float> k = normal(3 * 6 * kHeadsKv * kDim, 5), v = normal(k.size(), 6);
  std::vector<float> o(q.size(), -1.0f);
  Problem p = problem(3, 5, 6);
  p.q = rows_of(q, kHeadsQ, 5 * kHeadsQ * kDim), p.k = rows_of(k, kHeadsKv, 6 * kHeadsKv * kDim);
  p.v = rows_of(v, kHeadsKv, 6 * kHeadsKv * kDim), p.o = rows_of(o, kHeadsQ, 5 * kHeadsQ * kDim);
  p.seq_q.seqused = used_q.data();
  p.seq_k.seqused = used_k.data();
  std::vector<float> lse(3 * kHeadsQ * 5, -1.0f);
  p.softmax_lse = lse.data();
  for (bool is_left : {false, true}) {
    if (is_left) p.seq_q.leftpad = left_q.data(), p.seq_k.leftpad = left_k.data();
    std::fill(o.begin(), o.end(), -1.0f);
    std::fill(lse.begin(), lse.end(), -1.0f);
    run_kernel(p);
    for (int b = 0; b < 3; ++b) {
      int const first_q = is_left ? left_q[b] : 0, first_k = is_left ? left_k[b] : 0;
      int const seqlen_q = used_q[b] - first_q, seqlen_k = used_k[b] - first_k;
      Dense const one(rows(q, kHeadsQ, 5 * b + first_q, seqlen_q),
                      rows(k, kHeadsKv, 6 * b + first_k, seqlen_k),
                      rows(v, kHeadsKv, 6 * b + first_k, seqlen_k), seqlen_q, seqlen_k);
      CHECK(rows(o, kHeadsQ, 5 * b + first_q, seqlen_q) == one.o);
      for (float x : rows(o, kHeadsQ, 5 * b, first_q)) CHECK_EQ(x, -1.0f);
      for (float x : rows(o, kHeadsQ, 5 * b + used_q[b], 5 - used_q[b])) CHECK_EQ(x, -1.0f);
      for (int h = 0; h < kHeadsQ; ++h) {
        for (int i = 0; i < 5; ++i) {
          bool const counts = i >= first_q && i < used_q[b];
          float const due = counts ? one.lse[size_t(h * seqlen_q + i - first_q)] : -1.0f;
          CHECK_EQ(lse[size_t((b * kHeadsQ + h) * 5 + i)], due);
        }
      }
    }
  }
}

void pages() {
  constexpr int kPageSize = 4, kPages = 6;
  std::vector<float> q = normal(2 * 3 * kHeadsQ * kDim, 7);
  std::vector<float> k = normal(kPages * kPageSize * kHeadsKv * kDim, 8), v = normal(k.size(), 9);
  std::vector<float> o(q.size());
  std::vector<int32_t> const table = {4, 1, 0, -1, 5, 2, -1, -1}, used = {11, 5};
  Problem p = problem(2, 3, 16);
  int64_t const page = kPageSize * kHeadsKv * kDim;
  p.q = rows_of(q, kHeadsQ, 3 * kHeadsQ * kDim), p.o = rows_of(o, kHeadsQ, 3 * kHeadsQ * kDim);
  p.k = rows_of(k, kHeadsKv, page), p.v = rows_of(v, kHeadsKv, page);
  p.kv = {table.data(), 4, kPageSize, kPages};
  p.seq_k.seqused = used.data();
  run_kernel(p);
  for (int b = 0; b < 2; ++b) {
    std::vector<float> own_k, own_v;
    for (int i = 0; i < used[b]; ++i) {
      int const row = table[b * 4 + i / kPageSize] * kPageSize + i % kPageSize;
      for (float x : rows(k, kHeadsKv, row, 1)) own_k.push_back(x);
      for (float x : rows(v, kHeadsKv, row, 1)) own_v.push_back(x);
    }
    Dense const one(rows(q, kHeadsQ, 3 * b, 3), own_k, own_v, 3, used[b]);
    CHECK(rows(o, kHeadsQ, 3 * b, 3) == one.o);
  }
}

// Powers of two, so that scaling rounds nothing.
void scales() {
  std::vector<float> q = normal(3 * kHeadsQ * kDim, 10);
  std::vector<float> k = normal(9 * kHeadsKv * kDim, 11), v = normal(k.size(), 12);
  std::vector<float> o(q.size());
  float const of_q[] = {2, 0.5f, 4, 1}, of_k[] = {0.25f, 8}, of_v = 16, of_o[] = {1, 2, 4, 8};
  Problem p = problem(1, 3, 9);
  p.q = rows_of(q, kHeadsQ, 0), p.k = rows_of(k, kHeadsKv, 0);
  p.v = rows_of(v, kHeadsKv, 0), p.o = rows_of(o, kHeadsQ, 0);
  p.q.scale = of_q, p.k.scale = of_k, p.v.scale = &of_v, p.o.scale = of_o;
  p.q.scale_head_stride = p.k.scale_head_stride = p.o.scale_head_stride = 1;
  run_kernel(p);
  for (size_t i = 0; i < q.size(); ++i) q[i] *= of_q[i / kDim % kHeadsQ];
  for (size_t i = 0; i < k.size(); ++i) k[i] *= of_k[i / kDim % kHeadsKv], v[i] *= of_v;
  Dense const one(q, k, v, 3, 9);
  for (size_t i = 0; i < o.size(); ++i) {
    float const expected = one.o[i] / of_o[i / kDim % kHeadsQ];
    CHECK_NEAR(o[i], expected, 1e-6 * std::fabs(expected));
  }
}

}  // namespace

TEST(packed_sequences_of_each_kernel) { for_each_kernel(packed_sequences); }
TEST(rows_that_do_not_count_of_each_kernel) { for_each_kernel(rows_that_do_not_count); }
TEST(pages_of_each_kernel) { for_each_kernel(pages); }
TEST(scales_of_each_kernel) { for_each_kernel(scales); }

int main(int argc, char** argv) { return check::run(argc, argv); }
