#include "io/source/names.h"

#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <map>
#include <regex>
#include <set>
#include <span>
#include <utility>

#include "core/base/error.h"

namespace tessera::io {
namespace {

constexpr std::array<std::string_view, 3> kWrappers = {"_orig_mod", "_fsdp_wrapped_module",
                                                       "_checkpoint_wrapped_module"};
constexpr std::array<std::string_view, 5> kModelKeys = {"model", "module", "models", "state_dict",
                                                        "model_state_dict"};
constexpr std::array<std::string_view, 9> kOptimizerKeys = {
    "optimizer",        "optimizers",           "optim",       "optims",          "optimizer_state",
    "optimizer_states", "optimizer_state_dict", "optim_state", "optim_state_dict"};
constexpr std::array<std::string_view, 13> kOtherKeys = {
    "train_state",   "trainer",    "lr_scheduler", "lr_schedulers", "scheduler",
    "schedulers",    "dataloader", "data_loader",  "rng",           "rng_state",
    "random_states", "callbacks",  "loops"};

// And a number: of Lightning, and of Megatron's chained optimizers.
constexpr std::array<std::string_view, 2> kNumberedOptimizerKeys = {"optimizer_", "chained_"};

constexpr std::size_t kListed = 5;                // names in a message
constexpr std::size_t kLongestRenamed = 1 << 12;  // characters: std::regex recurses

template <std::size_t N>
bool contains(const std::array<std::string_view, N>& list, std::string_view text) {
  return std::find(list.begin(), list.end(), text) != list.end();
}

bool is_model_key(std::string_view key) { return contains(kModelKeys, key); }

bool is_optimizer_key(std::string_view key) {
  if (contains(kOptimizerKeys, key)) return true;
  return std::ranges::any_of(kNumberedOptimizerKeys, [&](std::string_view numbered) {
    return key.starts_with(numbered) && key.size() > numbered.size() &&
           key.find_first_not_of("0123456789", numbered.size()) == std::string_view::npos;
  });
}

std::string_view first_part(std::string_view name) { return name.substr(0, name.find('.')); }

// The outermost key of a tensor's path. In a flat dict, the first part of the name may be one.
std::string_view key_of(std::string_view name, std::string_view top_key) {
  return top_key.empty() ? first_part(name) : top_key;
}

// Nesting of the saved dict.
struct Nesting {
  std::string_view outer = {};  // key that contains model and optimizer; empty if there is none
  bool keyed = false;           // a key contains the model; inside `outer` if there is one
};

Nesting find_nesting(const std::vector<KeyedName>& names) {
  Nesting result;
  result.keyed =
      std::ranges::any_of(names, [](const KeyedName& name) { return is_model_key(name.top_key); });
  std::string_view outer;
  bool has_model = false, has_others = false, has_keys = true;
  for (const KeyedName& name : names) {
    const std::string_view first = key_of(name.name, name.top_key);
    if (contains(kOtherKeys, first)) continue;  // may be next to the outer key, as in Composer
    if (is_model_key(first) || is_optimizer_key(first)) return result;
    if (outer.empty()) outer = first;
    if (first != outer || !name.name.starts_with(std::string(first) + '.')) return result;
    const std::string_view second = first_part(name.name.substr(first.size() + 1));
    const bool is_other = is_optimizer_key(second) || contains(kOtherKeys, second);
    if (!is_other && !is_model_key(second)) return result;
    has_model = has_model || !is_other;
    has_others = has_others || is_other;
    has_keys = has_keys && !name.top_key.empty();
  }
  // In a flat dict of weights, `language_model.model.` and the like belong to the names.
  if (!has_model || (!has_others && !has_keys)) return result;
  result.outer = outer;
  result.keyed = has_others;
  return result;
}

// Reads "state.NAME.KIND". @return whether it is of that form
bool read_state(std::string_view text, TensorName& result) {
  constexpr std::string_view kState = "state.";
  // In a list of optimizers, their number is before it.
  const std::size_t number = text.find_first_not_of("0123456789");
  if (number > 0 && number < text.size() && text[number] == '.') text.remove_prefix(number + 1);
  const std::size_t dot = text.rfind('.');
  if (!text.starts_with(kState) || dot == std::string_view::npos || dot <= kState.size())
    return false;
  result.kind = text.substr(dot + 1);
  result.name = text.substr(kState.size(), dot - kState.size());
  return true;
}

// Role, kind, and name without the keys of the dict.
// @param all  all names of the checkpoint
TensorName classify(const KeyedName& tensor, const Nesting& nesting,
                    const std::set<std::string_view>& all) {
  TensorName result{std::string(tensor.name), std::string(tensor.name)};
  std::string_view rest = tensor.name, key = tensor.top_key;
  const bool is_nested =
      !nesting.outer.empty() && key_of(tensor.name, tensor.top_key) == nesting.outer;
  if (is_nested) {
    rest.remove_prefix(nesting.outer.size() + 1);
    key = nesting.keyed ? first_part(rest) : std::string_view();
  }
  const std::string_view first = key_of(rest, key);
  if (is_optimizer_key(first)) {
    result.role = TensorRole::OptimizerState;
    rest.remove_prefix(std::min(first.size() + 1, rest.size()));
    read_state(rest, result);
  } else if (TensorName state = result; read_state(rest, state) && all.contains(state.name)) {
    // Model and flattened optimizer in one dict, without keys of their own.
    result = std::move(state);
    result.role = TensorRole::OptimizerState;
  } else if (contains(kOtherKeys, first) || (nesting.keyed && !is_model_key(key))) {
    result.role = TensorRole::Other;
  } else if (is_model_key(key) && rest.starts_with(std::string(key) + '.')) {
    result.name = rest.substr(key.size() + 1);
  } else {
    result.name = rest;
  }
  return result;
}

// Chooses weights by `select` and `exclude`.
void choose_weights(std::vector<TensorName>& names, const NameRules& rules, const std::string& of) {
  const auto check = [&](const std::vector<std::string>& patterns, const char* option) {
    std::vector<std::string> sources;
    for (const TensorName& name : names)
      if (name.role != TensorRole::OptimizerState) sources.push_back(name.source);
    check_patterns(patterns, sources, option, of);
  };
  if (rules.must_match) {
    check(rules.select, "--select");
    check(rules.exclude, "--exclude");
  }
  for (TensorName& name : names) {
    if (name.role == TensorRole::OptimizerState) continue;
    const bool selected = !rules.select.empty() && is_chosen(rules.select, name.source);
    if (selected && name.role == TensorRole::Other) name.role = TensorRole::Weight;
    if (!rules.select.empty() && !selected) {
      name.role = TensorRole::Other;
      name.why = "not selected by --select";
    } else if (!rules.exclude.empty() && is_chosen(rules.exclude, name.source)) {
      name.role = TensorRole::Other;
      name.why = "left out by --exclude";
    }
  }
}

// Applies `change` to each name; throws if it must change one and changes none.
template <typename F>
void change_all(std::span<TensorName* const> names, const std::string& rule, bool must_change,
                F&& change) {
  bool changed = false;
  for (TensorName* const name : names) changed = change(name->name) || changed;
  if (changed || !must_change) return;
  std::vector<std::string_view> some;
  for (const TensorName* const name : names.first(std::min(names.size(), kListed)))
    some.push_back(name->name);
  throw InvalidArgument(
      "{} changes no name{}", rule,
      some.empty() ? "" : fmt::format("; the first are {}", fmt::join(some, ", ")));
}

struct Rename {
  std::regex old;
  std::string replacement;
};

Rename parse_rename(const std::string& text) {
  const auto refuse = [&](const std::string& why) {
    return InvalidArgument("--rename {}: {}; give s/OLD/NEW/, such as 's/^blocks\\./layers./'",
                           text, why);
  };
  if (text.size() < 4 || text[0] != 's') throw refuse("not of that form");
  const char mark = text[1];
  const std::size_t middle = text.find(mark, 2);
  if (middle == std::string::npos || middle == 2 || text.find(mark, middle + 1) != text.size() - 1)
    throw refuse(fmt::format("not of that form with {} three times", mark));
  try {
    return {std::regex(text.substr(2, middle - 2)),
            text.substr(middle + 1, text.size() - middle - 2)};
  } catch (const std::regex_error& error) {
    throw refuse(error.what());
  }
}

}  // namespace

std::string without_wrappers(std::string_view source) {
  std::string name;
  for (std::size_t begin = 0; begin <= source.size();) {
    const std::size_t end = std::min(source.find('.', begin), source.size());
    const std::string_view part = source.substr(begin, end - begin);
    if (!contains(kWrappers, part) || end == source.size()) {
      name += part;
      if (end < source.size()) name += '.';
    }
    begin = end + 1;
  }
  return name;
}

std::vector<TensorName> name_tensors(const std::vector<KeyedName>& tensors, const NameRules& rules,
                                     const std::string& of) {
  const Nesting nesting = find_nesting(tensors);
  std::vector<TensorName> names;
  std::set<std::string_view> all;
  for (const KeyedName& tensor : tensors) all.insert(tensor.name);
  for (const KeyedName& tensor : tensors) {
    names.push_back(classify(tensor, nesting, all));
    names.back().link = without_wrappers(names.back().name);
  }
  choose_weights(names, rules, of);
  std::vector<TensorName*> changed;  // names of weights
  for (TensorName& name : names) {
    const bool is_weight = name.role == TensorRole::Weight;
    if (!is_weight && name.kind.empty()) continue;
    // The user's prefixes are those of whole names.
    if (is_weight && !rules.is_auto() && (rules.keep_keys || !rules.prefixes.empty()))
      name.name = name.source;
    if (rules.is_auto()) name.name = without_wrappers(name.name);
    changed.push_back(&name);
  }
  for (const std::string& prefix : rules.prefixes) {
    change_all(changed, "--strip " + prefix, rules.must_match, [&](std::string& name) {
      const bool has = name.starts_with(prefix);
      if (has) name.erase(0, prefix.size());
      return has;
    });
  }
  for (const std::string& text : rules.renames) {
    const Rename rename = parse_rename(text);
    change_all(changed, "--rename " + text, rules.must_match, [&](std::string& name) {
      if (name.size() > kLongestRenamed || !std::regex_search(name, rename.old)) return false;
      name = std::regex_replace(name, rename.old, rename.replacement);
      return true;
    });
  }
  return names;
}

void check_distinct(const std::vector<TensorName>& names, const std::string& source) {
  std::map<std::pair<TensorRole, std::string>, const TensorName*> seen;
  for (const TensorName& name : names) {
    if (name.role == TensorRole::Other) continue;
    require(
        !name.name.empty(), "{}: {}", source,
        name.source.empty()
            ? "a tensor has an empty name"
            : fmt::format("the name {} is empty without its prefixes; keep names unchanged with "
                          "--strip none",
                          name.source));
    const auto [first, is_new] = seen.emplace(std::pair(name.role, name.str()), &name);
    require(is_new,
            "{}: {} and {} would both get the name {}; choose one with --select or --exclude, or "
            "the prefixes to remove with --strip",
            source, first->second->source, name.source, name.str());
  }
}

bool is_chosen(const std::vector<std::string>& patterns, const std::string& name) {
  return patterns.empty() || std::ranges::any_of(patterns, [&](const std::string& pattern) {
           return ::fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
         });
}

void check_patterns(const std::vector<std::string>& patterns, const std::vector<std::string>& names,
                    std::string_view option, std::string_view of) {
  std::vector<std::string> unused = patterns;
  std::erase_if(unused, [&](const std::string& pattern) {
    return std::ranges::any_of(names,
                               [&](const std::string& name) { return is_chosen({pattern}, name); });
  });
  const auto some = std::span(names).first(std::min(names.size(), kListed));
  require(unused.empty(), "{}: {} {} no tensor of {}{}", option, fmt::join(unused, ", "),
          unused.size() == 1 ? "matches" : "match", of,
          names.empty() ? "" : fmt::format(", with names such as {}", fmt::join(some, ", ")));
}

}  // namespace tessera::io
