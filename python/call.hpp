// A call of attention() or explain(): Python's arguments in, a Problem out. serving_call.hpp has
// the calls with packed sequences and caches, and backward_call.hpp the backward passes, which
// share their options.
//
// An option is a member of Arguments, a line of kKeywords in call.cpp, and the code there that
// writes it to the Problem. Options that are not given leave the Problem unchanged.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "cutlass_attn.hpp"

namespace cutlass_attn {

// The Python functions, as bits: each keyword lists the functions that have it.
enum Function : unsigned {
  kAttention = 1,
  kVarlen = 2,
  kDecode = 4,
  kAppend = 8,
  kBackward = 16,
  kVarlenBackward = 32
};

// Arguments by name, borrowed; null if not given. The Python functions document them.
struct Arguments {
  PyObject *q = nullptr, *k = nullptr, *v = nullptr;
  PyObject* options = nullptr;  // a dict of what follows

  PyObject *causal = nullptr, *window = nullptr, *attention_chunk = nullptr;
  PyObject *softmax_scale = nullptr, *softcap = nullptr;
  PyObject *layout = nullptr, *return_lse = nullptr, *out = nullptr, *kernel = nullptr;
  PyObject *accumulate = nullptr, *quantize = nullptr, *max_error = nullptr;
  PyObject* verify = nullptr;
  PyObject* score_mod = nullptr;  // (name, operands): of _modified.py
  PyObject *bias = nullptr, *mask = nullptr, *alibi_slopes = nullptr, *sinks = nullptr;
  PyObject *dropout_p = nullptr, *rng_state = nullptr;

  PyObject *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr;
  PyObject *seqused_q = nullptr, *seqused_k = nullptr, *leftpad_q = nullptr, *leftpad_k = nullptr;
  PyObject *block_table = nullptr, *k_scale = nullptr, *v_scale = nullptr;
  PyObject *cache_seqlens = nullptr, *cache_batch_idx = nullptr;
  PyObject *indices = nullptr, *topk_lengths = nullptr;
  PyObject *k_new = nullptr, *v_new = nullptr;
  PyObject *rotary_cos = nullptr, *rotary_sin = nullptr, *rotary_interleaved = nullptr;
  PyObject *num_splits = nullptr, *split_size = nullptr;
  PyObject* slot_mapping = nullptr;

  // For a backward pass, which takes `out` as an input.
  PyObject *grad_out = nullptr, *softmax_lse = nullptr, *grad_softmax_lse = nullptr;
  PyObject *grad_q = nullptr, *grad_k = nullptr, *grad_v = nullptr;
  PyObject *grad_bias = nullptr, *grad_sinks = nullptr;
  PyObject* deterministic = nullptr;
  PyObject* wanted = nullptr;  // inputs whose gradients to make, in place of those to write

  PyObject* dispatched =
      nullptr;  // of a function that runs: torch has seen the call, memory may be touched
  PyObject* is_cast = nullptr;  // of such a function: arrays are of what torch.autocast wants
  PyObject* device = nullptr;   // of explain(): a devices.Device, or None for that of q

  // Reads a vectorcall function(q, k, v, options, **more). `more` overrides `options`, and only
  // `more` may have keywords internal to this package. `name`: for messages. Raises TypeError.
  Arguments(Function function, char const* name, PyObject* const* args, Py_ssize_t count,
            PyObject* names);

  // Interns the names of arguments. To be called once, first.
  static void prepare();
};

// The arguments that may have a gradient, in the order of `wanted`, and their gradients.
struct Input {
  PyObject* Arguments::* value;
  PyObject* Arguments::* grad;
};
inline constexpr Input kInputs[] = {{&Arguments::q, &Arguments::grad_q},
                                    {&Arguments::k, &Arguments::grad_k},
                                    {&Arguments::v, &Arguments::grad_v},
                                    {&Arguments::bias, &Arguments::grad_bias},
                                    {&Arguments::sinks, &Arguments::grad_sinks}};

struct Prequantized;

// A Python function that takes over a call: function(q, k, v, options), or function(q, k, v,
// options, results). Looked up once.
struct Handler {
  char const* module;
  char const* name;
  PyObject* function = nullptr;

  pybind11::object operator()(Arguments const& given, pybind11::object const& results = {});
};

// Records a call for its backward pass: `results` after it ran here; `call` runs and records rare
// calls in Python, such as those under autocast.
struct Recorder {
  Handler results, call;
};
enum class Recording { kNone, kResults, kCall };

struct Call {
  Library const* library = nullptr;
  Arrays arrays;  // all that are given
  bool bshd = false, return_lse = false;
  bool is_packed = false;  // q and the result are (all rows, heads, columns)
  std::string kernel = "auto";
  View q;
  Problem problem;
  Float64Scalars scalars;                         // as given; the Problem has them in float32
  std::shared_ptr<Float64Scalars const> float64;  // of a float64 problem, which points to them
  UserScoreMod score_mod;              // of a problem that has one; its operands are borrowed
  Prequantized const* kept = nullptr;  // borrowed: K and V, rounded before

  // Memory allocated for the call, other than its results.
  std::vector<pybind11::object> held;

  // Arguments that the call writes, borrowed.
  std::vector<PyObject*> written;

  // Reads everything but arrays: types of objects, scalars, strings. Raises TypeError, ValueError.
  explicit Call(Arguments const& given);

  // Reads shapes, dtypes, devices and strides of all arrays except `out`, and with `memory` their
  // addresses. Raises TypeError, ValueError.
  void read_arrays(Arguments const& given, bool memory);

  // Writes softmax_scale and softcap to the Problem. Its dtype and head dim must be set.
  void set_scalars(Arguments const& given);

  // Reads padding as lengths, of a call that is not packed.
  void read_padding(Arguments const& given, bool memory);

  // Reads alibi_slopes, sinks and other options whose shapes depend on the Problem's sizes, which
  // must be set.
  void read_options(Arguments const& given, bool memory);

  // Reads an array that must be on the device of q.
  View read_option(char const* name, PyObject* x, bool memory) const;

  // Reads dtype and device of q, or of the array that takes its place in other functions.
  DType read_q(char const* name, PyObject* x, bool memory);

  // Reads an array that broadcasts to one entry per logit, or an array of one entry per query head.
  PerLogit read_per_logit(char const* name, View const& x) const;
  float const* read_per_head(char const* name, PyObject* x, bool memory) const;

  // Reads the array for the result, given by the caller or allocated for this call.
  void read_out(PyObject* out, bool memory, bool is_given = true);

  // Records an argument that the call writes. Raises ValueError, RuntimeError if that is forbidden.
  void write_to(char const* name, View const& x);
  // Tells torch of these writes after the call, unless torch's own operator does.
  void count_writes(Arguments const& given);

  // Raises the errors of run() before anything is written. Reads `out` if it is given.
  void require_kernel(Arguments const& given) const;

  // Launch options: device, stream or threads, and an allocator of memory that lives as long as
  // this call. Raises if the device is neither a CPU nor CUDA.
  LaunchOptions place();

  // How a call that torch need not see is recorded for its backward pass.
  Recording recording(Arguments const& given) const;

  // Runs the call after everything except the result has been read. Returns the result, a pair of
  // it and the LSE, or what the recorder returns for that pair.
  pybind11::object run(Arguments const& given, Recorder* recorder = nullptr);

  // The verdict on each variant of the op, for the given device or q's.
  pybind11::object explained(Op op, Arguments const& given) const;

  // Completes a call that is not run: a contiguous result, and aligned addresses that do not
  // overlap.
  void assume_memory(Arguments const& given);

  Device device() const { return q.device.type == dlpack::kCuda ? Device::kCuda : Device::kCpu; }
  // Shapes in the call's layout: of the result, and of an operand with these rows and heads.
  Shape out_shape() const;
  Shape operand_shape(Sequences const& rows, int64_t heads, int64_t head_dim) const;
  Shape lse_shape() const;
  // Whether some rows may belong to no sequence, so that kernels do not write them.
  bool leaves_out(Sequences const& rows) const { return is_packed || rows.is_padded(); }

  // Raises ValueError unless an array has the dtype of LSE and sinks: float32, or float64 like q.
  void require_number(char const* name, View const& x) const;
  char const* number_dtype() const {
    return problem.q.dtype == DType::kFloat64 ? "float64" : "float32";
  }
};

// Whether an argument was given and is not None.
inline bool has_value(PyObject* x) { return x != nullptr && x != Py_None; }

// Sets all elements of an array to zero.
void clear(PyObject* array);

// Raises if the heads of q are no multiple of those of k, and in the other layout would be one.
void require_heads(View const& q, View const& k, bool bshd);

}  // namespace cutlass_attn
