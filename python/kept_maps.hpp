// Maps of bool masks that forward calls keep for later ones (kernels/mask_maps.hpp).
#pragma once

#include <pybind11/pybind11.h>

#include "call.hpp"
#include "mask_maps.hpp"

namespace cutlass_attn {

// The maps that one call may use. All calls of the process share them, under the GIL: at most
// kMaps, of kBytes together, in memory of torch's. The least recently used go first. A map also
// goes when its tensor dies, or when a call finds that torch has counted a write to the tensor.
class KeptMaps final : public MaskMaps {
 public:
  static constexpr size_t kMaps = 8;
  static constexpr int64_t kBytes = 128 << 20;

  explicit KeptMaps(Call& call) : call_(call) {}
  // Whether torch counts the writes to the call's mask, as maps can be used only then. It does
  // not count those of torch.compile's code, which also gives the memory of tensors to others.
  bool is_for(Arguments const& given);
  Workspace find(MaskMapKey const& key) override;
  void keep(MaskMapKey const& key, Workspace const& workspace) override;

 private:
  Call& call_;
  pybind11::object owner_;  // the tensor that the mask is, or is a view of
  int64_t writes_ = 0;      // to it
};

// Defines _C.has_mask_map(q, k, v, options): whether a call would find its mask's map.
void define_kept_maps(pybind11::module_& m);

}  // namespace cutlass_attn
