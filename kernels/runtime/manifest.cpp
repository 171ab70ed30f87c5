// The generated tables. Compiled as C++20 for designated initialisers, so that each field has its
// name.
#include "runtime/manifest.hpp"

#include <iterator>

#include "core/general_score.hpp"
#include "manifest_units.inc"
#include "runtime/options.hpp"

namespace cutlass_attn {
namespace {

#include "manifest_table.inc"

}  // namespace

Table<ManifestKernel> manifest_kernels() { return {kKernels, std::size(kKernels)}; }
Table<ManifestRow> manifest_rows() { return {kRows, std::size(kRows)}; }
Table<ManifestRule> manifest_rules() { return {kTuned, std::size(kTuned)}; }

}  // namespace cutlass_attn
