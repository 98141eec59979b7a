// Source of the format: state_dict() of torch/optim/optimizer.py, and
// torch/distributed/checkpoint/state_dict.py of PyTorch 2.4 to 2.15.

#include "io/source/hyperparameters.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>
#include <utility>

#include "core/base/error.h"

namespace tessera::io {
namespace {

constexpr std::string_view kGroups = "param_groups";
constexpr std::size_t kMaxText = 1 << 12;    // bytes of a value
constexpr std::size_t kMaxItems = 16;        // of a tuple
constexpr std::size_t kMaxListed = 1 << 12;  // groups in a list, and names in left_out
constexpr std::size_t kMaxSettings = 256;    // of a group; a DCP has them for each weight
constexpr std::int64_t kMostBytes = std::int64_t{64} << 20;
constexpr std::size_t kEntryBytes = 96;  // of a map's entry with its value

bool is_utf8(std::string_view text) {
  try {
    static_cast<void>(Json(text).dump());
  } catch (const Json::exception&) {
    return false;
  }
  return true;
}

// Empty if the value is of another kind.
std::optional<Json> plain_value(const PickleValue& value, bool nested = false) {
  switch (value.kind) {
    case PickleKind::None:
      return Json();
    case PickleKind::Bool:
      return Json(value.integer != 0);
    case PickleKind::Int:
      return Json(value.integer);
    case PickleKind::Float:
      return std::isfinite(value.real) ? std::optional(Json(value.real)) : std::nullopt;
    case PickleKind::Str:
      if (value.text().size() > kMaxText || !is_utf8(value.text())) return {};
      return Json(value.text());
    case PickleKind::Tuple:
    case PickleKind::List: {
      if (nested || value.items().size() > kMaxItems) return {};
      Json list = Json::array();
      for (const PickleValue* item : value.items()) {
        std::optional<Json> plain = plain_value(*item, true);
        if (!plain) return {};
        list.push_back(std::move(*plain));
      }
      return list;
    }
    default:
      return {};
  }
}

// Memory that a value takes.
std::size_t bytes_of(const Json& value) {
  std::size_t bytes = kEntryBytes;
  if (value.is_string()) bytes += value.get_ref<const std::string&>().size();
  if (value.is_array())
    for (const Json& item : value) bytes += bytes_of(item);
  return bytes;
}

// Keys that hold the weights of a group, not a setting.
bool holds_weights(std::string_view key) { return key == "params" || key == "param_names"; }

// Position of "param_groups" among the keys; npos: not there.
std::size_t find_groups(std::string_view name) {
  for (std::size_t at = name.find(kGroups); at != std::string_view::npos;
       at = name.find(kGroups, at + 1)) {
    const std::size_t end = at + kGroups.size();
    if ((at == 0 || name[at - 1] == '.') && (end == name.size() || name[end] == '.')) return at;
  }
  return std::string_view::npos;
}

}  // namespace

std::optional<std::int64_t> Hyperparameters::take_step() {
  constexpr double kMost = 1e15;
  std::set<std::int64_t> steps;
  bool is_clear = true;
  std::map<std::shared_ptr<const Json>, std::shared_ptr<const Json>> others;  // without step
  for (ParamGroup& group : groups) {
    const auto step = group.settings->find("step");
    if (step == group.settings->end()) continue;
    const double value = step->is_number() ? step->get<double>() : -1;
    if (value >= 0 && value < kMost && value == std::floor(value))
      steps.insert(static_cast<std::int64_t>(value));
    else
      is_clear = false;
    const auto [other, is_new] = others.emplace(group.settings, nullptr);
    if (is_new) {
      Json settings = *group.settings;
      settings.erase("step");
      other->second = std::make_shared<const Json>(std::move(settings));
    }
    group.settings = other->second;
  }
  return is_clear && steps.size() == 1 ? std::optional(*steps.begin()) : std::nullopt;
}

struct HyperparametersReader::Content {
  /// A setting of a group after those before it. Most weights have the same, which are kept once.
  struct Setting {
    std::size_t before = 0, count = 0;  ///< index into `settings`; 0: none
    std::string key;
    Json value;
  };
  struct Group {
    std::size_t settings = 0;  ///< the last one
    std::vector<std::string> weights;
    std::vector<std::int64_t> numbers;
  };
  /// The groups of one optimizer.
  struct Optimizer {
    std::map<std::size_t, Group> list;
    std::map<std::string, std::size_t, std::less<>> by_weight;  // the last setting
  };

  bool is_full() const { return left < 0; }
  // Returns whether there was as much.
  bool spend(std::size_t bytes) {
    left -= std::min(left + 1, static_cast<std::int64_t>(bytes));
    return !is_full();
  }
  void leave_out(std::string_view name) {
    if (left_out.size() < kMaxListed && spend(kEntryBytes + name.size()))
      left_out.emplace_back(name);
  }
  void set(std::size_t& group, std::string_view key, const PickleValue& value,
           std::string_view name) {
    const std::optional<Json> plain =
        key.size() <= kMaxText && is_utf8(key) ? plain_value(value) : std::nullopt;
    if (!plain) return leave_out(name);
    const std::string id = fmt::format("{}\n{}\n{}", group, key, plain->dump());
    const auto [next, is_new] = after.emplace(id, settings.size());
    spend(id.size() + (is_new ? 2 * (id.size() + bytes_of(*plain)) : 0));
    if (is_new) settings.push_back({group, settings[group].count + 1, std::string(key), *plain});
    group = next->second;
    if (settings[group].count > kMaxSettings) left = -1;
  }
  std::shared_ptr<const Json> make(std::size_t group) {
    std::shared_ptr<const Json>& result = made[group];
    if (result) return result;
    Json object = Json::object();
    for (; group != 0 && !is_full(); group = settings[group].before) {
      const Setting& setting = settings[group];
      spend(setting.key.size() + bytes_of(setting.value));
      object.emplace(setting.key, setting.value);  // the last one of this key
    }
    return result = std::make_shared<const Json>(std::move(object));
  }
  void add_to(Group& group, std::string_view key, const PickleValue& value, std::string_view name) {
    if (!holds_weights(key)) return set(group.settings, key, value, name);
    if (!(value.is(PickleKind::List) || value.is(PickleKind::Tuple))) return;
    std::vector<std::string> weights;
    for (const PickleValue* weight : value.items()) {
      const bool is_name = weight->is(PickleKind::Str);
      if (!spend(kEntryBytes + (is_name ? weight->text().size() : 0))) return;
      if (is_name) weights.emplace_back(weight->text());
      if (weight->is(PickleKind::Int)) group.numbers.push_back(weight->integer);
    }
    // Numbers are of a state without names; param_names has those of the same weights.
    if (key == "params" && weights.size() == value.items().size())
      group.weights = std::move(weights);
  }
  // @param name  before the key, in left_out
  void add_all(Group& group, const PickleValue& dict, std::string_view name) {
    for (std::size_t k = 0; k + 1 < dict.items().size() && spend(1); k += 2) {
      if (!dict.items()[k]->is(PickleKind::Str)) continue;
      const std::string_view key = dict.items()[k]->text();
      if (!spend(key.size())) return;
      add_to(group, key, *dict.items()[k + 1], fmt::format("{}{}", name, key.substr(0, kMaxText)));
    }
  }

  std::int64_t left = kMostBytes;
  std::map<std::string, Optimizer, std::less<>> optimizers;  // by the keys before "param_groups"
  std::vector<Setting> settings{1};
  std::unordered_map<std::string, std::size_t> after;
  std::unordered_map<std::size_t, std::shared_ptr<const Json>> made;  // by the last setting
  std::vector<std::string> left_out;
};

HyperparametersReader::HyperparametersReader() : content_(std::make_unique<Content>()) {}
HyperparametersReader::~HyperparametersReader() = default;
HyperparametersReader::HyperparametersReader(HyperparametersReader&&) noexcept = default;

bool HyperparametersReader::is_one(std::string_view name) {
  return find_groups(name) != std::string_view::npos;
}

void HyperparametersReader::leave_out(std::string_view name) { content_->leave_out(name); }

void HyperparametersReader::leave_out_all() { content_->left = -1; }

bool HyperparametersReader::is_full() const { return content_->is_full(); }

void HyperparametersReader::add(std::string_view name, const PickleValue& value) {
  const std::size_t at = find_groups(name);
  require<InternalError>(at != std::string_view::npos, "{} has no hyperparameters", name);
  if (!content_->spend(1)) return;
  const std::string_view before = name.substr(0, at);
  auto optimizer = content_->optimizers.find(before);
  if (optimizer == content_->optimizers.end()) {
    if (!content_->spend(kEntryBytes + before.size())) return;
    optimizer = content_->optimizers.emplace(std::string(before), Content::Optimizer()).first;
  }
  auto& [list, by_weight] = optimizer->second;
  if (at + kGroups.size() == name.size()) {  // the list of all groups
    if (!value.is(PickleKind::List)) return leave_out(name);
    if (value.items().size() > kMaxListed) return leave_out_all();
    for (std::size_t i = 0; i < value.items().size() && content_->spend(kEntryBytes); ++i) {
      const PickleValue& group = *value.items()[i];
      if (group.is(PickleKind::Dict))
        content_->add_all(list[i], group, fmt::format("{}.{}.", name, i));
      else
        leave_out(name);
    }
    return;
  }
  const std::string_view rest = name.substr(at + kGroups.size() + 1);
  const std::size_t dot = rest.rfind('.');
  if (dot == std::string_view::npos) return leave_out(name);
  const std::string_view of = rest.substr(0, dot), key = rest.substr(dot + 1);
  std::size_t number = 0;
  const auto [end, error] = std::from_chars(of.data(), of.data() + of.size(), number);
  if (error == std::errc() && end == of.data() + of.size() && number < kMaxListed)
    return content_->add_to(list[number], key, value, name);
  auto found = by_weight.find(of);
  if (found == by_weight.end()) {
    if (!content_->spend(kEntryBytes + of.size())) return;
    found = by_weight.emplace(std::string(of), 0).first;
  }
  if (!holds_weights(key)) content_->set(found->second, key, value, name);
}

std::pair<std::shared_ptr<const Json>, std::vector<std::int64_t>> HyperparametersReader::read_group(
    const PickleValue& group) {
  Content::Group read;
  if (!group.is(PickleKind::Dict) || !content_->spend(kEntryBytes)) return {};
  content_->add_all(read, group, "");
  return {content_->make(read.settings), std::move(read.numbers)};
}

Hyperparameters HyperparametersReader::finish() {
  Hyperparameters result;
  for (auto& [key, optimizer] : content_->optimizers) {
    const std::size_t before = result.groups.size();
    for (auto& [number, group] : optimizer.list) {
      if (group.weights.empty()) continue;
      result.groups.push_back(
          {content_->make(group.settings), ParamGroup::Of::Named, std::move(group.weights)});
    }
    if (result.groups.size() > before) continue;
    std::unordered_map<std::size_t, std::size_t> by_last;   // groups, by the last setting
    std::unordered_map<std::string, std::size_t> by_value;  // settings may be in another order
    for (auto& [weight, last] : optimizer.by_weight) {
      const auto [found, is_new] = by_last.emplace(last, 0);
      if (is_new) {
        std::shared_ptr<const Json> settings = content_->make(last);
        found->second = by_value.emplace(settings->dump(), result.groups.size()).first->second;
        if (found->second == result.groups.size())
          result.groups.push_back({std::move(settings), ParamGroup::Of::Named, {}});
      }
      result.groups[found->second].weights.push_back(weight);
    }
  }
  if (is_full()) return {{}, {}, true};
  result.left_out = std::move(content_->left_out);
  return result;
}

}  // namespace tessera::io
