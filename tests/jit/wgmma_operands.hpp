// Products of a warpgroup from operands at given places of shared memory: the same code for a GPU
// and for the engine.
#pragma once

#include "arch/sm90.hpp"

namespace wgmma_operands {

using namespace cutlass_attn;

// As a descriptor has it, in bytes from the beginning of shared memory.
struct Place {
  int32_t offset, leading, stride;
};
struct Call {
  Place a, b;
};
enum Form { kSs, kRs, kTs };  // of Arch::wgmma_<form>

struct Params {
  char const* image;  // of shared memory
  int32_t image_bytes;
  int32_t count;
  Call const* calls;
  float* out;  // (count, 128 threads, kN / 2)
};

template <class Element, int kN, int kForm, class Arch>
CUTE_DEVICE void run(Params const& params, char* smem) {
  int const thread = Arch::thread();
  for (int at = 16 * thread; at < params.image_bytes; at += 16 * 128) {
    auto const* const words = reinterpret_cast<uint32_t const*>(params.image + at);
    uint32_t const copy[4] = {words[0], words[1], words[2], words[3]};
    Arch::store_shared(Arch::smem_address(smem + at), copy);
  }
  Arch::fence_proxy_async();
  Arch::sync();
  auto const* const words = reinterpret_cast<uint32_t const*>(params.image + 16 * thread);
  uint32_t a[4] = {words[0], words[1], words[2], words[3]};
  for (int i = 0; i < params.count; ++i) {
    Call const& call = params.calls[i];
    auto const descriptor = [&](Place const& place) {
      return Arch::descriptor(smem + place.offset, place.leading, place.stride);
    };
    float acc[kN / 2];
    for (int e = 0; e < kN / 2; ++e) acc[e] = 1e6f;  // which the first product is not to see
    Arch::wgmma_fence(acc, a);
    for (bool const accumulates : {false, true}) {
      if constexpr (kForm == kSs) {
        Arch::template wgmma_ss<Element>(acc, descriptor(call.a), descriptor(call.b), accumulates);
      } else if constexpr (kForm == kRs) {
        Arch::template wgmma_rs<Element>(acc, a, descriptor(call.b), accumulates);
      } else {
        Arch::template wgmma_ts<Element>(acc, descriptor(call.a), descriptor(call.b), accumulates);
      }
    }
    Arch::wgmma_commit();
    Arch::template wgmma_wait<0>(acc, a);
    float* const out = params.out + (int64_t(i) * 128 + thread) * (kN / 2);
    for (int e = 0; e < kN / 2; ++e) out[e] = acc[e];
  }
}

}  // namespace wgmma_operands
