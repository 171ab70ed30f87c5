// Launch parameters of a dense kernel for calls with a bias.
#pragma once

#include "core/forward_params.hpp"

namespace cutlass_attn {

struct BiasForwardParams : ForwardParams {
  BiasOrder order;

  static BiasForwardParams prepare(Problem const& p, Workspace const& workspace,
                                   DeviceLimits const& device, KernelFacts const& facts) {
    return {ForwardParams::prepare(p, workspace, device, facts), BiasOrder::of(p)};
  }
  template <int kBlockM, class Arch>
  CA_HOST_DEVICE TileCoord tile() const {
    return TileCoord(problem, scheduler, kBlockM,
                     order.place(scheduler.order.place(Arch::block()), scheduler.groups));
  }
};

}  // namespace cutlass_attn
