// Operations that threads of a block on the CPU wait for, and their names in errors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cutlass_attn::simt {

// The operation that a thread waits for, with the arguments on which all waiting threads must
// agree.
enum class Wait : uint8_t {
  kNothing,
  kBarrier,
  kNamedBarrier,
  kCluster,
  kMmaFloat16,
  kMmaBFloat16,
  kMmaInt8,
  kMmaUint8,
  kMmaE4m3,
  kLoadMatrix,
  kLoadMatrixTrans,
  kTransposeMatrix,
  kWmma,
  kSyncWarp,
  kShuffle,
  kShuffleIndex,
  kAny,
  kPhase,
  kWgmmaWait,
  kExited,
};

struct WaitFor {
  Wait what = Wait::kNothing;
  // A shuffle's lane mask, a named barrier's index, the rows of a wmma, or a parity.
  uint8_t argument = 0;
  uint16_t threads = 0;  // of a named barrier; for an mbarrier its offset in units of 8 bytes

  bool operator==(WaitFor const& x) const {
    return what == x.what && argument == x.argument && threads == x.threads;
  }
};

inline std::string call_of_sync(int barrier, int threads) {
  return "sync(" + std::to_string(barrier) + ", " + std::to_string(threads) + ")";
}

inline std::string describe(WaitFor wait) {
  switch (wait.what) {
    case Wait::kNothing:
      return "run";
    case Wait::kBarrier:
      return "wait in sync()";
    case Wait::kCluster:
      return "wait in cluster_sync()";
    case Wait::kNamedBarrier:
      return "wait in " + call_of_sync(wait.argument, wait.threads);
    case Wait::kMmaFloat16:
      return "wait in mma.m16n8k16.f16";
    case Wait::kMmaBFloat16:
      return "wait in mma.m16n8k16.bf16";
    case Wait::kMmaInt8:
      return "wait in mma.m16n8k32.s8";
    case Wait::kMmaUint8:
      return "wait in mma.m16n8k32.u8";
    case Wait::kMmaE4m3:
      return "wait in mma.m16n8k32.e4m3";
    case Wait::kLoadMatrix:
      return "wait in ldmatrix.x4";
    case Wait::kLoadMatrixTrans:
      return "wait in ldmatrix.x4.trans";
    case Wait::kTransposeMatrix:
      return "wait in movmatrix.trans";
    case Wait::kWmma:
      return "wait in wmma of " + std::to_string(wait.argument) + " rows";
    case Wait::kSyncWarp:
      return "wait in sync_warp()";
    case Wait::kShuffle:
      return "wait in shuffle_xor(" + std::to_string(wait.argument) + ")";
    case Wait::kShuffleIndex:
      return "wait in shuffle()";
    case Wait::kAny:
      return "wait in any()";
    case Wait::kPhase:
      return "wait for parity " + std::to_string(wait.argument) + " of the barrier at byte " +
             std::to_string(wait.threads * 8) + " of shared memory";
    case Wait::kWgmmaWait:
      return "wait in wgmma_wait<" + std::to_string(wait.argument) + ">()";
    case Wait::kExited:
      return "have exited";
  }
  return "";
}

// "lanes 0-15, 17 wait in sync(); lanes 16, 18-31 have exited"
inline std::string describe(WaitFor const* waits, int count, char const* noun) {
  std::string text;
  std::vector<bool> told(count, false);
  for (int first = 0; first < count; ++first) {
    if (told[first]) continue;
    text += text.empty() ? "" : "; ";
    text += noun;
    char const* separator = " ";
    for (int begin = first; begin < count; ++begin) {
      if (!(waits[begin] == waits[first])) continue;
      int end = begin;
      while (end < count && waits[end] == waits[first]) told[end++] = true;
      text += separator + std::to_string(begin);
      if (end - begin > 1) text += "-" + std::to_string(end - 1);
      separator = ", ";
      begin = end;
    }
    text += " " + describe(waits[first]);
  }
  return text;
}

}  // namespace cutlass_attn::simt
