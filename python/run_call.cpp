// Runs or explains a call that has been read, and records it for gradients.
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "call.hpp"
#include "errors.hpp"
#include "kept_maps.hpp"
#include "parse.hpp"
#include "prequantize.hpp"
#include "prequantized.hpp"
#include "runtime/options.hpp"

namespace py = pybind11;

namespace cutlass_attn {

LaunchOptions Call::place() {
  LaunchOptions options;
  options.device = device();
  options.device_index = q.device.index;
  options.kernel = kernel;
  if (problem.logits.has_score_mod) options.score_mod = &score_mod;
  library->place(q.device, options);
  // Freed once the call is enqueued: torch reuses the memory only for later work on this stream.
  options.allocate = [this](int64_t bytes) -> Workspace {
    py::gil_scoped_acquire locked;
    held.push_back(library->workspace(q, bytes));
    return {library->read(held.back().ptr(), true).data, bytes};
  };
  return options;
}

Recording Call::recording(Arguments const& given) const {
  if (!has_value(given.is_cast) && library->casts()) return Recording::kCall;
  if (!library->needs_gradient(arrays)) return Recording::kNone;
  if (has_value(given.out) || has_value(given.quantize)) return Recording::kCall;
  Arrays others;  // arguments without a gradient
  for (int i = 0; i < arrays.count; ++i) {
    PyObject* const x = arrays.items[i];
    bool const is_input = std::any_of(std::begin(kInputs), std::end(kInputs),
                                      [&](Input const& input) { return given.*input.value == x; });
    if (!is_input) others.add(x, arrays.is_integer[i]);
  }
  return library->needs_gradient(others) ? Recording::kCall : Recording::kResults;
}

py::object Call::run(Arguments const& given, Recorder* recorder) {
  LaunchOptions options = place();
  if (kept) options.workspace = kept->workspace;
  bool const has_out = has_value(given.out);
  // Kernels do not write rows outside the sequences. These rows are zero in a result allocated
  // here; rows of padding are zero in any result.
  bool const has_gaps = leaves_out(problem.seq_q);
  py::object out = has_out    ? py::reinterpret_borrow<py::object>(given.out)
                   : has_gaps ? library->zeros(q, out_shape())
                              : library->empty(q, out_shape());
  read_out(out.ptr(), true, has_out);
  if (has_out && problem.seq_q.is_padded()) clear(out.ptr());
  py::object lse, max_logits;
  auto const per_query = [&](py::object& made) {
    made = has_gaps ? library->filled(q, number_dtype(), lse_shape(), -INFINITY)
                    : library->empty_lse(q, lse_shape());
    return static_cast<float*>(library->read(made.ptr(), true).data);
  };
  if (return_lse || recorder) problem.softmax_lse = per_query(lse);
  if (return_max_logit) {
    float* const rows = per_query(max_logits);
    problem.max_logits = rows ? rows : static_cast<float*>(kNoMemory);
  }
  if (problem.dropout.p != 0.0f && !has_value(given.rng_state)) {
    held.push_back(library->random_state(q));
    PyObject* const state = held.back().ptr();
    problem.dropout.rng_state = static_cast<uint64_t const*>(library->read(state, true).data);
    // For the backward pass.
    if (recorder && PyDict_SetItemString(given.options, "rng_state", state) != 0) {
      throw py::error_already_set();
    }
  }
  KeptMaps maps(*this);
  bool const may_keep = maps.is_for(given);
  Status status;
  {
    py::gil_scoped_release unlocked;
    bool const is_rounded = options.workspace.bytes > 0;
    status = is_rounded ? attention_prequantized(problem, options)
             : may_keep ? attention_forward(problem, options, maps)
                        : attention_forward(problem, options);
  }
  raise_unless_ok(status);
  count_writes(given);
  py::object results = out;
  if (lse) results = py::make_tuple(std::move(out), std::move(lse));
  if (recorder) results = recorder->results(given, results);
  if (!max_logits) return results;
  py::tuple const before = return_lse ? py::tuple(results) : py::make_tuple(results);
  if (!has_value(given.per_query)) max_logits = library->largest_per_head(max_logits.ptr());
  return before + py::make_tuple(max_logits);
}

py::object Call::explained(Op op, Arguments const& given) const {
  DeviceInfo where;
  if (has_value(given.device)) {
    py::handle const device(given.device);
    int const capability = device.attr("compute_capability").cast<int>();
    where = capability ? typical_device(capability)
                       : device_info(static_cast<Device>(device.attr("kind").cast<int>()),
                                     device.attr("ordinal").cast<int>());
    if (int const num_sms = device.attr("num_sms").cast<int>()) where.num_sms = num_sms;
  } else {
    where = device_info(this->device(), q.device.index);
  }
  CallExplanation explanation;
  explanation.copied = copied;
  raise_unless_ok(explain(problem, op, where, kernel, explanation));
  if (kept && kept->workspace.bytes > 0) {
    for (Verdict& verdict : explanation.verdicts) verdict.workspace_bytes = 0;
  }
  return py::cast(std::move(explanation));
}

py::object Handler::operator()(Arguments const& given, py::object const& results) {
  if (function == nullptr) {
    py::object found = py::module_::import(module).attr(name);
    function = found.release().ptr();
  }
  PyObject* const args[] = {given.q, given.k, given.v, given.options, results.ptr()};
  return checked(PyObject_Vectorcall(function, args, results ? 5 : 4, nullptr));
}

}  // namespace cutlass_attn
