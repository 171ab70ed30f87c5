// The machine of compute capability 8.0 and later.
#pragma once

#include "arch/cp_async.hpp"
#include "arch/fp8.hpp"
#include "arch/global.hpp"
#include "arch/ldmatrix.hpp"
#include "arch/mma.hpp"
#include "arch/packed.hpp"
#include "arch/shared.hpp"
#include "arch/threads.hpp"
#include "arch/votes.hpp"

namespace cutlass_attn::arch {

struct Sm80 : Threads, Votes, Packed, SharedMemory, GlobalMemory, LdMatrix, CpAsync, Mma, Fp8 {
  static constexpr int kSmemAlignment = 128;
  static constexpr bool kHasWgmma = false;
};

}  // namespace cutlass_attn::arch
