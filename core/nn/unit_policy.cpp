#include "core/nn/unit_policy.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <utility>

#include "core/base/error.h"

namespace tessera::nn {
namespace {

// "50M"; 0 for other texts.
std::int64_t parse_count(std::string_view text) {
  std::int64_t count = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, count);
  if (error != std::errc() || count < 1) return 0;
  const std::string_view suffix(stop, static_cast<std::size_t>(end - stop));
  constexpr std::int64_t kMost = 1'000'000'000'000;
  for (const auto& [name, factor] : {std::pair<std::string_view, std::int64_t>{"", 1},
                                     {"K", 1'000},
                                     {"M", 1'000'000},
                                     {"B", 1'000'000'000}})
    if (suffix == name) return count <= kMost / factor ? count * factor : 0;
  return 0;
}

}  // namespace

UnitPolicy parse_unit_policy(std::string_view text) {
  if (text == "block") return {};
  UnitPolicy policy;
  // "1.5B" is no valid count, and no path either.
  const bool is_count = !text.empty() && std::isdigit(static_cast<unsigned char>(text[0])) != 0 &&
                        (text.find_first_of(".*,") == std::string_view::npos ||
                         (text.find_first_not_of("0123456789.KMB") == std::string_view::npos));
  if (is_count) policy.least_parameters = parse_count(text);
  bool valid = is_count ? policy.least_parameters > 0 : !text.empty();
  for (std::size_t begin = 0; valid && !is_count && begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    std::string_view pattern = text.substr(begin, end - begin);
    while (pattern.starts_with(' ')) pattern.remove_prefix(1);
    while (pattern.ends_with(' ')) pattern.remove_suffix(1);
    policy.patterns.emplace_back(pattern);
    valid = !policy.patterns.back().empty();
    begin = end + 1;
  }
  require(valid,
          "shard.units must be block, a number of parameters such as 50M, or patterns of module "
          "paths such as h.*.mlp, got '{}'",
          text);
  return policy;
}

}  // namespace tessera::nn
