#include "call.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <utility>

#include "errors.hpp"
#include "kept_maps.hpp"
#include "parse.hpp"
#include "prequantize.hpp"
#include "prequantized.hpp"
#include "runtime/options.hpp"
#include "serving_arrays.hpp"

namespace py = pybind11;

namespace cutlass_attn {
namespace {

// --- Arguments by name ---------------------------------------------------------------------------

struct Keyword {
  char const* name;
  PyObject* Arguments::* value;
  unsigned functions;                                 // functions with this keyword
  unsigned internal = 0;                              // of these, where it is this package's own
  enum Kind { kAny, kArray, kIntegers } kind = kAny;  // kArray: always; kIntegers: one of those
};

constexpr unsigned kServing = kVarlen | kDecode;
constexpr unsigned kGradients = kBackward | kVarlenBackward;
constexpr unsigned kDense = kAttention | kBackward;
constexpr unsigned kPacked = kVarlen | kVarlenBackward;
constexpr unsigned kAll = kAttention | kServing | kGradients;

constexpr Keyword kKeywords[] = {
    {"causal", &Arguments::causal, kAll},
    {"window", &Arguments::window, kAll},
    {"attention_chunk", &Arguments::attention_chunk, kAll},
    {"softmax_scale", &Arguments::softmax_scale, kAll},
    {"softcap", &Arguments::softcap, kAll},
    {"layout", &Arguments::layout, kDense},
    {"return_lse", &Arguments::return_lse, kAll},
    {"return_max_logit", &Arguments::return_max_logit, kAttention | kServing, kDecode},
    {"out", &Arguments::out, kAll, 0, Keyword::kArray},
    {"kernel", &Arguments::kernel, kAll},
    {"accumulate", &Arguments::accumulate, kDense},
    {"quantize", &Arguments::quantize, kDense | kPacked},
    {"max_error", &Arguments::max_error, kDense},
    {"verify", &Arguments::verify, kAttention | kServing},
    {"bias", &Arguments::bias, kDense, 0, Keyword::kArray},
    {"mask", &Arguments::mask, kDense | kDecode, kDecode, Keyword::kArray},
    {"alibi_slopes", &Arguments::alibi_slopes, kAll, 0, Keyword::kArray},
    {"sinks", &Arguments::sinks, kAll, 0, Keyword::kArray},
    {"dropout_p", &Arguments::dropout_p, kDense | kPacked},
    {"rng_state", &Arguments::rng_state, kDense | kPacked, 0, Keyword::kIntegers},
    {"cu_seqlens_q", &Arguments::cu_seqlens_q, kPacked, 0, Keyword::kIntegers},
    {"cu_seqlens_k", &Arguments::cu_seqlens_k, kPacked, 0, Keyword::kIntegers},
    {"seqused_q", &Arguments::seqused_q, kDense, 0, Keyword::kIntegers},
    {"seqused_k", &Arguments::seqused_k, kDense | kPacked, 0, Keyword::kIntegers},
    {"leftpad_q", &Arguments::leftpad_q, kDense, 0, Keyword::kIntegers},
    {"leftpad_k", &Arguments::leftpad_k, kDense, 0, Keyword::kIntegers},
    {"block_table", &Arguments::block_table, kServing | kVarlenBackward, 0, Keyword::kIntegers},
    {"k_scale", &Arguments::k_scale, kServing | kVarlenBackward | kAppend},
    {"v_scale", &Arguments::v_scale, kServing | kVarlenBackward | kAppend},
    {"cache_seqlens", &Arguments::cache_seqlens, kDecode, 0, Keyword::kIntegers},
    {"cache_batch_idx", &Arguments::cache_batch_idx, kDecode, 0, Keyword::kIntegers},
    {"kv_format", &Arguments::kv_format, kDecode | kAppend},
    {"indices", &Arguments::indices, kServing | kVarlenBackward, 0, Keyword::kIntegers},
    {"topk_lengths", &Arguments::topk_lengths, kDecode, 0, Keyword::kIntegers},
    {"k_new", &Arguments::k_new, kDecode, 0, Keyword::kArray},
    {"v_new", &Arguments::v_new, kDecode | kAppend, 0, Keyword::kArray},
    {"rotary_cos", &Arguments::rotary_cos, kDecode, 0, Keyword::kArray},
    {"rotary_sin", &Arguments::rotary_sin, kDecode, 0, Keyword::kArray},
    {"rotary_interleaved", &Arguments::rotary_interleaved, kDecode},
    {"num_splits", &Arguments::num_splits, kServing},
    {"split_size", &Arguments::split_size, kServing},
    {"slot_mapping", &Arguments::slot_mapping, kAppend, 0, Keyword::kIntegers},
    {"grad_out", &Arguments::grad_out, kGradients, 0, Keyword::kArray},
    {"softmax_lse", &Arguments::softmax_lse, kGradients, 0, Keyword::kArray},
    {"grad_softmax_lse", &Arguments::grad_softmax_lse, kGradients, 0, Keyword::kArray},
    {"grad_q", &Arguments::grad_q, kGradients, 0, Keyword::kArray},
    {"grad_k", &Arguments::grad_k, kGradients, 0, Keyword::kArray},
    {"grad_v", &Arguments::grad_v, kGradients, 0, Keyword::kArray},
    {"grad_bias", &Arguments::grad_bias, kGradients, 0, Keyword::kArray},
    {"grad_sinks", &Arguments::grad_sinks, kGradients, 0, Keyword::kArray},
    {"deterministic", &Arguments::deterministic, kDense | kPacked},
    {"wanted", &Arguments::wanted, kGradients, kGradients},
    {"score_mod", &Arguments::score_mod, kDense, kDense},
    {"dispatched", &Arguments::dispatched, kAll | kAppend, kAll | kAppend},
    {"is_cast", &Arguments::is_cast, kAttention | kVarlen, kAttention | kVarlen},
    {"per_query", &Arguments::per_query, kAttention, kAttention},
    {"device", &Arguments::device, kDense | kServing, kDense | kServing},
};
constexpr size_t kNumKeywords = std::size(kKeywords);

PyObject* g_names[kNumKeywords];  // interned, like names in calls that Python compiled

Keyword const* find(PyObject* name) {
  for (size_t i = 0; i < kNumKeywords; ++i) {
    if (g_names[i] == name) return &kKeywords[i];
  }
  for (size_t i = 0; i < kNumKeywords; ++i) {
    if (PyUnicode_Check(name) && PyUnicode_Compare(g_names[i], name) == 0) return &kKeywords[i];
  }
  return nullptr;
}

// Checks that shapes, dtypes and devices of q, k and v agree.
void check_operands(View const& q, View const& k, View const& v, bool bshd) {
  if (q.ndim != 4 || k.ndim != 4 || v.ndim != 4) {
    raise(PyExc_ValueError,
          std::string("q, k and v must have 4 dimensions, ") +
              (bshd ? "(batch, seqlen, heads, head_dim)" : "(batch, heads, seqlen, head_dim)") +
              ", got q " + shape_of(q.object) + ", k " + shape_of(k.object) + ", v " +
              shape_of(v.object));
  }
  auto const of = [](View const& x, int d) { return std::to_string(x.shape[d]); };
  int const head = bshd ? 2 : 1, row = bshd ? 1 : 2;
  if (k.shape[0] != q.shape[0] || v.shape[0] != q.shape[0]) {
    raise(PyExc_ValueError, "q, k and v must have one batch size, got " + of(q, 0) + ", " +
                                of(k, 0) + ", " + of(v, 0));
  }
  if (k.shape[3] != q.shape[3]) {
    raise(PyExc_ValueError, "q and k must have one head dim, got " + of(q, 3) + " and " + of(k, 3));
  }
  if (v.shape[head] != k.shape[head]) {
    raise(PyExc_ValueError,
          "k and v must have equal numbers of heads, got " + of(k, head) + " and " + of(v, head));
  }
  if (v.shape[row] != k.shape[row]) {
    raise(PyExc_ValueError,
          "k and v must have equal lengths, got " + of(k, row) + " and " + of(v, row) + " keys");
  }
  if (!(k.dtype == q.dtype) || !(v.dtype == q.dtype)) {
    raise(PyExc_ValueError, "q, k and v must have one dtype, got " + dtype_text(q) + ", " +
                                dtype_text(k) + ", " + dtype_text(v));
  }
  if (!(k.device == q.device) || !(v.device == q.device)) {
    raise(PyExc_ValueError, "q, k and v must be on one device, got " + device_text(q) + ", " +
                                device_text(k) + ", " + device_text(v));
  }
  require_heads(q, k, bshd);
}

}  // namespace

void require_heads(View const& q, View const& k, bool bshd) {
  auto const divides = [&](int d) {
    return k.shape[d] == 0 ? q.shape[d] == 0 : q.shape[d] % k.shape[d] == 0;
  };
  int const head = bshd ? 2 : 1, row = bshd ? 1 : 2;
  if (divides(head) || !divides(row)) return;  // or check.cpp refuses them
  auto const heads = [&](int d) {
    return std::to_string(q.shape[d]) + " and " + std::to_string(k.shape[d]);
  };
  char const* const names[] = {"\"bhsd\", (batch, heads, seqlen, head_dim)",
                               "\"bshd\", (batch, seqlen, heads, head_dim)"};
  raise(PyExc_ValueError,
        "num_heads_q and num_heads_kv are " + heads(head) + " by layout=" + names[bshd] +
            "; allowed: a multiple. They would be " + heads(row) + " by layout=" + names[!bshd]);
}

void clear(PyObject* array) {
  py::int_ const zero(0);
  if (PyObject_SetItem(array, Py_Ellipsis, zero.ptr()) != 0) throw py::error_already_set();
}

void Arguments::prepare() {
  for (size_t i = 0; i < kNumKeywords; ++i) {
    g_names[i] = PyUnicode_InternFromString(kKeywords[i].name);
    if (g_names[i] == nullptr) throw py::error_already_set();
  }
}

Arguments::Arguments(Function function, char const* name, PyObject* const* args, Py_ssize_t count,
                     PyObject* names) {
  if (count != 4 || !PyDict_Check(args[3])) {
    raise(PyExc_TypeError, std::string(name) + "() takes q, k, v and a dict of options");
  }
  auto const set = [&](PyObject* keyword, PyObject* value, bool is_internal) {
    Keyword const* const known = find(keyword);
    unsigned const functions = known == nullptr ? 0
                               : is_internal    ? known->functions
                                                : known->functions & ~known->internal;
    if (!(functions & function)) {
      raise(PyExc_TypeError,
            std::string(name) + "() got an unexpected keyword argument " + repr(keyword));
    }
    this->*known->value = value;
  };
  q = args[0];
  k = args[1];
  v = args[2];
  options = args[3];
  PyObject *keyword, *value;
  for (Py_ssize_t at = 0; PyDict_Next(options, &at, &keyword, &value);) set(keyword, value, false);
  Py_ssize_t const named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) set(PyTuple_GET_ITEM(names, i), args[count + i], true);
}

Call::Call(Arguments const& given) : library(&library_of(given.q, given.k, given.v)) {
  for (PyObject* x : {given.q, given.k, given.v}) arrays.add(x);
  for (Keyword const& keyword : kKeywords) {
    PyObject* const x = given.*keyword.value;
    if (keyword.kind == Keyword::kAny || !has_value(x)) continue;
    if (!library->has(x)) {
      raise(PyExc_TypeError, std::string(keyword.name) +
                                 " must be an array of the same library as q, got " + type_name(x));
    }
    arrays.add(x, keyword.kind == Keyword::kIntegers);
  }
  for (PyObject* scale : {given.k_scale, given.v_scale}) {
    if (has_value(scale) && library->has(scale)) arrays.add(scale);
  }

  Problem& p = problem;
  if (given.layout) bshd = is_bshd(given.layout);
  if (given.causal) p.mask.causal = boolean("causal", given.causal);
  if (given.return_lse) return_lse = boolean("return_lse", given.return_lse);
  if (given.return_max_logit) {
    return_max_logit = boolean("return_max_logit", given.return_max_logit);
    if (return_max_logit) p.max_logits = reinterpret_cast<float*>(int64_t(4) << 60);
  }
  // Only checked here; Python and the backward pass read the values.
  if (given.verify) boolean("verify", given.verify);
  if (given.deterministic) boolean("deterministic", given.deterministic);
  if (given.rotary_interleaved) boolean("rotary_interleaved", given.rotary_interleaved);
  if (has_value(given.window)) read_window(given.window, p.mask);
  if (has_value(given.attention_chunk)) {
    p.mask.attention_chunk = attention_chunk_of(given.attention_chunk);
  }
  if (has_value(given.softmax_scale)) {
    scalars.softmax_scale = number("softmax_scale", given.softmax_scale);
  }
  if (given.softcap) scalars.softcap = number("softcap", given.softcap);
  if (given.num_splits) p.num_splits = count("num_splits", given.num_splits, 0);
  if (given.split_size) p.split_size = count("split_size", given.split_size, 0);
  if (given.dropout_p) p.dropout.p = float(number("dropout_p", given.dropout_p));
  if (given.accumulate) p.accumulate = accumulate_of(given.accumulate);
  if (has_value(given.quantize)) {
    kept = prequantized_of(given.quantize);
    p.quantize = kept ? kept->problem.quantize : quantize_of(given.quantize);
  }
  if (has_value(given.max_error)) {
    p.max_error = max_error_of(given.max_error);
    if (p.quantize == Quantize::kNone || kept) {
      raise(PyExc_ValueError, "max_error is " + repr(given.max_error) + ", but quantize is " +
                                  (kept ? "a PrequantizedKV" : "None") +
                                  "; allowed: a mode, such as \"qk\"");
    }
  }
  if (has_value(given.score_mod)) {
    auto const [name, operands] = py::cast<std::pair<std::string, py::bytes>>(given.score_mod);
    char* data = nullptr;
    Py_ssize_t bytes = 0;
    if (PyBytes_AsStringAndSize(operands.ptr(), &data, &bytes) != 0) throw py::error_already_set();
    if (bytes > UserScoreMod::kMaxBytes) {
      raise(PyExc_ValueError, "score_mod reads tensors and numbers of " + std::to_string(bytes) +
                                  " bytes of sizes, strides and numbers; allowed: up to " +
                                  std::to_string(UserScoreMod::kMaxBytes));
    }
    score_mod = {name, data, int32_t(bytes)};
    p.logits.has_score_mod = true;
  }
  if (given.kernel) kernel = string("kernel", "auto", given.kernel);
}

DType Call::read_q(char const* name, PyObject* x, bool memory) {
  q = library->read(x, memory);
  DType dtype;
  if (get_dtype(q, dtype)) return dtype;
  std::string allowed = name_of(DType(0));
  for (int i = 1; i < kNumDTypes; ++i) {
    allowed += (i + 1 < kNumDTypes ? ", " : " or ") + std::string(name_of(DType(i)));
  }
  raise(PyExc_TypeError, std::string(name) + " must be " + allowed + ", got " + dtype_text(q));
}

namespace {

bool is_aligned(View const& x) {
  constexpr int64_t kElements = 8;  // of 16 bytes
  if (reinterpret_cast<uint64_t>(x.data) % 16 != 0) return false;
  for (int d = 0; d + 1 < x.ndim; ++d) {
    if (x.shape[d] > 1 && x.strides[d] % kElements != 0) return false;
  }
  return true;
}

// Checks the place of a call in a larger one, in host memory.
void check_part(Problem const& p) {
  auto const require = [&](int i, bool ok, std::string const& allowed) {
    int64_t const value = int64_t(p.dropout.rng_state[i]);
    if (ok && value >= 0 && value <= INT32_MAX) return;
    raise(PyExc_ValueError, "rng_state[" + std::to_string(i) + "] is " + std::to_string(value) +
                                ", allowed: " + allowed);
  };
  uint64_t const* const part = p.dropout.rng_state + 2;
  uint64_t const heads = uint64_t(p.num_heads_q);
  require(2, part[0] >= heads, "at least " + std::to_string(heads) + ", the query heads of q");
  require(3, part[1] <= part[0] - heads,
          "0 to " + std::to_string(part[0] - heads) + ", a first head for those of q");
  require(4, part[2] % 16 == 0, "a multiple of 16, the first query");
  require(5, part[3] % 32 == 0, "a multiple of 32, the first key");
}

}  // namespace

Operand Call::input(char const* name, View const& x, DType dtype, bool memory) {
  Operand const given = operand(name, x, bshd, dtype);
  bool const may_be_copied =
      is_assumed_on_gpu || (copies_unaligned && x.device.type == dlpack::kCuda);
  // Kernels of tensor cores have 16-bit elements, and head dims of whole vectors.
  bool const may_help = may_be_copied && x.dtype.bits == 16 && x.shape[x.ndim - 1] % 8 == 0 &&
                        kernel == "auto" && !kept;
  if (!may_help || is_aligned(x)) return given;
  copied.push_back(name);
  if (!is_assumed_on_gpu) {
    held.push_back(library->copy(x.object));
    return operand(name, library->read(held.back().ptr(), memory), bshd, dtype);
  }
  View copy = x;
  copy.data = nullptr;
  for (int64_t d = x.ndim, size = 1; d-- > 0; size *= x.shape[d]) copy.strides[d] = size;
  return operand(name, copy, bshd, dtype);
}

void Call::explain_copies(Arguments const& given) {
  is_assumed_on_gpu = has_value(given.device)
                          ? py::handle(given.device).attr("kind").cast<int>() == int(Device::kCuda)
                          : library->read(given.q, false).device.type == dlpack::kCuda;
}

void Call::read_arrays(Arguments const& given, bool memory) {
  DType const dtype = read_q("q", given.q, memory);
  View const k = library->read(given.k, memory), v = library->read(given.v, memory);
  check_operands(q, k, v, bshd);

  Problem& p = problem;
  int const head = bshd ? 2 : 1, row = bshd ? 1 : 2;
  p.batch = size("the batch", q.shape[0]);
  p.num_heads_q = size("the number of query heads", q.shape[head]);
  p.num_heads_kv = size("the number of key/value heads", k.shape[head]);
  p.seq_q.seqlen = size("the query length", q.shape[row]);
  p.seq_k.seqlen = size("the key length", k.shape[row]);
  p.head_dim = size("the head dim of q and k", q.shape[3]);
  p.head_dim_v = size("the head dim of v", v.shape[3]);
  p.q = input("q", q, dtype, memory);
  p.k = input("k", k, dtype, memory);
  p.v = input("v", v, dtype, memory);
  if (kept) kept->require_same(p, memory);
  set_scalars(given);
  p.logits.bias_dtype = dtype;
  if (arrays.count > 3) read_padding(given, memory);
  if (arrays.count > 3 || p.dropout.p != 0.0f) read_options(given, memory);
}

void Call::set_scalars(Arguments const& given) {
  Problem& p = problem;
  if (!has_value(given.softmax_scale) && p.head_dim > 0) {
    scalars.softmax_scale = 1.0 / std::sqrt(double(p.head_dim));
  }
  p.logits.softmax_scale = float(scalars.softmax_scale);
  p.logits.softcap = float(scalars.softcap);
  if (p.q.dtype == DType::kFloat64) {
    float64 = std::make_shared<Float64Scalars const>(scalars);
    p.float64 = float64.get();
  }
}

void Call::read_padding(Arguments const& given, bool memory) {
  struct {
    char const* name;
    PyObject* object;
    int32_t const*& rows;
  } const all[] = {{"seqused_q", given.seqused_q, problem.seq_q.seqused},
                   {"seqused_k", given.seqused_k, problem.seq_k.seqused},
                   {"leftpad_q", given.leftpad_q, problem.seq_q.leftpad},
                   {"leftpad_k", given.leftpad_k, problem.seq_k.leftpad}};
  for (auto const& [name, object, rows] : all) {
    if (!has_value(object)) continue;
    for (auto const& [other, x] : {std::pair("mask", given.mask), std::pair("bias", given.bias)}) {
      if (!has_value(x)) continue;
      raise(PyExc_ValueError, std::string(name) + " and " + other +
                                  " are both given; allowed: one of them, padding in a mask");
    }
    rows = address<int32_t>(
        serving_arrays::read_int32(*this, name, object, memory, {problem.batch}, "(batch,)"));
  }
}

View Call::read_option(char const* name, PyObject* x, bool memory) const {
  View const view = library->read(x, memory);
  if (!(view.device == q.device)) {
    raise(PyExc_ValueError, std::string(name) + " must be on " + device_text(q) + " like q, got " +
                                device_text(view));
  }
  require_memory(name, view);
  require_whole_elements(view);
  return view;
}

PerLogit Call::read_per_logit(char const* name, View const& x) const {
  Problem const& p = problem;
  int64_t const shape[] = {p.batch, p.num_heads_q, p.seq_q.seqlen, p.seq_k.seqlen};
  int64_t strides[4] = {};
  bool fits = 1 <= x.ndim && x.ndim <= 4;
  for (int d = 0; d < x.ndim && fits; ++d) {
    int const whole = d + 4 - x.ndim;
    fits = x.shape[d] == 1 || x.shape[d] == shape[whole];
    if (x.shape[d] != 1) strides[whole] = x.strides[d];
  }
  if (!fits) {
    raise(PyExc_ValueError,
          std::string(name) +
              " must have 1 to 4 dimensions that broadcast to (batch, num_heads_q, "
              "seqlen_q, seqlen_k) = " +
              tuple_text({shape[0], shape[1], shape[2], shape[3]}) + ", got shape " +
              shape_of(x.object) +
              (has_shape(x, {p.batch, p.seq_k.seqlen})
                   ? std::string("; for a padding mask (batch, seqlen_k) pass ") + name +
                         "[:, None, None, :]"
                   : ""));
  }
  return {address<void>(x), strides[0], strides[1], strides[2], strides[3]};
}

float const* Call::read_per_head(char const* name, PyObject* object, bool memory) const {
  View const x = read_option(name, object, memory);
  if (!has_shape(x, {problem.num_heads_q})) {
    raise(PyExc_ValueError, std::string(name) + " must have shape (num_heads_q,) = " +
                                tuple_text({problem.num_heads_q}) + ", got " + shape_of(object));
  }
  require_number(name, x);
  require_dense(name, x);
  return address<float>(x);
}

void Call::require_number(char const* name, View const& x) const {
  if (problem.q.dtype == DType::kFloat64) {
    require_dtype(name, x, kFloat64, "float64 like q");
  } else {
    require_dtype(name, x, kFloat32, "float32");
  }
}

void Call::read_options(Arguments const& given, bool memory) {
  Problem& p = problem;
  if (has_value(given.bias)) {
    View const x = read_option("bias", given.bias, memory);
    p.logits.bias = read_per_logit("bias", x);
    DType const like_q = p.q.dtype;
    if (!(x.dtype == q.dtype) && !(x.dtype == kFloat32)) {
      std::string const name = name_of(like_q);
      refuse_dtype("bias", x, name + " like q" + (like_q == DType::kFloat32 ? "" : ", or float32"),
                   x.dtype.code == dlpack::kBool ? "; a bool mask is the option mask" : "");
    }
    get_dtype(x, p.logits.bias_dtype);
  }
  if (has_value(given.mask)) {
    View const x = read_option("mask", given.mask, memory);
    p.mask.elements = read_per_logit("mask", x);
    if (x.dtype.code != dlpack::kBool) {
      refuse_dtype("mask", x, "bool, True where a query sees a key",
                   "; what is added to the logits is the option bias");
    }
  }

  int64_t const heads = p.num_heads_q;
  if (has_value(given.alibi_slopes)) {
    View const x = read_option("alibi_slopes", given.alibi_slopes, memory);
    if (!has_shape(x, {heads}) && !has_shape(x, {p.batch, heads})) {
      raise(PyExc_ValueError,
            "alibi_slopes must have shape (num_heads_q,) = " + tuple_text({heads}) +
                " or (batch, num_heads_q) = " + tuple_text({p.batch, heads}) + ", got " +
                shape_of(x.object));
    }
    bool const is_float64 = p.q.dtype == DType::kFloat64;
    p.logits.has_float64_slopes = is_float64 && x.dtype == kFloat64;
    if (!(x.dtype == kFloat32) && !p.logits.has_float64_slopes) {
      refuse_dtype("alibi_slopes", x, is_float64 ? "float64 like q, or float32" : "float32");
    }
    require_dense("alibi_slopes", x);
    p.logits.alibi_slopes = address<float>(x);
    p.logits.alibi_batch_stride = x.ndim == 2 ? x.strides[0] : 0;
  }
  if (has_value(given.sinks)) p.logits.sinks = read_per_head("sinks", given.sinks, memory);
  // Without rng_state, run() draws one before the launch.
  if (p.dropout.p != 0.0f) p.dropout.rng_state = static_cast<uint64_t const*>(kNoMemory);
  if (has_value(given.rng_state)) {
    View const x = read_option("rng_state", given.rng_state, memory);
    bool const is_part = has_shape(x, {6});
    if (!is_part && !has_shape(x, {2})) {
      raise(PyExc_ValueError,
            "rng_state must have shape (2,), a seed and an offset, or (6,), followed by the number "
            "of heads of a larger call and this call's first head, query and key there, got " +
                shape_of(x.object));
    }
    bool const is_integer = x.dtype.code == dlpack::kInt || x.dtype.code == dlpack::kUInt;
    if (!is_integer || x.dtype.bits != 64) refuse_dtype("rng_state", x, "int64 or uint64");
    require_dense("rng_state", x);
    if (p.dropout.p != 0.0f) {
      p.dropout.rng_state = address<uint64_t>(x);
      p.dropout.is_part = is_part;
      if (is_part && memory && x.device.type == dlpack::kCpu) check_part(p);
    }
  }
}

void Call::read_out(PyObject* out, bool memory, bool is_given) {
  View const x = library->read(out, memory);
  Shape const shape = out_shape();
  if (!shape.is_of(x)) {
    raise(PyExc_ValueError, "out must have shape " + tuple_text(shape) + ", got " + shape_of(out));
  }
  if (!(x.dtype == q.dtype)) {
    refuse_dtype("out", x, std::string(name_of(problem.q.dtype)) + " like q");
  }
  if (!(x.device == q.device)) {
    raise(PyExc_ValueError, "out must be on " + device_text(q) + " like q, got " + device_text(x));
  }
  if (is_given) write_to("out", x);
  problem.o = operand("out", x, bshd, problem.q.dtype);
}

void Call::assume_memory(Arguments const& given) {
  Problem& p = problem;
  if (!has_value(given.out)) {
    Shape const shape = out_shape();
    int64_t const* const last = shape.end() - 1;
    int64_t const second = last[-1] * last[0], third = last[0];
    p.o = {nullptr, is_packed ? 0 : last[-2] * second, bshd ? third : second, bshd ? second : third,
           p.q.dtype};
  }
  bool const is_view = !p.k.data && !p.v.data && library->share_storage(given.k, given.v);
  for (Operand* t : {&p.q, &p.k, &p.v, &p.o}) {
    int64_t const place = t == &p.o ? 3 : t == &p.v && !is_view ? 2 : 1;
    if (t->data == nullptr) t->data = reinterpret_cast<void*>(place << 60);
  }
}

void Call::write_to(char const* name, View const& x) {
  require_writable(name, x);
  if (library->is_frozen(x.object)) {
    raise(PyExc_RuntimeError, std::string(name) +
                                  " is an inference tensor, which can be written only in inference "
                                  "mode; call .clone() first");
  }
  written.push_back(x.object);
}

void Call::count_writes(Arguments const& given) {
  if (!has_value(given.dispatched)) {
    for (PyObject* x : written) library->count_write(x);
  }
  written.clear();
}

void Call::require_kernel(Arguments const& given) const {
  Call call = *this;
  if (has_value(given.out)) call.read_out(given.out, true);
  call.assume_memory(given);
  Plan chosen;
  raise_unless_ok(
      plan(call.problem, Op::kForward, device_info(device(), q.device.index), kernel, chosen));
}

Shape Call::out_shape() const {
  return operand_shape(problem.seq_q, problem.num_heads_q, problem.head_dim_v);
}

Shape Call::operand_shape(Sequences const& rows, int64_t heads, int64_t head_dim) const {
  if (is_packed) return {rows.total, heads, head_dim};
  return {problem.batch, bshd ? rows.seqlen : heads, bshd ? heads : rows.seqlen, head_dim};
}

Shape Call::lse_shape() const {
  if (is_packed) return {problem.num_heads_q, problem.seq_q.total};
  return {problem.batch, problem.num_heads_q, problem.seq_q.seqlen};
}

}  // namespace cutlass_attn
