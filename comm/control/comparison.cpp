#include "comm/control/comparison.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "comm/collective.h"
#include "comm/control/agreement.h"
#include "comm/control/rendezvous.h"

namespace tessera::comm {
namespace {

// Maximum numbers of fields, values and ranks in a message, and of a value's characters.
constexpr std::size_t kFieldsShown = 8, kValuesShown = 4, kRanksShown = 8, kValueShown = 120;

using Value = std::optional<std::string>;  // empty: the rank lacks the field
using Fields = std::map<std::string, std::string, std::less<>>;

// Appends new field names to `order`. A repeated name becomes "name (2)".
Fields parse_fields(std::string_view text, std::vector<std::string>& order,
                    std::set<std::string>& known) {
  Fields fields;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    const std::size_t equal = line.find(" = ");
    const std::string name(line.substr(0, equal));
    const std::string value(equal == line.npos ? "" : line.substr(equal + 3));
    std::string key = name;
    for (int again = 2; !fields.try_emplace(key, value).second; ++again) {
      key = fmt::format("{} ({})", name, again);
    }
    if (known.insert(key).second) order.push_back(key);
  }
  return fields;
}

// "rank 1 (host, pid 12) has '24'", "ranks 0, 2 have '12'"
std::string one_side(const std::vector<const RankText*>& ranks, const Value& value) {
  std::string text;
  if (ranks.size() == 1) {
    text = fmt::format("rank {} ({}) has ", ranks[0]->rank, ranks[0]->process);
  } else {
    std::vector<int> shown;
    for (std::size_t i = 0; i < std::min(ranks.size(), kRanksShown); ++i) {
      shown.push_back(ranks[i]->rank);
    }
    text = rank_list(shown);
    if (ranks.size() > kRanksShown) text += fmt::format(" and {} more", ranks.size() - kRanksShown);
    text += " have ";
  }
  if (!value) return text + "none";
  return text + (value->size() <= kValueShown
                     ? fmt::format("'{}'", *value)
                     : fmt::format("'{}...' ({} characters)", value->substr(0, kValueShown),
                                   value->size()));
}

// Description of a field's differences; empty if there are none.
std::string compare_field(const std::string& field, const std::vector<RankText>& ranks,
                          const std::vector<Fields>& fields, std::set<int>& odd) {
  // The different values and their ranks, ordered by lowest rank.
  std::vector<std::pair<Value, std::vector<const RankText*>>> sides;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const auto found = fields[i].find(field);
    const Value value = found == fields[i].end() ? Value() : Value(found->second);
    auto side = std::find_if(sides.begin(), sides.end(),
                             [&](const auto& known) { return known.first == value; });
    if (side == sides.end()) side = sides.insert(side, {value, {}});
    side->second.push_back(&ranks[i]);
  }
  if (sides.size() == 1) return {};
  const auto majority = std::max_element(
      sides.begin(), sides.end(),
      [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  std::vector<std::string> texts;
  for (auto side = sides.begin(); side != sides.end(); ++side) {
    if (side == majority) continue;
    for (const RankText* rank : side->second) odd.insert(rank->rank);
    if (texts.size() < kValuesShown) texts.push_back(one_side(side->second, side->first));
  }
  const std::size_t more = sides.size() - 1 - texts.size();
  if (more > 0) texts.push_back(fmt::format("{} more values", more));
  texts.push_back(one_side(majority->second, majority->first));
  return fmt::format("{}: {}", field, fmt::join(texts, ", "));
}

}  // namespace

std::optional<CommError> find_differences(std::string_view name,
                                          const std::vector<RankText>& ranks) {
  std::vector<std::string> order;
  std::set<std::string> known;
  std::vector<Fields> fields;
  for (const RankText& rank : ranks) fields.push_back(parse_fields(rank.text, order, known));
  std::vector<std::string> texts;
  std::size_t count = 0;
  std::set<int> odd;
  for (const std::string& field : order) {
    std::string text = compare_field(field, ranks, fields, odd);
    if (text.empty()) continue;
    if (++count <= kFieldsShown) texts.push_back(std::move(text));
  }
  if (count == 0) return std::nullopt;
  const std::vector<int> culprits(odd.begin(), odd.end());
  return CommError(
      CommFailure::Mismatch, culprits,
      "{}: {} differ{} from the others in {}: {}{}; start all ranks with the same program and "
      "configuration",
      name, rank_list(culprits), culprits.size() == 1 ? "s" : "",
      count == 1 ? "one field" : fmt::format("{} fields", count), fmt::join(texts, "; "),
      count > kFieldsShown ? fmt::format("; and {} fields more", count - kFieldsShown) : "");
}

void compare_among_ranks(Store& store, const std::string& name, int rank, int world_size,
                         const std::string& text, std::chrono::milliseconds deadline) {
  AgreementOptions options;
  options.name = name;
  options.describe = [](const std::string& value) { return decode_hello(value).process(); };
  const auto values = exchange(store, options, rank, world_size,
                               encode_hello(make_hello(rank, world_size, {}, text)), deadline);
  std::vector<RankText> ranks;
  for (const std::string& value : values) {
    Hello hello = decode_hello(value);
    ranks.push_back({hello.rank, hello.process(), std::move(hello.fingerprint)});
  }
  if (const auto error = find_differences(name, ranks)) throw CommError(*error);
}

}  // namespace tessera::comm
