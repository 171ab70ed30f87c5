// attention() of ordinary torch tensors with no more than scalar options, in one step from Python's
// objects to the launch: docs/host-time.md says what each piece of it costs.
#pragma once

#include <pybind11/pybind11.h>

namespace cutlass_attn {

// What the short path calls of torch, which this module does not link.
struct TorchFunctions {
  pybind11::type tensor;               // torch.Tensor
  pybind11::capsule exchange_api;      // its __dlpack_c_exchange_api__
  pybind11::object empty_like;         // torch.empty_like
  pybind11::object contiguous_format;  // torch.contiguous_format
  pybind11::object is_neg;             // torch.Tensor.is_neg
  pybind11::object is_grad_enabled;    // torch.is_grad_enabled
  pybind11::object num_threads;        // torch.get_num_threads
  pybind11::tuple interceptors;        // true while a call must go through torch's dispatcher
};

// A Python function of (q, k, v, causal, softmax_scale, softcap, layout) that returns the result,
// or None for what it does not take: the long path takes that, or says what is wrong with it.
// For everything, if torch's exchange API is of a version that is unknown here.
pybind11::object make_short_path(TorchFunctions torch);

}  // namespace cutlass_attn
