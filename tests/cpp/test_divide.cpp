// Division by multiplication, against the language's division.
#include "check.hpp"
#include "core/divide.hpp"

using namespace cutlass_attn;

TEST(agrees_with_division) {
  int64_t const most = INT32_MAX;
  auto const check_near = [&](int64_t divisor) {
    if (divisor < 1 || divisor > most) return;
    FastDivisor const by{int32_t(divisor)};
    for (int64_t multiple : {int64_t(0), divisor, 2 * divisor, most / 3, most / divisor * divisor,
                             most / 2 / divisor * divisor, most}) {
      for (int64_t x = multiple - 2; x <= multiple + 2; ++x) {
        if (x >= 0 && x <= most) CHECK_EQ(int64_t(by(int32_t(x))), x / divisor);
      }
    }
  };
  for (int64_t divisor = 1; divisor < 5000; ++divisor) check_near(divisor);
  for (int shift = 12; shift < 31; ++shift) {
    for (int64_t delta = -3; delta <= 3; ++delta) check_near((int64_t(1) << shift) + delta);
  }
  for (int64_t divisor = most - 100; divisor <= most; ++divisor) check_near(divisor);
  for (int64_t divisor = 5000; divisor <= most; divisor = divisor * 17 / 11 + 1)
    check_near(divisor);
}

int main(int argc, char** argv) { return check::run(argc, argv); }
