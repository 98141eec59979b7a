#include "io/base/size.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>
#include <utility>

#include "core/base/error.h"

namespace tessera::io {
namespace {

constexpr std::pair<std::string_view, double> kUnits[] = {
    {"", 1},      {"B", 1},        {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},
    {"TB", 1e12}, {"KIB", 0x1p10}, {"MIB", 0x1p20}, {"GIB", 0x1p30}, {"TIB", 0x1p40}};

}  // namespace

std::int64_t parse_bytes(std::string_view text) {
  double number = 0;
  const auto [stop, error] =
      std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  std::string unit(stop, static_cast<const char*>(text.data() + text.size()));
  unit.erase(0, unit.find_first_not_of(' '));
  std::transform(unit.begin(), unit.end(), unit.begin(),
                 [](char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 32) : c; });
  const auto* known = std::ranges::find(kUnits, unit, [](const auto& each) { return each.first; });
  require(error == std::errc{} && known != std::end(kUnits),
          "\"{}\" is not a size; write bytes with a unit, as in 5GB or 256MiB", text);
  const double bytes = std::floor(number * known->second);
  require(bytes >= 1 && bytes <= 0x1p62, "size \"{}\" must be from 1 byte to 2^62", text);
  return static_cast<std::int64_t>(bytes);
}

}  // namespace tessera::io
