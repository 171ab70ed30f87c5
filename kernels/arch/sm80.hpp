// What every GPU from compute capability 8.0 on has.
#pragma once

#include "arch/cp_async.hpp"
#include "arch/global.hpp"
#include "arch/ldmatrix.hpp"
#include "arch/mma.hpp"
#include "arch/shared.hpp"
#include "arch/threads.hpp"

namespace cutlass_attn::arch {

struct Sm80 : Threads, SharedMemory, GlobalMemory, LdMatrix, CpAsync, Mma {};

}  // namespace cutlass_attn::arch
