// cutlass/numeric_conversion.h for nvcc and for a plain C++ compiler.
//
// The header calls intrinsics that only nvcc declares, in conversions to and from integers that
// attention never instantiates. To parse it, the names have to exist; they are never defined.
#pragma once

#if !defined(__CUDACC__)
template <class... Args>
int __dp4a(Args...);
template <class... Args>
unsigned __byte_perm(Args...);
template <class Half2>
Half2 __hfma2(Half2, Half2, Half2);
#endif

#include <cutlass/numeric_conversion.h>
