// Source of the format: state_dict() of torch/optim/optimizer.py, and
// torch/distributed/checkpoint/state_dict.py of PyTorch 2.4 to 2.15.

#include "io/source/hyperparameters.h"

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
constexpr std::int64_t kMostBytes = std::int64_t{256} << 20;
constexpr std::int64_t kEntryBytes = 96;  // of a map's entry with its value

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
  std::set<std::int64_t> steps;
  for (ParamGroup& group : groups) {
    const auto step = group.settings->find("step");
    if (step == group.settings->end() || !step->is_number() ||
        std::abs(step->get<double>()) >= 1e15)
      continue;
    steps.insert(step->get<std::int64_t>());
    Json others = *group.settings;
    others.erase("step");
    group.settings = std::make_shared<const Json>(std::move(others));
  }
  return steps.size() == 1 ? std::optional(*steps.begin()) : std::nullopt;
}

struct HyperparametersReader::Content {
  struct Group {
    Json settings = Json::object();
    std::vector<std::string> weights;
  };
  /// Of one optimizer.
  struct Optimizer {
    std::map<std::size_t, Group> list;
    std::map<std::string, Json, std::less<>> by_weight;
  };

  void spend(std::size_t bytes) {
    left -= static_cast<std::int64_t>(bytes) + kEntryBytes;
    require<CorruptCheckpoint>(left >= 0, "{}: more hyperparameters than an optimizer has", where);
  }
  void leave_out(std::string name) {
    if (left_out.size() < kMaxListed) left_out.push_back(std::move(name));
  }
  void set(Json& settings, std::string_view key, const PickleValue& value, std::string_view name) {
    spend(key.size() + (value.is(PickleKind::Str) ? value.size : 0));
    std::optional<Json> plain = key.size() <= kMaxText ? plain_value(value) : std::nullopt;
    if (plain && is_utf8(key))
      settings[std::string(key)] = std::move(*plain);
    else
      leave_out(std::string(name));
  }
  void add_to(Group& group, std::string_view key, const PickleValue& value, std::string_view name) {
    if (!holds_weights(key)) return set(group.settings, key, value, name);
    // Numbers are of a state without names; param_names has those of the same weights.
    if (key != "params" || !(value.is(PickleKind::List) || value.is(PickleKind::Tuple))) return;
    group.weights.clear();
    for (const PickleValue* weight : value.items()) {
      if (!weight->is(PickleKind::Str)) return group.weights.clear();
      spend(weight->text().size());
      group.weights.emplace_back(weight->text());
    }
  }

  std::string where;
  std::int64_t left = kMostBytes;
  std::map<std::string, Optimizer, std::less<>> optimizers;  // by the keys before "param_groups"
  std::vector<std::string> left_out;
};

HyperparametersReader::HyperparametersReader(std::string where)
    : content_(std::make_unique<Content>()) {
  content_->where = std::move(where);
}
HyperparametersReader::~HyperparametersReader() = default;
HyperparametersReader::HyperparametersReader(HyperparametersReader&&) noexcept = default;

bool HyperparametersReader::is_one(std::string_view name) {
  return find_groups(name) != std::string_view::npos;
}

void HyperparametersReader::leave_out(std::string_view name) {
  content_->leave_out(std::string(name));
}

void HyperparametersReader::add(std::string_view name, const PickleValue& value) {
  const std::size_t at = find_groups(name);
  require<InternalError>(at != std::string_view::npos, "{} has no hyperparameters", name);
  Content::Optimizer& optimizer = content_->optimizers[std::string(name.substr(0, at))];
  if (at + kGroups.size() == name.size()) {  // the list of all groups
    if (!value.is(PickleKind::List) || value.items().size() > kMaxListed) return leave_out(name);
    for (std::size_t i = 0; i < value.items().size(); ++i) {
      const PickleValue& group = *value.items()[i];
      if (!group.is(PickleKind::Dict)) {
        leave_out(name);
        continue;
      }
      for (std::size_t k = 0; k + 1 < group.items().size(); k += 2) {
        if (!group.items()[k]->is(PickleKind::Str)) continue;
        const std::string_view key = group.items()[k]->text();
        content_->add_to(optimizer.list[i], key, *group.items()[k + 1],
                         fmt::format("{}.{}.{}", name, i, key.substr(0, kMaxText)));
      }
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
    return content_->add_to(optimizer.list[number], key, value, name);
  content_->spend(of.size());
  auto found = optimizer.by_weight.find(of);
  if (found == optimizer.by_weight.end())
    found = optimizer.by_weight.emplace(std::string(of), Json::object()).first;
  if (!holds_weights(key)) content_->set(found->second, key, value, name);
}

Hyperparameters HyperparametersReader::finish() {
  Hyperparameters result;
  for (auto& [key, optimizer] : content_->optimizers) {
    const std::size_t before = result.groups.size();
    for (auto& [number, group] : optimizer.list) {
      if (group.weights.empty()) continue;
      result.groups.push_back({std::make_shared<const Json>(std::move(group.settings)),
                               ParamGroup::Of::Named, std::move(group.weights)});
    }
    if (result.groups.size() > before) continue;
    std::unordered_map<std::string, std::size_t> numbers;  // of groups, by their settings
    for (auto& [weight, settings] : optimizer.by_weight) {
      const auto [found, is_new] = numbers.emplace(settings.dump(), result.groups.size());
      if (is_new)
        result.groups.push_back(
            {std::make_shared<const Json>(std::move(settings)), ParamGroup::Of::Named, {}});
      result.groups[found->second].weights.push_back(weight);
    }
  }
  result.left_out = std::move(content_->left_out);
  return result;
}

std::shared_ptr<const Json> HyperparametersReader::read_settings(
    const PickleValue& group, std::vector<std::string>& left_out) {
  if (!group.is(PickleKind::Dict)) return nullptr;
  Content content;
  content.where = kGroups;
  Content::Group read;
  for (std::size_t k = 0; k + 1 < group.items().size(); k += 2) {
    if (!group.items()[k]->is(PickleKind::Str)) continue;
    const std::string_view key = group.items()[k]->text();
    if (!holds_weights(key))
      content.set(read.settings, key, *group.items()[k + 1], key.substr(0, kMaxText));
  }
  left_out.insert(left_out.end(), content.left_out.begin(), content.left_out.end());
  return std::make_shared<const Json>(std::move(read.settings));
}

}  // namespace tessera::io
