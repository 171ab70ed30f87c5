// The loop over key tiles of the mma.sync forward kernel.
//
// A tile of keys goes through softmax, and then meets V, in slices of 16 or 32 keys: its weights
// are in registers for no longer than that. Here are the steps of all schedules, and one of them:
//
//   mainloop_pipelined.hpp  Q stays in registers (Config::kPipelined)
//   mainloop_general.hpp    the same, for the general score
//   mainloop_split.hpp      several warps share a row
//   tiled, below            where Q has no room in registers: Q K of the whole tile first, so that
//                           Q is read from shared memory once a tile; then weights(j+1) beside
//                           P V(j). One buffer each:
//
//              cp.async   V(n) ------+   K(n+1) ----------+
//              compute    Q K(n)     |   softmax, P V(n)  |   Q K(n+1) ...
//                      ^ K(n) landed   ^ V(n) landed
//
// Sums are kept in fp32, or in what Config::QkAccumulator and Config::PvAccumulator say. In fp16,
// Q K^T is converted before softmax; P V is added up over one slice alone and then joins O, which
// stays in fp32: the error does not grow with the number of keys.
#pragma once

#include <type_traits>

#include "core/alignment.hpp"
#include "core/mask.hpp"
#include "core/scheduler.hpp"
#include "cute/fragment.hpp"
#include "cute/softmax.hpp"
#include "sm80/config.hpp"
#include "sm80/mainloop_general.hpp"
#include "sm80/mainloop_pipelined.hpp"
#include "sm80/mainloop_split.hpp"
#include "sm80/tile_loader.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Score, class Arch>
struct MainloopForward {
  using Element = typename Config::Element;
  using Address = typename Arch::SmemAddress;
  using TileQ = typename Config::TileQ;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  using TiledMma = typename Config::template TiledMma<Arch>;
  using QkAccumulator = typename Config::QkAccumulator;
  using PvAccumulator = typename Config::PvAccumulator;
  static constexpr int kM = Config::kBlockM, kN = Config::kBlockN;
  static constexpr int kD = Config::kHeadDim, kDV = Config::kHeadDimV;
  static constexpr int kSlice = Config::template slice<Score>(), kSlices = kN / kSlice;
  static_assert(!Config::kPipelined || kSlices % 2 == 0);
  static constexpr int kRowBlocks = Config::kWarpRows / 16;  // m16 blocks of a warp
  static constexpr int kRows = 2 * kRowBlocks;               // rows of a thread

  using LoaderQ = TileLoader<Arch, Element, TileQ, Config::kThreads>;
  using LoaderK = TileLoader<Arch, Element, TileK, Config::kThreads>;
  using LoaderV = TileLoader<Arch, Element, TileV, Config::kThreads>;
  using Scores = decltype(partition_fragment_C(TiledMma{}, Shape<Int<kM>, Int<kSlice>>{}));
  // Q K^T as the tensor cores add it up.
  using Products = decltype(partition_fragment_C(
      typename Config::template TiledMma<Arch, QkAccumulator>{}, Shape<Int<kM>, Int<kSlice>>{}));
  using Output =
      decltype(partition_fragment_C(TiledMma{}, Shape<Int<kM>, Int<Config::kWarpColumns>>{}));
  // Other calls than aligned ones are for the general score alone: see manifest.toml.
  using IsAligned = std::conditional_t<Score::kIsGeneral, bool, true_type>;
  // m16n8k16 operands of a warp: A of one m16 block, B of two n8 blocks.
  using Words = uint32_t[4];

  AttnParams const& p;
  typename Config::SharedStorage& shared;
  TileCoord const& tile;
  NearMask const& mask;
  // The tiled loop is short of registers, and long enough for a look into shared memory.
  std::conditional_t<Config::kPipelined, TileRange const, TileRange const&> range;
  Score const score;
  float const log2_scale;
  int thread;
  IsAligned const is_aligned;  // whether 16 bytes of an operand can be copied at a time
  Element const* k_source;     // what this thread copies first of the next tile to be copied
  Element const* v_source;
  Address k_target;                   // where this thread copies to in K's buffer 0, for cp.async
  Address q_block, k_block, v_block;  // this lane's row of block (0, 0), for ldmatrix

  Output acc_o;  // (MMA, M, D)
  SoftmaxRows<Arch, kRows, Config::kWeightLimit> softmax;
  // P of a slice, as the A operand of P V.
  Words p_words[kSlice < 16 ? 1 : kSlice / 16][kRowBlocks];
  Words q_words[Config::kPipelined ? kRowBlocks * (kD / 16) : 1];

  // `coord` and `tiles` are what those in shared memory are, or are about to be.
  CUTE_DEVICE MainloopForward(AttnParams const& params, TileCoord const& coord,
                              TileRange const& tiles, typename Config::SharedStorage& storage)
      : p(params),
        shared(storage),
        tile(shared.tile),
        mask(shared.mask),
        range(Config::kPipelined ? tiles : storage.range),
        score(params),
        log2_scale(score.log2_scale()),
        thread(Arch::thread()),
        is_aligned(find_aligned(params)),
        k_source(source_of<LoaderK>(p.k, coord, tiles.begin)),
        v_source(source_of<LoaderV>(p.v, coord, tiles.begin)) {
    int const lane = thread % 32, warp = thread / 32;
    Address const q = Arch::smem_address(&shared) + Config::kQueriesAt;
    Address const k = Arch::smem_address(shared.k);
    Address const v = Arch::smem_address(shared.v);
    k_target = k + LoaderK::offset(thread);
    q_block = q + TileQ::offset(warp * 16 + lane % 16, lane / 16 * 8);
    k_block = k + TileK::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
    v_block = v + TileV::offset(lane % 16, lane / 16 * 8);
    clear(acc_o);
    CUTE_UNROLL
    for (int n = 0; n < kSlice / 16; ++n) {
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) p_words[n][m][i] = 0;
      }
    }
  }

  CUTE_DEVICE static IsAligned find_aligned(AttnParams const& p) {
    if constexpr (Score::kIsGeneral) {
      return address_bits(p, sizeof(Element)) % 16 == 0;
    } else {
      return {};
    }
  }

  // Whether all queries see the whole tile that begins at `key`, and code of its own is for that.
  // The general score has none: most of its code is the same for all tiles, and long.
  CUTE_DEVICE auto is_full(int key) const {
    if constexpr (Score::kIsGeneral) {
      return false_type{};
    } else {
      return range.is_full(key);
    }
  }

  // Which rows this warp has, and which share of those that Config::kColumnWarps have together.
  CUTE_DEVICE int row_warp() const { return thread / 32 / Config::kColumnWarps; }
  CUTE_DEVICE int column_warp() const { return thread / 32 % Config::kColumnWarps; }

  // Row of the tile and column of the slice that element (i, j) of as_rows() is.
  CUTE_DEVICE int row(int i) const { return row_of(thread, i); }
  CUTE_DEVICE static int row_of(int thread, int i) {
    return thread / 32 / Config::kColumnWarps * 16 + thread % 32 / 4 + i % 2 * 8 +
           i / 2 * (16 * Config::kWarps);
  }
  CUTE_DEVICE int column(int j) const { return thread % 4 * 2 + j % 2 + j / 2 * 8; }

  // Where this thread reads its first vector of the tile that begins at `key`.
  template <class Loader>
  CUTE_DEVICE Element const* source_of(TensorRef const& t, TileCoord const& coord, int key) const {
    return coord.template head_of<Element const>(t, coord.head_kv) +
           int64_t(key + Loader::row(thread)) * t.row_stride + Loader::column(thread);
  }

  // Copies the tile that begins at key `at`, maybe beyond the last.
  template <class Loader>
  CUTE_DEVICE void copy(Address target, Element const* source, int64_t row_stride, int at,
                        int columns) const {
    if (p.seqlen_k - at >= kN && at < range.end) {
      Loader::load_whole(target, source, row_stride, columns, thread);
    } else if (at < range.end) {
      Loader::load(target, source, row_stride, p.seqlen_k - at, columns, thread);
    }
    Arch::async_copy_commit();
  }

  // The same element by element, to the tile at `smem`. Finds out anew where this thread is, or the
  // compiler keeps that through the loop, and spills for it.
  template <class Loader>
  CUTE_DEVICE void copy_elements(char const* smem, TensorRef const& t, int at, int columns) const {
    if (at >= range.end) return;
    int own = thread;
    asm volatile("" : "+r"(own));
    Element const* const source = tile.template head_of<Element const>(t, tile.head_kv) +
                                  int64_t(at + Loader::row(own)) * t.row_stride +
                                  Loader::column(own);
    Loader::load_elements(Arch::smem_address(smem) + Loader::offset(own), source, t.row_stride,
                          p.seqlen_k - at, columns, own);
  }

  // Start copying the tile that begins at key `at`: the one after that of the call before.
  CUTE_DEVICE void copy_k(int at, int stage) {
    if (!is_aligned) return copy_elements<LoaderK>(shared.k[stage], p.k, at, p.head_dim);
    copy<LoaderK>(k_target + stage * TileK::kBytes, k_source, p.k.row_stride, at, p.head_dim);
    k_source += kN * p.k.row_stride;
  }
  CUTE_DEVICE void copy_v(int at, int stage) {
    if (!is_aligned) return copy_elements<LoaderV>(shared.v[stage], p.v, at, p.head_dim_v);
    // V's buffers follow K's. Where rows are as long, so does this thread's place in them.
    Address target = k_target + Config::kStages * TileK::kBytes;
    if constexpr (kD != kDV) {
      target += LoaderV::offset(thread) - LoaderK::offset(thread);
    }
    copy<LoaderV>(target + stage * TileV::kBytes, v_source, p.v.row_stride, at, p.head_dim_v);
    v_source += kN * p.v.row_stride;
  }

  // acc += A B for one m16n8k16 block, in the type of acc.
  template <class Acc>
  CUTE_DEVICE void multiply(Words const& a, uint32_t const* b, Acc&& acc) const {
    Tensor tA = make_tensor(reinterpret_cast<Element const*>(a), Shape<_8>{});
    Tensor tB = make_tensor(reinterpret_cast<Element const*>(b), Shape<_4>{});
    using Accumulator = typename std::decay_t<Acc>::value_type;
    gemm(MMA_Atom<typename Arch::template Mma<Element, Accumulator>>{}, tA, tB, acc);
  }

  CUTE_DEVICE void load_q(int m, int k, Words& words) const {
    Arch::load_matrix(TileQ::block(q_block, m * Config::kWarps, k), words);
  }

  // S += Q K^T for the 16 columns [16 k, ...) of Q and K and the keys of a slice of the K tile in
  // buffer `stage`.
  template <class Q>
  CUTE_DEVICE void multiply_qk(int stage, int slice, int k, Q const& q, Products& acc_s) const {
    CUTE_UNROLL
    for (int n = 0; n < kSlice / 16; ++n) {
      Words words;
      Arch::load_matrix(TileK::block(k_block + stage * TileK::kBytes, slice * (kSlice / 16) + n, k),
                        words);
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        CUTE_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) {
          multiply(q[m], words + 2 * half, acc_s(_, m, 2 * n + half));
        }
      }
    }
  }

  // S of kCount slices from `first` on, Q from registers or shared memory.
  template <int kCount>
  CUTE_DEVICE void product_qk(int stage, int first, Products* acc_s) const {
    CUTE_UNROLL
    for (int j = 0; j < kCount; ++j) clear(acc_s[j]);
    CUTE_UNROLL
    for (int k = 0; k < kD / 16; ++k) {
      Words q[kRowBlocks];
      if constexpr (!Config::kPipelined) {
        CUTE_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) load_q(m, k, q[m]);
      }
      CUTE_UNROLL
      for (int j = 0; j < kCount; ++j) {
        multiply_qk(stage, first + j, k, Config::kPipelined ? q_words + k * kRowBlocks : q,
                    acc_s[j]);
      }
    }
  }

  // S in fp32: the products themselves, or a copy of them.
  CUTE_DEVICE static decltype(auto) in_fp32(Products& acc_s) {
    if constexpr (std::is_same_v<QkAccumulator, float>) {
      return (acc_s);
    } else {
      return convert_to<float>(acc_s);
    }
  }

  CUTE_DEVICE void load_v(int stage, int n, int d, Words& words) const {
    Arch::load_matrix_trans(TileV::block(v_block + stage * TileV::kBytes, n, d), words);
  }

  // O += P V for the slice whose weights p_words holds. `first` is its load_v(), done ahead, of the
  // first 16 keys and columns.
  CUTE_DEVICE void product_pv(int stage, int slice, Words const& first) {
    if constexpr (std::is_same_v<PvAccumulator, float>) {
      product_pv_at_once(stage, slice, first);
    } else {
      product_pv_in_levels(stage, slice, first);
    }
  }

  CUTE_DEVICE void product_pv_at_once(int stage, int slice, Words const& first) {
    CUTE_UNROLL
    for (int n = 0; n < kSlice / 16; ++n) {
      CUTE_UNROLL
      for (int d = 0; d < kDV / 16; ++d) multiply_pv(stage, slice, n, d, first, acc_o, 2 * d);
    }
  }

  // The slice's sum in PvAccumulator, 16 columns at a time, and then O += that.
  CUTE_DEVICE void product_pv_in_levels(int stage, int slice, Words const& first) {
    using Sums = decltype(partition_fragment_C(
        typename Config::template TiledMma<Arch, PvAccumulator>{}, Shape<Int<kM>, _16>{}));
    CUTE_UNROLL
    for (int d = 0; d < kDV / 16; ++d) {
      Sums sums;  // (MMA, M, half)
      clear(sums);
      CUTE_UNROLL
      for (int n = 0; n < kSlice / 16; ++n) multiply_pv(stage, slice, n, d, first, sums, 0);
      auto const wide = convert_to<float>(sums);
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        CUTE_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) {
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) acc_o(i, m, 2 * d + half) += wide(i, m, half);
        }
      }
    }
  }

  // Of that, the keys [16 n, ...) of the slice and the columns [16 d, ...): into sums(_, m, at) and
  // sums(_, m, at + 1), 8 columns each.
  template <class Sums>
  CUTE_DEVICE void multiply_pv(int stage, int slice, int n, int d, Words const& first, Sums& sums,
                               int at) const {
    Words words;
    if (n == 0 && d == 0) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) words[i] = first[i];
    } else {
      load_v(stage, slice * (kSlice / 16) + n, d, words);
    }
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        multiply(p_words[n][m], words + 2 * half, sums(_, m, at + half));
      }
    }
  }

  // Scores of the slice that begins at `key`: score functor and mask. `is_full`: no key is hidden.
  template <class S, class IsFull>
  CUTE_DEVICE void finish_scores(S&& s, int key, IsFull is_full) const {
    if constexpr (is_full && Score::kIsIdentity) return;
    // Keeps the compiler from holding the ends of every row's interval from slice to slice; it
    // spilled for them.
    asm volatile("" ::: "memory");
    if constexpr (Score::kIsGeneral) {
      score.template scale<kRows, decltype(size<1>(s))::value>(s);
      add_terms(s, key);
    } else {
      if constexpr (!Score::kIsIdentity) {
        CUTE_UNROLL
        for (int i = 0; i < size(s); ++i) s(i) = score(s(i));
      }
      hide(s, key, is_full);
    }
  }

  // Where the logits of a slice are that this thread has.
  struct Place {
    MainloopForward const& loop;
    int first_key, thread;
    CUTE_DEVICE int batch() const { return loop.tile.batch; }
    CUTE_DEVICE int head(int i) const { return loop.tile.head(row_of(thread, i)); }
    CUTE_DEVICE int query(int i) const { return loop.tile.query(row_of(thread, i)); }
    CUTE_DEVICE int key(int j) const { return first_key + loop.column(j); }
  };

  // The general score's terms, and the mask.
  template <class S>
  CUTE_DEVICE void add_terms(S&& s, int key) const {
    score.template add_terms<kRows, decltype(size<1>(s))::value>(
        s, Place{*this, key, Arch::recompute(thread)});
    branch(!range.is_full(key), [&] { hide(s, key, false_type{}); });
  }

  // -inf for the keys of a slice that the mask hides. `is_full`: none.
  template <class S, class IsFull>
  CUTE_DEVICE void hide(S&& s, int key, IsFull is_full) const {
    int own = thread;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      own = Arch::recompute(own);
      int const r = row_of(own, i), q = tile.query(r);
      int const lo = is_full ? 0 : mask.lo(q - tile.q_begin) - key;
      int const hi = is_full ? 0 : mask.hi(q - tile.q_begin) - key;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(s); ++j) {
        int const n = column(j);
        s(i, j) = is_full || (n >= lo && n < hi) ? s(i, j) : -kInf;
      }
    }
  }

  // Weights of a slice, rounded, in p_words.
  CUTE_DEVICE void pack(Scores const& weights) {
    CUTE_UNROLL
    for (int n = 0; n < kSlice / 16; ++n) {
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          // An m16n8 block: rows g and g + 8, two columns.
          auto const pair = weights(_, m, 2 * n + i / 2);
          p_words[n][m][i] = Arch::template pack<Element>(pair(i % 2 * 2), pair(i % 2 * 2 + 1));
        }
      }
    }
  }

  // Drops weights of a slice that begins at key `at`, and scales the others up.
  template <class W>
  CUTE_DEVICE void drop(W&& w, int at) const {
    if constexpr (Score::kIsGeneral) {
      branch(p.dropout_p != 0.0f, [&] {
        Dropout const& dropout = shared.dropout;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
          int const r = row(i);
          PhiloxWords const words =
              dropout.draw(tile.batch, tile.head(r), tile.query(r), at + column(0));
          CUTE_UNROLL
          for (int j = 0; j < size<1>(w); ++j) {
            // The slice is all the 32 keys of a draw, one half or a quarter. (An index that is no
            // constant would put the words into local memory.)
            uint32_t word = words.word[j / 2];
            if (kSlice <= 16 && at % 32 >= 16) word = words.word[(2 + j / 2) % 4];
            if (kSlice == 8 && at % 16 >= 8) word = at % 32 < 16 ? words.word[1] : words.word[3];
            w(i, j) *= dropout.factor(word, j);
          }
        }
      });
    }
  }

  // From the finished scores of a slice that begins at key `at` to its weights, in p_words. False:
  // some are too large, a reference must be raised. What needs no weights, `meanwhile`, is done
  // before the warp agrees on that: instructions do not mix across a branch.
  template <class Meanwhile>
  CUTE_DEVICE bool weigh(Scores& acc_s, int at, Meanwhile&& meanwhile) {
    Tensor s = as_rows(acc_s);  // (row, key)
    bool const ok = softmax.weigh(s, log2_scale);
    drop(s, at);
    pack(acc_s);
    meanwhile();
    return !Arch::any(!ok);
  }

  // The same after raising references; from the scores, once more.
  CUTE_DEVICE void weigh_again(Scores& acc_s, int at) {
    Tensor s = as_rows(acc_s);
    softmax.raise(s, as_rows(acc_o), log2_scale);
    drop(s, at);
    pack(acc_s);
  }

  // The same for a score of much code, which looks at the scores before; raises references first.
  CUTE_DEVICE void weigh_raised(Scores& acc_s, int at) {
    Tensor s = as_rows(acc_s);
    softmax.weigh_raised(s, as_rows(acc_o), log2_scale);
    drop(s, at);
    pack(acc_s);
  }

  // Starts copying the first tile; Q to registers once it and K are there.
  CUTE_DEVICE void begin_pipelined() {
    copy_k(range.begin, 0);
    copy_v(range.begin, 0);
    Arch::template async_copy_wait<1>();
    Arch::sync();  // Q and K are there for all
    CUTE_UNROLL
    for (int k = 0; k < kD / 16; ++k) {
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) load_q(m, k, q_words[k * kRowBlocks + m]);
    }
  }

  // --- tiled -----------------------------------------------------------------------------------

  template <int j, class IsFull>
  CUTE_DEVICE void slice(int key, Products (&acc_s)[kSlices], IsFull is_full) {
    Scores weights = in_fp32(acc_s[j]);  // the K they were made of is not there any more
    finish_scores(as_rows(weights), key + j * kSlice, is_full);
    if (!weigh(weights, key + j * kSlice, [] {})) {
      auto&& scores = in_fp32(acc_s[j]);
      finish_scores(as_rows(scores), key + j * kSlice, is_full);
      weigh_again(scores, key + j * kSlice);
    }
    softmax.add();
    if constexpr (j == 0) copy_k(key + kN, 0);
    Words v_first;
    load_v(0, j * (kSlice / 16), 0, v_first);
    product_pv(0, j, v_first);
    if constexpr (j + 1 < kSlices) slice<j + 1>(key, acc_s, is_full);
  }

  template <class IsFull>
  CUTE_DEVICE void step(int key, IsFull is_full) {
    Arch::template async_copy_wait<0>();
    Arch::sync();  // K is there for all; the V before is read by none
    copy_v(key, 0);
    Products acc_s[kSlices];
    product_qk<kSlices>(0, 0, acc_s);
    Arch::template async_copy_wait<0>();
    Arch::sync();  // V is there for all; K is read by none
    slice<0>(key, acc_s, is_full);
  }

  CUTE_DEVICE void run_tiled() {
    copy_k(range.begin, 0);
    for (int key = range.begin; key < range.end; key += kN) {
      if (is_full(key)) {
        step(key, true_type{});
      } else {
        step(key, false_type{});
      }
    }
  }

  // Leaves the unnormalised O and the softmax state in acc_o and softmax.
  CUTE_DEVICE void run(TileCoord const& coord, TileRange const& tiles) {
    if (tiles.begin >= tiles.end) {  // these queries see no key
      Arch::sync();                  // shared.tile is there for all
      return;
    }
    Address const q = Arch::smem_address(&shared) + Config::kQueriesAt;
    LoaderQ::load_queries(q + LoaderQ::offset(thread), p, coord, is_aligned, thread);
    Arch::async_copy_commit();
    if constexpr (Config::kPipelined) {
      if (!is_aligned) Arch::sync();  // shared.tile is there for all
      if constexpr (Score::kIsGeneral) {
        GeneralSchedule<Config, Arch, MainloopForward>{*this}.run();
      } else {
        PipelinedSchedule<Config, Arch, MainloopForward>{*this}.run();
      }
    } else {
      Arch::sync();  // shared.range and shared.tile are there for all
      if constexpr (Config::kColumnWarps > 1) {
        SplitSchedule<Config, Score, Arch, MainloopForward>(*this).run();
      } else {
        run_tiled();
      }
    }
    // As a number of its own, or the compiler keeps what was made of it before, through the loop.
    asm volatile("" : "+r"(thread));
    Arch::template async_copy_wait<0>();  // of tiles beyond the last
    softmax.complete();
    if constexpr (Config::kColumnWarps > 1) merge_sums<Config, Arch>(*this);
  }
};

}  // namespace cutlass_attn::sm80
