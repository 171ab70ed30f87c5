#include "backward_call.hpp"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "call.hpp"
#include "entry.hpp"
#include "errors.hpp"
#include "parse.hpp"
#include "runtime/options.hpp"
#include "serving_call.hpp"

namespace py = pybind11;

namespace cutlass_attn {
namespace {

void require_shape(char const* name, View const& x, Shape const& shape) {
  if (shape.is_of(x)) return;
  raise(PyExc_ValueError, std::string(name) + " must have shape " + tuple_text(shape) + ", got " +
                              shape_of(x.object));
}

// Reads an operand with the dtype and device of q. A null address is replaced by kNoMemory, because
// null means that a gradient is not wanted.
Operand read_rows(Call& call, char const* name, PyObject* object, bool memory, Shape const& shape,
                  bool is_input) {
  View const x = call.read_option(name, object, memory);
  require_shape(name, x, shape);
  if (!(x.dtype == call.q.dtype)) {
    refuse_dtype(name, x, std::string(name_of(call.problem.q.dtype)) + " like q");
  }
  DType const dtype = call.problem.q.dtype;
  Operand rows = is_input ? call.input(name, x, dtype, memory) : operand(name, x, call.bshd, dtype);
  if (rows.data == nullptr) rows.data = kNoMemory;
  return rows;
}

float const* read_lse(Call const& call, char const* name, PyObject* object, bool memory) {
  View const x = call.read_option(name, object, memory);
  require_shape(name, x, call.lse_shape());
  call.require_number(name, x);
  if (!x.is_contiguous()) {
    raise(PyExc_ValueError, std::string(name) + " must be contiguous; call .contiguous() first");
  }
  return address<float>(x);
}

// A gradient to be written, with the shape of an operand of the forward call.
struct Wanted {
  char const* name;
  PyObject* object;
  Operand Gradients::* gradient;
  Shape shape;
};

// Reads all arguments except q, k, v and their options, which are read already.
void read_gradients(Call& call, Arguments const& given, bool memory, Gradients& grad) {
  Problem& p = call.problem;
  if (given.deterministic) grad.deterministic = boolean("deterministic", given.deterministic);
  if (has_value(given.grad_out)) {
    grad.o = read_rows(call, "grad_out", given.grad_out, memory, call.out_shape(), true);
  }
  if (has_value(given.out)) p.o = read_rows(call, "out", given.out, memory, call.out_shape(), true);
  if (has_value(given.softmax_lse)) {
    p.softmax_lse = const_cast<float*>(read_lse(call, "softmax_lse", given.softmax_lse, memory));
  }
  if (has_value(given.grad_softmax_lse)) {
    grad.softmax_lse = read_lse(call, "grad_softmax_lse", given.grad_softmax_lse, memory);
  }
  auto const write_to = [&](char const* name, View const& x) {
    if (!has_value(given.wanted)) call.write_to(name, x);  // otherwise it was allocated here
  };
  Wanted const wanted[] = {
      {"grad_q", given.grad_q, &Gradients::q,
       call.operand_shape(p.seq_q, p.num_heads_q, p.head_dim)},
      {"grad_k", given.grad_k, &Gradients::k,
       call.operand_shape(p.seq_k, p.num_heads_kv, p.head_dim)},
      {"grad_v", given.grad_v, &Gradients::v,
       call.operand_shape(p.seq_k, p.num_heads_kv, p.head_dim_v)},
  };
  for (auto const& [name, object, gradient, shape] : wanted) {
    if (!has_value(object)) continue;
    write_to(name, call.library->read(object, memory));
    grad.*gradient = read_rows(call, name, object, memory, shape, false);
  }
  if (has_value(given.grad_bias)) {
    View const x = call.read_option("grad_bias", given.grad_bias, memory);
    write_to("grad_bias", x);
    bool const is_short = x.dtype == call.q.dtype && x.dtype.bits == 16;
    if (is_short) {
      grad.bias_dtype = p.q.dtype;
    } else {
      call.require_number("grad_bias", x);
    }
    grad.bias = call.read_per_logit("grad_bias", x);
  }
  if (has_value(given.grad_sinks)) {
    write_to("grad_sinks", call.library->read(given.grad_sinks, memory));
    grad.sinks = const_cast<float*>(call.read_per_head("grad_sinks", given.grad_sinks, memory));
  }
  p.grad = &grad;
}

void require_given(char const* function, Arguments const& given) {
  struct {
    char const* name;
    PyObject* object;
  } const needed[] = {
      {"grad_out", given.grad_out}, {"out", given.out}, {"softmax_lse", given.softmax_lse}};
  for (auto const& [name, object] : needed) {
    if (has_value(object)) continue;
    raise(PyExc_TypeError, std::string(function) + "() needs " + name + ", got None");
  }
}

// Sets all gradients to zero, for a call without queries, which launches nothing.
void clear(Arguments const& given) {
  for (Input const& input : kInputs) {
    PyObject* const x = given.*input.grad;
    if (has_value(x)) cutlass_attn::clear(x);
  }
}

// Returns false, and does nothing, if the gradient of a bias must be float32.
bool run(char const* function, Call& call, Arguments const& given) {
  require_given(function, given);
  Gradients grad;
  read_gradients(call, given, true, grad);
  Problem const& p = call.problem;
  if (p.dropout.p != 0.0f && !has_value(given.rng_state)) {
    raise(PyExc_TypeError,
          std::string(function) + "() needs rng_state with dropout_p: that of the forward call");
  }
  if (call.q.device.type == dlpack::kOtherDevice) {
    raise(PyExc_ValueError,
          "q, k and v must be on a CPU or CUDA device, got " + attribute(given.q, "device"));
  }
  if (p.batch == 0 || p.num_heads_q == 0 || p.seq_q.seqlen == 0) {
    raise_unless_ok(check(p, Op::kBackward));
    clear(given);
    return true;
  }
  bool const is_padded = p.seq_q.is_padded() || p.seq_k.is_padded();
  if (is_padded && !has_value(given.wanted)) clear(given);
  LaunchOptions const options = call.place();
  if (has_value(given.wanted) && grad.bias_dtype != DType::kFloat32 &&
      !gives_bias_grad(p, options)) {
    return false;
  }
  Status status;
  {
    py::gil_scoped_release unlocked;
    status = attention_backward(p, options);
  }
  raise_unless_ok(status);
  call.count_writes(given);
  return true;
}

// For a call with `wanted` whose forward call did not go through torch's dispatcher.
bool must_see(Call const& call, Arguments const& given) {
  if (has_value(given.dispatched)) return false;
  Arrays arrays;
  for (PyObject* x : {given.grad_out, given.grad_softmax_lse}) {
    if (has_value(x)) arrays.add(x);
  }
  return call.library->records() || call.library->must_see(arrays);
}

// Replaces missing gradients of the results by zeros, and makes arrays contiguous.
void prepare(Call& call, Arguments& given) {
  Library const& library = *call.library;
  auto const replace = [&call](PyObject*& x, py::object by) {
    x = call.held.emplace_back(std::move(by)).ptr();
  };
  struct {
    char const* name;
    PyObject*& object;
    bool is_lse;
  } const results[] = {{"out", given.out, false},
                       {"softmax_lse", given.softmax_lse, true},
                       // May be broadcast: the gradient of a sum is one number for all.
                       {"grad_out", given.grad_out, false},
                       {"grad_softmax_lse", given.grad_softmax_lse, true}};
  for (auto const& [name, object, is_lse] : results) {
    if (!has_value(object)) continue;
    View const x = library.read(object, true);
    require_memory(name, x);
    bool const is_read = is_lse ? x.is_contiguous() : is_dense(x);
    if (!is_read) replace(object, library.contiguous(object));
  }
  if (!has_value(given.grad_out)) replace(given.grad_out, library.zeros_like(given.out));
}

// Returns a tuple of gradients, as long as `wanted`.
py::object run_wanted(char const* function, Call& call, Arguments given) {
  Library const& library = *call.library;
  auto const is_bias = [](Input const& input) { return input.value == &Arguments::bias; };
  // The gradient of a bias, summed over its broadcast dimensions: in the bias's dtype if the kernel
  // rounds, otherwise in float32 first. Kernels do not write rows outside the sequences.
  auto const make = [&](Input const& input) {
    PyObject* const x = given.*input.value;
    if (is_bias(input)) return library.empty(library.read(x, true), Shape(library.read(x, true)));
    Sequences const& rows = input.value == &Arguments::q ? call.problem.seq_q : call.problem.seq_k;
    return call.leaves_out(rows) ? library.zeros_like(x) : library.empty_like(x);
  };
  py::sequence const wanted = py::reinterpret_borrow<py::sequence>(given.wanted);
  py::tuple grads(std::min(wanted.size(), std::size(kInputs)));
  for (size_t i = 0; i < grads.size(); ++i) {
    bool const is_wanted = wanted[i].cast<bool>();
    grads[i] = is_wanted ? make(kInputs[i]) : py::none();
    if (is_wanted) given.*kInputs[i].grad = PyTuple_GET_ITEM(grads.ptr(), Py_ssize_t(i));
  }
  prepare(call, given);
  // A kernel of float64 rounds no sum to the bias's dtype.
  bool const may_round = !(has_value(given.grad_bias) && call.q.dtype.bits == 64);
  if (may_round && run(function, call, given)) return grads;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!is_bias(kInputs[i])) continue;
    py::object const sum = library.empty_lse(call.q, Shape(library.read(given.bias, true)));
    given.grad_bias = sum.ptr();
    run(function, call, given);
    grads[i] = sum.attr("to")(py::handle(given.bias).attr("dtype"));
  }
  return grads;
}

// The result of run(), or None if torch's operator must run the backward pass.
template <class Run>
py::object unless_lazy(Arguments const& given, Run&& run) {
  try {
    return run();
  } catch (NoMemory const&) {
    if (has_value(given.dispatched)) throw;
    return py::none();
  }
}

py::object backward(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Arguments const given(kBackward, "backward", args, count, names);
  Call call(given);
  call.copies_unaligned = true;
  if (!has_value(given.wanted)) {
    call.read_arrays(given, true);
    run("backward", call, given);
    return py::none();
  }
  if (must_see(call, given)) return py::none();
  return unless_lazy(given, [&] {
    call.read_arrays(given, true);
    return run_wanted("backward", call, given);
  });
}

py::object backward_varlen(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Arguments const given(kVarlenBackward, "backward_varlen", args, count, names);
  Call call(given);
  call.copies_unaligned = true;
  if (!has_value(given.wanted)) {
    read_varlen(call, given, true);
    run("backward_varlen", call, given);
    return py::none();
  }
  if (must_see(call, given)) return py::none();
  if (has_value(given.block_table)) {
    raise(PyExc_NotImplementedError, "attention_varlen has no backward pass with block_table");
  }
  if (has_value(given.indices)) {
    raise(PyExc_NotImplementedError, "attention_varlen has no backward pass with indices");
  }
  return unless_lazy(given, [&] {
    read_varlen(call, given, true);
    return run_wanted("backward_varlen", call, given);
  });
}

// Assigns addresses that do not overlap to arrays that are missing or have no memory.
void assume_memory(Call& call, Arguments const& given, Gradients& grad) {
  call.assume_memory(given);
  Problem& p = call.problem;
  // Strides of a contiguous array (batch, heads, rows, columns).
  auto const assume = [&](Operand& rows, bool is_given, int64_t place, int64_t heads,
                          int64_t seqlen, int64_t head_dim) {
    if (!is_given) {
      int64_t const second = seqlen * head_dim, third = head_dim;
      rows = {nullptr, heads * second, second, third, p.q.dtype};
    }
    if (!is_given || rows.data == kNoMemory) rows.data = reinterpret_cast<void*>(place << 60);
  };
  assume(grad.o, has_value(given.grad_out), 1, p.num_heads_q, p.seq_q.seqlen, p.head_dim_v);
  assume(grad.q, has_value(given.grad_q), 4, p.num_heads_q, p.seq_q.seqlen, p.head_dim);
  assume(grad.k, has_value(given.grad_k), 5, p.num_heads_kv, p.seq_k.seqlen, p.head_dim);
  assume(grad.v, has_value(given.grad_v), 6, p.num_heads_kv, p.seq_k.seqlen, p.head_dim_v);
  if (p.softmax_lse == nullptr) p.softmax_lse = static_cast<float*>(kNoMemory);
  if (grad.bias) {  // as run_wanted() allocates it
    PerLogit const& bias = p.logits.bias;
    int64_t entries = 1;
    auto const stride_of = [&](int64_t of_bias, int64_t count) {
      int64_t const stride = of_bias == 0 ? 0 : entries;
      if (of_bias != 0) entries *= count;
      return stride;
    };
    grad.bias.key_stride = stride_of(bias.key_stride, p.seq_k.seqlen);
    grad.bias.row_stride = stride_of(bias.row_stride, p.seq_q.seqlen);
    grad.bias.head_stride = stride_of(bias.head_stride, p.num_heads_q);
    grad.bias.batch_stride = stride_of(bias.batch_stride, p.batch);
    grad.bias.data = reinterpret_cast<void*>(int64_t(7) << 60);
  }
  if (grad.sinks == kNoMemory) grad.sinks = reinterpret_cast<float*>(int64_t(13) << 59);
}

py::object explain_backward(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Arguments const given(kBackward, "explain", args, count, names);
  Call call(given);
  call.explain_copies(given);
  call.read_arrays(given, true);
  Gradients grad;
  read_gradients(call, given, true, grad);
  assume_memory(call, given, grad);
  return call.explained(Op::kBackward, given);
}

}  // namespace

void define_backward_calls(py::module_& m) {
  static PyMethodDef methods[] = {
      method<backward>("backward", "Writes the gradients of a call of attention()."),
      method<backward_varlen>("backward_varlen",
                              "Writes the gradients of a call of attention_varlen()."),
      method<explain_backward>("explain_backward",
                               "Verdicts on a backward pass, with `device` as a keyword."),
      {},
  };
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace cutlass_attn
