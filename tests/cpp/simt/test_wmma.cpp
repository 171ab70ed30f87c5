// Fragments on the CPU engine, and the wmma kernel on problems whose answer is known.
#include <cmath>
#include <random>
#include <string>

#include "arch/sm80.hpp"
#include "arch/wmma.hpp"
#include "check.hpp"
#include "simt/wmma_checks.hpp"

using namespace wmma_checks;
using arch::Sm80;
using simt::run_grid;
namespace engine = simt::engine;

namespace {

bool contains(std::string const& text, std::string const& part) {
  return text.find(part) != std::string::npos;
}

// C = A B + C with B in both orders, and every matrix with gaps between its lines.
template <int kM, int kN, class Order>
void check_product() {
  using Wmma = arch::Wmma<kM, kN>;
  constexpr int kLdA = 24, kLdB = 40, kLdC = kN + 4;
  constexpr bool kByRows = std::is_same_v<Order, typename Wmma::RowMajor>;
  struct Shared {
    alignas(32) half_t a[kM * kLdA];
    alignas(32) half_t b[32 * kLdB];
    alignas(32) float c[kM * kLdC];
  };
  std::mt19937 random(1);
  std::uniform_int_distribution<int> integer(-8, 8);
  float a[kM][16], b[16][kN], c[kM][kN];
  for (auto& row : a)
    for (float& x : row) x = float(integer(random));
  for (auto& row : b)
    for (float& x : row) x = float(integer(random));
  for (auto& row : c)
    for (float& x : row) x = float(integer(random));
  int wrong = 0;
  std::string const error = run_grid({1, 32, sizeof(Shared)}, {}, [&](char* smem) {
                              auto& shared = *reinterpret_cast<Shared*>(smem);
                              if (Sm80::thread() == 0) {
                                for (int m = 0; m < kM; ++m) {
                                  for (int k = 0; k < 16; ++k)
                                    shared.a[m * kLdA + k] = half_t(a[m][k]);
                                  for (int n = 0; n < kN; ++n) shared.c[m * kLdC + n] = c[m][n];
                                }
                                for (int k = 0; k < 16; ++k) {
                                  for (int n = 0; n < kN; ++n) {
                                    shared.b[kByRows ? k * kLdB + n : n * kLdB + k] =
                                        half_t(b[k][n]);
                                  }
                                }
                              }
                              Sm80::sync_warp();
                              typename Wmma::A fragment_a;
                              typename Wmma::template B<Order> fragment_b;
                              typename Wmma::Accumulator fragment_c, ones;
                              Wmma::load(fragment_a, shared.a, kLdA);
                              Wmma::load(fragment_b, shared.b, kLdB);
                              Wmma::load(fragment_c, shared.c, kLdC);
                              Wmma::fill(ones, 1.0f);
                              Wmma::mma(fragment_c, fragment_a, fragment_b);
                              for (int i = 0; i < ones.num_elements; ++i)
                                fragment_c.x[i] += ones.x[i];
                              Sm80::sync_warp();
                              Wmma::store(shared.c, fragment_c, kLdC);
                              Sm80::sync_warp();
                              if (Sm80::thread() != 7) return;
                              for (int m = 0; m < kM; ++m) {
                                for (int n = 0; n < kN; ++n) {
                                  float expected = c[m][n] + 1.0f;
                                  for (int k = 0; k < 16; ++k) expected += a[m][k] * b[k][n];
                                  wrong += shared.c[m * kLdC + n] != expected;
                                }
                              }
                            }).message;
  CHECK_EQ(error, "");
  CHECK(wrong == 0);
}

template <int kM, int kN>
void check_shape() {
  using Wmma = arch::Wmma<kM, kN>;
  check_product<kM, kN, typename Wmma::RowMajor>();
  check_product<kM, kN, typename Wmma::ColMajor>();
}

TEST(products_of_fragments) {
  check_shape<16, 16>();
  check_shape<8, 32>();
  check_shape<32, 8>();
}

TEST(bad_matrices_are_reported) {
  using Wmma = arch::Wmma<16, 16>;
  auto const load = [](int offset, int ld) {
    return run_grid({1, 32, 1024}, {},
                    [&](char* smem) {
                      typename Wmma::A a;
                      Wmma::load(a, reinterpret_cast<half_t*>(smem) + offset, ld);
                    })
        .message;
  };
  CHECK_EQ(load(0, 16), "");
  CHECK_EQ(load(16, 24), "");
  CHECK(
      contains(load(8, 16), "load_matrix_sync at offset 16 of shared memory, which is not align"));
  CHECK(
      contains(load(0, 20), "load_matrix_sync with leading dimension 20; allowed: from 16, mult"));
  CHECK(contains(load(0, 8), "load_matrix_sync with leading dimension 8; allowed: from 16, mult"));
  CHECK(contains(load(144, 24), "load_matrix_sync of a matrix beyond the 1024 bytes of shared"));
  CHECK(contains(load(-16, 16), "load_matrix_sync of a matrix beyond the 1024 bytes of shared"));
}

TEST(warps_that_diverge_are_reported) {
  using Wmma = arch::Wmma<8, 32>;
  auto const error = run_grid({1, 32, 0}, {}, [&](char*) {
                       typename Wmma::Accumulator c;
                       typename Wmma::A a{};
                       typename Wmma::template B<typename Wmma::RowMajor> b{};
                       Wmma::fill(c, 0.0f);
                       if (Sm80::thread() < 5) {
                         Sm80::sync_warp();
                       } else {
                         Wmma::mma(c, a, b);
                       }
                     }).message;
  CHECK(contains(error, "lanes 0-4 wait in sync_warp(); lanes 5-31 wait in wmma of 8 rows"));
}

TEST(without_poison_memory_starts_as_zero) {
  simt::Schedule schedule;
  schedule.poison = false;
  alignas(16) static uint32_t const source[4] = {1, 2, 3, 4};
  CHECK_EQ(run_grid({1, 32, 16}, schedule,
                    [](char* smem) {
                      if (Sm80::thread() != 0) return;
                      CHECK(*reinterpret_cast<uint32_t*>(smem) == 0);
                      Sm80::cp_async(Sm80::smem_address(smem), source, true);
                      Sm80::cp_async_commit_group();
                      CHECK(*reinterpret_cast<uint32_t*>(smem) == 0);
                      Sm80::cp_async_wait_group<0>();
                      CHECK(*reinterpret_cast<uint32_t*>(smem) == 1);
                    })
               .message,
           "");
}

// A pointer to the first element of a two-dimensional array and a pointer to the array are equal
// addresses: the suspicion of the earlier effort about `Q_tile` without `&[0][0]` is wrong.
TEST(an_array_begins_where_its_first_element_does) {
  static half_t tile[16][64];
  CHECK(reinterpret_cast<half_t*>(tile) == &tile[0][0]);
  CHECK(reinterpret_cast<half_t*>(&tile) == &tile[0][0]);
}

TEST(identity) { CHECK(identity_gives_identity()); }
TEST(first_tile) {
  CHECK(first_tile_is_the_scalar_one(kWmma<4, 16, 16>, 16));
  CHECK(first_tile_is_the_scalar_one(kWmma<4, 8, 32>, 16));
}
TEST(one_warp) {
  CHECK(first_tile_is_the_scalar_one(kWmma<1, 16, 16>, 16));
  CHECK(first_tile_is_the_scalar_one(kWmma<1, 8, 32>, 16));
}
TEST(known_values) { CHECK(known_values_come_back()); }

TEST(reference_shape) {
  for (bool causal : {false, true}) {
    KnownProblem problem(2, 8, 512, 0.125f, causal, normal(11), normal(12), normal(13));
    std::vector<half_t> const exact = problem.exact();
    for (LaunchKernel launch : {kWmma<8, 16, 16>, kWmma<8, 8, 32>}) {
      std::vector<half_t> const o = problem.run(launch);
      CHECK_EQ(o.size(), exact.size());
      double worst = 0;  // in units of allclose(atol=1e-3, rtol=1e-3)
      for (size_t i = 0; i < o.size(); ++i) {
        double const expected = float(exact[i]), error = std::fabs(float(o[i]) - expected);
        worst = std::fmax(worst, error / (1e-3 + 1e-3 * std::fabs(expected)));
      }
      CHECK_NEAR(worst, 0.0, 1.0);
    }
  }
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
