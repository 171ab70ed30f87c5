// A minimal test framework.
//
//   TEST(what_is_true) { CHECK(x < y); CHECK_EQ(a, b); CHECK_NEAR(a, b, tolerance); }
//   int main(int argc, char** argv) { return check::run(argc, argv); }
//
// A failing check prints its position and values, and the test goes on; if STOP_AT_FAILURE is set
// in the environment, the program ends. Arguments of the program name the tests to run; without
// arguments it runs all. Checks may come from any thread.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Test {
  char const* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> list;
  return list;
}

inline std::atomic<int> failures{0};

inline void fail(char const* file, int line, std::string const& what) {
  // Enough to see the pattern; a broken kernel would fill the disk.
  if (++failures <= 100) std::printf("%s:%d: %s\n", file, line, what.c_str());
  if (std::getenv("STOP_AT_FAILURE")) {
    std::fflush(stdout);
    std::_Exit(1);
  }
}

template <class A, class B>
void compare(bool ok, char const* file, int line, char const* what, A const& a, B const& b) {
  if (ok) return;
  std::ostringstream text;
  text.precision(9);
  text << what << ": " << a << " and " << b;
  fail(file, line, text.str());
}

// |a - b| <= tolerance; infinities and NaN must match.
inline bool near(double a, double b, double tolerance) {
  return std::isnan(a) ? std::isnan(b) : a == b || std::fabs(a - b) <= tolerance;
}

// Runs the tests that the arguments name, or all. Returns 1 if one failed, 2 if a name is unknown.
inline int run(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    bool is_known = false;
    for (Test const& test : tests()) is_known |= std::strcmp(argv[i], test.name) == 0;
    if (is_known) continue;
    std::printf("there is no test %s\n", argv[i]);
    return 2;
  }
  for (Test const& test : tests()) {
    bool wanted = argc < 2;
    for (int i = 1; i < argc; ++i) wanted |= std::strcmp(argv[i], test.name) == 0;
    if (!wanted) continue;
    int const before = failures;
    test.run();
    std::printf("%s %s\n", failures == before ? "pass" : "FAIL", test.name);
  }
  return failures != 0;
}

}  // namespace check

#define TEST(name)                                                                  \
  static void name();                                                               \
  static bool const name##_added = (check::tests().push_back({#name, name}), true); \
  static void name()

#define CHECK(condition) \
  ((condition) ? void() : check::fail(__FILE__, __LINE__, "CHECK(" #condition ")"))
#define CHECK_EQ(a, b) check::compare((a) == (b), __FILE__, __LINE__, #a " == " #b, a, b)
#define CHECK_NEAR(a, b, tolerance) \
  check::compare(check::near(a, b, tolerance), __FILE__, __LINE__, #a " ~ " #b, a, b)
