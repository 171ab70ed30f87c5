// wgmma, TMA and mbarriers on the engine: their results, and the engine's reports of misuse.
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "arch/sm90.hpp"
#include "check.hpp"
#include "simt/async.hpp"
#include "simt/host_unit.hpp"

using namespace cutlass_attn;
using cutlass::half_t;

namespace {

using arch::Sm90;
constexpr int kBytes = 64 * 128;  // of a tile of 64 x 64

struct Tiles {
  alignas(1024) char a[kBytes], b[kBytes];
  arch::Barrier full[1], empty[1];
};

struct Matrix {
  std::vector<half_t> values = std::vector<half_t>(64 * 64, half_t(1.0f));
  TensorMap map;
  Matrix() {
    TensorView const view{values.data(), {64, 64, 1, 1, 1}, {128, 16, 16, 16}, {64, 64, 1, 1, 1}};
    CHECK(encode(view, false, map) == nullptr);
  }
};

// Runs body(shared, thread, accumulators) in a warpgroup, after barriers are initialised.
std::string run(std::function<void(Tiles&, int, float (&)[32])> const& body, bool fences = true,
                bool overlaps = false) {
  simt::Schedule const schedule{1, simt::FiberOrder::kForward, 0};
  Status const status =
      simt::run_grid({1, 128, sizeof(Tiles), 1, overlaps}, schedule, [&](char* smem) {
        Tiles& shared = *reinterpret_cast<Tiles*>(smem);
        int const thread = Sm90::thread();
        if (thread == 0) {
          Sm90::mbarrier_init(shared.full, 1);
          Sm90::mbarrier_init(shared.empty, 4);
          if (fences) Sm90::fence_mbarrier_init();
        }
        Sm90::sync();
        float acc[32] = {};
        body(shared, thread, acc);
      });
  return status.message;
}

void load(Tiles& shared, Matrix const& a, Matrix const& b) {
  Sm90::mbarrier_arrive_expect_tx(shared.full, 2 * kBytes);
  Sm90::tma_load(shared.a, a.map, shared.full, 0, 0, 0, 0, 0);
  Sm90::tma_load(shared.b, b.map, shared.full, 0, 0, 0, 0, 0);
}

void multiply(Tiles& shared, float (&acc)[32], int leading = 16, int stride = 1024) {
  auto const a = Sm90::descriptor(shared.a, leading, stride);
  auto const b = Sm90::descriptor(shared.b, leading, stride);
  for (int k = 0; k < 4; ++k) Sm90::wgmma_ss<half_t>(acc, a + 2 * k, b + 2 * k, k > 0);
  Sm90::wgmma_commit();
}

bool has(std::string const& text, char const* part) {
  if (text.find(part) != std::string::npos) return true;
  std::printf("  said: %s\n", text.c_str());
  return false;
}

// Calls visit for element (row, column) of a thread's part of a product.
template <class Visit>
void for_accumulators(int thread, Visit&& visit) {
  int const row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  for (int i = 0; i < 32; ++i) visit(row + i / 2 % 2 * 8, i / 4 * 8 + column + i % 2, i);
}

struct Integers {
  Matrix a, b;
  Integers() {
    for (int i = 0; i < 64 * 64; ++i) {
      a.values[i] = half_t(float(i * 7 % 13 - 6));
      b.values[i] = half_t(float(i * 5 % 11 - 5));
    }
  }
};

TEST(a_product_is_there_after_its_wait) {
  Integers const m;
  std::vector<float> c(64 * 64), before(64 * 64);
  CHECK_EQ(run([&](Tiles& shared, int thread, float (&acc)[32]) {
             if (thread == 0) load(shared, m.a, m.b);
             Sm90::mbarrier_wait(shared.full, 0);
             Sm90::wgmma_fence(acc);
             multiply(shared, acc);
             auto const keep = [&](std::vector<float>& to) {
               for_accumulators(thread, [&](int i, int j, int at) { to[i * 64 + j] = acc[at]; });
             };
             keep(before);
             Sm90::wgmma_wait<0>(acc);
             keep(c);
           }),
           "");
  int wrong = 0, nan = 0;
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < 64; ++j) {
      float sum = 0;
      for (int k = 0; k < 64; ++k) {
        sum += float(m.a.values[i * 64 + k]) * float(m.b.values[j * 64 + k]);
      }
      wrong += c[i * 64 + j] != sum;
      nan += before[i * 64 + j] != before[i * 64 + j];
    }
  }
  CHECK_EQ(wrong, 0);
  CHECK_EQ(nan, 64 * 64);  // without the wait
}

TEST(a_product_of_rows_with_rows) {
  Integers const m;
  std::vector<float> c(64 * 64);
  CHECK_EQ(run([&](Tiles& shared, int thread, float (&acc)[32]) {
             if (thread == 0) load(shared, m.a, m.b);
             Sm90::mbarrier_wait(shared.full, 0);
             Sm90::wgmma_fence(acc);
             auto const a = Sm90::descriptor(shared.a, kBytes, 1024);
             auto const b = Sm90::descriptor(shared.b, kBytes, 1024);
             for (int k = 0; k < 4; ++k) {
               Sm90::wgmma_ts<half_t>(acc, a + k * 128, b + k * 128, k > 0);
             }
             Sm90::wgmma_commit();
             Sm90::wgmma_wait<0>(acc);
             for_accumulators(thread, [&](int i, int j, int at) { c[i * 64 + j] = acc[at]; });
           }),
           "");
  int wrong = 0;
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < 64; ++j) {
      float sum = 0;
      for (int k = 0; k < 64; ++k) {
        sum += float(m.a.values[k * 64 + i]) * float(m.b.values[k * 64 + j]);
      }
      wrong += c[i * 64 + j] != sum;
    }
  }
  CHECK_EQ(wrong, 0);
}

// 64 x 64 x 32 in 8 bits: A of int8 in shared memory, of e4m3 in registers as for m16n8k32; B in
// shared memory, by rows.
template <class Byte, class Value, class Multiply>
void check_bytes(Value const& value, Multiply const& multiply) {
  std::vector<Byte> a(64 * 32), b(64 * 32);
  for (int i = 0; i < 64 * 32; ++i) a[i] = Byte(i * 37 % 101), b[i] = Byte(i * 53 % 103 + 128);
  std::vector<double> c(64 * 64);
  CHECK_EQ(run([&](Tiles& shared, int thread, float (&)[32]) {
             for (int at = thread; at < 64 * 32; at += 128) {
               int const row = at / 32, place = row * 128 + at % 32;
               uint32_t const swizzled = simt::swizzle128(uint32_t(place));
               shared.a[swizzled] = char(a[at]), shared.b[swizzled] = char(b[at]);
             }
             Sm90::sync();
             uint32_t words[4];
             int const row = thread / 32 * 16 + thread % 32 / 4, four = thread % 4 * 4;
             for (int i = 0; i < 4; ++i) {
               std::memcpy(&words[i], &a[(row + i % 2 * 8) * 32 + four + i / 2 * 16], 4);
             }
             auto const results = multiply(shared, words);
             for_accumulators(thread, [&](int i, int j, int at) { c[i * 64 + j] = results[at]; });
           }),
           "");
  int wrong = 0;
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < 64; ++j) {
      double sum = 0;
      for (int k = 0; k < 32; ++k) sum += value(a[i * 32 + k]) * value(b[j * 32 + k]);
      // Twice: the second call accumulates.
      wrong += std::fabs(c[i * 64 + j] - 2 * sum) > std::fabs(2 * sum) * 0x1p-12;
    }
  }
  CHECK_EQ(wrong, 0);
}
TEST(products_in_8_bits) {
  auto const b_of = [](Tiles& shared) { return Sm90::descriptor(shared.b, 16, 1024); };
  check_bytes<int8_t>([](int8_t x) { return double(x); },
                      [&](Tiles& shared, uint32_t const(&)[4]) {
                        auto const a = Sm90::descriptor(shared.a, 16, 1024);
                        uint32_t acc[32];
                        Sm90::wgmma_fence(acc);
                        Sm90::wgmma_int8(acc, a, b_of(shared), false);
                        Sm90::wgmma_int8(acc, a, b_of(shared), true);
                        Sm90::wgmma_commit();
                        Sm90::wgmma_wait<0>(acc);
                        std::vector<double> results;
                        for (uint32_t x : acc) results.push_back(int32_t(x));
                        return results;
                      });
  check_bytes<uint8_t>([](uint8_t x) { return double(float(E4M3{x})); },
                       [&](Tiles& shared, uint32_t const(&a)[4]) {
                         float acc[32];
                         Sm90::wgmma_fence(acc);
                         Sm90::wgmma_e4m3(acc, a, b_of(shared), false);
                         Sm90::wgmma_e4m3(acc, a, b_of(shared), true);
                         Sm90::wgmma_commit();
                         Sm90::wgmma_wait<0>(acc);
                         return std::vector<double>(acc, acc + 32);
                       });
}

// wgmma reads the stores of threads through another proxy.
TEST(stores_need_a_fence_for_wgmma) {
  Matrix const a;
  auto const store = [&](bool fences) {
    return run([&](Tiles& shared, int thread, float (&acc)[32]) {
      if (thread == 0) load(shared, a, a);
      Sm90::mbarrier_wait(shared.full, 0);
      Sm90::store_shared(Sm90::smem_address(shared.a + thread * 4), 0u);
      if (fences) Sm90::fence_proxy_async();
      Sm90::sync();
      Sm90::wgmma_fence(acc);
      multiply(shared, acc);
      Sm90::wgmma_wait<0>(acc);
    });
  };
  CHECK(has(store(false), "without an fence_proxy_async()"));
  CHECK_EQ(store(true), "");
}

TEST(a_wrong_parity_never_ends) {
  Matrix a;
  CHECK(has(run([&](Tiles& shared, int thread, float (&)[32]) {
              if (thread == 0) load(shared, a, a);
              Sm90::mbarrier_wait(shared.full, 0);
              Sm90::mbarrier_wait(shared.full, 1);
            }),
            "wait for parity 1 of the barrier at byte 16384"));
}

TEST(too_few_bytes_keep_a_phase_open) {
  Matrix a;
  CHECK(has(run([&](Tiles& shared, int thread, float (&)[32]) {
              if (thread == 0) {
                Sm90::mbarrier_arrive_expect_tx(shared.full, 2 * kBytes);
                Sm90::tma_load(shared.a, a.map, shared.full, 0, 0, 0, 0, 0);
              }
              Sm90::mbarrier_wait(shared.full, 0);
            }),
            "lacks 0 of 1 arrivals and 8192 bytes"));
}

TEST(too_many_arrivals) {
  CHECK(has(run([&](Tiles& shared, int thread, float (&)[32]) {
              if (thread == 0) Sm90::mbarrier_arrive_expect_tx(shared.full, 16);
              Sm90::sync();
              if (thread == 1) Sm90::mbarrier_arrive(shared.full);
            }),
            "after all 1 arrivals of its phase"));
}

// Runs body(shared, thread, rank) in a cluster of two blocks with barriers of one arrival, and
// shared.a full of 1 + rank.
std::string run_two(std::function<void(Tiles&, int, int)> const& body, bool leaves = true) {
  simt::Schedule const schedule{1, simt::FiberOrder::kForward, 0};
  return simt::run_grid({2, 128, sizeof(Tiles), 2}, schedule,
                        [&](char* smem) {
                          Tiles& shared = *reinterpret_cast<Tiles*>(smem);
                          int const thread = Sm90::thread(), rank = Sm90::block();
                          if (thread == 0) Sm90::mbarrier_init(shared.full, 1);
                          uint32_t const word = uint32_t(1 + rank),
                                         words[4] = {word, word, word, word};
                          for (int i = thread * 16; i < kBytes; i += 128 * 16) {
                            Sm90::store_shared(Sm90::smem_address(shared.a + i), words);
                          }
                          Sm90::cluster_sync();
                          body(shared, thread, rank);
                          if (leaves) Sm90::cluster_sync();
                        })
      .message;
}

// The first half of the tile comes from the first block, the other half from the second one. In one
// block it lands before the arrival that announces it.
TEST(blocks_of_a_cluster_copy_to_each_other) {
  int wrong = 0;
  auto const exchange = [&](bool fences, int bytes) {
    return run_two([&](Tiles& shared, int thread, int rank) {
      if (fences) Sm90::fence_proxy_async();
      Sm90::sync();
      char const* const half = shared.a + rank * kBytes / 2;
      if (thread == 0) Sm90::cp_async_bulk(half, kBytes / 2, 1 - rank, shared.full);
      if (thread == 0 && rank == 1) Sm90::mbarrier_has_ended(shared.full, 0);
      Sm90::cluster_sync();
      if (thread == 0) Sm90::mbarrier_arrive_expect_tx(shared.full, bytes);
      Sm90::mbarrier_wait(shared.full, 0);
      auto const* const words = reinterpret_cast<uint32_t const*>(shared.a);
      wrong += words[thread] != 1;
      wrong += words[kBytes / 8 + thread] != 2;
    });
  };
  CHECK_EQ(exchange(true, kBytes / 2), "");
  CHECK_EQ(wrong, 0);
  CHECK(has(exchange(false, kBytes / 2), "without an fence_proxy_async()"));
  CHECK(has(exchange(true, kBytes), "lacks 0 of 1 arrivals and 4096 bytes"));
  CHECK(has(exchange(true, 16), "4080 bytes more at the barrier"));
}

TEST(arrivals_in_another_block) {
  CHECK_EQ(run_two([](Tiles& shared, int thread, int rank) {
             if (thread == 0) Sm90::mbarrier_arrive_cluster(shared.full, 1 - rank);
             Sm90::mbarrier_wait(shared.full, 0);
           }),
           "");
  CHECK(has(run_two(
                [](Tiles& shared, int thread, int rank) {
                  if (rank == 0) return;
                  for (int i = 0; i < 100; ++i) Sm90::sync();
                  if (thread == 0) Sm90::mbarrier_arrive_cluster(shared.full, 0);
                },
                false),
            "asks for shared memory of block 0 of its cluster, which has exited"));
}

TEST(one_lane_of_a_warp_is_elected) {
  std::vector<int> elected(128);
  CHECK_EQ(run([&](Tiles&, int thread, float (&)[32]) { elected[size_t(thread)] = Sm90::elect(); }),
           "");
  for (int warp = 0; warp < 4; ++warp) {
    auto const first = elected.begin() + 32 * warp;
    CHECK_EQ(std::accumulate(first, first + 32, 0), 1);
  }
  CHECK(has(run([&](Tiles&, int thread, float (&)[32]) {
              if (thread != 40) Sm90::elect();
            }),
            "lanes 8 have exited"));
}

TEST(barriers_need_a_fence_for_tma) {
  Matrix a;
  CHECK(has(run(
                [&](Tiles& shared, int thread, float (&)[32]) {
                  if (thread == 0) load(shared, a, a);
                },
                false),
            "without a fence_mbarrier_init()"));
}

// In a grid that begins before earlier grids end. One thread waits for its whole block.
TEST(copies_wait_for_grids_before) {
  Matrix a;
  auto const copy = [&](bool waits) {
    return run(
        [&](Tiles& shared, int thread, float (&)[32]) {
          if (thread == 0 && waits) Sm90::griddepcontrol_wait();
          Sm90::sync();
          if (thread == 32) load(shared, a, a);
          Sm90::mbarrier_wait(shared.full, 0);
        },
        true, true);
  };
  CHECK_EQ(copy(true), "");
  CHECK(has(copy(false), "thread 32 has TMA copy data that earlier grids may still write"));
}

TEST(wgmma_needs_a_fence) {
  Matrix a;
  CHECK(has(run([&](Tiles& shared, int thread, float (&acc)[32]) {
              if (thread == 0) load(shared, a, a);
              Sm90::mbarrier_wait(shared.full, 0);
              multiply(shared, acc);
              Sm90::wgmma_wait<0>(acc);
            }),
            "without a wgmma_fence()"));
}

TEST(wgmma_needs_a_wait) {
  Matrix a;
  CHECK(has(run([&](Tiles& shared, int thread, float (&acc)[32]) {
              if (thread == 0) load(shared, a, a);
              Sm90::mbarrier_wait(shared.full, 0);
              Sm90::wgmma_fence(acc);
              multiply(shared, acc);
            }),
            "4 wgmma in flight that no wait covers"));
}

TEST(accumulators_are_not_to_be_written_in_flight) {
  Matrix a;
  CHECK(has(run([&](Tiles& shared, int thread, float (&acc)[32]) {
              if (thread == 0) load(shared, a, a);
              Sm90::mbarrier_wait(shared.full, 0);
              Sm90::wgmma_fence(acc);
              multiply(shared, acc);
              acc[0] = 0.0f;
              Sm90::wgmma_wait<0>(acc);
            }),
            "wrote accumulators while a wgmma was in flight"));
}

TEST(a_is_not_to_be_written_in_flight) {
  Matrix a;
  CHECK(has(run([&](Tiles& shared, int thread, float (&acc)[32]) {
              if (thread == 0) load(shared, a, a);
              Sm90::mbarrier_wait(shared.full, 0);
              uint32_t registers[4] = {};
              Sm90::wgmma_fence(acc, registers);
              auto const b = Sm90::descriptor(shared.b, kBytes, 1024);
              Sm90::wgmma_rs<half_t>(acc, registers, b, false);
              Sm90::wgmma_commit();
              registers[2] = 1;
              Sm90::wgmma_wait<0>(acc);
            }),
            "changed registers of A"));
}

// A buffer that is released too early is NaN when wgmma reads it.
TEST(an_early_release_is_seen) {
  Matrix a;
  float sum = 0;
  CHECK_EQ(run([&](Tiles& shared, int thread, float (&acc)[32]) {
             if (thread == 0) load(shared, a, a);
             Sm90::mbarrier_wait(shared.full, 0);
             Sm90::wgmma_fence(acc);
             multiply(shared, acc);
             Sm90::sync();
             if (thread == 0) load(shared, a, a);
             Sm90::sync();
             Sm90::wgmma_wait<0>(acc);
             sum += acc[0];
             Sm90::mbarrier_wait(shared.full, 1);
           }),
           "");
  CHECK(sum != sum);
}

// A wait says nothing about reads of other warps of the warpgroup.
TEST(a_wait_is_of_its_own_warp) {
  Matrix a;
  for (bool const syncs : {false, true}) {
    std::string const said = run([&](Tiles& shared, int thread, float (&acc)[32]) {
      if (thread == 0) load(shared, a, a);
      Sm90::mbarrier_wait(shared.full, 0);
      Sm90::wgmma_fence(acc);
      multiply(shared, acc);
      Sm90::wgmma_wait<0>(acc);
      if (syncs) Sm90::sync();
      if (thread == 0) load(shared, a, a);
      Sm90::mbarrier_wait(shared.full, 1);
    });
    CHECK(syncs ? said.empty()
                : has(said, "wgmma reads for a warp that has not resumed from its wait"));
  }
}

TEST(descriptors_have_to_fit_the_tile) {
  Matrix a;
  auto const of = [&](int stride) {
    for (int i = 0; i < 64 * 64; ++i) a.values[i] = half_t(float(i / 64));
    float value = 0;
    std::string const error = run([&](Tiles& shared, int thread, float (&acc)[32]) {
      if (thread == 0) load(shared, a, a);
      Sm90::mbarrier_wait(shared.full, 0);
      Sm90::wgmma_fence(acc);
      multiply(shared, acc, 16, stride);
      Sm90::wgmma_wait<0>(acc);
      if (thread == 127) value = acc[31];
    });
    CHECK_EQ(error, "");
    return value;
  };
  CHECK_EQ(of(1024), 63.0f * 63.0f * 64.0f);
  CHECK(of(512) != 63.0f * 63.0f * 64.0f);
}

TEST(tiles_lie_at_the_period_of_the_swizzle) {
  Matrix a;
  CHECK(has(run([&](Tiles& shared, int thread, float (&)[32]) {
              if (thread != 0) return;
              Sm90::tma_load(shared.a + 128, a.map, shared.full, 0, 0, 0, 0, 0);
            }),
            "allowed: multiples of 1024"));
}

TEST(registers_come_in_eights) {
  CHECK(has(run([](Tiles&, int, float (&)[32]) { Sm90::setmaxnreg_inc<236>(); }),
            "allowed: multiples of 8"));
}

// 168 for each of 384 threads: a request for more would wait until the block ends.
TEST(a_block_gets_no_more_registers_than_it_began_with) {
  Status const status = simt::run_grid({1, 384, 0}, {1, simt::FiberOrder::kForward, 0},
                                       [](char*) { Sm90::setmaxnreg_inc<176>(); });
  CHECK(has(status.message, "a block of 384 threads has 64512"));
  CHECK(simt::run_grid({1, 384, 0}, {1, simt::FiberOrder::kForward, 0}, [](char*) {
          Sm90::setmaxnreg_inc<168>();
        }).ok());
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
