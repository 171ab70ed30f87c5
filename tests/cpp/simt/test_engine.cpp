// The engine's promises: order, barriers, shuffles, asynchronous copies, and its reports.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <thread>
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

// Runs one block and returns the engine's report, empty for success.
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

TEST(shuffle_reads_any_lane) {
  int wrong = 0;
  CHECK(run_block(64, 0, [&](char*) {
          uint64_t const thread = engine::thread(), source = thread * 7 % 5;
          wrong += engine::shuffle(thread << 40 | 5, int(source)) !=
                   ((thread / kWarpSize * kWarpSize + source) << 40 | 5);
        }).empty());
  CHECK(wrong == 0);
  CHECK(contains(run_block(32, 0, [](char*) { engine::shuffle(0, 32); }),
                 "shuffle with lane 32; allowed: 0 to 31"));
}

TEST(any_is_of_the_warp) {
  for (Schedule const& schedule : kSchedules) {
    std::atomic<int> wrong{0};
    CHECK(run_grid({2, 96, 0}, schedule, [&](char*) {
            int const warp = engine::thread() / 32, lane = engine::thread() % 32;
            for (int round = 0; round < 40; ++round) {
              // Warp 0 in no lane, warp 1 in one lane, warp 2 in all but one; from round 32 on in
              // no lane.
              bool const one = lane == round;
              bool const predicate = warp == 0 ? false : warp == 1 ? one : !one && round < 32;
              wrong += engine::any(predicate) != (warp != 0 && round < 32);
            }
            wrong += !engine::any(true);
          }).ok());
    CHECK(wrong == 0);
  }
}

TEST(named_barriers_separate_their_groups) {
  for (Schedule const& schedule : kSchedules) {
    std::atomic<int> wrong{0};
    // Warps 0 and 2 at barrier 1, warps 1, 3 and 4 at barrier 15, each with its own number of
    // rounds.
    Status const status = run_grid({3, 160, 160 * sizeof(int)}, schedule, [&](char* smem) {
      int* const slots = reinterpret_cast<int*>(smem);
      int const thread = engine::thread(), warp = thread / 32;
      bool const even = warp == 0 || warp == 2;
      int const barrier = even ? 1 : 15, threads = even ? 64 : 96;
      int const next = warp == 0 ? 2 : warp == 2 ? 0 : warp == 1 ? 3 : warp == 3 ? 4 : 1;
      for (int round = 0; round < (even ? 3 : 8); ++round) {
        slots[thread] = round * 1000 + thread;
        engine::sync(barrier, threads);
        int const other = next * 32 + (thread + 7) % 32;
        wrong += slots[other] != round * 1000 + other;
        engine::sync(barrier, threads);
      }
      engine::sync();
      // The barrier of the whole block frees all named barriers: other warps, another count.
      slots[thread] = -thread;
      engine::sync(warp < 1 ? 2 : 1, warp < 1 ? 32 : 128);
      int const other = warp < 1 ? (thread + 1) % 32 : 32 + (thread + 40) % 128;
      wrong += slots[other] != -other;
      engine::sync(3, 160);  // a named barrier of all threads as well
      engine::sync(1, 160);
    });
    CHECK(status.ok());
    CHECK(wrong == 0);
  }
}

TEST(named_barriers_let_other_groups_pass) {
  for (Schedule const& schedule : kSchedules) {
    // Warp 0 waits at barrier 1 while warps 2 and 3 pass barrier 2 repeatedly. Warp 1, which warp 0
    // waits for, is at barrier 3 until warp 2 arrives there.
    int rounds = 0, seen = -1;
    Status const status = run_grid({1, 128, 0}, schedule, [&](char*) {
      int const warp = engine::thread() / 32;
      for (int round = 0; warp >= 2 && round < 5; ++round) {
        engine::sync(2, 64);
        if (engine::thread() == 64) ++rounds;
      }
      if (warp == 1 || warp == 2) engine::sync(3, 64);
      if (warp < 2) engine::sync(1, 64);
      if (engine::thread() == 0) seen = rounds;
    });
    CHECK(status.ok());
    CHECK(seen == 5);
  }
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
                               engine::ldmatrix_x4(true, smem, d);
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

TEST(divergence_at_votes_and_named_barriers_is_reported) {
  CHECK(contains(run_block(32, 0,
                           [](char*) {
                             if (engine::thread() < 4) {
                               engine::any(true);
                             } else {
                               engine::shuffle_xor(0, 4);
                             }
                           }),
                 "warp 0 has diverged: lanes 0-3 wait in any(); lanes 4-31 wait in "
                 "shuffle_xor(4)"));
  CHECK(contains(run_block(32, 0, [](char*) { engine::thread() < 31 && engine::any(false); }),
                 "lanes 0-30 wait in any(); lanes 31 have exited"));
  // Barriers take whole warps: two half warps do not count as one.
  CHECK(contains(run_block(64, 0,
                           [](char*) {
                             if (engine::thread() % 32 < 16) engine::sync(3, 64);
                           }),
                 "warp 0 has diverged: lanes 0-15 wait in sync(3, 64); lanes 16-31 have exited"));
  CHECK(contains(run_block(32, 0, [](char*) { engine::sync(engine::thread() < 16 ? 1 : 2, 32); }),
                 "lanes 0-15 wait in sync(1, 32); lanes 16-31 wait in sync(2, 32)"));
  CHECK(contains(
      run_block(32, 0, [](char*) { engine::thread() < 16 ? engine::sync() : engine::sync(1, 32); }),
      "lanes 0-15 wait in sync(); lanes 16-31 wait in sync(1, 32)"));
}

TEST(named_barriers_that_never_fill_are_reported) {
  for (Schedule const& schedule : kSchedules) {
    auto const deadlock_of = [&](auto const& body) {
      return run_grid({1, 128, 0}, schedule, body).message;
    };
    CHECK(contains(deadlock_of([](char*) {
                     if (engine::thread() >= 96) engine::sync(4, 64);
                   }),
                   "deadlock: threads 0-95 have exited; threads 96-127 wait in sync(4, 64)"));
    CHECK(contains(deadlock_of([](char*) {
                     int const warp = engine::thread() / 32;
                     if (warp == 0) engine::sync(1, 64);
                     if (warp == 1) engine::sync(2, 64);
                     if (warp == 2) engine::sync();
                   }),
                   "deadlock: threads 0-31 wait in sync(1, 64); threads 32-63 wait in sync(2, 64); "
                   "threads 64-95 wait in sync(); threads 96-127 have exited"));
    CHECK(contains(deadlock_of([](char*) {
                     if (engine::thread() >= 64) return;
                     engine::sync(1, 64);
                     if (engine::thread() < 32) engine::sync(1, 64);
                   }),
                   "deadlock: threads 0-31 wait in sync(1, 64); threads 32-127 have exited"));
  }
}

// One warp writes, arrives and goes on; the other waits before it reads.
TEST(who_arrives_at_a_named_barrier_does_not_wait) {
  for (Schedule const& schedule : kSchedules) {
    int sums[2] = {};
    Status const status = run_grid({1, 64, 2 * 32 * 4}, schedule, [&](char* smem) {
      auto* const values = reinterpret_cast<int*>(smem);
      int const lane = engine::thread() % 32;
      for (int round = 0; round < 2; ++round) {
        if (engine::thread() < 32) {
          values[round * 32 + lane] = 1 + round;
          engine::arrive(1 + round, 64);
        } else {
          engine::sync(1 + round, 64);
          if (lane != 0) continue;
          for (int i = 0; i < 32; ++i) sums[round] += values[round * 32 + i];
        }
      }
    });
    CHECK_EQ(status.message, "");
    CHECK_EQ(sums[0], 32);
    CHECK_EQ(sums[1], 64);
  }
}

TEST(bad_arrivals_at_named_barriers_are_reported) {
  for (Schedule const& schedule : kSchedules) {
    auto const error_of = [&](auto const& body) {
      return run_grid({1, 64, 0}, schedule, body).message;
    };
    // 32 threads that arrive twice would count as the 64.
    CHECK(contains(error_of([](char*) {
                     if (engine::thread() >= 32) return;
                     engine::arrive(1, 64);
                     engine::arrive(1, 64);
                   }),
                   "comes to sync(1, 64) a second time before the others have"));
    CHECK(contains(error_of([](char*) {
                     if (engine::thread() < 32) engine::arrive(2, 64);
                     engine::sync();
                   }),
                   "ends with 32 threads arrived at barrier 2, which wants 64"));
  }
}

// Every block writes numbers to its memory, and sums those of all blocks.
TEST(blocks_of_a_cluster_see_each_other) {
  for (Schedule const& schedule : kSchedules) {
    std::atomic<int> wrong{0};
    Status const status = run_grid({12, 64, 64 * 4, 4}, schedule, [&](char* smem) {
      int* const mine = reinterpret_cast<int*>(smem);
      int const thread = engine::thread(), block = engine::block();
      for (int round = 0; round < 3; ++round) {
        mine[thread] = round * 10000 + block * 100 + thread;
        engine::sync();  // of one block only
        wrong += mine[63 - thread] != round * 10000 + block * 100 + 63 - thread;
        engine::cluster_sync();
        for (int rank = 0; rank < 4; ++rank) {
          int const other = *static_cast<int const*>(engine::mapa(&mine[thread], rank));
          wrong += other != round * 10000 + (block / 4 * 4 + rank) * 100 + thread;
        }
        engine::cluster_sync();
      }
    });
    CHECK_EQ(status.message, "");
    CHECK(wrong == 0);
  }
}

TEST(bad_use_of_clusters_is_reported) {
  auto const error_of = [&](int cluster, auto const& body) {
    return run_grid({4, 32, 64, cluster}, kSchedules[0], body).message;
  };
  CHECK(contains(error_of(3, [](char*) {}), "simt: clusters of 3 blocks in 4"));
  CHECK(contains(
      error_of(2, [](char* smem) { engine::mapa(smem, 2); }),
      "block 0: thread 0 asks for shared memory of block 2 of its cluster; allowed: 0 to 1"));
  CHECK(contains(error_of(2, [](char* smem) { engine::mapa(smem + 64, 1); }),
                 "thread 0 mapa at an address outside the 64 bytes of shared memory"));
  CHECK(contains(
      error_of(2,
               [](char* smem) {
                 if (engine::block() % 2 == 1) engine::mapa(smem, 0);
               }),
      "block 1: thread 0 asks for shared memory of block 0 of its cluster, which has exited"));
  CHECK(contains(
      error_of(2,
               [](char*) {
                 if (engine::block() % 2 == 1) engine::cluster_sync();
               }),
      "deadlock: threads 0-31 have exited; threads 32-63 wait in cluster_sync() of the cluster"));
  // An address taken before the block exited.
  for (Schedule const& schedule : kSchedules) {
    std::atomic<int> seen{0};
    Status const status = run_grid({2, 32, 64, 2}, schedule, [&](char* smem) {
      auto* const mine = reinterpret_cast<uint32_t*>(smem);
      mine[0] = 7;
      engine::cluster_sync();
      auto const* other = static_cast<uint32_t const*>(engine::mapa(mine, 0));
      engine::cluster_sync();
      if (engine::block() == 0) return;
      for (int i = 0; i < 100; ++i) engine::sync();
      if (*other == ~uint32_t(0)) ++seen;
    });
    CHECK_EQ(status.message, "");
    CHECK(seen == 32 || schedule.order != FiberOrder::kForward);
  }
}

TEST(bad_calls_of_named_barriers_are_reported) {
  auto const call = [](int barrier, int threads) {
    return run_block(64, 0, [&](char*) { engine::sync(barrier, threads); });
  };
  CHECK(call(1, 64).empty() && call(15, 64).empty());
  for (auto [barrier, threads] :
       {std::pair{0, 64}, {16, 64}, {-1, 64}, {1, 0}, {1, -32}, {1, 40}, {1, 96}}) {
    CHECK(contains(call(barrier, threads), "thread 0 calls sync(" + std::to_string(barrier) + ", " +
                                               std::to_string(threads) +
                                               "); allowed: barriers 1 to 15, multiples of 32 "
                                               "threads up to the block's 64"));
  }
  for (Schedule const& schedule : kSchedules) {
    auto const error_of = [&](auto const& body) {
      return run_grid({1, 128, 0}, schedule, body).message;
    };
    // The schedule determines which of the two comes second.
    std::string const mismatch =
        error_of([](char*) { engine::sync(1, engine::thread() < 64 ? 64 : 96); });
    CHECK(contains(mismatch, "calls sync(1, 64) where others call sync(1, 96)") ||
          contains(mismatch, "calls sync(1, 96) where others call sync(1, 64)"));
    // Two pairs of warps at one barrier: on a GPU any two of the four could meet.
    std::string const crowd = error_of([](char*) { engine::sync(1, 64); });
    CHECK(contains(crowd, "calls sync(1, 64) after warps "));
    CHECK(contains(crowd, " with no barrier of the whole block in between; allowed: 2 warps"));
    CHECK(contains(error_of([](char*) {
                     if (engine::thread() < 96) engine::sync(5, 64);
                   }),
                   "calls sync(5, 64) after warps "));
  }
  CHECK(contains(run_block(96, 0, [](char*) { engine::sync(5, 64); }),
                 "thread 64 calls sync(5, 64) after warps 0, 1 with no barrier"));
}

// --- cp.async ------------------------------------------------------------------------------------

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
    engine::cp_async(&to[0], &source[0], true);
    CHECK(all(to[0], 0xff));  // neither the old data nor the new
    engine::cp_async_commit_group();
    engine::cp_async(&to[1], &source[1], true);
    engine::cp_async(&to[2], nullptr, false);
    engine::cp_async_commit_group();
    CHECK(all(to[0], 0xff) && all(to[1], 0xff) && all(to[2], 0xff));

    source[0] = filled(7);  // the copy reads when it lands
    engine::cp_async_wait_group(2);
    CHECK(all(to[0], 0xff));
    engine::cp_async_wait_group(1);
    CHECK(all(to[0], 7) && all(to[1], 0xff) && all(to[2], 0xff));

    engine::cp_async_commit_group();  // a group without copies counts as a group
    engine::cp_async_wait_group(1);
    CHECK(all(to[1], 2) && all(to[2], 0));

    engine::cp_async(&to[3], &source[3], true);
    engine::cp_async_wait_group(0);
    CHECK(all(to[3], 0xff));  // never committed
    engine::cp_async_commit_group();
    engine::cp_async_wait_group(0);
    CHECK(all(to[3], 4));
  });
  CHECK(error.empty());
}

TEST(copies_belong_to_their_thread) {
  Vector const source = filled(9);
  CHECK(run_block(64, 64 * 16, [&](char* smem) {
          Vector* const to = reinterpret_cast<Vector*>(smem);
          int const thread = engine::thread();
          engine::cp_async(&to[thread], &source, true);
          engine::cp_async_commit_group();
          if (thread % 2 == 0) engine::cp_async_wait_group(0);
          engine::sync();
          CHECK(all(to[(thread + 1) % 64], thread % 2 == 0 ? 0xff : 9));
          engine::sync();
          engine::cp_async_wait_group(0);
        }).empty());
}

TEST(bad_copies_are_reported) {
  Vector const source[2] = {};
  auto const copy = [&](ptrdiff_t to, ptrdiff_t from, bool predicate = true) {
    return run_block(32, 32, [&](char* smem) {
      if (engine::thread() != 3) return;
      engine::cp_async(smem + to, reinterpret_cast<char const*>(source) + from, predicate);
      engine::cp_async_commit_group();
      engine::cp_async_wait_group(0);
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
                               engine::cp_async(smem, source, true);
                               engine::cp_async(smem + 16, source, true);
                               if (commit) engine::cp_async_commit_group();
                             }),
                   "thread 5 exits with 2 asynchronous copies in flight that no wait covers"));
  }
}

TEST(bad_matrix_addresses_are_reported) {
  auto const load = [](ptrdiff_t offset) {
    return run_block(32, 512, [&](char* smem) {
      uint32_t d[4];
      engine::ldmatrix_x4(false, smem + (engine::thread() == 7 ? offset : 0), d);
    });
  };
  CHECK(load(496).empty());
  CHECK(contains(load(504), "thread 7 ldmatrix at an address outside the 512 bytes of shared"));
  CHECK(contains(load(2), "thread 7 ldmatrix at offset 2 of shared memory, which is not aligned"));
  auto const store = [](ptrdiff_t offset) {
    return run_block(32, 512, [&](char* smem) {
      engine::stmatrix_x4(smem + (engine::thread() == 7 ? offset : 0), {});
    });
  };
  CHECK(store(496).empty());
  CHECK(contains(store(504), "thread 7 stmatrix at an address outside the 512 bytes of shared"));
  CHECK(contains(store(2), "thread 7 stmatrix at offset 2 of shared memory, which is not aligned"));
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

TEST(an_error_ends_blocks_that_wait_for_others) {
  for (Schedule schedule : kSchedules) {
    schedule.num_threads = 2;
    std::atomic<int> blocks{0}, counter{0};
    Status const status = run_grid({2, 32, 16}, schedule, [&](char* smem) {
      if (engine::thread() != 0) return;
      ++blocks;
      while (blocks < 2) std::this_thread::yield();  // both run
      if (engine::block() == 1) {
        smem[16] = 0;
      } else {
        while (counter == 0) engine::wait_for_other_blocks();  // block 1 would have added to it
      }
    });
    CHECK(contains(status.message, "simt: block 1: "));
  }
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
