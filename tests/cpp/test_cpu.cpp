// The CPU's own kernel, with every instruction set of this processor, against fp64.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "attention_case.hpp"
#include "check.hpp"
#include "cpu/attention.hpp"
#include "cpu/element.hpp"

using namespace cutlass_attn;
using attention_case::Case;
using attention_case::SolvedCase;
using cpu::Isa;

namespace {

constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

template <class Body>
void for_each_isa(Body const& body) {
  for (int isa = 0; isa <= int(cpu::best_isa()); ++isa) body(Isa(isa));
}

void run(Case const& what) {
  for (DType dtype : kDTypes) {
    if (what.quantize != Quantize::kNone && dtype == DType::kFloat32) continue;
    SolvedCase problem(what, dtype);
    for_each_isa([&](Isa isa) {
      CHECK(cpu::attention_forward(problem.call(), {}, isa).ok());
      std::string const verdict = problem.verdict();
      if (verdict.empty()) return;
      check::fail(__FILE__, __LINE__,
                  what.name + ", dtype " + std::to_string(int(dtype)) + ", instruction set " +
                      std::to_string(int(isa)) + ": " + verdict);
    });
  }
}

// An fp32 call with one head, for problems that Case cannot describe.
struct Plain {
  std::vector<float> q, k, v, o, lse;
  Problem p;

  Plain(int seqlen_q, int seqlen_k, int head_dim)
      : q(size_t(seqlen_q) * head_dim),
        k(size_t(seqlen_k) * head_dim),
        v(k.size()),
        o(q.size()),
        lse(size_t(seqlen_q)) {
    for (std::vector<float>* x : {&q, &k, &v}) {
      for (size_t i = 0; i < x->size(); ++i) (*x)[i] = std::sin(float(i * 37 % 1009));
    }
    p.q = {q.data(), 0, 0, head_dim};
    p.k = {k.data(), 0, 0, head_dim};
    p.v = {v.data(), 0, 0, head_dim};
    p.o = {o.data(), 0, 0, head_dim};
    p.softmax_lse = lse.data();
    p.set_dtype(DType::kFloat32);
    p.batch = p.num_heads_q = p.num_heads_kv = 1;
    p.seq_q.seqlen = seqlen_q;
    p.seq_k.seqlen = seqlen_k;
    p.head_dim = p.head_dim_v = head_dim;
    p.logits.softmax_scale = 0.25f;
  }
};

// Plain in fp16, with products in 8 bits.
struct RoundedCall : Plain {
  std::vector<cpu::Float16> q16, k16, v16, o16;

  RoundedCall(int seqlen_q, int seqlen_k, int head_dim, Quantize mode)
      : Plain(seqlen_q, seqlen_k, head_dim), q16(in_fp16(q)), k16(in_fp16(k)), v16(in_fp16(v)) {
    o16.resize(o.size());
    p.q.data = q16.data();
    p.k.data = k16.data();
    p.v.data = v16.data();
    p.o.data = o16.data();
    p.set_dtype(DType::kFloat16);
    p.quantize = mode;
  }

  static std::vector<cpu::Float16> in_fp16(std::vector<float> const& x) {
    std::vector<cpu::Float16> result(x.size());
    for (size_t i = 0; i < x.size(); ++i) cpu::from_float(x[i], result[i]);
    return result;
  }
};

// A copy of numbers, after which no memory may be read.
class Guarded {
 public:
  explicit Guarded(std::vector<cpu::Float16> const& x) {
    size_t const page = size_t(sysconf(_SC_PAGESIZE)), bytes = x.size() * sizeof(x[0]);
    size_t const own = (bytes + page - 1) / page * page;
    size_ = own + page;
    pages_ = static_cast<char*>(
        mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CHECK(pages_ != MAP_FAILED && mprotect(pages_ + own, page, PROT_NONE) == 0);
    data = pages_ + own - bytes;
    std::memcpy(data, x.data(), bytes);
  }
  ~Guarded() { munmap(pages_, size_); }
  Guarded(Guarded const&) = delete;

  char* data;

 private:
  char* pages_;
  size_t size_;
};

}  // namespace

TEST(every_case) {
  for (Case const& what : attention_case::cases(24)) run(what);
}

TEST(every_option) {
  for (Case const& what : attention_case::option_cases(24)) run(what);
  for (Case const& what : attention_case::logit_cases(24)) run(what);
}

TEST(odd_head_dims) {
  for (Case const& what : attention_case::odd_head_dims()) run(what);
}

TEST(q_and_k_in_8_bits) {
  for (auto const& cases : {attention_case::cases(24), attention_case::option_cases(24)}) {
    for (Case what : cases) {
      if (what.dropout_p > 0) continue;
      what.quantize = Quantize::kQk;
      run(what);
    }
  }
}

// Weights that are rounded to 8 bits may fall the other way. tests/call/test_quantize_accuracy.py
// compares the fastest instruction set to the definition.
TEST(instruction_sets_round_weights_alike) {
  for (Quantize mode : {Quantize::kInt8, Quantize::kFp8}) {
    std::vector<std::vector<float>> results;
    for_each_isa([&](Isa isa) {
      RoundedCall x(150, 200, 64, mode);
      x.p.mask.causal = true;
      CHECK(cpu::attention_forward(x.p, {}, isa).ok());
      results.emplace_back();
      for (cpu::Float16 y : x.o16) results.back().push_back(cpu::to_float(y));
    });
    for (std::vector<float> const& result : results) {
      double error = 0, size = 0;
      for (size_t i = 0; i < result.size(); ++i) {
        error += std::pow(result[i] - results[0][i], 2);
        size += std::pow(results[0][i], 2);
      }
      CHECK(size > 0 && error < 1e-5 * size);
    }
  }
}

TEST(nothing_is_read_beyond_the_last_row) {
  for (Quantize mode : {Quantize::kQk, Quantize::kInt8, Quantize::kFp8}) {
    for (float max_error : {0.0f, 1e-6f, 10.0f}) {
      for_each_isa([&](Isa isa) {
        RoundedCall x(9, 70, 20, mode);
        Guarded const q(x.q16), k(x.k16), v(x.v16);
        x.p.q.data = q.data;
        x.p.k.data = k.data;
        x.p.v.data = v.data;
        x.p.max_error = max_error;
        CHECK(cpu::attention_forward(x.p, {}, isa).ok());
      });
    }
  }
}

// More than one tile of queries and of keys, all of them ragged.
TEST(many_tiles) {
  Case causal{"three tiles, causal", 160, 150};
  causal.num_heads_q = 2;
  causal.head_dim = 24;
  causal.causal = true;
  run(causal);
  causal.quantize = Quantize::kQk;
  run(causal);
  causal.quantize = Quantize::kNone;
  Case window = causal;
  window.name = "three tiles, window";
  window.causal = false;
  window.window_left = 70;
  window.window_right = 5;
  run(window);
}

// Rows of one tile are queries times heads, and a group of heads may not fit into one.
TEST(more_heads_in_a_group_than_rows_in_a_tile) {
  for (int heads : {60, 150, 300}) {
    Case x{std::to_string(heads) + " heads", 3, 70};
    x.num_heads_q = heads;
    x.head_dim = 8;
    x.causal = true;
    run(x);
  }
}

TEST(any_number_of_threads_gives_the_same_bits) {
  for_each_isa([](Isa isa) {
    Plain one(1000, 700, 64);
    one.p.mask.causal = true;
    LaunchOptions options;
    options.num_threads = 1;
    CHECK(cpu::attention_forward(one.p, options, isa).ok());
    for (int threads : {2, 3, 7, 64, 0}) {
      Plain many(1000, 700, 64);
      many.p.mask.causal = true;
      options.num_threads = threads;
      CHECK(cpu::attention_forward(many.p, options, isa).ok());
      CHECK(std::memcmp(many.o.data(), one.o.data(), one.o.size() * sizeof(float)) == 0);
      CHECK(std::memcmp(many.lse.data(), one.lse.data(), one.lse.size() * sizeof(float)) == 0);
    }
  });
}

TEST(lse_may_be_unwanted) {
  Plain with(20, 70, 16), without(20, 70, 16);
  without.p.softmax_lse = nullptr;
  CHECK(cpu::attention_forward(with.p, {}).ok());
  CHECK(cpu::attention_forward(without.p, {}).ok());
  CHECK(with.o == without.o);
  CHECK(with.lse != without.lse);
}

TEST(strides_may_be_zero_or_negative) {
  for_each_isa([](Isa isa) {
    // Keys and values in reverse order in memory, all queries one row.
    Plain reversed(20, 70, 16), plain(20, 70, 16);
    for (int n = 0; n < 70; ++n) {
      std::memcpy(&plain.k[n * 16], &reversed.k[(69 - n) * 16], 16 * sizeof(float));
      std::memcpy(&plain.v[n * 16], &reversed.v[(69 - n) * 16], 16 * sizeof(float));
    }
    for (int n = 0; n < 20; ++n) {
      std::memcpy(&plain.q[n * 16], &reversed.q[0], 16 * sizeof(float));
    }
    reversed.p.q.row_stride = 0;
    reversed.p.k.data = &reversed.k[69 * 16];
    reversed.p.v.data = &reversed.v[69 * 16];
    reversed.p.k.row_stride = reversed.p.v.row_stride = -16;
    CHECK(cpu::attention_forward(reversed.p, {}, isa).ok());
    CHECK(cpu::attention_forward(plain.p, {}, isa).ok());
    CHECK(reversed.o == plain.o);
  });
}

// Equal logits of 2e11, where one rounding of the logit is worth thousands of powers of two.
TEST(logits_far_beyond_what_fp32_resolves) {
  for_each_isa([](Isa isa) {
    Plain x(5, 100, 16);
    x.q.assign(x.q.size(), 60000);
    x.k.assign(x.k.size(), 59999);
    for (size_t i = 0; i < x.v.size(); ++i) x.v[i] = float(i / 16);
    CHECK(cpu::attention_forward(x.p, {}, isa).ok());
    for (float o : x.o) CHECK_NEAR(o, 49.5, 1e-4);
  });
}

TEST(infinite_scores) {
  for_each_isa([](Isa isa) {
    Plain x(40, 100, 16);
    x.p.mask.causal = true;  // query i sees 61 + i keys
    x.q.assign(x.q.size(), 1);
    x.k[80 * 16] = INFINITY;   // seen by queries from 20 on: inf - inf
    x.k[10 * 16] = -INFINITY;  // seen by all: a weight of 0
    x.v[10 * 16 + 3] = 1e30f;
    CHECK(cpu::attention_forward(x.p, {}, isa).ok());
    for (int q = 0; q < 40; ++q) {
      for (int d = 0; d < 16; ++d) {
        float const o = x.o[size_t(q) * 16 + d];
        CHECK(q < 20 ? std::fabs(o) <= 1 : std::isnan(o));
      }
      CHECK(q < 20 ? std::isfinite(x.lse[q]) : std::isnan(x.lse[q]));
    }
  });
}

int main(int argc, char** argv) { return check::run(argc, argv); }
