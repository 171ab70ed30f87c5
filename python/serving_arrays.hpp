// Checks of arrays that the calls of serving_call.hpp share, and readers of caches.
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

// Checks keys and values: equal rows and heads, q's dtype and device. With `may_be_fp8` both may
// also be float8_e4m3fn. Returns their dtype. `dtype`: dtype of q.
DType check_pair(Call const& call, Names const& names, View const& k, View const& v, int ndim,
                 char const* dims, DType dtype, bool may_be_fp8);

// Checks a cache of tokens in the format kv_format. V is the same array, or empty. Returns the
// format.
DType check_tokens(Call const& call, Names const& names, PyObject* kv_format, View const& k,
                   View const& v);
// K of such a cache, (pages, page_size, 1, bytes of a token).
Operand token_operand(char const* name, View const& k, DType format);

// Reads a contiguous int32 array of this shape; `dims` describes the shape in messages.
View read_int32(Call const& call, char const* name, PyObject* x, bool memory, Shape const& shape,
                char const* dims);

// Reads (batch + 1) offsets. Their number determines the batch.
View read_offsets(Call const& call, char const* name, PyObject* x, bool memory);

// Reads a dequantization factor, one for all heads or one per head.
void read_scale(Call& call, char const* name, PyObject* x, bool memory, Operand& operand);

// Reads the pages of a block table: (pages, page_size, heads, head_dim).
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
