// A call of attention() or explain(): Python's arguments in, a Problem out. serving_call.hpp has
// the calls with packed sequences and caches, and backward_call.hpp the backward passes, which
// share their options.
//
// An option is a member of Arguments, a line of kKeywords in call.cpp, and what it says to the
// Problem there. One that is not given leaves the Problem as it is.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "arrays.hpp"
#include "cutlass_attn.hpp"

namespace cutlass_attn {

// Functions of Python, by which an argument's name is known to some and not to others.
enum Function : unsigned {
  kAttention = 1,
  kVarlen = 2,
  kDecode = 4,
  kAppend = 8,
  kBackward = 16,
  kVarlenBackward = 32
};

// Arguments by name, borrowed; null where not given. Python's functions say what they mean.
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

  // Of a backward pass, of which `out` is an input.
  PyObject *grad_out = nullptr, *softmax_lse = nullptr, *grad_softmax_lse = nullptr;
  PyObject *grad_q = nullptr, *grad_k = nullptr, *grad_v = nullptr;
  PyObject *grad_bias = nullptr, *grad_sinks = nullptr;
  PyObject* deterministic = nullptr;
  PyObject* wanted = nullptr;  // inputs whose gradients to make, in place of those to write

  PyObject* dispatched =
      nullptr;  // of a function that runs: torch has seen the call, memory may be touched
  PyObject* is_cast = nullptr;  // of such a function: arrays are of what torch.autocast wants
  PyObject* device = nullptr;   // of explain(): a devices.Device, or None for that of q

  // Of a vectorcall function(q, k, v, options, **more), in which `more` goes before `options` and
  // alone may have what is for this package. `name`: for messages. Raises TypeError.
  Arguments(Function function, char const* name, PyObject* const* args, Py_ssize_t count,
            PyObject* names);

  // Interns the names of arguments: once, before anything else.
  static void prepare();
};

// What may have a gradient, in the order of `wanted`, and where the gradient goes.
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

// A function of Python that sees to a call: function(q, k, v, options), with the call's results at
// the end, if there are some. Looked up once.
struct Handler {
  char const* module;
  char const* name;
  PyObject* function = nullptr;

  pybind11::object operator()(Arguments const& given, pybind11::object const& results = {});
};

// By which a call is recorded for a backward pass: of its results, and of one that is rare, such as
// of autocast, instead of running it.
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
  UserScoreMod score_mod;              // of a problem that has one; its operands are borrowed
  Prequantized const* kept = nullptr;  // borrowed: K and V, rounded before

  // Memory that was made for the call, beside its results.
  std::vector<pybind11::object> held;

  // Arguments that the call writes, borrowed.
  std::vector<PyObject*> written;

  // Reads what does not need arrays: kinds of objects, scalars, strings. Raises TypeError,
  // ValueError.
  explicit Call(Arguments const& given);

  // Reads shapes, dtypes, devices and strides of all arrays but `out`, and their addresses if
  // `memory`. Raises TypeError, ValueError.
  void read_arrays(Arguments const& given, bool memory);

  // Reads which rows of batch entries count, of a call that is not packed.
  void read_padding(Arguments const& given, bool memory);

  // Reads alibi_slopes, sinks and all else that depends on sizes, which the Problem has by now.
  void read_options(Arguments const& given, bool memory);

  // Reads an array that must be on the device of q.
  View read_option(char const* name, PyObject* x, bool memory) const;

  // Reads q, or the array with this name that stands for it: its dtype and device.
  DType read_q(char const* name, PyObject* x, bool memory);

  // Reads an array with one entry per logit, which broadcasts, or with one per query head.
  PerLogit read_per_logit(char const* name, View const& x) const;
  float const* read_per_head(char const* name, PyObject* x, bool memory) const;

  // Reads the result, given or made for this call.
  void read_out(PyObject* out, bool memory, bool is_given = true);

  // Notes an argument that the call writes. Raises ValueError, RuntimeError where it must not.
  void write_to(char const* name, View const& x);
  // Once they are written: tells torch, unless it knows from its own operator.
  void count_writes(Arguments const& given);

  // Raises what run() would before it writes anything. Reads `out` if it is given.
  void require_kernel(Arguments const& given) const;

  // Where the call runs, which must be a CPU or CUDA device, with memory of it on demand, which
  // lives as long as this call.
  LaunchOptions place();

  // Of a call that nothing of torch has to see.
  Recording recording(Arguments const& given) const;

  // Runs it, once everything is read but the result: the result, or a pair of it and LSE, or what
  // the recorder's function of results makes of the pair.
  pybind11::object run(Arguments const& given, Recorder* recorder = nullptr);

  // What dispatch says of each variant of the op, on the device that is given or on that of q.
  pybind11::object explained(Op op, Arguments const& given) const;

  // Stands in for what a call that is not run may lack: a contiguous result, and addresses, which
  // are aligned and overlap nothing.
  void assume_memory(Arguments const& given);

  Device device() const { return q.device.type == dlpack::kCuda ? Device::kCuda : Device::kCpu; }
  // In the order of the layout: of the result, and of all rows of so many heads.
  Shape out_shape() const;
  Shape operand_shape(Sequences const& rows, int64_t heads, int64_t head_dim) const;
  Shape lse_shape() const;
  // Whether kernels leave out rows: of packed operands no entry need have all of them.
  bool leaves_out(Sequences const& rows) const { return is_packed || rows.is_padded(); }

  // Raises ValueError unless an array has the dtype of the LSE, sinks and the gradients of sinks
  // and bias.
  void require_number(char const* name, View const& x) const;
  char const* number_dtype() const {
    return problem.q.dtype == DType::kFloat64 ? "float64" : "float32";
  }
};

// Whether an argument that may be None has a value.
inline bool has_value(PyObject* x) { return x != nullptr && x != Py_None; }

// Sets all elements of an array to zero.
void clear(PyObject* array);

}  // namespace cutlass_attn
