// Kernels of calls whose rows are not in dense operands: the dense cases of test_races.cpp are
// packed or put into pages before they run.
#include <algorithm>
#include <vector>

#include "simt/kernels_under_test.hpp"
#include "simt/packed.hpp"
#include "simt/pages.hpp"
#include "simt/unit_of.hpp"
#include "sm80/decode.hpp"
#include "sm80/forward.hpp"
#include "sm80/latent.hpp"
#include "sm90/latent.hpp"

using namespace cutlass_attn;
using packed::Paged;
using packed::Rows;

namespace {

using Half = cutlass::half_t;

// K and V in pages and in 8 bits, stored as two and four times their values.
struct PagedFp8 : Paged {
  float const k_scale = 0.5f, v_scale = 0.25f;
  std::vector<E4M3> k_fp8, v_fp8;

  explicit PagedFp8(Problem const& p) : Paged(p) {
    store(k, k_fp8, problem.k, k_scale);
    store(v, v_fp8, problem.v, v_scale);
  }

 private:
  static void store(Rows const& from, std::vector<E4M3>& to, Operand& operand, float const& scale) {
    for (uint16_t bits : from.memory) to.push_back(to_e4m3(half_to_float(bits) / scale));
    operand.data = to.data();
    operand.dtype = DType::kFloat8E4M3;
    operand.scale = &scale;
  }
};

// Batch entries embedded in longer ones: rows before and after the valid rows are NaN.
struct Padded {
  static constexpr int kLeft = 2, kRight = 3;
  Problem problem;
  std::vector<int32_t> left, end_q, end_k;
  Rows q, k, v, o;
  std::vector<float> lse;

  explicit Padded(Problem const& p)
      : problem(p),
        left(size_t(p.batch), kLeft),
        end_q(size_t(p.batch), kLeft + p.seq_q.seqlen),
        end_k(size_t(p.batch), kLeft + p.seq_k.seqlen),
        q(elements(p, p.seq_q, p.num_heads_q, p.head_dim)),
        k(elements(p, p.seq_k, p.num_heads_kv, p.head_dim)),
        v(elements(p, p.seq_k, p.num_heads_kv, p.head_dim_v)),
        o(elements(p, p.seq_q, p.num_heads_q, p.head_dim_v)),
        lse(size_t(p.batch) * size_t(p.num_heads_q) * size_t(length(p.seq_q))),
        given_(p) {
    put(q, problem.q, p.q, p.seq_q, p.num_heads_q, p.head_dim);
    put(k, problem.k, p.k, p.seq_k, p.num_heads_kv, p.head_dim);
    put(v, problem.v, p.v, p.seq_k, p.num_heads_kv, p.head_dim_v);
    put(o, problem.o, p.o, p.seq_q, p.num_heads_q, p.head_dim_v);
    problem.softmax_lse = lse.data();
    problem.seq_q = {length(p.seq_q), nullptr, end_q.data(), left.data()};
    problem.seq_k = {length(p.seq_k), nullptr, end_k.data(), left.data()};
  }
  Padded(Padded const&) = delete;

  // Copies the results to their positions in the call.
  void give_back() {
    Problem const& p = given_;
    move(o, p.o, p.seq_q, p.num_heads_q, p.head_dim_v, true);
    int64_t const rows = p.seq_q.seqlen;
    for (int64_t head = 0; head < int64_t(p.batch) * p.num_heads_q; ++head) {
      std::copy_n(lse.begin() + head * length(p.seq_q) + kLeft, rows, p.softmax_lse + head * rows);
    }
  }

 private:
  Problem given_;

  static int32_t length(Sequences const& s) { return s.seqlen + kLeft + kRight; }
  static int64_t elements(Problem const& p, Sequences const& s, int heads, int columns) {
    return int64_t(p.batch) * heads * length(s) * columns;
  }
  void move(Rows& rows, Operand const& there, Sequences const& s, int heads, int columns,
            bool back) {
    rows.move(there, given_.batch, heads, s.seqlen, columns, back, [&](int b, int h, int r) {
      return ((int64_t(b) * heads + h) * length(s) + kLeft + r) * columns;
    });
  }
  void put(Rows& rows, Operand& here, Operand const& there, Sequences const& s, int heads,
           int columns) {
    move(rows, there, s, heads, columns, false);
    int64_t const head = int64_t(length(s)) * columns;
    here = {rows.memory.data(), heads * head, head, columns, there.dtype};
  }
};

// Unchanged.
struct Dense {
  Problem problem;
  explicit Dense(Problem const& p) : problem(p) {}
};

template <class Kernel, class Pages = Paged, class Score = IdentityScore,
          class OtherScore = GeneralScore>
Status run_paged(Problem const& p, RunOptions const& options) {
  Pages paged(p);
  return simt::launch_on_host<Kernel, Score, OtherScore>(paged.problem, options);
}

template <class Kernel>
Status run_packed(Problem const& p, RunOptions const& options) {
  packed::Packed packed({p});
  Status const status =
      simt::launch_on_host<Kernel, IdentityScore, SoftcapScore>(packed.problem, options);
  packed.give_back();
  return status;
}

template <class Kernel>
Status run_padded(Problem const& p, RunOptions const& options) {
  Padded padded(p);
  Status const status =
      simt::launch_on_host<Kernel, IdentityScore, SoftcapScore>(padded.problem, options);
  padded.give_back();
  return status;
}

// Three splits, whose workspace begins as garbage. Each run leaves zeros for the next one.
template <class Kernel, class Pages = Paged, class OtherScore = GeneralScore>
Status run_split(Problem const& p, RunOptions const& given) {
  static KernelUnit const unit = simt::unit_of<Kernel, IdentityScore, OtherScore>();
  constexpr KernelArguments arguments =
      simt::arguments_of_kernel<Kernel, IdentityScore, OtherScore>();
  Pages paged(p);
  paged.problem.num_splits = 3;
  std::vector<char> workspace(size_t(arguments.workspace_bytes(paged.problem, {}, unit.facts)),
                              char(0xff));
  RunOptions options = given;
  static std::vector<int32_t> zeros(64);
  options.workspace = {workspace.data(), int64_t(workspace.size()), zeros.data(),
                       int64_t(zeros.size()) * 4};
  return launch(arguments, unit, paged.problem, {}, options);
}

}  // namespace

std::vector<KernelUnderTest> kernels_under_test() {
  using Decode = sm80::Decode<Half, TileShape<64, 64, 16, 16, 4>>;
  using Varlen = sm80::Forward<Half, TileShape<64, 64, 64, 64, 4>, with::PackedRows>;
  using PagedForward = sm80::Forward<Half, TileShape<64, 64, 64, 64, 4>, with::Pages>;
  using SplitKeys = sm80::Forward<Half, TileShape<64, 64, 64, 64, 4>, with::KeySplits>;

  using DecodeFp8 = sm80::Decode<Half, TileShape<64, 64, 16, 16, 4>, with::StoredAs<E4M3>>;
  using PagedForwardFp8 =
      sm80::Forward<Half, TileShape<64, 64, 64, 64, 4>, with::Pages, with::StoredAs<E4M3>>;
  KernelUnderTest decode{"sm80/decode/f16/d64/16x16x4, split over blocks, pages", DType::kFloat16,
                         &run_split<Decode>};
  KernelUnderTest decode_fp8{"sm80/decode_fp8/f16/d64/16x16x4, converted", DType::kFloat16,
                             &run_split<DecodeFp8, PagedFp8>};
  KernelUnderTest paged_fp8{"sm80/paged_fp8/f16/d64/64x64x4, converted", DType::kFloat16,
                            &run_paged<PagedForwardFp8, PagedFp8>};
  KernelUnderTest alibi{"sm80/paged/f16/d64/64x64x4, ALiBi, pages last to first", DType::kFloat16,
                        &run_paged<PagedForward, Paged, Score<Alibi>, Score<Softcap, Alibi>>};
  using Wide = sm80::Latent<Half, TileShape<512, 512, 16, 16, 1, 4>, with::OwnValues>;
  using WideFp8 =
      sm80::Latent<Half, TileShape<512, 512, 16, 32, 1, 4>, with::OwnValues, with::StoredAs<E4M3>>;
  KernelUnderTest wide{"sm80/wide/f16/d512/16x16x1c4, columns divided, pages", DType::kFloat16,
                       &run_split<Wide>};
  KernelUnderTest wide_fp8{"sm80/wide_fp8/f16/d512/16x32x1c4, columns divided, converted",
                           DType::kFloat16, &run_split<WideFp8, PagedFp8>};
  using WideWgmma = sm90::Latent<Half, TileShape<512, 512, 64, 32, 4, 2>, with::OwnValues>;
  KernelUnderTest wide_wgmma{"sm90/wide/f16/d512/64x32x4c2, columns divided, pages",
                             DType::kFloat16, &run_split<WideWgmma, Paged, SoftcapScore>};
  wide.head_dim = wide_fp8.head_dim = wide_wgmma.head_dim = 512;
  alibi.has_alibi = true;
  decode.is_decode = decode_fp8.is_decode = wide.is_decode = wide_fp8.is_decode = true;
  decode_fp8.fp8_kv = paged_fp8.fp8_kv = wide_fp8.fp8_kv = true;
  return {decode,
          {"sm80/varlen/f16/d64/64x64x4, packed", DType::kFloat16, &run_packed<Varlen>},
          {"sm80/varlen/f16/d64/64x64x4, padded", DType::kFloat16, &run_padded<Varlen>},
          {"sm80/paged/f16/d64/64x64x4, pages", DType::kFloat16, &run_paged<PagedForward>},
          {"sm80/split_keys/f16/d64/64x64x4, tiles of rows merged", DType::kFloat16,
           &run_split<SplitKeys, Dense, SoftcapScore>},
          decode_fp8,
          paged_fp8,
          alibi,
          wide,
          wide_fp8,
          wide_wgmma};
}
