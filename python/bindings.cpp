// The Python module _C: calls by keyword, plain lists and dicts out. It links neither torch nor
// numpy.

#include <cstdint>
#include <string>
#include <vector>

#include "backward_call.hpp"
#include "call.hpp"
#include "compiler.hpp"
#include "cutlass_attn.hpp"
#include "entry.hpp"
#include "errors.hpp"
#include "merge_call.hpp"
#include "prequantized.hpp"
#include "py.hpp"
#include "runtime/options.hpp"
#include "serving_call.hpp"

namespace {

using namespace cutlass_attn;

// attention(). Unless the keyword `dispatched` is given, it asks first whether torch must see the
// call; if so, Python's _call.operator takes over.
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

// Reads and checks a call without running it; its tensors need no memory.
Call read_call(Arguments const& given, bool memory) {
  Call call(given);
  call.read_arrays(given, memory);
  if (has_value(given.out)) call.read_out(given.out, memory);
  call.assume_memory(given);
  return call;
}

py::object describe(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Call call = read_call(Arguments(kAttention, "attention", args, count, names), false);
  raise_unless_ok(check(call.problem));
  Problem const& p = call.problem;
  py::object const quantize =
      p.quantize == Quantize::kNone ? py::none() : py::to_python(name_of(p.quantize));
  py::object const max_error = p.max_error == 0.0f ? py::none() : py::to_python(p.max_error);
  return records().call(name_of(p.q.dtype), name_of(p.accumulate), quantize, max_error,
                        call.device() == Device::kCuda ? "cuda" : "cpu", call.bshd, p.num_heads_q,
                        p.num_heads_kv, p.seq_q.seqlen, p.seq_k.seqlen, p.head_dim,
                        p.logits.softmax_scale, p.dropout.p);
}

py::object explain_call(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Arguments const given(kAttention, "explain", args, count, names);
  return read_call(given, true).explained(Op::kForward, given);
}

// --- Facts and settings --------------------------------------------------------------------------

py::object variant_list(PyObject* const*, Py_ssize_t, PyObject*) {
  std::vector<py::object> list;
  for (VariantInfo const& v : variants()) {
    auto const words = [](std::vector<std::string> const& x) {
      return checked(PyList_AsTuple(py::to_list(x).ptr()));
    };
    list.push_back(py::dict(
        "key", v.key, "kernel", v.kernel, "op", v.op == Op::kBackward ? "backward" : "forward",
        "device", v.device == Device::kCuda ? "cuda" : "cpu", "arch", v.arch, "dtype", int(v.dtype),
        "head_dim", v.head_dim, "head_dim_v", v.head_dim_v, "head_dim_multiple",
        v.head_dim_multiple, "max_rows", v.max_rows, "tile", v.tile, "accumulate",
        int(v.accumulate), "quantize", int(v.quantize), "options", words(v.options), "needs",
        words(v.needs), "tier", v.tier, "compiled", v.compiled, "automatic", v.automatic));
  }
  return py::to_list(list);
}

py::object build(PyObject* const*, Py_ssize_t, PyObject*) {
  BuildInfo const info = build_info();
  return py::dict("version", info.version, "tier", info.tier, "cuda", info.cuda, "architectures",
                  info.architectures, "cutlass", info.cutlass, "compiler", info.compiler, "simt",
                  info.simt);
}

py::object kept(PyObject* args, PyObject* keywords) {
  int device_index;
  parse(args, keywords, "i", {"device_index"}, &device_index);
  return py::to_python(kept_bytes(device_index));
}

py::object info_of_device(PyObject* args, PyObject* keywords) {
  int device, index;
  parse(args, keywords, "ii", {"device", "index"}, &device, &index);
  DeviceInfo const info = device_info(static_cast<Device>(device), index);
  return py::dict("compute_capability", info.compute_capability, "unavailable", info.unavailable);
}

py::object add_tile_call(PyObject* args, PyObject* keywords) {
  char const *kernel, *tile;
  int head_dim, head_dim_v;
  parse(args, keywords, "$siis", {"kernel", "head_dim", "head_dim_v", "tile"}, &kernel, &head_dim,
        &head_dim_v, &tile);
  raise_unless_ok(add_tile({kernel, head_dim, head_dim_v, tile}));
  return py::none();
}

py::object prefer_tile_call(PyObject* args, PyObject* keywords) {
  char const *kernel, *tile;
  int smem_kb, head_dim, head_dim_v, decode;
  float min_blocks_per_sm;
  parse(args, keywords, "$isiisfp",
        {"smem_kb", "kernel", "head_dim", "head_dim_v", "tile", "min_blocks_per_sm", "decode"},
        &smem_kb, &kernel, &head_dim, &head_dim_v, &tile, &min_blocks_per_sm, &decode);
  raise_unless_ok(
      prefer_tile({smem_kb, kernel, head_dim, head_dim_v, tile, min_blocks_per_sm, decode != 0}));
  return py::none();
}

py::object rule_list(PyObject* const*, Py_ssize_t, PyObject*) {
  std::vector<py::object> list;
  for (TileRule const& rule : tile_rules()) {
    list.push_back(py::dict("smem_kb", rule.smem_kb, "kernel", rule.kernel, "head_dim",
                            rule.head_dim, "head_dim_v", rule.head_dim_v, "tile", rule.tile,
                            "min_blocks_per_sm", rule.min_blocks_per_sm, "decode", rule.decode));
  }
  return py::to_list(list);
}

py::object mark_failing_call(PyObject* args, PyObject* keywords) {
  int smem_kb;
  char const *key, *reason;
  parse(args, keywords, "iss", {"smem_kb", "key", "reason"}, &smem_kb, &key, &reason);
  raise_unless_ok(mark_failing(smem_kb, key, reason));
  return py::none();
}

void define(py::handle m) {
  Arguments::prepare();
  static PyMethodDef methods[] = {
      method<forward>("forward", "Runs a call, with the keywords of attention() and `dispatched`."),
      method<describe>("describe", "Checks a call of attention() and returns it as a Call."),
      method<explain_call>("explain", "Verdicts on a call, with `device` as a keyword."),
      method<variant_list>("variants", "All kernel variants, as dicts."),
      method<build>("build_info", "What this build consists of, as a dict."),
      keyword_method<kept>("kept_bytes", "Bytes of a GPU that the library keeps."),
      keyword_method<info_of_device>("device_info", "What is known of a device, as a dict."),
      keyword_method<add_tile_call>("add_tile", "Adds a variant with another tile."),
      keyword_method<prefer_tile_call>("prefer_tile", "Adds a rule of which tile is chosen."),
      method<rule_list>("tile_rules", "The rules of which tile is chosen, as dicts."),
      keyword_method<mark_failing_call>("mark_failing", "Keeps a variant from being chosen."),
      {},
  };
  py::check(PyModule_AddFunctions(m.ptr(), methods) == 0);
  Records const& types = records();
  auto const add = [&](char const* name, py::record const& type) {
    py::check(PyModule_AddObjectRef(m.ptr(), name, type.type().ptr()) == 0);
  };
  add("Call", types.call);
  add("Verdict", types.verdict);
  add("PassedOver", types.passed_over);
  add("Explanation", types.explanation);
  define_libraries(m);
  define_serving_calls(m);
  define_merge_call(m);
  define_backward_calls(m);
  define_prequantized(m);
  define_compiler(m);
}

}  // namespace

Records const& cutlass_attn::records() {
  // Never freed: Python is gone before static objects are.
  static auto const* const types = new Records{
      {"cutlass_attn._C.Call",
       "What a call of attention() asks for, but for its arrays.",
       {{"dtype", nullptr},
        {"accumulate", nullptr},
        {"quantize", nullptr},
        {"max_error", nullptr},
        {"device", nullptr},
        {"bshd", nullptr},
        {"num_heads_q", nullptr},
        {"num_heads_kv", nullptr},
        {"seqlen_q", nullptr},
        {"seqlen_k", nullptr},
        {"head_dim", nullptr},
        {"softmax_scale", nullptr},
        {"dropout_p", nullptr},
        {}}},
      {"cutlass_attn._C.Verdict",
       "What dispatch thinks of one variant for one call.",
       {{"key", nullptr},
        {"chosen", nullptr},
        {"reason", nullptr},
        {"splits", nullptr},
        {"workspace_bytes", nullptr},
        {"score", nullptr},
        {"at_first_use", nullptr},
        {"max_launches", nullptr},
        {}}},
      {"cutlass_attn._C.PassedOver",
       "A kernel that is preferred to the one that runs.",
       {{"kernel", nullptr}, {"reason", nullptr}, {"count", nullptr}, {}}},
      {"cutlass_attn._C.Explanation",
       "Verdicts on a call, and kernels passed over.",
       {{"verdicts", nullptr}, {"passed_over", nullptr}, {}}},
  };
  return *types;
}

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT,
      "_C",
      "cutlass_attn's kernels; use cutlass_attn.attention instead.",
      -1,
      nullptr,
      nullptr,
      nullptr,
      nullptr,
      nullptr,
  };
  try {
    py::object module = checked(PyModule_Create(&definition));
    define(module);
    return module.release();
  } catch (py::Error const&) {
    return nullptr;
  }
}
