// Gradients of tensors that a user's score_mod captures, in every backward kernel that has one.
#include "backward_kernels.hpp"
#include "captures_case.hpp"

using namespace captures;
using backward_case::BFloat;
using backward_case::Half;
using backward_case::Tile;

namespace {

Case nan_keys() {
  Case c = plain();
  c.name = "keys that are NaN and that no query sees", c.batch = 1;
  c.mask = backward_case::window(30, -4), c.nan_keys = 4;
  return c;
}

template <class Kernel, class Mod, class... Terms>
void check_kernels() {
  for (Case const& what : {plain(), masked(), rows_without_keys(), nan_keys()}) {
    check_kernel<Kernel, Mod, Terms...>(what);
  }
}
template <class Kernel>
void check_all() {
  check_kernels<Kernel, mods::Added>();
  check_kernels<Kernel, mods::Distance>();
  check_kernels<Kernel, mods::Scaled>();
  check_kernel<Kernel, mods::SteepAdded>(masked());
}

}  // namespace

TEST(without_roles) { check_all<sm80::Backward<half_t, Tile<64, 64, 128, 4>>>(); }
TEST(roles) { check_all<sm80::Backward<BFloat, Tile<128, 32, 128, 8>>>(); }
// One stage of dO.
TEST(roles_d256) {
  using Kernel = sm80::Backward<half_t, Tile<256, 32, 64, 8>>;
  check_kernel<Kernel, mods::Distance>(masked());
  check_kernel<Kernel, mods::Scaled>(masked());
}
TEST(halves_of_columns) {
  using Kernel = sm80::Backward<half_t, Tile<512, 16, 32, 8>>;
  check_kernel<Kernel, mods::Added>(masked());
  check_kernel<Kernel, mods::Scaled>(masked());
}
TEST(wgmma) {
  check_all<sm90::Backward<half_t, backward_case::Wgmma64>>();
  using Wide = sm90::Backward<BFloat, backward_case::Wgmma128>;
  check_kernel<Wide, mods::Distance>(plain());
  check_kernel<Wide, mods::Scaled>(masked());
}
TEST(wgmma_and_a_mask) {
  using Kernel = backward_case::Masked<BFloat, backward_case::Wgmma128>;
  check_kernel<Kernel, mods::Distance, MaskBits>(masked());
  check_kernel<Kernel, mods::Scaled, MaskBits>(masked());
}

int main(int argc, char** argv) { return check::run(argc, argv); }
