// Launch parameters of the wgmma kernel for latent attention: those of latent/params.hpp, and how
// TMA finds the rows of its cache.
#pragma once

#include "latent/params.hpp"
#include "sm90/tma_rows.hpp"

namespace cutlass_attn {
namespace sm90 {

// Boxes of eight rows of K or V with all columns, laid out as a group of GroupedTile. A unit of 16
// keys, which lies in one page, is two boxes: each of the two blocks of a cluster copies one, a
// block alone both.
struct LatentBoxes {
  static constexpr int kRows = 8, kUnit = 16;
  TensorMap map;  // dimensions: column of a chunk of 64, row, chunk, page or batch entry, head
  bool exist;     // whether the cache can be copied in boxes

  // On the host.
  void prepare(Problem const& p, Operand const& t, int columns, bool is_on_gpu) {
    bool const has_pages = p.kv.has_pages();
    int32_t const rows = at_least_1(has_pages ? p.kv.page_size : p.seq_k.rows());
    int32_t const batch = p.seq_k.cu_seqlens ? 1 : p.batch;
    int32_t const entries = at_least_1(has_pages ? p.kv.num_pages : batch);
    bool const has_units = !has_pages || rows % kUnit == 0;
    bool const is_ascending = t.row_stride >= 0 && t.batch_stride >= 0 && t.head_stride >= 0;
    exist = has_units && is_ascending && !p.kv.indices && t.dtype == p.q.dtype &&
            columns % 64 == 0 &&
            encode({address_of(t, p),
                    {64, uint32_t(rows), uint32_t(columns / 64), uint32_t(entries),
                     uint32_t(p.num_heads_kv)},
                    {stride_bytes(rows, t.row_stride), 128, stride_bytes(entries, t.batch_stride),
                     stride_bytes(p.num_heads_kv, t.head_stride)},
                    {64, kRows, uint32_t(columns / 64), 1, 1}},
                   is_on_gpu, map) == nullptr;
  }
};

}  // namespace sm90

struct LatentBoxParams : LatentParams {
  sm90::LatentBoxes k_boxes, v_boxes;  // of V: for kernels that copy it

  // Called on the host.
  static LatentBoxParams prepare(Problem const& p, Workspace const& workspace,
                                 DeviceLimits const& device, KernelFacts const& facts) {
    LatentBoxParams params{LatentParams(p, workspace, device, facts), {}, {}};
    bool const is_converted = p.k.dtype != p.q.dtype;
    bool const is_latent = p.v.data == p.k.data;
    if (is_converted || (params.cluster == 1 && is_latent)) return params;
    bool const is_on_gpu = device.compute_capability != 0;
    params.k_boxes.prepare(p, p.k, p.head_dim, is_on_gpu);
    bool const is_view = is_latent && p.head_dim_v < p.head_dim;
    if (!is_view) params.v_boxes.prepare(p, p.v, p.head_dim_v, is_on_gpu);
    // Without TMA, copies are not worth sharing: 292 us instead of 274 for 128 x 4096 keys of 128
    // heads, 1239 instead of 1189 for 4 x 4096 keys and values of 4 heads (H200, bf16).
    if (!params.k_boxes.exist || (!is_view && !params.v_boxes.exist)) params.cluster = 1;
    return params;
  }
};

}  // namespace cutlass_attn
