// Which cases the mutants run first.
//
//   TEST_FIRST    a text: kernels and cases whose names share words with it run first, so that a
//                 bug that the text is about is found sooner
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <string>
#include <vector>

namespace test_first {

// How many words of a name, except short ones, are in a text.
inline int words_in(std::string const& name, std::string const& text) {
  int count = 0;
  auto const is_letter = [](unsigned char c) { return std::isalnum(c) != 0; };
  for (auto begin = name.begin(); begin != name.end();) {
    begin = std::find_if(begin, name.end(), is_letter);
    auto const end = std::find_if_not(begin, name.end(), is_letter);
    count += end - begin >= 3 && text.find(std::string(begin, end)) != std::string::npos;
    begin = end;
  }
  return count;
}

// A list of things that have names, sorted by TEST_FIRST.
template <class T>
std::vector<T> sorted(std::vector<T> list) {
  char const* const given = std::getenv("TEST_FIRST");
  std::string const text = given ? given : "";
  std::stable_sort(list.begin(), list.end(), [&](T const& a, T const& b) {
    return words_in(a.name, text) > words_in(b.name, text);
  });
  return list;
}

}  // namespace test_first
