// Kernels that one unit compiles for test_races.cpp.
#pragma once

#include <vector>

#include "attention_case.hpp"
#include "cutlass_attn.hpp"

struct KernelUnderTest {
  char const* name;
  cutlass_attn::DType dtype;
  cutlass_attn::Status (*launch)(cutlass_attn::Problem const&, cutlass_attn::RunOptions const&);
  bool takes_options = false;  // bias, masks, ALiBi, sinks, dropout
  int head_dim = 64;           // of its cases
  bool takes_unaligned = true;
  bool is_decode = false;  // its cases have few queries
  cutlass_attn::Accumulate accumulate = cutlass_attn::Accumulate::kFloat32;
  cutlass_attn::Quantize quantize = cutlass_attn::Quantize::kNone;
  bool fp8_kv = false;     // K and V are float8_e4m3fn numbers
  bool drops = false;      // its cases have dropout
  bool has_alibi = false;  // its cases have ALiBi
  std::vector<attention_case::Case> (*cases)(int head_dim) = nullptr;  // only these cases
};

std::vector<KernelUnderTest> kernels_under_test();
