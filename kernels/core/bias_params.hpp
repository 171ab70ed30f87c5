// Arguments of a dense kernel for calls with a bias.
#pragma once

#include "core/forward_params.hpp"

namespace cutlass_attn {

// The order of tiles of rows: where batch entries share the bias of a head, all of them run before
// the next head, and read it from L2.
struct BiasOrder {
  int32_t entries;  // that run before the next head
  FastDivisor by_entries;

  static BiasOrder of(Problem const& p) {
    int32_t const entries = p.logits.bias.batch_stride == 0 && p.batch > 1 ? p.batch : 1;
    return {entries, FastDivisor(entries)};
  }
  CA_HOST_DEVICE TileOrder::Place place(TileScheduler const& scheduler, int number) const {
    TileOrder::Place place = scheduler.order.place(number);
    if (entries > 1) {
      int const head = by_entries(place.head);
      place.head = (place.head - head * entries) * scheduler.groups + head;
    }
    return place;
  }
};

struct BiasForwardParams : ForwardParams {
  BiasOrder order;

  static BiasForwardParams prepare(Problem const& p, Workspace const& workspace,
                                   DeviceLimits const& device, KernelFacts const& facts) {
    return {ForwardParams::prepare(p, workspace, device, facts), BiasOrder::of(p)};
  }
  template <int kBlockM, class Arch>
  CA_HOST_DEVICE TileCoord tile() const {
    return TileCoord(problem, scheduler, kBlockM, order.place(scheduler, Arch::block()));
  }
};

}  // namespace cutlass_attn
