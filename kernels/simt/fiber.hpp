// Fibers: execution stacks that take turns on one OS thread, and their annotations for
// ThreadSanitizer. For host.cpp only.
//
// A switch is the compiler's builtin setjmp and longjmp: a handful of instructions. swapcontext
// makes a system call each time. The C library's longjmp does not support a change of stacks:
// _FORTIFY_SOURCE reports it as an attack, and ThreadSanitizer wraps it in bookkeeping. In a
// ThreadSanitizer build (CUTLASS_ATTN_SIMT_TSAN) every fiber is a separate thread to the sanitizer,
// and a switch orders nothing between fibers.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstddef>
#include <new>

#if defined(CUTLASS_ATTN_SIMT_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_set_fiber_name(void* fiber, char const* name);
void __tsan_acquire(void* token);
void __tsan_release(void* token);
void __tsan_read4_pc(void* address, void* pc);
void __tsan_read8_pc(void* address, void* pc);
void __tsan_read16_pc(void* address, void* pc);
void __tsan_write4_pc(void* address, void* pc);
void __tsan_write8_pc(void* address, void* pc);
void __tsan_write16_pc(void* address, void* pc);
void AnnotateIgnoreReadsBegin(char const* file, int line);
void AnnotateIgnoreReadsEnd(char const* file, int line);
void AnnotateIgnoreWritesBegin(char const* file, int line);
void AnnotateIgnoreWritesEnd(char const* file, int line);
}
#endif

namespace cutlass_attn::simt {

// The race detector's view. host.cpp itself is compiled without instrumentation, so its reads and
// writes on behalf of other fibers are invisible. Accesses by a GPU thread are announced here, with
// their place in the kernel.
namespace race {
#if defined(CUTLASS_ATTN_SIMT_TSAN)
inline void acquire(void* token) { __tsan_acquire(token); }
inline void release(void* token) { __tsan_release(token); }
inline void read16(void const* address, void* place) {
  __tsan_read16_pc(const_cast<void*>(address), place);
}
inline void write16(void* address, void* place) { __tsan_write16_pc(address, place); }
inline void read(void const* address, int bytes, void* place) {
  auto const function = bytes == 4   ? &__tsan_read4_pc
                        : bytes == 8 ? &__tsan_read8_pc
                                     : &__tsan_read16_pc;
  function(const_cast<void*>(address), place);
}
inline void write(void* address, int bytes, void* place) {
  auto const function = bytes == 4   ? &__tsan_write4_pc
                        : bytes == 8 ? &__tsan_write8_pc
                                     : &__tsan_write16_pc;
  function(address, place);
}
// While an Unseen exists, calls of malloc, free and memcpy by the present fiber are invisible as
// well.
struct Unseen {
  Unseen() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unseen() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
  Unseen(Unseen const&) = delete;
};
#else
inline void acquire(void*) {}
inline void release(void*) {}
inline void read16(void const*, void*) {}
inline void write16(void*, void*) {}
inline void read(void const*, int, void*) {}
inline void write(void*, int, void*) {}
struct Unseen {
  Unseen() {}  // not trivial: a variable of it is used
};
#endif
}  // namespace race

// Zeroed pages, returned to the system by the destructor.
class Pages {
 public:
  explicit Pages(size_t bytes) : bytes_(bytes) {
    void* const address =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<char*>(address);
  }
  ~Pages() { munmap(data_, bytes_); }
  Pages(Pages const&) = delete;
  Pages& operator=(Pages const&) = delete;

  char* data() const { return data_; }

 private:
  char* data_;
  size_t bytes_;
};

// Stacks of kBytes each, with an inaccessible guard page below each.
class Stacks {
 public:
  static constexpr size_t kBytes = 256 * 1024;

  // Bytes of stack i that are used. The stacks of a warp begin at 32 different places of a page:
  // from one place, all would use the same few lines of the L1 cache.
  static size_t bytes(int i) { return kBytes - size_t(i) % 32 * 128; }

  explicit Stacks(int count) : pitch_(kBytes + page()), pages_(count * pitch_) {
    for (int i = 0; i < count; ++i) mprotect(pages_.data() + i * pitch_, page(), PROT_NONE);
  }
  char* stack(int i) const { return pages_.data() + i * pitch_ + page(); }

 private:
  static size_t page() { return size_t(sysconf(_SC_PAGESIZE)); }

  size_t pitch_;
  Pages pages_;
};

// An execution stack: the caller's own (default constructed), or a fiber that runs `entry`, which
// never returns.
class Context {
 public:
  Context() {
#if defined(CUTLASS_ATTN_SIMT_TSAN)
    tsan_ = __tsan_get_current_fiber();
#endif
  }
  Context(char* stack, size_t bytes, void (*entry)(), char const* name) : is_fiber_(true) {
    getcontext(&start_);
    start_.uc_stack.ss_sp = stack;
    start_.uc_stack.ss_size = bytes;
    start_.uc_link = nullptr;
    makecontext(&start_, entry, 0);
#if defined(CUTLASS_ATTN_SIMT_TSAN)
    tsan_ = __tsan_create_fiber(0);
    __tsan_set_fiber_name(tsan_, name);
#else
    (void)name;
#endif
  }
  ~Context() {
#if defined(CUTLASS_ATTN_SIMT_TSAN)
    if (is_fiber_) __tsan_destroy_fiber(tsan_);
#endif
  }
  Context(Context const&) = delete;
  Context& operator=(Context const&) = delete;

  // For the race detector: everything that `other` has done happens before everything that the
  // present context does from now on.
  void join(Context& other) {
#if defined(CUTLASS_ATTN_SIMT_TSAN)
    constexpr unsigned kSync = 0;
    __tsan_switch_to_fiber(other.tsan_, kSync);
    __tsan_switch_to_fiber(tsan_, kSync);
#else
    (void)other;
#endif
  }

  // Switches from the present context to `to`; returns when some context switches back.
  void switch_to(Context& to) {
#if defined(CUTLASS_ATTN_SIMT_TSAN)
    constexpr unsigned kNoSync = 1;
    __tsan_switch_to_fiber(to.tsan_, kNoSync);
#endif
    if (__builtin_setjmp(resume_) != 0) return;
    if (!to.is_fiber_ || to.started_) to.resume();
    to.started_ = true;
    setcontext(&to.start_);
  }

 private:
  // With -fcf-protection=return or full (Ubuntu's default), resume_ has another layout.
#if defined(__x86_64__) && !(defined(__CET__) && (__CET__ & 2))
  // __builtin_longjmp without a call around it. Processors predict returns from the calls before
  // them; a call that never returns makes them mispredict every return of the next fiber.
  [[noreturn, gnu::always_inline]] void resume() {
    asm volatile("movq (%0), %%rbp; movq 16(%0), %%rsp; jmpq *8(%0)" ::"a"(resume_) : "memory");
    __builtin_unreachable();
  }
#else
  // The compiler requires longjmp and setjmp to be in different functions.
  [[noreturn, gnu::noinline]] void resume() { __builtin_longjmp(resume_, 1); }
#endif

  ucontext_t start_;
  void* resume_[5];
#if defined(CUTLASS_ATTN_SIMT_TSAN)
  void* tsan_;
#endif
  bool started_ = false;
  bool is_fiber_ = false;
};

}  // namespace cutlass_attn::simt
