// The CPU as a kernel body sees it: the interface of simt/device.hpp on the engine of
// simt/engine.hpp.
#pragma once

#include <cstring>
#include <type_traits>

#include "simt/engine.hpp"
#include "simt/host_atoms.hpp"

namespace cutlass_attn::simt {

struct Host {
  template <class Element>
  using Mma = HostMma<Element>;
  using LoadMatrix = HostLoadMatrix<false>;
  using LoadMatrixTrans = HostLoadMatrix<true>;
  using AsyncCopy = HostAsyncCopy;

  static int thread() { return engine::thread(); }
  static int block() { return engine::block(); }

  static void sync() { engine::sync(); }

  template <class T>
  static T shuffle_xor(T value, int lane_mask) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t));
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = engine::shuffle_xor(bits, lane_mask);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
  }

  static void async_copy_commit() { engine::async_copy_commit(); }

  template <int kPending>
  static void async_copy_wait() {
    engine::async_copy_wait(kPending);
  }
};

}  // namespace cutlass_attn::simt
