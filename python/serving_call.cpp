#include "serving_call.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "core/token_format.hpp"
#include "entry.hpp"
#include "errors.hpp"
#include "parse.hpp"
#include "runtime/options.hpp"
#include "serving_arrays.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace cutlass_attn {

using namespace serving_arrays;

// --- attention_varlen ----------------------------------------------------------------------------

void read_varlen(Call& call, Arguments const& given, bool memory) {
  constexpr Names kNames = {"q", "k", "v"};
  Problem& p = call.problem;
  if (call.kept) {
    raise(PyExc_ValueError, std::string("quantize is a PrequantizedKV, which calls of attention() "
                                        "take; allowed for packed sequences: \"") +
                                name_of(p.quantize) + "\", which rounds k and v in each call");
  }
  DType const dtype = call.read_q("q", given.q, memory);
  View const k = call.library->read(given.k, memory), v = call.library->read(given.v, memory);
  bool const is_paged = has_value(given.block_table);
  require_dims("q", call.q, 3, "(rows, heads, head_dim)");
  DType const kv_dtype =
      check_pair(call, kNames, k, v, is_paged ? 4 : 3,
                 is_paged ? "(pages, page_size, heads, head_dim) with block_table"
                          : "(rows, heads, head_dim) without block_table",
                 dtype, true);
  call.bshd = call.is_packed = true;
  require_given("attention_varlen", "cu_seqlens_q", given.cu_seqlens_q);
  View const cu_q = read_offsets(call, "cu_seqlens_q", given.cu_seqlens_q, memory);
  p.batch = size("the batch", cu_q.shape[0] - 1);
  set_dims(call, dtype, call.q.shape[1], k, v);
  p.seq_q.seqlen = p.seq_q.total = size("the number of rows of q", call.q.shape[0]);
  p.seq_q.cu_seqlens = address<int32_t>(cu_q);
  p.q = call.input("q", call.q, dtype, memory);
  bool const is_listed = has_value(given.indices);
  bool const may_copy = !is_paged && !is_listed;  // not a cache
  p.k = may_copy ? call.input("k", k, kv_dtype, memory) : operand("k", k, true, kv_dtype);
  p.v = may_copy ? call.input("v", v, kv_dtype, memory) : operand("v", v, true, kv_dtype);
  bool const has_cu_k = has_value(given.cu_seqlens_k), has_used = has_value(given.seqused_k);
  if (is_listed) {
    p.seq_q.cu_seqlens = nullptr;
    read_packed_lists(call, given, k, memory);
  } else if (is_paged) {
    if (has_cu_k || !has_used) {
      raise(PyExc_ValueError,
            std::string("with block_table, seqused_k says how many keys an entry has: ") +
                (has_cu_k ? "cu_seqlens_k must be None" : "it must be given"));
    }
    read_pages(call, given, kNames, k, memory);
  } else {
    p.seq_k.seqlen = p.seq_k.total = size("the number of rows of k", k.shape[0]);
    p.seq_k.cu_seqlens = p.seq_q.cu_seqlens;
    if (has_cu_k) {
      p.seq_k.cu_seqlens =
          address<int32_t>(read_int32(call, "cu_seqlens_k", given.cu_seqlens_k, memory,
                                      {int64_t(p.batch) + 1}, "(batch + 1,)"));
    } else if (p.seq_k.total != p.seq_q.total) {
      raise(PyExc_ValueError,
            "without cu_seqlens_k the keys are packed as the queries are, but k "
            "has " +
                std::to_string(p.seq_k.total) + " rows and q " + std::to_string(p.seq_q.total));
    }
  }
  if (has_used && !is_listed) {
    p.seq_k.seqused = address<int32_t>(
        read_int32(call, "seqused_k", given.seqused_k, memory, {p.batch}, "(batch,)"));
  }
  call.set_scalars(given);
  read_scale(call, "k_scale", given.k_scale, memory, p.k);
  read_scale(call, "v_scale", given.v_scale, memory, p.v);
  call.read_options(given, memory);
}

namespace {

// --- attention_decode ----------------------------------------------------------------------------

constexpr Names kDecodeNames = {"q", "k_cache", "v_cache"};

// The entries of a contiguous cache as pages that hold all their rows. Entries without rows have no
// memory, so they are no pages.
KvStore entries_as_pages(int32_t const* index, int32_t rows, int64_t entries) {
  return {index, index ? 1 : 0, std::max(rows, 1),
          rows > 0 ? size("the batch of k_cache", entries) : 0};
}

void read_decode(Call& call, Arguments const& given, bool memory) {
  bool const is_listed = has_value(given.indices);
  if (!is_listed) require_given("attention_decode", "cache_seqlens", given.cache_seqlens);
  if (!is_listed && has_value(given.topk_lengths)) {
    raise(PyExc_ValueError, "topk_lengths is given without indices, to which it applies");
  }
  Problem& p = call.problem;
  DType const dtype = call.read_q("q", given.q, memory);
  View const k = call.library->read(given.k, memory), v = call.library->read(given.v, memory);
  bool const is_paged = has_value(given.block_table);
  bool const is_mapped = has_value(given.cache_batch_idx);
  require_dims("q", call.q, 4, "(batch, seqlen, heads, head_dim)");
  bool const has_tokens = has_value(given.kv_format);
  DType const kv_dtype =
      has_tokens ? check_tokens(call, kDecodeNames, given.kv_format, k, v)
                 : check_pair(call, kDecodeNames, k, v, 4,
                              is_paged ? "(pages, page_size, heads, head_dim) with block_table"
                                       : "(batch, seqlen, heads, head_dim) without block_table",
                              dtype, true);
  if (!is_listed && !is_paged && !has_tokens) require_heads(call.q, k, true);
  call.bshd = true;
  p.batch = size("the batch", call.q.shape[0]);
  set_dims(call, dtype, call.q.shape[2], k, v);
  p.seq_q.seqlen = size("the number of queries", call.q.shape[1]);
  p.q = call.input("q", call.q, dtype, memory);
  if (has_tokens) {
    p.k = p.v = token_operand("k_cache", k, kv_dtype);
    p.head_dim = format_of(kv_dtype).columns;
    p.head_dim_v = format_of(kv_dtype).columns_v;
    p.kv.page_size = size("the number of rows of k_cache", k.shape[1]);
  } else {
    p.k = operand("k_cache", k, true, kv_dtype);
    p.v = operand("v_cache", v, true, kv_dtype);
  }
  if (is_paged && is_mapped) {
    raise(PyExc_ValueError,
          "cache_batch_idx and block_table are both given; allowed: one of them, as either says "
          "where an entry's keys are");
  }
  if (is_listed) {
    read_indices(call, given, kDecodeNames, k, memory);
  } else if (is_paged) {
    read_pages(call, given, kDecodeNames, k, memory);
  } else {
    p.seq_k.seqlen = size("the number of rows of k_cache", k.shape[1]);
    if (is_mapped) {
      View const index =
          read_int32(call, "cache_batch_idx", given.cache_batch_idx, memory, {p.batch}, "(batch,)");
      p.kv = entries_as_pages(address<int32_t>(index), p.seq_k.seqlen, k.shape[0]);
    } else if (k.shape[0] != p.batch) {
      raise(PyExc_ValueError, "k_cache has " + std::to_string(k.shape[0]) + " entries and q " +
                                  std::to_string(p.batch) +
                                  "; allowed: equal numbers, or cache_batch_idx, or block_table");
    }
  }
  if (!is_listed) {
    p.seq_k.seqused = address<int32_t>(
        read_int32(call, "cache_seqlens", given.cache_seqlens, memory, {p.batch}, "(batch,)"));
  }
  call.set_scalars(given);
  read_scale(call, "k_scale", given.k_scale, memory, p.k);
  read_scale(call, "v_scale", given.v_scale, memory, p.v);
  call.read_options(given, memory);
}

// Checks lengths and entries in host memory; messages use this function's argument names.
void check_cache_seqlens(Call const& call, Arguments const& given) {
  Problem const& p = call.problem;
  bool const is_mapped = has_value(given.cache_batch_idx);
  int64_t const entries = call.library->read(given.k, true).shape[0];
  for (int32_t b = 0; b < p.batch && call.q.device.type == dlpack::kCpu && p.seq_k.seqused; ++b) {
    int32_t const length = p.seq_k.seqused[b];
    if (p.kv.indices && (length < 0 || length > p.seq_k.seqlen)) {
      raise(PyExc_ValueError, "topk_lengths[" + std::to_string(b) + "] is " +
                                  std::to_string(length) + ", allowed: 0 to " +
                                  std::to_string(p.seq_k.seqlen) + ", the keys of a list");
    }
  }
  for (int32_t b = 0; b < p.batch && call.q.device.type == dlpack::kCpu && p.kv.list_seqlens; ++b) {
    int32_t const length = p.kv.list_seqlens[b];
    int64_t const most = p.kv.block_table_stride * p.kv.page_size;
    if (length < 0 || length > most) {
      raise(PyExc_ValueError, "cache_seqlens[" + std::to_string(b) + "] is " +
                                  std::to_string(length) + ", allowed: 0 to " +
                                  std::to_string(most) + ", the keys that block_table covers");
    }
  }
  for (int32_t b = 0; b < p.batch && call.q.device.type == dlpack::kCpu && !p.kv.indices; ++b) {
    int32_t const length = p.seq_k.seqused[b];
    if (length < 0 || length > p.seq_k.seqlen) {
      raise(PyExc_ValueError,
            "cache_seqlens[" + std::to_string(b) + "] is " + std::to_string(length) +
                ", allowed: 0 to " + std::to_string(p.seq_k.seqlen) + ", the keys that " +
                (is_mapped || !p.kv.block_table ? "k_cache" : "block_table") + " covers");
    }
    int32_t const entry = is_mapped ? p.kv.block_table[b] : 0;
    if (entry < 0 || (is_mapped && entry >= entries)) {
      raise(PyExc_ValueError, "cache_batch_idx[" + std::to_string(b) + "] is " +
                                  std::to_string(entry) + ", allowed: 0 to " +
                                  std::to_string(entries - 1) + ", the entries of k_cache");
    }
  }
}

void read_rotary(Call const& call, Arguments const& given, bool memory, AppendProblem& append) {
  if (has_value(given.rotary_cos) != has_value(given.rotary_sin)) {
    raise(PyExc_ValueError, "rotary_cos and rotary_sin go together, got one of them");
  }
  if (!has_value(given.rotary_cos)) return;
  Problem const& p = call.problem;
  View views[2];
  struct {
    char const* name;
    PyObject* x;
  } const arrays[] = {{"rotary_cos", given.rotary_cos}, {"rotary_sin", given.rotary_sin}};
  for (int i = 0; i < 2; ++i) {
    auto const& [name, x] = arrays[i];
    views[i] = call.read_option(name, x, memory);
    require_dims(name, views[i], 2, "(positions, rotary_dim / 2)");
    require_like_q(call, kDecodeNames, name, views[i]);
    require_dense(name, views[i]);
    int64_t const positions = views[i].shape[0], half = views[i].shape[1];
    if (half < 1 || 2 * half > p.head_dim) {
      raise(PyExc_ValueError, std::string(name) + " has " + std::to_string(half) +
                                  " columns, allowed: 1 to half the head dim, " +
                                  std::to_string(p.head_dim / 2));
    }
    if (positions < p.seq_k.seqlen) {
      raise(PyExc_ValueError, std::string(name) + " has " + std::to_string(positions) +
                                  " positions, allowed: " + std::to_string(p.seq_k.seqlen) +
                                  " or more, as an entry of the cache has rows");
    }
  }
  if (views[1].shape[1] != views[0].shape[1]) {
    raise(PyExc_ValueError, "rotary_cos and rotary_sin must have equal numbers of columns, got " +
                                shape_of(given.rotary_cos) + " and " + shape_of(given.rotary_sin));
  }
  if (p.seq_k.seqlen == 0) return;  // no key to rotate or to see, and maybe no position
  append.rotary.cos = address<void>(views[0]);
  append.rotary.sin = address<void>(views[1]);
  append.rotary.cos_stride = views[0].strides[0];
  append.rotary.sin_stride = views[1].strides[0];
  append.rotary.positions =
      size("the number of positions", std::min(views[0].shape[0], views[1].shape[0]));
  append.rotary.dim = int32_t(2 * views[0].shape[1]);
  if (given.rotary_interleaved) {
    append.rotary.interleaved = boolean("rotary_interleaved", given.rotary_interleaved);
  }
}

// Reads the arguments for new keys. A null k.data: the call has none.
AppendProblem read_new_keys(Call& call, Arguments const& given, bool memory) {
  constexpr Names kNames = {"q", "k_new", "v_new"};
  AppendProblem append;
  Problem const& p = call.problem;
  bool const has_tokens = is_token_format(p.k.dtype);
  if (has_tokens && has_value(given.v_new)) {
    raise(PyExc_ValueError, "v_new is given; allowed with kv_format: None, as V is part of k_new");
  }
  if (!has_tokens && has_value(given.k_new) != has_value(given.v_new)) {
    raise(PyExc_ValueError, "k_new and v_new go together, got one of them");
  }
  if (!has_value(given.k_new)) {
    if (has_value(given.rotary_cos) || has_value(given.rotary_sin)) {
      raise(PyExc_ValueError,
            "rotary_cos and rotary_sin need k_new: keys in the cache must be "
            "rotated already");
    }
    return append;
  }
  View const k = call.library->read(given.k_new, memory);
  View const v = has_tokens ? k : call.library->read(given.v_new, memory);
  check_pair(call, kNames, k, v, 4, "(batch, new keys, heads, head_dim)", p.q.dtype, false);
  if (k.shape[0] != p.batch || k.shape[2] != p.num_heads_kv ||
      (!has_tokens && v.shape[3] != p.head_dim_v)) {
    raise(PyExc_ValueError,
          "k_new and v_new must have the batch of q and the heads and head dims of k_cache and "
          "v_cache, (batch, new keys, heads, head_dim) = (" +
              std::to_string(p.batch) + ", any, " + std::to_string(p.num_heads_kv) + ", " +
              std::to_string(p.head_dim) + ") and (" + std::to_string(p.batch) + ", any, " +
              std::to_string(p.num_heads_kv) + ", " + std::to_string(p.head_dim_v) + "), got " +
              shape_of(given.k_new) + " and " + shape_of(given.v_new));
  }
  call.write_to("k_cache", call.library->read(given.k, memory));
  append.k = operand("k_new", k, true, p.q.dtype);
  append.k_cache = p.k;
  if (!has_tokens) {
    call.write_to("v_cache", call.library->read(given.v, memory));
    append.v = operand("v_new", v, true, p.q.dtype);
    append.v_cache = p.v;
  }
  append.kv = p.kv;
  if (!p.kv.block_table) append.kv = entries_as_pages(nullptr, p.seq_k.seqlen, p.batch);
  append.cache_rows = p.seq_k.seqlen;
  append.cache_seqlens = p.seq_k.seqused;
  append.batch = p.batch;
  append.seqlen = size("the number of new keys", k.shape[1]);
  append.num_heads_kv = p.num_heads_kv;
  append.head_dim = p.head_dim;
  append.head_dim_v = p.head_dim_v;
  append.q_advances =
      p.mask.causal || p.mask.window_left != kUnbounded || p.mask.window_right != kUnbounded;
  read_rotary(call, given, memory, append);
  return append;
}

// Results of append_step().
struct Appended {
  py::object q_rotated = py::none(), seqlens_after;
};

// Called before the new keys are written, so that a rejected call writes nothing.
void require_kernel(Call const& call, Arguments const& given, AppendProblem const& append) {
  if (append.rotary.dim == 0) return call.require_kernel(given);
  Call rotated = call;  // its queries will have memory of their own, not allocated yet
  Problem& p = rotated.problem;
  int64_t const row = int64_t(p.num_heads_q) * p.head_dim;
  p.q = {nullptr, p.seq_q.seqlen * row, p.head_dim, row, p.q.dtype};
  rotated.require_kernel(given);
}

// Writes the new keys. Afterwards the call is attention over all keys.
Appended append_step(Call& call, Arguments const& given, AppendProblem& append) {
  Problem& p = call.problem;
  Appended made;
  made.seqlens_after = call.library->scratch(call.q, "int32", {p.batch});
  View const after = call.library->read(made.seqlens_after.ptr(), true);
  append.seqlens_after = const_cast<int32_t*>(address<int32_t>(after));
  if (append.rotary.dim > 0) {
    made.q_rotated =
        call.library->empty(call.q, {p.batch, p.seq_q.seqlen, p.num_heads_q, p.head_dim});
    View const rotated = call.library->read(made.q_rotated.ptr(), true);
    append.q = p.q;
    append.q_rotated = operand("q", rotated, true, p.q.dtype);
    append.num_heads_q = p.num_heads_q;
    append.seqlen_q = p.seq_q.seqlen;
    p.q = append.q_rotated;
  }
  p.seq_k.seqused = append.seqlens_after;
  LaunchOptions const options = call.place();
  Status status;
  {
    py::gil_scoped_release unlocked;
    status = append_kv(append, options);
  }
  raise_unless_ok(status);
  call.count_writes(given);
  return made;
}

// --- append_kv -----------------------------------------------------------------------------------

AppendProblem read_append(Call& call, Arguments const& given, bool memory) {
  constexpr Names kNames = {"k", "k", "v"};
  constexpr Names kCacheNames = {"k", "k_cache", "v_cache"};
  bool const has_tokens = has_value(given.kv_format);
  if (!has_tokens) require_given("append_kv", "v", given.v_new);
  if (has_tokens && has_value(given.v_new)) {
    raise(PyExc_ValueError, "v is given; allowed with kv_format: None, as V is part of k");
  }
  require_given("append_kv", "slot_mapping", given.slot_mapping);
  DType const dtype = call.read_q("k", given.q, memory);
  View const& k = call.q;
  View const v = has_tokens ? k : call.library->read(given.v_new, memory);
  check_pair(call, kNames, k, v, 3, "(rows, heads, head_dim)", dtype, false);
  View const k_cache = call.library->read(given.k, memory);
  View const v_cache = call.library->read(given.v, memory);
  DType const cache_dtype = has_tokens
                                ? check_tokens(call, kCacheNames, given.kv_format, k_cache, v_cache)
                                : check_pair(call, kCacheNames, k_cache, v_cache, 4,
                                             "(pages, page_size, heads, head_dim)", dtype, true);
  if (k_cache.shape[2] != k.shape[1] || (!has_tokens && v_cache.shape[3] != v.shape[2])) {
    raise(PyExc_ValueError,
          "k and v must have the heads and head dims of k_cache and v_cache, got " +
              shape_of(given.q) + " and " + shape_of(given.v_new) + " for " + shape_of(given.k) +
              " and " + shape_of(given.v));
  }
  call.write_to("k_cache", k_cache);
  if (!has_tokens) call.write_to("v_cache", v_cache);
  View const slots = call.read_option("slot_mapping", given.slot_mapping, memory);
  if (slots.ndim != 1 || slots.shape[0] > k.shape[0]) {
    raise(PyExc_ValueError, "slot_mapping must have shape (rows,) with at most the " +
                                std::to_string(k.shape[0]) + " rows of k, got " +
                                shape_of(given.slot_mapping));
  }
  require_dtype("slot_mapping", slots, kInt64, "int64");
  require_dense("slot_mapping", slots);
  AppendProblem append;
  append.k = operand("k", k, true, dtype);
  if (has_tokens) {
    append.k_cache = token_operand("k_cache", k_cache, cache_dtype);
  } else {
    append.v = operand("v", v, true, dtype);
    append.k_cache = operand("k_cache", k_cache, true, cache_dtype);
    append.v_cache = operand("v_cache", v_cache, true, cache_dtype);
  }
  if (k_cache.shape[1] < 1) {
    raise(PyExc_ValueError, "k_cache has pages of 0 keys, allowed: 1 or more");
  }
  append.kv.page_size = size("the page size", k_cache.shape[1]);
  append.kv.num_pages = size("the number of pages", k_cache.shape[0]);
  append.slot_mapping = address<int64_t>(slots);
  append.batch = 1;
  append.seqlen = size("the number of rows", slots.shape[0]);
  append.num_heads_kv = call.problem.num_heads_kv = size("the number of heads", k.shape[1]);
  append.head_dim = size("the head dim of k", k.shape[2]);
  append.head_dim_v = size("the head dim of v", v.shape[2]);
  read_scale(call, "k_scale", given.k_scale, memory, append.k_cache);
  read_scale(call, "v_scale", given.v_scale, memory, append.v_cache);
  return append;
}

// --- Entries -------------------------------------------------------------------------------------

// Runs a call through torch's operator: torch must see it before its memory is touched.
py::object through_operator(char const* name, Arguments const& given) {
  py::object const function = py::module_::import("cutlass_attn._call.serving_operator").attr(name);
  py::dict const options = py::reinterpret_borrow<py::dict>(given.options);
  py::tuple const arrays =
      py::make_tuple(py::handle(given.q), py::handle(given.k), py::handle(given.v));
  if (has_value(given.mask)) return function(*arrays, "mask"_a = py::handle(given.mask), **options);
  return function(*arrays, **options);
}

// Whether a call runs through the operator; asked before and after its arrays are read. Functions
// without a gradient raise their error there.
bool must_go(Call const& call, Arguments const& given, bool has_gradient = false) {
  if (has_value(given.dispatched)) return false;
  return call.library->must_see(call.arrays) ||
         (!has_gradient && call.library->needs_gradient(call.arrays));
}
// Reads the call. Returns true if it runs through the operator because an array has no memory.
template <class Read>
bool is_lazy(Arguments const& given, Read&& read) {
  try {
    read();
    return false;
  } catch (NoMemory const&) {
    if (has_value(given.dispatched)) throw;
    return true;
  }
}
bool has_no_memory(Call const& call, Arguments const& given) {
  if (call.q.device.type != dlpack::kOtherDevice) return false;
  std::string const device = attribute(given.q, "device");
  if (!has_value(given.dispatched) && device == "meta") return true;
  raise(PyExc_ValueError, "q, k and v must be on a CPU or CUDA device, got " + device);
}

py::object varlen(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Arguments const given(kVarlen, "attention_varlen", args, count, names);
  Call call(given);
  constexpr char const* kModule = "cutlass_attn._call.serving_operator";
  static Recorder recorder = {{kModule, "record_varlen"}, {kModule, "eager_varlen"}};
  if (must_go(call, given, true)) return through_operator("varlen", given);
  bool const dispatched = has_value(given.dispatched);
  Recording const recording = dispatched ? Recording::kNone : call.recording(given);
  if (recording != Recording::kNone && has_value(given.indices)) {
    raise(PyExc_NotImplementedError, "attention_varlen with indices has no derivative yet");
  }
  if (recording == Recording::kCall) return recorder.call(given);
  if (is_lazy(given, [&] { read_varlen(call, given, true); })) {
    return through_operator("varlen", given);
  }
  if (has_no_memory(call, given)) return through_operator("varlen", given);
  return call.run(given, recording == Recording::kResults ? &recorder : nullptr);
}

Arguments decode_arguments(char const* name, PyObject* const* args, Py_ssize_t count,
                           PyObject* names) {
  Arguments given(kDecode, name, args, count, names);
  // With lists of keys, the position of a key relative to its query is unknown.
  if (given.causal == nullptr && !has_value(given.indices)) given.causal = Py_True;
  given.per_query = given.return_max_logit;
  return given;
}

py::object decode(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Arguments const given = decode_arguments("attention_decode", args, count, names);
  Call call(given);
  char const* const name = call.return_max_logit ? "decode_with_max_logits" : "decode";
  if (must_go(call, given)) return through_operator(name, given);
  AppendProblem append;
  if (is_lazy(given, [&] {
        read_decode(call, given, true);
        append = read_new_keys(call, given, true);
      })) {
    return through_operator(name, given);
  }
  if (has_no_memory(call, given)) return through_operator(name, given);
  check_cache_seqlens(call, given);
  Appended made;  // lives as long as the call
  if (has_value(given.k_new)) {
    require_kernel(call, given, append);
    made = append_step(call, given, append);
  }
  return call.run(given);
}

py::object decode_append(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Arguments const given = decode_arguments("attention_decode", args, count, names);
  Call call(given);
  read_decode(call, given, true);
  AppendProblem append = read_new_keys(call, given, true);
  if (has_no_memory(call, given)) return py::none();
  check_cache_seqlens(call, given);
  if (!has_value(given.dispatched)) require_kernel(call, given, append);
  Appended made = append_step(call, given, append);
  return py::make_tuple(std::move(made.q_rotated), std::move(made.seqlens_after));
}

py::object append(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Arguments const given(kAppend, "append_kv", args, count, names);
  Call call(given);
  if (must_go(call, given)) return through_operator("append", given);
  AppendProblem problem;
  if (is_lazy(given, [&] { problem = read_append(call, given, true); })) {
    return through_operator("append", given);
  }
  if (has_no_memory(call, given)) return through_operator("append", given);
  LaunchOptions const options = call.place();
  Status status;
  {
    py::gil_scoped_release unlocked;
    status = append_kv(problem, options);
  }
  raise_unless_ok(status);
  call.count_writes(given);
  return py::none();
}

// Explanation of a call that is not run.
py::object explained(Call& call, Arguments const& given) {
  if (has_value(given.out)) call.read_out(given.out, true);
  call.assume_memory(given);
  return call.explained(Op::kForward, given);
}

py::object explain_varlen(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Arguments const given(kVarlen, "explain", args, count, names);
  Call call(given);
  read_varlen(call, given, true);
  return explained(call, given);
}

py::object explain_decode(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Arguments const given = decode_arguments("explain", args, count, names);
  Call call(given);
  read_decode(call, given, true);
  read_new_keys(call, given, true);
  return explained(call, given);
}

}  // namespace

void define_serving_calls(py::module_& m) {
  static PyMethodDef methods[] = {
      method<varlen>("varlen", "Runs attention_varlen()."),
      method<decode>("decode", "Runs attention_decode()."),
      method<decode_append>("decode_append",
                            "Runs the part of attention_decode() that appends new keys."),
      method<append>("append", "Runs append_kv()."),
      method<explain_varlen>("explain_varlen", "Verdicts on a call of attention_varlen()."),
      method<explain_decode>("explain_decode", "Verdicts on a call of attention_decode()."),
      {},
  };
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace cutlass_attn
