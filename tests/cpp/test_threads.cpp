// run_items: every item runs once, and an exception of any thread reaches the caller.
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "cpu/threads.hpp"

using namespace cutlass_attn;

namespace {

RunOptions with_threads(int count) {
  RunOptions options;
  options.num_threads = count;
  return options;
}

constexpr double kMuchWork = 1e12;  // enough for every requested thread

// Both threads have an item before one throws, so it is known which thread throws.
void check_exception_reaches_caller(bool of_caller) {
  std::thread::id const caller = std::this_thread::get_id();
  std::atomic<int> started{0};
  std::string message;
  try {
    (void)cpu::run_items(2, kMuchWork, 64, with_threads(2), [&](int64_t, char*) {
      ++started;
      while (started < 2) std::this_thread::yield();
      if ((std::this_thread::get_id() == caller) == of_caller) throw std::runtime_error("item");
    });
  } catch (std::runtime_error const& error) {
    message = error.what();
  }
  CHECK_EQ(message, "item");
}

}  // namespace

TEST(every_item_runs_once) {
  std::vector<std::atomic<int>> runs(1000);
  Status const status = cpu::run_items(1000, kMuchWork, 64, with_threads(4),
                                       [&](int64_t i, char*) { ++runs[size_t(i)]; });
  CHECK(status.ok());
  for (auto const& count : runs) CHECK_EQ(count.load(), 1);
}

TEST(exception_of_calling_thread_reaches_caller) { check_exception_reaches_caller(true); }

TEST(exception_of_other_thread_reaches_caller) { check_exception_reaches_caller(false); }

int main(int argc, char** argv) { return check::run(argc, argv); }
