#include "cpu/attention.hpp"

#include <algorithm>
#include <vector>

#include "core/predict.hpp"
#include "core/sequences.hpp"
#include "cpu/backward.hpp"
#include "cpu/quantized.hpp"
#include "cpu/threads.hpp"
#include "cpu/tile.hpp"
#include "runtime/options.hpp"

namespace cutlass_attn::cpu {
namespace {

// All tiles of a call, in a linear order. The order depends on the call alone, so results do not
// depend on the number of threads.
class Tiles {
 public:
  explicit Tiles(Problem const& p)
      : p_(p),
        group_(p.num_heads_q / p.num_heads_kv),
        heads_(std::min(group_, kTileRows)),
        queries_(p.kv.indices ? 1 : std::min(kTileRows / heads_, p.seq_q.seqlen)),
        head_tiles_((group_ + heads_ - 1) / heads_) {
    count_ = tiles_of(p.seq_q.seqlen) * p.batch;
    double logits = double(p.seq_q.seqlen) * p.seq_k.seqlen * p.batch;
    if (options_of(p, Op::kForward) & option::varlen) {
      first_.assign(1, 0);
      logits = 0.0;
      for (int b = 0; b < p.batch; ++b) {
        SeqLens const lens = VarlenSeqInfo(p, b).lens(p);
        first_.push_back(first_.back() + tiles_of(lens.q));
        logits += double(lens.q) * lens.k;
      }
      count_ = first_.back();
    }
    work_ = logits * p.num_heads_q * (p.head_dim + p.head_dim_v);
  }

  int64_t count() const { return count_; }
  int max_rows() const { return heads_ * queries_; }
  double work() const { return work_; }  // multiply-adds, without a mask

  // Neighbouring tiles share K and V. Under a causal mask the last queries have the most work, so
  // they come first; the threads then finish together.
  Tile operator[](int64_t index) const {
    int batch = 0, seqlen_q = p_.seq_q.seqlen;
    if (first_.empty()) {
      batch = int(index / tiles_of(seqlen_q));
      index -= batch * tiles_of(seqlen_q);
    } else {
      batch = int(std::upper_bound(first_.begin(), first_.end(), index) - first_.begin()) - 1;
      index -= first_[size_t(batch)];
      seqlen_q = VarlenSeqInfo(p_, batch).lens(p_).q;
    }
    int const query_tiles = (seqlen_q - 1) / queries_ + 1;
    int const query_tile = query_tiles - 1 - int(index % query_tiles);
    index /= query_tiles;
    int const head_tile = int(index % head_tiles_);
    int const kv_head = int(index / head_tiles_);
    int const first = head_tile * heads_;
    int const q_begin = query_tile * queries_;
    Tile tile;
    tile.batch = batch;
    tile.kv_head = kv_head;
    tile.head_begin = kv_head * group_ + first;
    tile.heads = std::min(heads_, group_ - first);
    tile.q_begin = q_begin;
    tile.q_end = q_begin + std::min(queries_, seqlen_q - q_begin);
    return tile;
  }

 private:
  Problem const& p_;
  int group_, heads_, queries_, head_tiles_;
  int64_t count_;
  std::vector<int64_t> first_;  // first tile of each batch entry, if lengths differ
  double work_;

  // Tiles of a batch entry with seqlen_q queries.
  int64_t tiles_of(int32_t seqlen_q) const {
    return (int64_t(seqlen_q) + queries_ - 1) / queries_ * head_tiles_ * p_.num_heads_kv;
  }
};

}  // namespace

Status predict_errors(Problem const& params, RunOptions const& options, bool is_gpu,
                      float* errors) {
  static Isa const isa = best_isa();
  return predict_errors(params, isa, options, is_gpu, errors);
}

Status attention_forward(Problem const& params, RunOptions const& options) {
  static Isa const isa = best_isa();
  return attention_forward(params, options, isa);
}

Status attention_forward(Problem const& params, RunOptions const& options, Isa isa) {
  if (params.q.dtype == DType::kFloat64) return attention_forward_float64(params, options, isa);
  Tiles const tiles(params);
  bool const is_8_bit = params.quantize != Quantize::kNone;
  TileFunction const wide = tile_function(params, isa);
  TileFunction const narrow = is_8_bit ? quantized_tile_function(params, isa) : wide;
  size_t size = scratch_size(params, tiles.max_rows());
  if (is_8_bit) size = std::max(size, quantized_scratch_size(params, tiles.max_rows()));
  std::vector<float> errors;
  if (params.max_error > 0.0f) {
    errors.resize(size_t(params.batch) * size_t(params.num_heads_q));
    Status const status = predict_errors(params, isa, options, false, errors.data());
    if (!status.ok()) return status;
  }
  // One decision for all query heads that share a KV head, as on a GPU.
  int const group = params.num_heads_q / params.num_heads_kv;
  auto const is_within = [&](Tile const& tile) {
    if (errors.empty()) return true;
    auto const first =
        errors.begin() + int64_t(tile.batch) * params.num_heads_q + int64_t(tile.kv_head) * group;
    return std::all_of(first, first + group,
                       [&](float error) { return quantize::is_within(error, params.max_error); });
  };
  return run_items(tiles.count(), tiles.work(), size * sizeof(float), options,
                   [&](int64_t i, char* scratch) {
                     Tile const tile = tiles[i];
                     TileFunction const run = is_within(tile) ? narrow : wide;
                     run(params, tile, reinterpret_cast<float*>(scratch));
                   });
}

}  // namespace cutlass_attn::cpu
