// merge_states(): checks, the CPU loop, and the call of the GPU kernel. CMake defines
// CUTLASS_ATTN_CUDA as 0 or 1.
#include "serving/merge.hpp"

#include <string>

#include "cpu/element.hpp"
#include "runtime/device.hpp"
#include "runtime/options.hpp"
#include "serving/elements.hpp"
#include "serving/merge_kernel.hpp"

namespace cutlass_attn {
namespace {

using serving::MergeKernel;
using serving::MergeParams;

Status check(MergeProblem const& p) {
  struct {
    char const* name;
    int64_t value, least, most;
  } const dims[] = {
      {"batch", p.batch, 0, INT32_MAX},
      {"num_heads", p.num_heads, 0, INT32_MAX},
      {"seqlen", p.seqlen, 0, kMaxSeqlen},
      {"head_dim", p.head_dim, 1, kMaxHeadDim},
      {"batch x seqlen", int64_t(p.batch) * p.seqlen, 0, INT32_MAX},
      {"rows in all", MergeKernel<float>::rows(p), 0, int64_t(INT32_MAX) * 8},
  };
  for (auto const& dim : dims) {
    if (dim.value < dim.least || dim.value > dim.most) {
      return Status::invalid(std::string(dim.name) + " is " + std::to_string(dim.value) +
                             ", allowed: " + std::to_string(dim.least) + " to " +
                             std::to_string(dim.most));
    }
  }
  if (int32_t(p.a.dtype) >= kNumDTypes || p.a.dtype == DType::kFloat64) {
    return Status::no_kernel(std::string("a is ") + name_of(p.a.dtype) +
                             ", allowed: float16, bfloat16, float32");
  }
  struct {
    char const* name;
    Operand const& operand;
  } const operands[] = {{"b", p.b}, {"o", p.o}};
  for (auto const& [name, operand] : operands) {
    if (operand.dtype == p.a.dtype) continue;
    return Status::invalid(std::string(name) + " is " + name_of(operand.dtype) +
                           ", allowed: " + name_of(p.a.dtype) + " like a");
  }
  struct {
    char const* name;
    void const* data;
  } const memory[] = {{"a", p.a.data},         {"b", p.b.data},         {"o", p.o.data},
                      {"lse_a", p.lse_a.data}, {"lse_b", p.lse_b.data}, {"lse", p.lse.data}};
  for (auto const& [name, data] : memory) {
    if (data == nullptr && MergeKernel<float>::rows(p) > 0) {
      return Status::invalid(std::string(name) + " is null, but there are " +
                             std::to_string(MergeKernel<float>::rows(p)) + " rows");
    }
  }
  return {};
}

// Whether all rows are aligned to 16 bytes and have lengths that are multiples of 16 bytes.
bool is_aligned(MergeProblem const& p) {
  int64_t const bytes = size_of(p.a.dtype);
  bool result = p.head_dim * bytes % 16 == 0;
  for (Operand const* t : {&p.a, &p.b, &p.o}) {
    result &= reinterpret_cast<uint64_t>(t->data) % 16 == 0;
    for (int64_t stride : {t->batch_stride, t->head_stride, t->row_stride}) {
      result &= stride * bytes % 16 == 0;
    }
  }
  return result;
}

template <class Element>
void merge_on_host(MergeParams const& params) {
  MergeProblem const& p = params.problem;
  for (int query = 0; query < p.batch * p.seqlen; ++query) {
    for (int head = 0; head < p.num_heads; ++head) {
      MergeKernel<Element, cpu::Convert>::merge_row(p, query, head, params.is_aligned, 0, 1);
    }
  }
}

}  // namespace

Status merge_states(MergeProblem const& p, LaunchOptions const& options) {
  Status const status = check(p);
  if (!status.ok() || MergeKernel<float>::rows(p) == 0) return status;
  MergeParams const params{p, is_aligned(p)};
  if (options.device == Device::kCuda) {
#if CUTLASS_ATTN_CUDA
    DeviceGuard const guard(options.device_index);
    return guard.status().ok() ? serving::merge_on_device(params, options) : guard.status();
#else
    return Status::device_error("this build has no CUDA runtime");
#endif
  }
  serving::by_element<cpu::Float16, cpu::BFloat16>(
      p.a.dtype, [&](auto element) { merge_on_host<decltype(element)>(params); });
  return {};
}

}  // namespace cutlass_attn
