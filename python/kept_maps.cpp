#include "kept_maps.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "entry.hpp"

namespace py = pybind11;

namespace cutlass_attn {
namespace {

struct Kept {
  MaskMapKey key;
  py::object owner;  // a weak reference
  int64_t writes;
  py::object memory;
  Workspace workspace;
};

// The most recently used first. Never destroyed: Python ends before static objects do.
std::vector<Kept>& all() {
  static auto& kept = *new std::vector<Kept>;
  return kept;
}

// Removes maps. Freeing memory may run Python code, which must find the list complete.
template <class Predicate>
void remove(Predicate const& predicate) {
  std::vector<Kept> left, removed;
  for (Kept const& x : all()) (predicate(x) ? removed : left).push_back(x);
  all().swap(left);
}

py::object reference_to(py::object const& owner) {
  static auto const& forget = *new py::cpp_function(
      [](py::handle dead) { remove([&](Kept const& x) { return x.owner.is(dead); }); });
  return checked(PyWeakref_NewRef(owner.ptr(), forget.ptr()));
}

bool is_of(Kept const& kept, py::object const& owner) {
  return checked(PyObject_CallNoArgs(kept.owner.ptr())).is(owner);
}

py::object has_mask_map(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Arguments const given(kAttention, "explain", args, count, names);
  Call call(given);
  call.read_arrays(given, true);
  if (has_value(given.out)) call.read_out(given.out, true);
  call.assume_memory(given);
  MaskMapKey key;
  KeptMaps maps(call);
  bool const is_asked = maps.is_for(given) && mask_map_key(call.problem, call.place(), key);
  return py::bool_(is_asked && maps.find(key).bytes > 0);
}

}  // namespace

bool KeptMaps::is_for(Arguments const& given) {
  if (!has_value(given.mask) || has_value(given.dispatched)) return false;
  owner_ = call_.library->counted(given.mask, writes_);
  return bool(owner_);
}

Workspace KeptMaps::find(MaskMapKey const& key) {
  py::gil_scoped_acquire const locked;
  remove([&](Kept const& x) { return is_of(x, owner_) && x.writes != writes_; });
  auto const found = std::find_if(all().begin(), all().end(),
                                  [&](Kept const& x) { return x.key == key && is_of(x, owner_); });
  if (found == all().end()) return {};
  std::rotate(all().begin(), found, found + 1);
  call_.held.push_back(all().front().memory);  // another thread may remove it
  return all().front().workspace;
}

void KeptMaps::keep(MaskMapKey const& key, Workspace const& workspace) {
  py::gil_scoped_acquire const locked;
  // A tensor that has died may have had this memory.
  remove([&](Kept const& x) { return x.key == key; });
  all().insert(all().begin(), {key, reference_to(owner_), writes_, call_.held.back(), workspace});
  size_t maps = 0;
  int64_t bytes = 0;
  remove([&](Kept const& x) {
    bytes += x.workspace.bytes;
    return ++maps > kMaps || bytes > kBytes;
  });
}

void define_kept_maps(py::module_& m) {
  static PyMethodDef methods[] = {
      method<has_mask_map>("has_mask_map", "Whether a call would find its mask's map."),
      {},
  };
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace cutlass_attn
