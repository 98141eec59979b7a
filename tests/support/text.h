#pragma once

#include <string>
#include <string_view>

namespace tessera::test {

inline bool holds(std::string_view text, std::string_view part) {
  return text.find(part) != text.npos;
}

inline int count(std::string_view text, std::string_view part) {
  int n = 0;
  for (auto at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++n;
  return n;
}

}  // namespace tessera::test
