// mbarriers of a thread block on the CPU, and the TMA copies that they count. For host.cpp, which
// knows the threads. Functions return an error message, or an empty string.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "core/tensor_map.hpp"

namespace cutlass_attn::simt {

// Maps the linear offset of a byte to its offset in a tile swizzled by 128 bytes. Both count from
// an address aligned to 1024 bytes.
inline uint32_t swizzle128(uint32_t linear) { return linear ^ (linear >> 7 & 7) << 4; }

class AsyncUnits {
 public:
  static constexpr uint32_t kWord = 4;
  enum class Stored : uint8_t { kNot, kUnseen, kSeen };  // by the thread's proxy fence

  struct Barrier {
    int arrivals, pending;  // arrivals of a phase; arrivals missing in the present phase
    int64_t bytes = 0;      // missing in the present phase
    unsigned phase = 0;     // index of the present phase
    bool is_fenced = false;
    std::vector<int> waiters;  // threads
    char token = 0;            // stands for an order of events to the race detector
    explicit Barrier(int arrivals) : arrivals(arrivals), pending(arrivals) {}
  };
  using Coordinates = int32_t[TensorView::kDims];

  void reset(char* smem, int smem_bytes) {
    smem_ = smem;
    smem_bytes_ = smem_bytes;
    barriers_.clear();
    copies_.clear();
    stored_.clear();
    stores_.clear();
  }

  // A thread's store. The asynchronous proxy, through which wgmma reads, need not see it before
  // that thread's proxy_fence().
  void store(void const* to, int bytes, int thread) {
    if (barriers_.empty()) return;  // a kernel without mbarriers
    stored_.resize(size_t(smem_bytes_) / kWord);
    if (size_t(thread) >= stores_.size()) stores_.resize(size_t(thread) + 1);
    for (uint32_t at = offset(to) / kWord; at < (offset(to) + bytes) / kWord; ++at) {
      stored_[at] = Stored::kUnseen;
      stores_[size_t(thread)].push_back(at);
    }
  }
  void proxy_fence(int thread) {
    if (size_t(thread) >= stores_.size()) return;
    for (uint32_t const at : stores_[size_t(thread)]) stored_[at] = Stored::kSeen;
    stores_[size_t(thread)].clear();
  }
  Stored stored(uint32_t offset) const {
    return stored_.empty() ? Stored::kNot : stored_[offset / kWord];
  }
  bool has_unseen(uint32_t begin, int bytes) const {
    for (uint32_t at = begin; at < begin + uint32_t(bytes); at += kWord) {
      if (stored(at) == Stored::kUnseen) return true;
    }
    return false;
  }

  uint32_t offset(void const* address) const {
    return uint32_t(static_cast<char const*>(address) - smem_);
  }
  // Null if no mbarrier is at the address.
  Barrier* find(void const* address) {
    auto const found = barriers_.find(offset(address));
    return found == barriers_.end() ? nullptr : &found->second;
  }
  static std::string name(uint32_t offset) {
    return "the barrier at byte " + std::to_string(offset) + " of shared memory";
  }

  std::string init(void const* address, int arrivals) {
    if (offset(address) % 8 != 0 || offset(address) + 8 > uint32_t(smem_bytes_)) {
      return "makes a barrier at byte " + std::to_string(offset(address)) +
             " of shared memory; allowed: multiples of 8 inside it";
    }
    if (arrivals < 1) return "makes a barrier of " + std::to_string(arrivals) + " arrivals";
    barriers_.insert_or_assign(offset(address), Barrier(arrivals));
    return "";
  }
  void fence() {
    for (auto& [at, barrier] : barriers_) barrier.is_fenced = true;
  }

  // An arrival that also adds `bytes` to the transaction count of the phase. Appends the threads to
  // wake to `woken`.
  std::string arrive(void const* address, int bytes, std::vector<int>& woken) {
    Barrier* const barrier = find(address);
    if (barrier == nullptr)
      return "arrives at " + name(offset(address)) + ", which is not initialised";
    if (barrier->pending == 0) {
      return "arrives at " + name(offset(address)) + " after all " +
             std::to_string(barrier->arrivals) + " arrivals of its phase";
    }
    --barrier->pending;
    barrier->bytes += bytes;
    end_phase(*barrier, woken);
    return excess(offset(address), *barrier);
  }

  static bool has_ended(Barrier const& barrier, int parity) {
    return int(barrier.phase & 1) != parity;
  }

  // Starts a copy. Its destination is NaN until the copy lands.
  std::string copy(TensorView const& view, void* to, void const* barrier, Coordinates const& at,
                   bool poison) {
    Barrier* const counts = find(barrier);
    if (counts == nullptr)
      return "has TMA count at " + name(offset(barrier)) + ", which is not initialised";
    if (!counts->is_fenced) {
      return "has TMA count at " + name(offset(barrier)) + " without a fence_mbarrier_init()";
    }
    int64_t const bytes = bytes_of(view);
    if (offset(to) % 1024 != 0 || offset(to) + bytes > smem_bytes_) {
      return "has TMA copy " + std::to_string(bytes) + " bytes to byte " +
             std::to_string(offset(to)) + " of shared memory; allowed: multiples of 1024 inside it";
    }
    if (std::string wrong = why_not(view); !wrong.empty()) return wrong;
    if (poison) std::memset(to, 0xff, size_t(bytes));
    Copy copy{view, static_cast<char*>(to), offset(barrier), {}, nullptr, bytes};
    std::memcpy(copy.at, at, sizeof(at));
    copies_.push_back(copy);
    return "";
  }
  // Starts a copy from the memory of another block.
  std::string copy_from(char const* from, uint32_t to, int bytes, void const* barrier,
                        bool poison) {
    if (find(barrier) == nullptr) {
      return "has a bulk copy count at " + name(offset(barrier)) + ", which is not initialised";
    }
    if (bytes % 16 != 0 || to + uint32_t(bytes) > uint32_t(smem_bytes_)) {
      return "has a bulk copy of " + std::to_string(bytes) + " bytes to byte " +
             std::to_string(to) + " of shared memory; allowed: multiples of 16 inside it";
    }
    if (poison) std::memset(smem_ + to, 0xff, size_t(bytes));
    copies_.push_back({{}, smem_ + to, offset(barrier), {}, from, bytes});
    return "";
  }

  // Bytes of a copy.
  static int64_t bytes_of(TensorView const& view) {
    int64_t bytes = 2;
    for (uint32_t const n : view.box) bytes *= n;
    return bytes;
  }

  // Lands the copies that this barrier counts.
  std::string land(void const* barrier, std::vector<int>& woken) {
    std::vector<Copy> others;
    std::string wrong;
    for (Copy const& copy : copies_) {
      if (copy.barrier != offset(barrier)) {
        others.push_back(copy);
        continue;
      }
      Barrier& counts = barriers_.at(copy.barrier);
      counts.bytes -= copy.bytes;
      if (std::string more = excess(copy.barrier, counts); !more.empty()) wrong = more;
      if (copy.from != nullptr) {
        std::memcpy(copy.to, copy.from, size_t(copy.bytes));
      } else {
        move(copy);
      }
      end_phase(counts, woken);
    }
    copies_ = std::move(others);
    return wrong;
  }

  size_t copies_in_flight() const { return copies_.size(); }

  // Describes what the barriers with waiting threads still lack.
  std::string describe() const {
    std::string text;
    for (auto const& [at, barrier] : barriers_) {
      if (barrier.waiters.empty()) continue;
      text += "; " + name(at) + " is in phase " + std::to_string(barrier.phase) + " and lacks " +
              std::to_string(barrier.pending) + " of " + std::to_string(barrier.arrivals) +
              " arrivals and " + std::to_string(barrier.bytes) + " bytes";
    }
    return text;
  }

 private:
  struct Copy {
    TensorView view;
    char* to;
    uint32_t barrier;
    Coordinates at;
    char const* from;  // a copy between blocks of a cluster; null: one of `view`
    int64_t bytes;
  };

  // Bytes may land before the arrivals that announce them, but not more than all of these.
  static std::string excess(uint32_t at, Barrier const& barrier) {
    if (barrier.pending != 0 || barrier.bytes >= 0) return "";
    return "has TMA land " + std::to_string(-barrier.bytes) + " bytes more at " + name(at) +
           " than its phase waits for";
  }

  static void end_phase(Barrier& barrier, std::vector<int>& woken) {
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    ++barrier.phase;
    barrier.pending = barrier.arrivals;
    woken.insert(woken.end(), barrier.waiters.begin(), barrier.waiters.end());
    barrier.waiters.clear();
  }

  // Why cuTensorMapEncodeTiled would reject the view; empty if it would not.
  static std::string why_not(TensorView const& view) {
    if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0) {
      return "has TMA read a tensor whose address is not aligned to 16 bytes";
    }
    for (int64_t const stride : view.stride) {
      if (stride < 0 || stride % 16 != 0 || stride >= int64_t(1) << 40) {
        return "has TMA step by " + std::to_string(stride) +
               " bytes; allowed: multiples of 16 from 0, below 2^40";
      }
    }
    for (uint32_t const n : view.box) {
      if (n < 1 || n > 256) return "has TMA copy a box with a side of " + std::to_string(n);
    }
    return view.box[0] == 64 ? "" : "has TMA swizzle rows that are not 128 bytes long";
  }

  void move(Copy const& copy) const {
    TensorView const& view = copy.view;
    uint32_t linear = offset(copy.to);
    uint32_t i[TensorView::kDims] = {};
    for (i[4] = 0; i[4] < view.box[4]; ++i[4]) {
      for (i[3] = 0; i[3] < view.box[3]; ++i[3]) {
        for (i[2] = 0; i[2] < view.box[2]; ++i[2]) {
          for (i[1] = 0; i[1] < view.box[1]; ++i[1], linear += 128) move_row(copy, i, linear);
        }
      }
    }
  }

  void move_row(Copy const& copy, uint32_t const (&i)[TensorView::kDims], uint32_t linear) const {
    constexpr int kElements = 8;  // of 16 bytes
    auto const is_inside = [&](int dim, int64_t at) {
      return at >= 0 && at < int64_t(copy.view.extent[dim]);
    };
    uint64_t row = reinterpret_cast<uint64_t>(copy.view.data);  // all modulo 2^64
    bool inside = true;
    for (int d = 1; d < TensorView::kDims; ++d) {
      int64_t const at = int64_t(copy.at[d]) + i[d];
      inside = inside && is_inside(d, at);
      row += inside ? uint64_t(at) * uint64_t(copy.view.stride[d - 1]) : 0;
    }
    for (int x = 0; x < 64; x += kElements) {
      char* const to = smem_ + swizzle128(linear + uint32_t(x) * 2);
      std::memset(to, 0, 16);
      for (int e = 0; inside && e < kElements; ++e) {
        int64_t const at = int64_t(copy.at[0]) + x + e;
        if (!is_inside(0, at)) continue;
        std::memcpy(to + 2 * e, reinterpret_cast<char const*>(row + uint64_t(at) * 2), 2);
      }
    }
  }

  char* smem_ = nullptr;
  int smem_bytes_ = 0;
  std::map<uint32_t, Barrier> barriers_;
  std::vector<Stored> stored_;                 // by word
  std::vector<std::vector<uint32_t>> stores_;  // by thread: words
  std::vector<Copy> copies_;                   // in flight, oldest first
};

}  // namespace cutlass_attn::simt
