// What the calls of serving_call.hpp ask of their arrays: of all of them alike, and of what is
// stored.
#pragma once

#include "call.hpp"

namespace cutlass_attn::serving_arrays {

// Names of the operands of a call, for messages.
struct Names {
  char const *q, *k, *v;
};

void require_given(char const* function, char const* name, PyObject* x);
void require_dims(char const* name, View const& x, int ndim, char const* dims);
void require_device_of_q(Call const& call, Names const& names, char const* name, View const& x);
void require_like_q(Call const& call, Names const& names, char const* name, View const& x);

// Keys and values: rows and heads of as many, of q's dtype and device; with `may_be_fp8` also both
// of float8_e4m3fn. Returns their dtype, q's being `dtype`.
DType check_pair(Call const& call, Names const& names, View const& k, View const& v, int ndim,
                 char const* dims, DType dtype, bool may_be_fp8);

// A cache of tokens in the format that kv_format names; V is the same array, or empty. Returns the
// format.
DType check_tokens(Call const& call, Names const& names, PyObject* kv_format, View const& k,
                   View const& v);
// K of such a cache, (pages, page_size, 1, bytes of a token).
Operand token_operand(char const* name, View const& k, DType format);

// int32 numbers next to each other, of this shape; `dims` says it in words.
View read_int32(Call const& call, char const* name, PyObject* x, bool memory, Shape const& shape,
                char const* dims);

// (batch + 1): how many entries there are.
View read_offsets(Call const& call, char const* name, PyObject* x, bool memory);

// A factor of what is stored, for all heads or for each.
void read_scale(Call& call, char const* name, PyObject* x, bool memory, Operand& operand);

// Pages that a table names: (pages, page_size, heads, head_dim).
void read_pages(Call& call, Arguments const& given, Names const& names, View const& k, bool memory);
// Lists of the keys of each query, (batch, seqlen_q, topk): rows of the whole cache, or with a
// block table rows of a sequence.
void read_indices(Call& call, Arguments const& given, Names const& names, View const& k,
                  bool memory);
// Lists of rows of k for each packed query, (rows, topk). All queries are of one sequence then: a
// list is all that says which keys a query sees.
void read_packed_lists(Call& call, Arguments const& given, View const& k, bool memory);
void set_dims(Call& call, DType dtype, int64_t heads_q, View const& k, View const& v);

}  // namespace cutlass_attn::serving_arrays
