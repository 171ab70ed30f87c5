// wgmma of one thread block on the CPU. For host.cpp, which knows the threads.
//
// The wait that covers a product executes it: until then its accumulators are NaN, and its
// operands, in shared memory and in registers, are read only then.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "simt/async.hpp"
#include "simt/warp_ops.hpp"

namespace cutlass_attn::simt {

inline constexpr int kWarpgroupSize = 128;

// A thread's part of the wgmma calls in flight.
class ThreadWgmma {
 public:
  void reset() {
    calls_.clear();
    accumulators_.clear();
    groups_ = 0;
    is_fenced_ = false;
  }

  void fence() { is_fenced_ = true; }
  void commit() { ++groups_; }

  std::string issue(engine::WgmmaCall const& call, float* accumulator) {
    if (!is_fenced_) {
      return "calls wgmma without a wgmma_fence() since it could last touch the registers";
    }
    int const size = call.n / 2;
    if (find(accumulator) == nullptr) {
      accumulators_.push_back({accumulator, {accumulator, accumulator + size}});
      std::fill_n(accumulator, size, poison());
    }
    Call made{call, accumulator, groups_, {}};
    if (call.a != nullptr) std::memcpy(made.a, call.a, sizeof(made.a));
    calls_.push_back(made);
    return "";
  }

  struct Call {
    engine::WgmmaCall call;
    float* accumulator;
    int64_t group;
    uint32_t a[4];  // the registers at the time of the call
  };
  // Number of calls, oldest first, that a wait for all but `pending` groups covers.
  size_t covered(int pending) const {
    size_t n = 0;
    while (n < calls_.size() && calls_[n].group < groups_ - pending) ++n;
    return n;
  }
  Call const& call(size_t i) const { return calls_[i]; }
  size_t in_flight() const { return calls_.size(); }
  float* values(float* accumulator) { return find(accumulator)->values.data(); }

  // Marks the first `count` calls as done. Releases accumulators that no other call uses.
  std::string finish(size_t count) {
    std::string wrong;
    for (size_t i = 0; i < count; ++i) {
      Call const& call = calls_[i];
      if (call.call.a != nullptr && std::memcmp(call.a, call.call.a, sizeof(call.a)) != 0) {
        wrong = "changed registers of A while a wgmma was in flight";
      }
    }
    calls_.erase(calls_.begin(), calls_.begin() + ptrdiff_t(count));
    for (size_t i = 0; i < accumulators_.size();) {
      Accumulator& mine = accumulators_[i];
      bool const stays = std::any_of(calls_.begin(), calls_.end(), [&](Call const& call) {
        return call.accumulator == mine.address;
      });
      if (stays) {
        ++i;
        continue;
      }
      for (size_t j = 0; j < mine.values.size(); ++j) {
        float const expected = poison();
        if (std::memcmp(&mine.address[j], &expected, sizeof(float)) != 0) {
          wrong = "wrote accumulators while a wgmma was in flight";
        }
        mine.address[j] = mine.values[j];
      }
      accumulators_.erase(accumulators_.begin() + ptrdiff_t(i));
    }
    is_fenced_ = false;
    return wrong;
  }

 private:
  struct Accumulator {
    float* address;
    std::vector<float> values;
  };
  static float poison() {
    uint32_t const bits = 0x7fffdead;  // a NaN
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
  }
  Accumulator* find(float* address) {
    for (Accumulator& mine : accumulators_) {
      if (mine.address == address) return &mine;
    }
    return nullptr;
  }

  std::vector<Call> calls_;  // in flight, oldest first
  std::vector<Accumulator> accumulators_;
  int64_t groups_ = 0;  // committed so far
  bool is_fenced_ = false;
};

// Lines of shared memory that products read.
class WgmmaLines {
 public:
  static constexpr uint32_t kLine = 128;  // bytes

  void clear(int smem_bytes) { are_read_.assign(size_t(smem_bytes) / kLine + 1, 0); }
  void add(uint32_t at) { are_read_[at / kLine] = 1; }
  bool has_any(uint32_t at, uint32_t bytes) const {
    auto const first = are_read_.begin() + at / kLine, end = first + (bytes + kLine - 1) / kLine;
    return std::find(first, end, 1) != end;
  }

 private:
  std::vector<uint8_t> are_read_;
};

// An operand in shared memory, decoded from its descriptor.
struct WgmmaMatrix {
  uint32_t start, leading, stride;
  bool is_swizzled;

  explicit WgmmaMatrix(uint64_t descriptor)
      : start(uint32_t(descriptor & 0x3fff) * 16),
        leading(uint32_t(descriptor >> 16 & 0x3fff) * 16),
        stride(uint32_t(descriptor >> 32 & 0x3fff) * 16),
        is_swizzled(descriptor >> 62 == 1) {}

  // Offset of element (row, column). Columns are contiguous, in groups of 8 rows and 128 bytes.
  uint32_t offset(int row, int column, int element_bytes = 2) const {
    uint32_t const byte = uint32_t(column) * uint32_t(element_bytes);
    return swizzle128(start + byte / 128 * leading + uint32_t(row) / 8 * stride +
                      uint32_t(row) % 8 * 128 + byte % 128);
  }
};

// Reads an operand, and notes what is read.
struct WgmmaReader {
  static constexpr uint32_t kChunk = 16;  // contiguous bytes: swizzling moves them together

  char const* smem;
  int smem_bytes;
  AsyncUnits const& units;
  std::vector<uint32_t>& of_threads;  // words that threads stored
  WgmmaLines& lines;
  std::string wrong;

  // Calls visit(row, column, element) for all elements.
  template <class T, class Visit>
  void read(WgmmaMatrix const& matrix, int rows, int columns, Visit const& visit) {
    constexpr int kElements = int(kChunk / sizeof(T));
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < columns; column += kElements) {
        T x[kElements] = {};
        read_chunk(matrix.offset(row, column, int(sizeof(T))), x);
        for (int i = 0; i < kElements; ++i) visit(row, column + i, x[i]);
      }
    }
  }

 private:
  void read_chunk(uint32_t at, void* to) {
    if (at + kChunk > uint32_t(smem_bytes)) {
      wrong = "has wgmma read beyond shared memory";
      return;
    }
    for (uint32_t word = at; word < at + kChunk; word += AsyncUnits::kWord) {
      AsyncUnits::Stored const stored = units.stored(word);
      if (stored != AsyncUnits::Stored::kNot) of_threads.push_back(word / AsyncUnits::kWord);
      if (stored == AsyncUnits::Stored::kUnseen) {
        wrong = "has wgmma read what was stored without an fence_proxy_async()";
      }
    }
    std::memcpy(to, smem + at, kChunk);
    lines.add(at);
  }
};

// The nearest number towards 0 with 13 bits of mantissa.
inline float cut_to_13_bits(double x) {
  float y = float(x);
  if (std::fabs(double(y)) > std::fabs(x)) y = std::nextafterf(y, 0.0f);
  uint32_t bits;
  std::memcpy(&bits, &y, sizeof bits);
  if (std::isfinite(y)) bits &= ~0x3ffu;
  std::memcpy(&y, &bits, sizeof bits);
  return y;
}

// A product in 8 bits, 64 x n x 32, for one call by all threads of a warpgroup.
inline std::string warpgroup_mma8(WgmmaReader& reader,
                                  ThreadWgmma::Call const* const (&calls)[kWarpgroupSize],
                                  float* const (&values)[kWarpgroupSize]) {
  constexpr int kM = 64, kK = 32, kMaxN = 256;
  engine::WgmmaCall const& first = calls[0]->call;
  bool const is_int8 = first.input == engine::MmaInput::kInt8;
  static thread_local uint8_t a8[kM][kK], b8[kK][kMaxN];
  static thread_local double a[kM][kK], b[kK][kMaxN], c[kM][kMaxN];  // sums are exact
  WgmmaMatrix const of_a(first.a_descriptor), of_b(first.b_descriptor);
  if ((first.a == nullptr && !of_a.is_swizzled) || !of_b.is_swizzled) {
    return "calls wgmma with an operand that is not swizzled by 128 bytes";
  }
  reader.read<uint8_t>(of_b, first.n, kK, [&](int j, int k, uint8_t x) { b8[k][j] = x; });
  if (first.a == nullptr) {
    reader.read<uint8_t>(of_a, kM, kK, [&](int m, int k, uint8_t x) { a8[m][k] = x; });
  }
  for (int t = 0; t < kWarpgroupSize && first.a != nullptr; ++t) {
    int const row = t / 32 * 16 + t % 32 / 4, four = t % 4 * 4;
    for (int i = 0; i < 4; ++i) {
      std::memcpy(&a8[row + i % 2 * 8][four + i / 2 * 16], &calls[t]->call.a[i], 4);
    }
  }
  double numbers[256];
  for (int x = 0; x < 256; ++x) {
    numbers[x] = is_int8 ? double(int8_t(uint8_t(x))) : double(float(E4M3{uint8_t(x)}));
  }
  for (int k = 0; k < kK; ++k) {
    for (int m = 0; m < kM; ++m) a[m][k] = numbers[a8[m][k]];
    for (int j = 0; j < first.n; ++j) b[k][j] = numbers[b8[k][j]];
  }
  for (int m = 0; m < kM; ++m) std::fill_n(c[m], first.n, 0.0);
  add_product<Doubles4>(a, b, first.n, c);
  for (int t = 0; t < kWarpgroupSize; ++t) {
    int const row = t / 32 * 16 + t % 32 / 4, pair = t % 4 * 2;
    for (int i = 0; i < first.n / 2; ++i) {
      double sum = c[row + i / 2 % 2 * 8][i / 4 * 8 + pair + i % 2];
      int32_t before;
      std::memcpy(&before, &values[t][i], sizeof before);
      if (first.accumulates) sum += is_int8 ? double(before) : double(values[t][i]);
      if (is_int8 && std::fabs(sum) > 0x7fffffff) return "has wgmma add up beyond an int32";
      int32_t const whole = is_int8 ? int32_t(sum) : 0;
      float const cut = cut_to_13_bits(sum);
      std::memcpy(&values[t][i], is_int8 ? static_cast<void const*>(&whole) : &cut, 4);
    }
  }
  return reader.wrong;
}

// D = A B, or D += A B, 64 x n x 16, for one call by all threads of a warpgroup. Adds to
// `of_threads` the words of A and B in shared memory that threads stored, and to `lines` all lines
// that are read.
inline std::string warpgroup_mma(char const* smem, int smem_bytes, AsyncUnits const& units,
                                 std::vector<uint32_t>& of_threads, WgmmaLines& lines,
                                 ThreadWgmma::Call const* const (&calls)[kWarpgroupSize],
                                 float* const (&values)[kWarpgroupSize]) {
  constexpr int kM = 64, kK = 16, kMaxN = 256;
  engine::WgmmaCall const& first = calls[0]->call;
  int const n = first.n;
  for (auto const* call : calls) {
    if (call->call.n != n || call->call.a_descriptor != first.a_descriptor ||
        call->call.b_descriptor != first.b_descriptor ||
        call->call.accumulates != first.accumulates || call->call.input != first.input ||
        call->call.is_transposed != first.is_transposed) {
      return "has a wgmma in flight that differs between the threads of the warpgroup";
    }
  }
  if (n % 8 != 0 || n < 8 || n > kMaxN) return "calls wgmma with n = " + std::to_string(n);

  WgmmaReader reader{smem, smem_bytes, units, of_threads, lines, {}};
  if (first.input == engine::MmaInput::kInt8 || first.input == engine::MmaInput::kE4m3) {
    return warpgroup_mma8(reader, calls, values);
  }
  static thread_local uint16_t a16[kM * kK], b16[kK * kMaxN];
  static thread_local float a[kM][kK], b[kK][kMaxN], c[kM][kMaxN];
  constexpr float zeros[2] = {};
  if (first.a == nullptr) {
    WgmmaMatrix const matrix(first.a_descriptor);
    if (!matrix.is_swizzled) return "calls wgmma with an A that is not swizzled by 128 bytes";
    if (first.is_transposed) {
      reader.read<uint16_t>(matrix, kK, kM, [&](int k, int m, uint16_t x) { a16[m * kK + k] = x; });
    } else {
      reader.read<uint16_t>(matrix, kM, kK, [&](int m, int k, uint16_t x) { a16[m * kK + k] = x; });
    }
  }
  WgmmaMatrix const matrix(first.b_descriptor);
  if (!matrix.is_swizzled) return "calls wgmma with a B that is not swizzled by 128 bytes";
  if ((first.a != nullptr) != first.is_transposed) {
    reader.read<uint16_t>(matrix, kK, n, [&](int k, int j, uint16_t x) { b16[k * n + j] = x; });
  } else {
    reader.read<uint16_t>(matrix, n, kK, [&](int j, int k, uint16_t x) { b16[k * n + j] = x; });
  }
  for (int t = 0; t < kWarpgroupSize; ++t) {
    int const row = t / 32 * 16 + t % 32 / 4, pair = t % 4 * 2;
    for (int i = 0; i < 4 && first.a != nullptr; ++i) {
      std::memcpy(&a16[(row + i % 2 * 8) * kK + pair + i / 2 * 8], &calls[t]->call.a[i], 4);
    }
    for (int i = 0; i < n / 2; i += 2) {
      float* const to = &c[row + i / 2 % 2 * 8][i / 4 * 8 + pair];
      std::memcpy(to, first.accumulates ? &values[t][i] : zeros, sizeof(zeros));
    }
  }
  widen(first.input, a16, &a[0][0], kM * kK);
  for (int k = 0; k < kK; ++k) widen(first.input, b16 + k * n, b[k], n);
  add_product<Floats8>(a, b, n, c);
  for (int t = 0; t < kWarpgroupSize; ++t) {
    int const row = t / 32 * 16 + t % 32 / 4, pair = t % 4 * 2;
    for (int i = 0; i < n / 2; i += 2) {
      std::memcpy(&values[t][i], &c[row + i / 2 % 2 * 8][i / 4 * 8 + pair], sizeof(zeros));
    }
  }
  return reader.wrong;
}

}  // namespace cutlass_attn::simt
