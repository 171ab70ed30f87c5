// The Python module _C: functions with keywords, which return plain lists and dicts. It links
// neither torch nor numpy.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>

#include "backward_call.hpp"
#include "call.hpp"
#include "compiler.hpp"
#include "cutlass_attn.hpp"
#include "entry.hpp"
#include "errors.hpp"
#include "jax_handlers.hpp"
#include "kept_maps.hpp"
#include "merge_call.hpp"
#include "prequantized.hpp"
#include "runtime/options.hpp"
#include "serving_call.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace {

using namespace cutlass_attn;

// attention(). Unless the keyword `dispatched` is given, it first asks whether torch must see the
// call; if so, Python's _call.operator runs it.
py::object forward(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Arguments const given(kAttention, "attention", args, count, names);
  Call call(given);
  Library const& library = *call.library;
  constexpr char const* kModule = "cutlass_attn._call.operator";
  static Handler recorded = {kModule, "recorded"};
  static Recorder recorder = {{kModule, "record"}, {kModule, "eager"}};
  bool const dispatched = has_value(given.dispatched);
  if (!dispatched && library.must_see(call.arrays)) {
    return recorded(given);
  }
  Recording const recording = dispatched ? Recording::kNone : call.recording(given);
  if (recording == Recording::kCall) return recorder.call(given);
  call.copies_unaligned = true;
  try {
    call.read_arrays(given, true);
  } catch (NoMemory const&) {
    if (dispatched) throw;
    return recorded(given);
  }
  if (call.q.device.type == dlpack::kOtherDevice) {
    std::string const device = attribute(given.q, "device");
    if (!dispatched && device == "meta") return recorded(given);
    raise(PyExc_ValueError, "q, k and v must be on a CPU or CUDA device, got " + device);
  }

  return call.run(given, recording == Recording::kResults ? &recorder : nullptr);
}

// Reads and checks a call without running it. Its tensors need no memory.
Call read_call(Arguments const& given, bool memory) {
  Call call(given);
  call.explain_copies(given);
  call.read_arrays(given, memory);
  if (has_value(given.out)) call.read_out(given.out, memory);
  call.assume_memory(given);
  return call;
}

py::object describe(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Call call = read_call(Arguments(kAttention, "attention", args, count, names), false);
  raise_unless_ok(check(call.problem));
  return py::cast(std::move(call));
}

py::object explain_call(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Arguments const given(kAttention, "explain", args, count, names);
  return read_call(given, true).explained(Op::kForward, given);
}

void define_calls(py::module_& m) {
  Arguments::prepare();
  static PyMethodDef methods[] = {
      method<forward>("forward", "Runs a call, with the keywords of attention() and `dispatched`."),
      method<describe>("describe", "Checks a call of attention() and returns it as a Call."),
      method<explain_call>("explain", "Verdicts on a call, with `device` as a keyword."),
      {},
  };
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();

  py::class_<Call> call(m, "Call", "The options and sizes of a call of attention().");
  auto const field = [&call](char const* name, auto get) {
    call.def_property_readonly(name, [get](Call const& c) { return get(c.problem); });
  };
  field("dtype", [](Problem const& p) { return name_of(p.q.dtype); });
  field("accumulate", [](Problem const& p) { return name_of(p.accumulate); });
  field("quantize", [](Problem const& p) {
    bool const is_none = p.quantize == Quantize::kNone;
    return is_none ? py::object(py::none()) : py::object(py::str(name_of(p.quantize)));
  });
  field("max_error", [](Problem const& p) {
    return p.max_error == 0.0f ? py::object(py::none()) : py::object(py::float_(p.max_error));
  });
  field("num_heads_q", [](Problem const& p) { return p.num_heads_q; });
  field("num_heads_kv", [](Problem const& p) { return p.num_heads_kv; });
  field("seqlen_q", [](Problem const& p) { return p.seq_q.seqlen; });
  field("seqlen_k", [](Problem const& p) { return p.seq_k.seqlen; });
  field("head_dim", [](Problem const& p) { return p.head_dim; });
  field("softmax_scale", [](Problem const& p) { return p.logits.softmax_scale; });
  field("dropout_p", [](Problem const& p) { return p.dropout.p; });
  call.def_readonly("bshd", &Call::bshd);
  call.def_property_readonly(
      "device", [](Call const& c) { return c.device() == Device::kCuda ? "cuda" : "cpu"; });

  py::class_<Verdict>(m, "Verdict", "Dispatch's verdict on one variant for one call.")
      .def_readonly("key", &Verdict::key)
      .def_readonly("chosen", &Verdict::chosen)
      .def_readonly("reason", &Verdict::reason)
      .def_readonly("splits", &Verdict::splits)
      .def_readonly("workspace_bytes", &Verdict::workspace_bytes)
      .def_readonly("score", &Verdict::score)
      .def_readonly("at_first_use", &Verdict::at_first_use)
      .def_readonly("max_launches", &Verdict::max_launches);
  py::class_<PassedOver>(m, "PassedOver", "A kernel that dispatch prefers to the one that runs.")
      .def_readonly("kernel", &PassedOver::kernel)
      .def_readonly("reason", &PassedOver::reason)
      .def_readonly("count", &PassedOver::count);
  py::class_<CallExplanation>(m, "Explanation", "Verdicts on a call, and kernels passed over.")
      .def_readonly("verdicts", &CallExplanation::verdicts)
      .def_readonly("copied", &CallExplanation::copied)
      .def_property_readonly("chosen",
                             [](CallExplanation const& x) -> Verdict const* {
                               for (Verdict const& verdict : x.verdicts) {
                                 if (verdict.chosen) return &verdict;
                               }
                               return nullptr;
                             })
      .def_readonly("passed_over", &CallExplanation::passed_over);
}

py::list variant_list() {
  py::list list;
  for (VariantInfo const& v : variants()) {
    list.append(py::dict(
        "key"_a = v.key, "kernel"_a = v.kernel,
        "op"_a = v.op == Op::kBackward ? "backward" : "forward",
        "device"_a = v.device == Device::kCuda ? "cuda" : "cpu", "arch"_a = v.arch,
        "dtype"_a = int(v.dtype), "head_dim"_a = v.head_dim, "head_dim_v"_a = v.head_dim_v,
        "head_dim_multiple"_a = v.head_dim_multiple, "max_rows"_a = v.max_rows, "tile"_a = v.tile,
        "accumulate"_a = int(v.accumulate), "quantize"_a = int(v.quantize),
        "options"_a = py::tuple(py::cast(v.options)), "needs"_a = py::tuple(py::cast(v.needs)),
        "tier"_a = v.tier, "compiled"_a = v.compiled, "automatic"_a = v.automatic));
  }
  return list;
}

py::dict build() {
  BuildInfo const info = build_info();
  return py::dict("version"_a = info.version, "tier"_a = info.tier, "cuda"_a = info.cuda,
                  "architectures"_a = info.architectures, "cutlass"_a = info.cutlass,
                  "compiler"_a = info.compiler, "simt"_a = info.simt);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "cutlass_attn's kernels; use cutlass_attn.attention instead.";
  define_libraries(m);
  define_calls(m);
  define_serving_calls(m);
  define_merge_call(m);
  define_backward_calls(m);
  define_prequantized(m);
  define_kept_maps(m);
  define_jax_handlers(m);
  m.def("variants", &variant_list);
  m.def("build_info", &build);
  m.def("kept_bytes", &kept_bytes);
  m.def("device_info", [](int device, int index) {
    DeviceInfo const info = device_info(static_cast<Device>(device), index);
    return py::dict("compute_capability"_a = info.compute_capability,
                    "unavailable"_a = info.unavailable);
  });
  define_compiler(m);
  m.def(
      "add_tile",
      [](std::string kernel, int head_dim, int head_dim_v, std::string tile) {
        raise_unless_ok(add_tile({std::move(kernel), head_dim, head_dim_v, std::move(tile)}));
      },
      py::kw_only(), "kernel"_a, "head_dim"_a, "head_dim_v"_a, "tile"_a);
  m.def(
      "check_tile",
      [](std::string kernel, int head_dim, int head_dim_v, std::string tile) {
        TileCheck const check =
            check_tile({std::move(kernel), head_dim, head_dim_v, std::move(tile)});
        return py::make_tuple(check.why_not, check.spills);
      },
      py::kw_only(), "kernel"_a, "head_dim"_a, "head_dim_v"_a, "tile"_a);
  m.def(
      "prefer_tile",
      [](int smem_kb, std::string kernel, int head_dim, int head_dim_v, std::string tile,
         bool decode) {
        raise_unless_ok(prefer_tile(
            {smem_kb, std::move(kernel), head_dim, head_dim_v, std::move(tile), decode}));
      },
      py::kw_only(), "smem_kb"_a, "kernel"_a, "head_dim"_a, "head_dim_v"_a, "tile"_a, "decode"_a);
  m.def("tile_rules", [] {
    py::list list;
    for (TileRule const& rule : tile_rules()) {
      list.append(py::dict("smem_kb"_a = rule.smem_kb, "kernel"_a = rule.kernel,
                           "head_dim"_a = rule.head_dim, "head_dim_v"_a = rule.head_dim_v,
                           "tile"_a = rule.tile, "decode"_a = rule.decode));
    }
    return list;
  });
  m.def("mark_failing", [](int smem_kb, std::string const& key, std::string reason) {
    raise_unless_ok(mark_failing(smem_kb, key, std::move(reason)));
  });
}
