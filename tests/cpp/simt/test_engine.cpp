// The engine's own promises: order, barriers, shuffles, asynchronous copies, and what it reports.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "check.hpp"
#include "simt/engine.hpp"

using namespace cutlass_attn;
using namespace cutlass_attn::simt;

namespace {

Schedule const kSchedules[] = {
    {1, FiberOrder::kForward, 0}, {1, FiberOrder::kReverse, 0}, {1, FiberOrder::kRandom, 1},
    {1, FiberOrder::kRandom, 2},  {3, FiberOrder::kForward, 0},
};

// Runs one block and returns what the engine reports, empty for success.
template <class Body>
std::string run_block(int threads, int smem_bytes, Body const& body) {
  return run_grid({1, threads, smem_bytes}, kSchedules[0], body).message;
}

bool contains(std::string const& text, std::string const& part) {
  if (text.find(part) != std::string::npos) return true;
  std::printf("expected \"%s\" in \"%s\"\n", part.c_str(), text.c_str());
  return false;
}

TEST(every_thread_of_every_block_runs_once) {
  for (Schedule const& schedule : kSchedules) {
    std::vector<std::atomic<int>> runs(7 * 96);
    CHECK(run_grid({7, 96, 0}, schedule, [&](char*) {
            ++runs[engine::block() * 96 + engine::thread()];
          }).ok());
    CHECK(std::all_of(runs.begin(), runs.end(), [](auto const& n) { return n == 1; }));
  }
  CHECK(run_grid({0, 96, 0}, kSchedules[0], [](char*) { CHECK(false); }).ok());
  CHECK(contains(run_block(40, 0, [](char*) {}), "blocks of 40 threads; allowed: multiples of 32"));
}

TEST(order_is_what_the_schedule_says) {
  auto const order_of = [](Schedule const& schedule) {
    std::vector<int> order;
    CHECK(run_grid({1, 64, 0}, schedule, [&](char*) { order.push_back(engine::thread()); }).ok());
    return order;
  };
  std::vector<int> ascending(64);
  for (int i = 0; i < 64; ++i) ascending[i] = i;
  std::vector<int> const descending(ascending.rbegin(), ascending.rend());

  CHECK(order_of(kSchedules[0]) == ascending);
  CHECK(order_of(kSchedules[1]) == descending);
  std::vector<int> const one = order_of(kSchedules[2]), two = order_of(kSchedules[3]);
  CHECK(one != ascending && one != descending && one != two);
  CHECK(one == order_of(kSchedules[2]));
  CHECK(std::set<int>(one.begin(), one.end()).size() == 64);
}

TEST(barrier_separates) {
  for (Schedule const& schedule : kSchedules) {
    std::atomic<int> wrong{0};
    Status const status = run_grid({3, 128, 128 * sizeof(int)}, schedule, [&](char* smem) {
      int* const slots = reinterpret_cast<int*>(smem);
      int const thread = engine::thread();
      for (int round = 0; round < 4; ++round) {
        slots[thread] = round * 1000 + thread;
        engine::sync();
        int const other = (thread * 37 + 11 + round) % 128;
        wrong += slots[other] != round * 1000 + other;
        engine::sync();
      }
    });
    CHECK(status.ok());
    CHECK(wrong == 0);
  }
}

TEST(shuffle_exchanges) {
  for (int lane_mask = 0; lane_mask < kWarpSize; ++lane_mask) {
    int wrong = 0;
    CHECK(run_block(64, 0, [&](char*) {
            uint64_t const thread = engine::thread();
            wrong += engine::shuffle_xor(thread << 40 | 5, lane_mask) !=
                     ((thread ^ uint64_t(lane_mask)) << 40 | 5);
          }).empty());
    CHECK(wrong == 0);
  }
  CHECK(contains(run_block(32, 0, [](char*) { engine::shuffle_xor(0, 32); }),
                 "shuffle_xor with lane mask 32; allowed: 0 to 31"));
}

TEST(shared_memory_starts_as_nan_in_every_block) {
  std::atomic<int> wrong{0};
  constexpr int kFloats = 100;
  Status const status = run_grid({3, 32, kFloats * 4}, kSchedules[0], [&](char* smem) {
    wrong += uintptr_t(smem) % 128 != 0;
    for (int i = engine::thread(); i < kFloats; i += 32) {
      float& x = reinterpret_cast<float*>(smem)[i];
      wrong += !std::isnan(x);
      x = 1.0f;
    }
  });
  CHECK(status.ok());
  CHECK(wrong == 0);
}

TEST(writes_outside_shared_memory_are_reported) {
  CHECK(contains(run_block(32, 48, [](char* smem) { smem[48 + 5] = 0; }),
                 "block 0: shared memory was written 5 bytes past its end, 48 bytes"));
  CHECK(contains(run_block(32, 48, [](char* smem) { smem[-2] = 0; }),
                 "shared memory was written 2 bytes before its start"));
  CHECK(run_block(32, 48, [](char* smem) { smem[47] = 0; }).empty());
}

TEST(divergence_is_reported) {
  auto const mma = [&](engine::MmaInput input) {
    float c[4] = {};
    engine::mma_m16n8k16(input, c, {0, 0, 0, 0}, {0, 0});
  };
  CHECK(contains(run_block(64, 0,
                           [](char*) {
                             if (engine::thread() >= 32) {
                               engine::shuffle_xor(0, engine::thread() % 2 ? 1 : 2);
                             }
                           }),
                 "warp 1 has diverged: lanes 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, "
                 "28, 30 wait in shuffle_xor(2); lanes 1, 3, 5,"));
  CHECK(contains(run_block(32, 64,
                           [&](char* smem) {
                             uint32_t d[4];
                             if (engine::thread() < 8) {
                               mma(engine::MmaInput::kFloat16);
                             } else if (engine::thread() < 31) {
                               engine::load_matrix(true, smem, d);
                             }
                           }),
                 "block 0: warp 0 has diverged: lanes 0-7 wait in mma.m16n8k16.f16; lanes 8-30 "
                 "wait in ldmatrix.x4.trans; lanes 31 have exited"));
  CHECK(contains(run_block(32, 0,
                           [&](char*) {
                             mma(engine::thread() < 3 ? engine::MmaInput::kFloat16
                                                      : engine::MmaInput::kBFloat16);
                           }),
                 "lanes 0-2 wait in mma.m16n8k16.f16; lanes 3-31 wait in mma.m16n8k16.bf16"));
}

TEST(deadlock_is_reported) {
  for (Schedule const& schedule : kSchedules) {
    Status const status = run_grid({2, 128, 0}, schedule, [](char*) {
      if (engine::thread() < 96) engine::sync();
    });
    CHECK(status.code == StatusCode::kDeviceError);
    CHECK(contains(status.message,
                   "deadlock: threads 0-95 wait in sync(); threads 96-127 have exited"));
  }
  CHECK(contains(run_block(64, 0,
                           [](char*) {
                             if (engine::thread() < 32) engine::sync();
                             engine::shuffle_xor(0, 1);
                             engine::sync();
                             if (engine::thread() < 32) engine::sync();
                           }),
                 "deadlock: threads 0-31 wait in sync(); threads 32-63 have exited"));
}

// --- cp.async
// -------------------------------------------------------------------------------------

struct alignas(16) Vector {
  uint8_t bytes[16];
};

bool all(Vector const& x, int byte) {
  return std::all_of(x.bytes, x.bytes + 16, [&](uint8_t b) { return b == byte; });
}

Vector filled(int byte) {
  Vector x;
  std::memset(x.bytes, byte, 16);
  return x;
}

TEST(copies_land_at_their_wait) {
  Vector source[4] = {filled(1), filled(2), filled(3), filled(4)};
  std::string const error = run_block(32, 4 * 16, [&](char* smem) {
    if (engine::thread() != 0) return;
    Vector* const to = reinterpret_cast<Vector*>(smem);
    to[0] = filled(0);
    engine::async_copy(&to[0], &source[0], true);
    CHECK(all(to[0], 0xff));  // not what was there, not what will be
    engine::async_copy_commit();
    engine::async_copy(&to[1], &source[1], true);
    engine::async_copy(&to[2], nullptr, false);
    engine::async_copy_commit();
    CHECK(all(to[0], 0xff) && all(to[1], 0xff) && all(to[2], 0xff));

    source[0] = filled(7);  // the copy reads when it lands
    engine::async_copy_wait(2);
    CHECK(all(to[0], 0xff));
    engine::async_copy_wait(1);
    CHECK(all(to[0], 7) && all(to[1], 0xff) && all(to[2], 0xff));

    engine::async_copy_commit();  // a group without copies is a group
    engine::async_copy_wait(1);
    CHECK(all(to[1], 2) && all(to[2], 0));

    engine::async_copy(&to[3], &source[3], true);
    engine::async_copy_wait(0);
    CHECK(all(to[3], 0xff));  // never committed
    engine::async_copy_commit();
    engine::async_copy_wait(0);
    CHECK(all(to[3], 4));
  });
  CHECK(error.empty());
}

TEST(copies_belong_to_their_thread) {
  Vector const source = filled(9);
  CHECK(run_block(64, 64 * 16, [&](char* smem) {
          Vector* const to = reinterpret_cast<Vector*>(smem);
          int const thread = engine::thread();
          engine::async_copy(&to[thread], &source, true);
          engine::async_copy_commit();
          if (thread % 2 == 0) engine::async_copy_wait(0);
          engine::sync();
          CHECK(all(to[(thread + 1) % 64], thread % 2 == 0 ? 0xff : 9));
          engine::sync();
          engine::async_copy_wait(0);
        }).empty());
}

TEST(bad_copies_are_reported) {
  Vector const source[2] = {};
  auto const copy = [&](ptrdiff_t to, ptrdiff_t from, bool predicate = true) {
    return run_block(32, 32, [&](char* smem) {
      if (engine::thread() != 3) return;
      engine::async_copy(smem + to, reinterpret_cast<char const*>(source) + from, predicate);
      engine::async_copy_commit();
      engine::async_copy_wait(0);
    });
  };
  CHECK(copy(16, 16).empty());
  CHECK(contains(copy(8, 0), "thread 3 cp.async at offset 8 of shared memory, which is not"));
  CHECK(contains(copy(32, 0), "thread 3 cp.async at an address outside the 32 bytes of shared"));
  CHECK(contains(copy(-16, 0), "outside the 32 bytes of shared memory"));
  CHECK(contains(copy(0, 4), "thread 3 cp.async reads from an address that is not aligned to 16"));
  CHECK(copy(0, 4, false).empty());

  for (bool commit : {false, true}) {
    CHECK(contains(run_block(32, 32,
                             [&](char* smem) {
                               if (engine::thread() != 5) return;
                               engine::async_copy(smem, source, true);
                               engine::async_copy(smem + 16, source, true);
                               if (commit) engine::async_copy_commit();
                             }),
                   "thread 5 exits with 2 asynchronous copies in flight that no wait covers"));
  }
}

TEST(bad_matrix_addresses_are_reported) {
  auto const load = [](ptrdiff_t offset) {
    return run_block(32, 512, [&](char* smem) {
      uint32_t d[4];
      engine::load_matrix(false, smem + (engine::thread() == 7 ? offset : 0), d);
    });
  };
  CHECK(load(496).empty());
  CHECK(contains(load(504), "thread 7 ldmatrix at an address outside the 512 bytes of shared"));
  CHECK(contains(load(2), "thread 7 ldmatrix at offset 2 of shared memory, which is not aligned"));
}

TEST(an_error_ends_the_grid) {
  for (Schedule const& schedule : kSchedules) {
    std::atomic<int> blocks{0};
    Status const status = run_grid({1000, 32, 16}, schedule, [&](char* smem) {
      if (engine::thread() != 0) return;
      ++blocks;
      if (engine::block() == 5 || engine::block() == 994) smem[16] = 0;
    });
    CHECK(contains(status.message, "simt: block "));
    CHECK(blocks < 1000);
  }
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
