// wgmma_operands.hpp on the engine, for ctypes.
#include "wgmma_operands.hpp"

#include <cstdio>

#include "simt/engine.hpp"

using namespace wgmma_operands;

namespace {

template <class Element, int kN, int kForm>
Status run_instance(Params const& params) {
  return simt::run_grid({1, 128, params.image_bytes}, {1},
                        [&](char* smem) { run<Element, kN, kForm, arch::Sm90>(params, smem); });
}

template <class Element, int kN>
Status run_form(int form, Params const& params) {
  return form == kSs   ? run_instance<Element, kN, kSs>(params)
         : form == kRs ? run_instance<Element, kN, kRs>(params)
                       : run_instance<Element, kN, kTs>(params);
}

template <class Element>
Status run_n(int n, int form, Params const& params) {
  switch (n) {
    case 32:
      return run_form<Element, 32>(form, params);
    case 64:
      return run_form<Element, 64>(form, params);
    case 96:
      return run_form<Element, 96>(form, params);
    case 128:
      return run_form<Element, 128>(form, params);
    case 192:
      return run_form<Element, 192>(form, params);
    case 256:
      return run_form<Element, 256>(form, params);
  }
  return Status::invalid("no such n");
}

}  // namespace

// 0, or writes why not.
extern "C" int run_on_engine(int is_bf16, int n, int form, Params const* params, char* why,
                             int size) {
  Status const status = is_bf16 ? run_n<cutlass::bfloat16_t>(n, form, *params)
                                : run_n<cutlass::half_t>(n, form, *params);
  std::snprintf(why, size_t(size), "%s", status.message.c_str());
  return !status.ok();
}
