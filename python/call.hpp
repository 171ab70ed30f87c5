// A call of attention() or explain(): turns Python's arguments into a Problem. serving_call.hpp has
// the calls with packed sequences and caches, backward_call.hpp the backward passes; they share the
// options.
//
// An option is a member of Arguments, a line of kKeywords in call.cpp, and code there that writes
// it to the Problem. An option that is not given leaves the Problem unchanged.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "cutlass_attn.hpp"

namespace cutlass_attn {

// The Python functions, as bits. Each keyword lists the functions that have it.
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
  PyObject* options = nullptr;  // a dict of the arguments below

  PyObject *causal = nullptr, *window = nullptr, *attention_chunk = nullptr;
  PyObject *softmax_scale = nullptr, *softcap = nullptr;
  PyObject *layout = nullptr, *out = nullptr, *kernel = nullptr;
  PyObject *return_lse = nullptr, *return_max_logit = nullptr;
  PyObject *accumulate = nullptr, *quantize = nullptr, *max_error = nullptr;
  PyObject* verify = nullptr;
  PyObject* score_mod = nullptr;  // (name, operands), from _modified.py
  PyObject *bias = nullptr, *mask = nullptr, *alibi_slopes = nullptr, *sinks = nullptr;
  PyObject *dropout_p = nullptr, *rng_state = nullptr;

  PyObject *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr;
  PyObject *seqused_q = nullptr, *seqused_k = nullptr, *leftpad_q = nullptr, *leftpad_k = nullptr;
  PyObject *block_table = nullptr, *k_scale = nullptr, *v_scale = nullptr;
  PyObject *cache_seqlens = nullptr, *cache_batch_idx = nullptr;
  PyObject *indices = nullptr, *topk_lengths = nullptr, *kv_format = nullptr;
  PyObject *k_new = nullptr, *v_new = nullptr;
  PyObject *rotary_cos = nullptr, *rotary_sin = nullptr, *rotary_interleaved = nullptr;
  PyObject *num_splits = nullptr, *split_size = nullptr;
  PyObject* slot_mapping = nullptr;

  // For a backward pass, where `out` is an input.
  PyObject *grad_out = nullptr, *softmax_lse = nullptr, *grad_softmax_lse = nullptr;
  PyObject *grad_q = nullptr, *grad_k = nullptr, *grad_v = nullptr;
  PyObject *grad_bias = nullptr, *grad_sinks = nullptr;
  PyObject* deterministic = nullptr;
  // Inputs whose gradients are allocated, instead of written to given arrays.
  PyObject* wanted = nullptr;

  // Internal: torch has seen the call, so memory may be touched.
  PyObject* dispatched = nullptr;
  // Internal: arrays already have the dtypes that torch.autocast wants.
  PyObject* is_cast = nullptr;
  // Internal: the largest logits of each query, in the LSE's layout, instead of each head.
  PyObject* per_query = nullptr;
  PyObject* device = nullptr;  // for explain(): a devices.Device, or None for the device of q

  // Reads a vectorcall function(q, k, v, options, **more). `more` overrides `options`, and only
  // `more` may contain keywords internal to this package. `name`: for messages. Raises TypeError.
  Arguments(Function function, char const* name, PyObject* const* args, Py_ssize_t count,
            PyObject* names);

  // Interns the names of arguments. Call once, first.
  static void prepare();
};

// Arguments that may have a gradient, in the order of `wanted`, and their gradients.
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

// Records a call for its backward pass. `results` records a call that ran here; `call` runs and
// records rare calls in Python, such as calls under autocast.
struct Recorder {
  Handler results, call;
};
enum class Recording { kNone, kResults, kCall };

struct CallExplanation : Explanation {
  std::vector<std::string> copied;  // names of inputs of which a call makes copies
};

struct Call {
  Library const* library = nullptr;
  Arrays arrays;  // all arrays that are given
  bool bshd = false, return_lse = false, return_max_logit = false;
  bool is_packed = false;  // q and the result are (all rows, heads, columns)
  std::string kernel = "auto";
  View q;
  Problem problem;
  Float64Scalars scalars;                         // as given; the Problem has them in float32
  std::shared_ptr<Float64Scalars const> float64;  // for a float64 problem, which points to them
  UserScoreMod score_mod;              // if the problem has one; its operands are borrowed
  Prequantized const* kept = nullptr;  // borrowed: prequantized K and V

  // Memory allocated for the call, other than its results.
  std::vector<pybind11::object> held;

  // Whether input() copies; whether instead it only returns strides as if it had, to explain a call
  // on a GPU; and the names of the inputs of which either is true.
  bool copies_unaligned = false, is_assumed_on_gpu = false;
  std::vector<std::string> copied;

  // Arguments that the call writes, borrowed.
  std::vector<PyObject*> written;

  // Reads everything but arrays: object types, scalars, strings. Raises TypeError, ValueError.
  explicit Call(Arguments const& given);

  // Reads shapes, dtypes, devices and strides of all arrays except `out`, and with `memory` their
  // addresses. Raises TypeError, ValueError.
  void read_arrays(Arguments const& given, bool memory);

  // Writes softmax_scale and softcap to the Problem. Dtype and head dim must be set already.
  void set_scalars(Arguments const& given);

  // Reads padding as lengths, for a call that is not packed.
  void read_padding(Arguments const& given, bool memory);

  // Reads alibi_slopes, sinks and other options whose shapes depend on the Problem's sizes, which
  // must be set already.
  void read_options(Arguments const& given, bool memory);

  // Reads an array that must be on the device of q.
  View read_option(char const* name, PyObject* x, bool memory) const;

  // An input, as kernels read it. Those of tensor cores read 16 bytes at a time, so an input on a
  // GPU whose address or strides are not multiples of 16 bytes is copied first.
  Operand input(char const* name, View const& x, DType dtype, bool memory);
  void explain_copies(Arguments const& given);  // sets is_assumed_on_gpu

  // Reads dtype and device of q, or of the array in its place in other functions.
  DType read_q(char const* name, PyObject* x, bool memory);

  // Reads an array that broadcasts to one entry per logit, or an array of one entry per query head.
  PerLogit read_per_logit(char const* name, View const& x) const;
  float const* read_per_head(char const* name, PyObject* x, bool memory) const;

  // Reads the array of the result, given by the caller or allocated for this call.
  void read_out(PyObject* out, bool memory, bool is_given = true);

  // Records an argument that the call writes. Raises ValueError or RuntimeError if it may not.
  void write_to(char const* name, View const& x);
  // Reports these writes to torch after the call, unless torch's own operator does.
  void count_writes(Arguments const& given);

  // Raises the errors that run() would, before anything is written. Reads `out` if it is given.
  void require_kernel(Arguments const& given) const;

  // Launch options: device, stream or threads, and an allocator of memory that lives as long as
  // this call. Raises if the device is neither a CPU nor CUDA.
  LaunchOptions place();

  // How a call that torch need not see is recorded for its backward pass.
  Recording recording(Arguments const& given) const;

  // Runs the call after everything except the result has been read. Returns the result, or the
  // recorder's return value for a pair of result and LSE; with return_lse and return_max_logit a
  // tuple that also has the LSE, and the largest logits.
  pybind11::object run(Arguments const& given, Recorder* recorder = nullptr);

  // Verdicts on each variant of the op, for the given device or that of q.
  pybind11::object explained(Op op, Arguments const& given) const;

  // Completes a call that is not run: a contiguous result, and aligned addresses that do not
  // overlap.
  void assume_memory(Arguments const& given);

  Device device() const { return q.device.type == dlpack::kCuda ? Device::kCuda : Device::kCpu; }
  // Shapes in the call's layout: of the result, and of an operand with these rows and heads.
  Shape out_shape() const;
  Shape operand_shape(Sequences const& rows, int64_t heads, int64_t head_dim) const;
  Shape lse_shape() const;
  // Whether some rows may belong to no sequence; kernels do not write these.
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
