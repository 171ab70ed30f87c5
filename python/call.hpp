// A call of attention() or explain(): Python's arguments in, a Problem out.
//
// An option is a member of Arguments, a line of kKeywords in call.cpp, and what it says to the
// Problem there. One that is not given leaves the Problem as it is.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <string>

#include "arrays.hpp"
#include "cutlass_attn.hpp"

namespace cutlass_attn {

// Arguments by name, borrowed; null where not given. Python's `attention` says what they mean.
struct Arguments {
  PyObject *q = nullptr, *k = nullptr, *v = nullptr;
  PyObject* options = nullptr;  // a dict of what follows

  PyObject *causal = nullptr, *window = nullptr, *attention_chunk = nullptr;
  PyObject *softmax_scale = nullptr, *softcap = nullptr;
  PyObject *layout = nullptr, *return_lse = nullptr, *out = nullptr, *kernel = nullptr;
  PyObject* accumulate = nullptr;
  PyObject* verify = nullptr;
  PyObject *bias = nullptr, *mask = nullptr, *alibi_slopes = nullptr, *sinks = nullptr;
  PyObject *dropout_p = nullptr, *rng_state = nullptr;

  PyObject* dispatched = nullptr;  // of forward(): torch has seen the call, memory may be touched
  PyObject* device = nullptr;      // of explain(): a devices.Device, or None for that of q

  // Of a vectorcall function(q, k, v, options, **more), in which `more` goes before `options` and
  // alone may have the last two. Raises TypeError.
  Arguments(char const* function, PyObject* const* args, Py_ssize_t count, PyObject* names);

  // Interns the names of arguments: once, before anything else.
  static void prepare();
};

struct Call {
  Library const* library = nullptr;
  Arrays arrays;  // all that are given
  bool bshd = false, return_lse = false;
  std::string kernel = "auto";
  View q;
  Problem problem;

  // Reads what does not need arrays: kinds of objects, scalars, strings. Raises TypeError,
  // ValueError.
  explicit Call(Arguments const& given);

  // Reads shapes, dtypes, devices and strides of all arrays but `out`, and their addresses if
  // `memory`. Raises TypeError, ValueError.
  void read_arrays(Arguments const& given, bool memory);

  // Reads the result, given or made for this call.
  void read_out(PyObject* out, bool memory);

  // Stands in for what a call that is not run may lack: a contiguous result, and addresses, which
  // are aligned and overlap nothing.
  void assume_memory(Arguments const& given);

  Device device() const { return q.device.type == dlpack::kCuda ? Device::kCuda : Device::kCpu; }
  std::array<int64_t, 4> out_shape() const;  // in the order of the layout
  std::array<int64_t, 3> lse_shape() const;

 private:
  void read_options(Arguments const& given, bool memory);
  View read_option(char const* name, PyObject* x, bool memory) const;
  PerLogit read_per_logit(char const* name, View const& x) const;
};

// Whether an argument that may be None has a value.
inline bool has_value(PyObject* x) { return x != nullptr && x != Py_None; }

}  // namespace cutlass_attn
