// Includes the file CA_CPU_BODY once per instruction set, each time in a namespace, with these
// macros:
//
//   CA_CPU_TARGET    the attribute that selects the instruction set
//   CA_CPU_LANES     fp32 numbers in a vector register
//   CA_CPU_VECTORS   vectors of query rows in a block
//   CA_CPU_COUNT     keys or output columns of one product; VECTORS x COUNT vectors stay in
//                    registers
//
// CA_CPU_CALL(isa, call) is `call` in the namespace of that Isa.

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CA_CPU_HAS_X86 1

namespace avx512 {
#define CA_CPU_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")))
#define CA_CPU_LANES 16
#define CA_CPU_VECTORS 3
#define CA_CPU_COUNT 8
#include CA_CPU_BODY
#undef CA_CPU_TARGET
#undef CA_CPU_LANES
#undef CA_CPU_VECTORS
#undef CA_CPU_COUNT
}  // namespace avx512

namespace avx2 {
#define CA_CPU_TARGET __attribute__((target("avx2,fma")))
#define CA_CPU_LANES 8
#define CA_CPU_VECTORS 2
#define CA_CPU_COUNT 6
#include CA_CPU_BODY
#undef CA_CPU_TARGET
#undef CA_CPU_LANES
#undef CA_CPU_VECTORS
#undef CA_CPU_COUNT
}  // namespace avx2

#endif

namespace baseline {
#define CA_CPU_TARGET
#define CA_CPU_LANES 4
#define CA_CPU_VECTORS 2
#define CA_CPU_COUNT 4
#include CA_CPU_BODY
#undef CA_CPU_TARGET
#undef CA_CPU_LANES
#undef CA_CPU_VECTORS
#undef CA_CPU_COUNT
}  // namespace baseline

#ifdef CA_CPU_HAS_X86
#define CA_CPU_CALL(isa, call) \
  ((isa) == Isa::kAvx512 ? avx512::call : (isa) == Isa::kAvx2 ? avx2::call : baseline::call)
#else
#define CA_CPU_CALL(isa, call) ((void)(isa), baseline::call)
#endif
