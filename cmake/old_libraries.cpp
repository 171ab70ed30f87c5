// What headers of g++ 12 refer to, and libraries of manylinux_2_28 (glibc 2.28, libstdc++ of g++ 8)
// lack. Names as the compiler writes them: hidden members of a class cannot be declared again.
#include <exception>
#include <new>

#define HIDDEN(type, name, symbol, ...)                                                    \
  extern "C" __attribute__((visibility("hidden"))) type name(__VA_ARGS__) __asm__(symbol); \
  type name(__VA_ARGS__)

// glibc 2.32: whether no thread was ever started. As it may not be known, it is false.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

// std::__throw_bad_array_new_length(), g++ 11
HIDDEN(void, throw_bad_array_new_length, "_ZSt28__throw_bad_array_new_lengthv") {
  throw std::bad_array_new_length();
}

// What the inline copy and destruction of std::exception_ptr call, g++ 12. libstdc++ has both
// out of line too, of a version that tells them from those of this library.
extern "C" void copy_exception_ptr(void* to, void const* from);
extern "C" void destroy_exception_ptr(void* x);
__asm__(".symver copy_exception_ptr, _ZNSt15__exception_ptr13exception_ptrC1ERKS0_@CXXABI_1.3.3");
__asm__(".symver destroy_exception_ptr, _ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3");

HIDDEN(void, add_reference, "_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv", void* x) {
  void* copy;  // never destroyed
  copy_exception_ptr(&copy, x);
}
HIDDEN(void, release, "_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv", void* x) {
  destroy_exception_ptr(x);
}
