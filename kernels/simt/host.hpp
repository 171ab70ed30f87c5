// The CPU as a kernel body sees it: the interface of simt/device.hpp on the engine of
// simt/engine.hpp.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt/engine.hpp"
#include "simt/host_atoms.hpp"
#include "simt/host_wmma.hpp"

namespace cutlass_attn::simt {

struct Host {
  template <class Element, class Accumulator = float>
  using Mma = HostMma<Element, Accumulator>;
  using LoadMatrix = HostLoadMatrix<false>;
  using LoadMatrixTrans = HostLoadMatrix<true>;
  using AsyncCopy = HostAsyncCopy;
  template <int kM, int kN>
  using Wmma = HostWmma<kM, kN>;

  static int thread() { return engine::thread(); }
  static int block() { return engine::block(); }
  static int recompute(int x) { return x; }
  static float compute(float x) { return x; }

  static void sync() { engine::sync(); }
  static void sync(int barrier, int threads) { engine::sync(barrier, threads); }
  static void sync_warp() { engine::sync_warp(); }

  template <class T>
  static T shuffle_xor(T value, int lane_mask) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t));
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = engine::shuffle_xor(bits, lane_mask);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
  }

  static bool any(bool predicate) { return engine::any(predicate); }

  template <class Element>
  static uint32_t pack(float low, float high) {
    static_assert(std::is_same_v<Element, cutlass::half_t> ||
                  std::is_same_v<Element, cutlass::bfloat16_t>);
    return uint32_t(Element(low).raw()) | uint32_t(Element(high).raw()) << 16;
  }

  using SmemAddress = uintptr_t;

  static SmemAddress smem_address(void const* smem) { return reinterpret_cast<uintptr_t>(smem); }

  static void load_matrix(SmemAddress row, uint32_t (&d)[4]) {
    engine::load_matrix(false, reinterpret_cast<void const*>(row), d);
  }
  static void load_matrix_trans(SmemAddress row, uint32_t (&d)[4]) {
    engine::load_matrix(true, reinterpret_cast<void const*>(row), d);
  }

  static void store_shared(SmemAddress dst, uint32_t const (&words)[4]) {
    engine::store_shared(reinterpret_cast<void*>(dst), words);
  }

  static void async_copy(SmemAddress dst, void const* src, bool predicate) {
    engine::async_copy(reinterpret_cast<void*>(dst), src, predicate);
  }
  static void async_copy_commit() { engine::async_copy_commit(); }

  template <int kPending>
  static void async_copy_wait() {
    engine::async_copy_wait(kPending);
  }
};

}  // namespace cutlass_attn::simt
