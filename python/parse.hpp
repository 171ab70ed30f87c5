// Converts Python scalars and arrays to those of the library. Errors are TypeError or ValueError;
// they name the argument, what was given and what is allowed.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "arrays.hpp"
#include "cutlass_attn.hpp"
#include "errors.hpp"

namespace cutlass_attn {

// --- Scalars -------------------------------------------------------------------------------------

bool boolean(char const* name, PyObject* x);
double number(char const* name, PyObject* x);
std::string string(char const* name, char const* example, PyObject* x);
bool is_bshd(PyObject* layout);
Accumulate accumulate_of(PyObject* x);
Quantize quantize_of(PyObject* x);
float max_error_of(PyObject* x);
// An int >= least.
int32_t count(char const* name, PyObject* x, int32_t least);
int32_t attention_chunk_of(PyObject* x);
// `mask.causal` must be set already.
void read_window(PyObject* window, Mask& mask);

// --- Arrays --------------------------------------------------------------------------------------

inline constexpr dlpack::DataType kFloat32 = {dlpack::kFloat, 32, 1};
inline constexpr dlpack::DataType kFloat64 = {dlpack::kFloat, 64, 1};
inline constexpr dlpack::DataType kFloat8E4M3 = {dlpack::kFloat8E4M3, 8, 1};
inline constexpr dlpack::DataType kUInt8 = {dlpack::kUInt, 8, 1};
inline constexpr dlpack::DataType kInt32 = {dlpack::kInt, 32, 1};
inline constexpr dlpack::DataType kInt64 = {dlpack::kInt, 64, 1};

// Address of an array without elements, or without memory on torch's "meta" device. Null would mean
// that the argument is not given.
inline void* const kNoMemory = reinterpret_cast<void*>(int64_t(1) << 60);

template <class T>
T const* address(View const& x) {
  return static_cast<T const*>(x.data ? x.data : kNoMemory);
}

inline std::string dtype_text(View const& x) { return attribute(x.object, "dtype"); }
inline std::string device_text(View const& x) { return attribute(x.object, "device"); }

// "(2, 4)", "(4,)": tuples as Python writes them.
std::string tuple_text(Shape const& sizes);

inline bool has_shape(View const& x, std::initializer_list<int64_t> shape) {
  return x.ndim == int(shape.size()) && std::equal(shape.begin(), shape.end(), x.shape);
}

// Returns false if the library does not have the dtype.
bool get_dtype(View const& x, DType& dtype);

// `hint`: what to do instead, from the semicolon on.
[[noreturn]] void refuse_dtype(char const* name, View const& x, std::string const& allowed,
                               char const* hint = "");
void require_dtype(char const* name, View const& x, dlpack::DataType dtype, char const* allowed);
void require_writable(char const* name, View const& x);
void require_memory(char const* name, View const& x);  // may also raise NoMemory
void require_whole_elements(View const& x);
bool is_dense(View const& x);  // in the last dimension
void require_dense(char const* name, View const& x);

// `value` as the size of a dimension; `name` describes it in messages.
int32_t size(char const* name, int64_t value);

// Reads (batch, heads, rows, columns); with `bshd` (batch, rows, heads, columns), or (rows, heads,
// columns).
Operand operand(char const* name, View const& x, bool bshd, DType dtype);

}  // namespace cutlass_attn
