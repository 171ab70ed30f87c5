// Q and K in int8: Q is rounded once per block, and int32 sums become scores.
#pragma once

#include "quantized/queries.hpp"
#include "sm80/operands.hpp"
#include "sm80/quantized/kv_copy.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Score, class Arch>
struct Operands<Config, Score, Arch, int8_t>
    : Operands<Config, Score, Arch, typename Config::Element> {
  using Base = Operands<Config, Score, Arch, typename Config::Element>;
  using Base::Base;
  using Base::copy, Base::log2_scale, Base::q_rows, Base::scores, Base::shared, Base::start;
  using typename Base::Address, typename Base::Place, typename Base::Shared, typename Base::Step;

  // Scales of a thread's rows of Q.
  struct QScales {
    float rows[Config::kRows] = {};
  };

  template <class Params>
  CUTE_DEVICE static void store_block(Params const& params, typename Config::Coord const& tile,
                                      Shared& shared) {
    auto const head = params.head_of(tile.seq, tile.head_kv);
    shared.block.all_scales = params.scales_of(head, 0);
    shared.block.shift = params.shift_of(head);
    for (auto& of_lane : shared.block.start) {
      for (uint32_t& start : of_lane) start = quantize::kMagicBits;
    }
  }

  CUTE_DEVICE void begin_with_q(typename Step::Q& q) {
    Base::copy_first_tile();
    quantize_q(q);
  }
  // The buffer of Q becomes the second stages.
  CUTE_DEVICE void release_q() const { Arch::sync(); }

  // Rounds Q to int8 in half of Q's buffer, while the first K, or K and V, are being copied. After
  // the next barrier the other half may be overwritten.
  CUTE_DEVICE void prepare_q() {
    typename Step::Q q;
    Arch::template cp_async_wait_group<1>();
    Arch::sync();  // Q full
    quantize_q(q);
    Arch::sync();  // Q empty
    Step::store_q8(q, shared, scores.place);
  }
  CUTE_DEVICE Address q_rows_of_tile() const {
    return Step::q8_rows(Arch::smem_address(shared.q8), scores.place.warp_m(),
                         scores.place.thread % 32);
  }

  CUTE_DEVICE auto units(int key) const {
    if constexpr (kKeepsSums) {
      return units_of(key, [&](int i) { return q_scale_of(i); });
    } else {
      return log2_scale;
    }
  }
  CUTE_DEVICE auto units(int key, QScales const& q_scales) const {
    if constexpr (kKeepsSums) {
      return units_of(key, [&](int i) { return q_scales.rows[i]; });
    } else {
      return log2_scale;
    }
  }
  // The part of units() that is constant over tiles, and can be read before a tile is full.
  CUTE_DEVICE QScales q_scales() const {
    QScales scales;
    if constexpr (kKeepsSums) {
      CUTE_UNROLL
      for (int i = 0; i < Config::kRows; ++i) scales.rows[i] = q_scale_of(i);
    }
    return scales;
  }
  CUTE_DEVICE static constexpr bool has_units_of_last(int j) {
    return j % (Config::kScaleKeys / Step::kKeyBlock) != 0;
  }

  template <class S, class IsFull, class Units>
  CUTE_DEVICE void apply(S&& s, int key, IsFull is_full, Units& units) const {
    if constexpr (kKeepsSums && !is_full) units.move_nan(s);
    if constexpr (!kKeepsSums) to_products(s, key);
    Base::apply(s, key, is_full);
  }

  // Converts int32 sums to products of Q and K.
  template <class S>
  CUTE_DEVICE void to_products(S&& s, int key) const {
    float const k_scale = k_scale_of(key);
    CUTE_UNROLL
    for (int i = 0; i < Config::kRows; ++i) {
      float const factor = q_scale_of(i) * k_scale;
      float const q_shift = shared.block.q_shift[scores.place.row(i)];
      CUTE_UNROLL
      for (int j = 0; j < columns_of<decltype(s)>; ++j) {
        s(i, j) = fmaf(s(i, j) - quantize::kMagic, factor, q_shift);
      }
    }
  }

  // In units of log2: the constant Q . shift, which int32 sums lack, for the LSE and sinks.
  template <class Softmax>
  CUTE_DEVICE void complete_max(Place const& place, Softmax& softmax) const {
    if constexpr (kKeepsSums) {
      if (!needs_q_shift(scores.p)) return;
      CUTE_UNROLL
      for (int i = 0; i < Config::kRows; ++i) {
        float& max = softmax.rows[i].max;
        if (max != -kInf) max = fmaf(shared.block.q_shift[place.row(i)], log2_scale, max);
      }
    }
  }

 private:
  // Whether int32 sums go to softmax unconverted.
  static constexpr bool kKeepsSums = Score::kIsIdentity;
  // Lower bound of a factor: a scale may be 0, and 0 times -inf would be NaN.
  static constexpr float kMinFactor = 0x1p-126f;

  // Whether logits need Q . shift. If int32 sums go to softmax, only the LSE and sinks need it.
  CUTE_DEVICE static bool needs_q_shift(Problem const& p) {
    return !kKeepsSums || p.softmax_lse || p.logits.sinks;
  }

  // Rounds Q to int8 into registers, and stores its scales in shared memory. Q is full.
  CUTE_DEVICE void quantize_q(typename Step::Q& q) {
    using Queries = QuantizedQueries<Config, Score, Arch>;
    float scale[Config::kRows] = {};
    Queries::load(q_rows, q, scale);
    bool const is_first = scores.place.thread % 4 == 0;  // one thread per row
    CUTE_UNROLL
    for (int i = 0; i < Config::kRows; ++i) {
      if (is_first) shared.block.q_scale[scores.place.row(i)] = scale[i];
    }
    unpredicated_if(needs_q_shift(scores.p), [&] {
      int const columns = (scores.p.head_dim + 31) / 32 * 32;
      CUTE_UNROLL
      for (int i = 0; i < Config::kRows; ++i) {
        float const sum = Queries::dot(q_rows, i, shared.block.shift, columns);
        if (is_first) shared.block.q_shift[scores.place.row(i)] = sum;
      }
    });
    Arch::sync_warp();  // q_scale and q_shift full, for the threads that have their rows
    Arch::load_shared(Arch::smem_address(shared.block.start[scores.place.thread % 4]), start);
  }

  template <class QScaleOf>
  CUTE_DEVICE auto units_of(int key, QScaleOf&& q_scale_of) const {
    SumUnits<Config::kRows> units;
    float const k_scale = k_scale_of(key) * log2_scale;
    CUTE_UNROLL
    for (int i = 0; i < Config::kRows; ++i) {
      units.factors[i] = fmaf(q_scale_of(i), k_scale, kMinFactor);
    }
    return units;
  }

  // Scale of the key group that this thread has in an accumulator.
  CUTE_DEVICE float k_scale_of(int key) const {
    return shared.block.scales[Config::place_of_scales(key)].of_group(scores.place.thread % 4);
  }

  CUTE_DEVICE float q_scale_of(int i) const { return shared.block.q_scale[scores.place.row(i)]; }
};

}  // namespace cutlass_attn::sm80
