#include "serving_arrays.hpp"

#include <algorithm>
#include <string>

#include "core/token_format.hpp"
#include "errors.hpp"
#include "parse.hpp"
#include "runtime/options.hpp"

namespace cutlass_attn::serving_arrays {

void require_given(char const* function, char const* name, PyObject* x) {
  if (has_value(x)) return;
  raise(PyExc_TypeError, std::string(function) + "() needs " + name + ", got None");
}

void require_dims(char const* name, View const& x, int ndim, char const* dims) {
  if (x.ndim == ndim) return;
  raise(PyExc_ValueError, std::string(name) + " must have " + std::to_string(ndim) +
                              " dimensions, " + dims + ", got shape " + shape_of(x.object));
}

void require_device_of_q(Call const& call, Names const& names, char const* name, View const& x) {
  if (!(x.device == call.q.device)) {
    raise(PyExc_ValueError, std::string(name) + " must be on " + device_text(call.q) + " like " +
                                names.q + ", got " + device_text(x));
  }
}

void require_like_q(Call const& call, Names const& names, char const* name, View const& x) {
  if (!(x.dtype == call.q.dtype)) {
    refuse_dtype(name, x, dtype_text(call.q) + " like " + names.q);
  }
  require_device_of_q(call, names, name, x);
}

DType check_pair(Call const& call, Names const& names, View const& k, View const& v, int ndim,
                 char const* dims, DType dtype, bool may_be_fp8) {
  require_dims(names.k, k, ndim, dims);
  require_dims(names.v, v, ndim, dims);
  if (!std::equal(k.shape, k.shape + ndim - 1, v.shape)) {
    raise(PyExc_ValueError, std::string(names.k) + " and " + names.v +
                                " must have one shape but for the head dim, got " +
                                shape_of(k.object) + " and " + shape_of(v.object));
  }
  int64_t const head_dim = call.q.shape[call.q.ndim - 1];
  if (k.shape[ndim - 1] != head_dim) {
    raise(PyExc_ValueError, std::string(names.q) + " and " + names.k +
                                " must have one head dim, got " + std::to_string(head_dim) +
                                " and " + std::to_string(k.shape[ndim - 1]));
  }
  bool const is_fp8 = may_be_fp8 && k.dtype == kFloat8E4M3 && v.dtype == kFloat8E4M3;
  auto const also = [&](char const* other) {
    return may_be_fp8 ? std::string(", or float8_e4m3fn if it is that of ") + other : std::string();
  };
  struct {
    char const *name, *other;
    View const& x;
  } const both[] = {{names.k, names.v, k}, {names.v, names.k, v}};
  for (auto const& [name, other, x] : both) {
    if (!is_fp8 && !(x.dtype == call.q.dtype)) {
      refuse_dtype(name, x, dtype_text(call.q) + " like " + names.q + also(other));
    }
    require_device_of_q(call, names, name, x);
  }
  return is_fp8 ? DType::kFloat8E4M3 : dtype;
}

DType check_tokens(Call const& call, Names const& names, PyObject* kv_format, View const& k,
                   View const& v) {
  std::string const name = string("kv_format", "ds_mla", kv_format);
  DType dtype = DType::kDsMla;
  if (name == name_of(DType::kDsMlaV4)) {
    dtype = DType::kDsMlaV4;
  } else if (name != name_of(dtype)) {
    raise(PyExc_ValueError, "kv_format is \"" + name + "\", allowed: \"ds_mla\", \"ds_mla_v4\"");
  }
  TokenFormat const format = format_of(dtype);
  std::string const with = " with kv_format \"" + name + "\"";
  require_dims(names.k, k, 4, "(pages, page_size, 1, bytes of a token)");
  if (k.shape[2] != 1 || k.shape[3] != format.token_bytes) {
    raise(PyExc_ValueError, std::string(names.k) + " must have shape (pages, page_size, 1, " +
                                std::to_string(format.token_bytes) + ")" + with + ", got " +
                                shape_of(k.object));
  }
  if (!(k.dtype == kUInt8) && !(k.dtype == kFloat8E4M3)) {
    refuse_dtype(names.k, k, "uint8 or float8_e4m3fn" + with);
  }
  require_device_of_q(call, names, names.k, k);
  require_dense(names.k, k);
  if (k.shape[1] > 1 && k.strides[1] != format.token_bytes) {
    raise(PyExc_ValueError, std::string(names.k) + "'s stride between the rows of a page is " +
                                std::to_string(k.strides[1]) + ", allowed" + with + ": " +
                                std::to_string(format.token_bytes));
  }
  int64_t const columns = call.q.shape[call.q.ndim - 1];
  if (columns != format.columns) {
    raise(PyExc_ValueError, std::string(names.q) + " has " + std::to_string(columns) +
                                " columns, allowed" + with + ": " + std::to_string(format.columns));
  }
  bool const is_same = v.ndim == k.ndim && std::equal(k.shape, k.shape + k.ndim, v.shape) &&
                       std::equal(k.strides, k.strides + k.ndim, v.strides) && v.data == k.data;
  if (!is_same && std::find(v.shape, v.shape + v.ndim, 0) == v.shape + v.ndim) {
    raise(PyExc_ValueError, std::string(names.v) + " is not " + names.k + ", allowed" + with +
                                ": the same array, as V is its first " +
                                std::to_string(format.columns_v) + " columns");
  }
  return dtype;
}

Operand token_operand(char const* name, View const& k, DType format) {
  Operand result = operand(name, k, true, format);
  result.head_stride = 0;
  result.row_stride = format_of(format).row_bytes;
  return result;
}

View read_int32(Call const& call, char const* name, PyObject* x, bool memory, Shape const& shape,
                char const* dims) {
  View const view = call.read_option(name, x, memory);
  if (!shape.is_of(view)) {
    raise(PyExc_ValueError, std::string(name) + " must have shape " + dims + " = " +
                                tuple_text(shape) + ", got " + shape_of(x));
  }
  require_dtype(name, view, kInt32, "int32");
  require_dense(name, view);
  return view;
}

View read_offsets(Call const& call, char const* name, PyObject* x, bool memory) {
  View const view = call.read_option(name, x, memory);
  if (view.ndim != 1 || view.shape[0] < 1) {
    raise(PyExc_ValueError,
          std::string(name) + " must have shape (batch + 1,), got " + shape_of(x));
  }
  require_dtype(name, view, kInt32, "int32");
  require_dense(name, view);
  return view;
}

void read_scale(Call& call, char const* name, PyObject* x, bool memory, Operand& operand) {
  if (!has_value(x)) return;
  if (!call.library->has(x)) {
    float const value = float(number(name, x));
    if (value == 1.0f) return;
    if (!(value > 0.0f && value <= 3.0e38f)) {
      raise(PyExc_ValueError,
            std::string(name) + " is " + repr(x) + ", allowed: a finite number > 0");
    }
    call.held.push_back(call.library->filled(call.q, "float32", {1}, value));
    operand.scale =
        static_cast<float const*>(call.library->read(call.held.back().ptr(), memory).data);
    return;
  }
  View const view = call.read_option(name, x, memory);
  int64_t const heads = call.problem.num_heads_kv;
  bool const is_one = view.ndim == 0 || has_shape(view, {1});
  if (!is_one && !has_shape(view, {heads})) {
    raise(PyExc_ValueError, std::string(name) +
                                " must be a number, or have shape (num_heads_kv,) = " +
                                tuple_text({heads}) + " or (1,), got " + shape_of(x));
  }
  require_dtype(name, view, kFloat32, "float32");
  operand.scale = address<float>(view);
  operand.scale_head_stride = is_one ? 0 : view.strides[0];
}

void read_pages(Call& call, Arguments const& given, Names const& names, View const& k,
                bool memory) {
  Problem& p = call.problem;
  View const table = call.read_option("block_table", given.block_table, memory);
  if (table.ndim != 2 || table.shape[0] != p.batch) {
    raise(PyExc_ValueError, "block_table must have shape (batch, pages of an entry) with batch = " +
                                std::to_string(p.batch) + ", got " + shape_of(given.block_table));
  }
  require_dtype("block_table", table, kInt32, "int32");
  require_dense("block_table", table);
  int64_t const rows = table.shape[1] * k.shape[1];
  if (k.shape[1] < 1 || rows > kMaxSeqlen) {
    raise(PyExc_ValueError, std::string(names.k) + " has pages of " + std::to_string(k.shape[1]) +
                                " keys, and block_table " + std::to_string(table.shape[1]) +
                                " of them an entry; allowed: pages of 1 or more, and up to " +
                                std::to_string(kMaxSeqlen) + " keys in all");
  }
  p.kv.block_table = address<int32_t>(table);
  p.kv.block_table_stride = table.strides[0];
  p.kv.page_size = size("the page size", k.shape[1]);
  p.kv.num_pages = size("the number of pages", k.shape[0]);
  p.seq_k.seqlen = int32_t(rows);
}

void read_indices(Call& call, Arguments const& given, Names const& names, View const& k,
                  bool memory) {
  bool const is_paged = has_value(given.block_table);
  struct {
    char const* name;
    PyObject* x;
  } const others[] = {{"cache_seqlens", is_paged ? nullptr : given.cache_seqlens},
                      {"cache_batch_idx", given.cache_batch_idx},
                      {"k_new", given.k_new}};
  for (auto const& [name, x] : others) {
    if (!has_value(x)) continue;
    raise(PyExc_ValueError, std::string(name) + " and indices are both given; allowed: one of " +
                                "them, as indices are rows of the whole cache");
  }
  Problem& p = call.problem;
  if (is_paged) {
    if (!has_value(given.cache_seqlens)) {
      raise(PyExc_ValueError,
            "indices and block_table are given without cache_seqlens; allowed: all three, as "
            "indices are then rows of a sequence");
    }
    read_pages(call, given, names, k, memory);
    p.kv.list_seqlens = address<int32_t>(
        read_int32(call, "cache_seqlens", given.cache_seqlens, memory, {p.batch}, "(batch,)"));
  }
  View const x = call.read_option("indices", given.indices, memory);
  if (x.ndim != 3 || x.shape[0] != p.batch || x.shape[1] != p.seq_q.seqlen) {
    raise(PyExc_ValueError, "indices must have shape (batch, seqlen_q, topk) with (batch, " +
                                std::string("seqlen_q) = ") +
                                tuple_text({p.batch, p.seq_q.seqlen}) + ", got " +
                                shape_of(given.indices));
  }
  require_dtype("indices", x, kInt32, "int32");
  require_dense("indices", x);
  if (k.shape[1] < 1 || x.shape[2] > kMaxSeqlen) {
    raise(PyExc_ValueError, "k_cache has entries of " + std::to_string(k.shape[1]) +
                                " keys, and indices " + std::to_string(x.shape[2]) +
                                " of a query; allowed: 1 or more, and up to " +
                                std::to_string(kMaxSeqlen));
  }
  p.seq_k.seqlen = int32_t(x.shape[2]);
  p.kv.page_size = size("the page size", k.shape[1]);
  p.kv.num_pages = size("the number of pages", k.shape[0]);
  p.kv.indices = address<int32_t>(x);
  p.kv.indices_batch_stride = x.strides[0];
  p.kv.indices_query_stride = x.strides[1];
  if (!has_value(given.topk_lengths)) return;
  p.seq_k.seqused = address<int32_t>(
      read_int32(call, "topk_lengths", given.topk_lengths, memory, {p.batch}, "(batch,)"));
}

void read_packed_lists(Call& call, Arguments const& given, View const& k, bool memory) {
  struct {
    char const* name;
    PyObject* x;
  } const others[] = {{"cu_seqlens_k", given.cu_seqlens_k},
                      {"seqused_k", given.seqused_k},
                      {"block_table", given.block_table}};
  for (auto const& [name, x] : others) {
    if (!has_value(x)) continue;
    raise(PyExc_ValueError, std::string(name) + " and indices are both given; allowed: one of " +
                                "them, as indices are rows of k");
  }
  Problem& p = call.problem;
  View const x = call.read_option("indices", given.indices, memory);
  if (x.ndim != 2 || x.shape[0] != call.q.shape[0]) {
    raise(PyExc_ValueError, "indices must have shape (rows of q, topk) with rows of q = " +
                                std::to_string(call.q.shape[0]) + ", got " +
                                shape_of(given.indices));
  }
  require_dtype("indices", x, kInt32, "int32");
  require_dense("indices", x);
  p.batch = 1;
  p.seq_q.seqlen = p.seq_q.total = size("the number of rows of q", call.q.shape[0]);
  p.seq_k.seqlen = size("the number of indices", x.shape[1]);
  p.kv.page_size = std::max(size("the number of rows of k", k.shape[0]), 1);
  p.kv.num_pages = k.shape[0] > 0;
  p.kv.indices = address<int32_t>(x);
  p.kv.indices_query_stride = x.strides[0];
}

void set_dims(Call& call, DType dtype, int64_t heads_q, View const& k, View const& v) {
  Problem& p = call.problem;
  p.num_heads_q = size("the number of query heads", heads_q);
  p.num_heads_kv = size("the number of key/value heads", k.shape[k.ndim - 2]);
  p.head_dim = size("the head dim of q and k", k.shape[k.ndim - 1]);
  p.head_dim_v = size("the head dim of v", v.shape[v.ndim - 1]);
  p.logits.bias_dtype = dtype;
}

}  // namespace cutlass_attn::serving_arrays
