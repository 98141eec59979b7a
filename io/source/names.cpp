#include "io/source/names.h"

#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "core/base/error.h"

namespace tessera::io {
namespace {

constexpr std::array<std::string_view, 3> kWrappers = {"_orig_mod", "_fsdp_wrapped_module",
                                                       "_checkpoint_wrapped_module"};
constexpr std::array<std::string_view, 2> kPrefixes = {"model.", "module."};
constexpr std::array<std::string_view, 4> kModelKeys = {"model", "module", "models", "state_dict"};
constexpr std::array<std::string_view, 9> kOptimizerKeys = {
    "optimizer",        "optimizers",           "optim",       "optims",          "optimizer_state",
    "optimizer_states", "optimizer_state_dict", "optim_state", "optim_state_dict"};
constexpr std::array<std::string_view, 11> kOtherKeys = {
    "train_state", "trainer",   "lr_scheduler",  "lr_schedulers", "scheduler", "dataloader",
    "data_loader", "rng_state", "random_states", "callbacks",     "loops"};

template <std::size_t N>
bool contains(const std::array<std::string_view, N>& list, std::string_view text) {
  return std::find(list.begin(), list.end(), text) != list.end();
}

bool is_optimizer_key(std::string_view key) {
  if (contains(kOptimizerKeys, key)) return true;
  constexpr std::string_view kNumbered = "optimizer_";  // of Lightning
  return key.starts_with(kNumbered) && key.size() > kNumbered.size() &&
         key.find_first_not_of("0123456789", kNumbered.size()) == std::string_view::npos;
}

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

}  // namespace

bool is_model_key(std::string_view top_key) { return contains(kModelKeys, top_key); }

std::string strip_name(std::string_view source, const NameRules& rules) {
  if (!rules.prefixes.empty()) {
    for (const std::string& prefix : rules.prefixes) {
      if (source.starts_with(prefix)) source.remove_prefix(prefix.size());
    }
    return std::string(source);
  }
  if (!rules.strip_wrappers) return std::string(source);
  const std::string whole = without_wrappers(source);
  std::string_view name = whole;
  for (bool found = true; found;) {
    found = false;
    for (const std::string_view prefix : kPrefixes) {
      if (!name.starts_with(prefix)) continue;
      name.remove_prefix(prefix.size());
      found = true;
    }
  }
  return std::string(name);
}

TensorName classify(std::string_view source, std::string_view top_key, bool keyed,
                    const NameRules& rules) {
  TensorName result{std::string(source), std::string(source), TensorRole::Weight};
  const std::string_view first =
      top_key.empty() ? source.substr(0, std::min(source.find('.'), source.size())) : top_key;
  if (is_optimizer_key(first)) {
    result.role = TensorRole::OptimizerState;
    std::string_view rest = source;
    rest.remove_prefix(std::min(first.size() + 1, rest.size()));
    constexpr std::string_view kState = "state.";
    const std::size_t dot = rest.rfind('.');
    if (rest.starts_with(kState) && dot != std::string_view::npos && dot > kState.size()) {
      const std::string name = strip_name(rest.substr(kState.size(), dot - kState.size()), rules);
      if (!name.empty()) result.name = fmt::format("{}/{}", rest.substr(dot + 1), name);
    }
  } else if (contains(kOtherKeys, first) || (keyed && !is_model_key(top_key))) {
    result.role = TensorRole::Other;
  } else {
    result.name = strip_name(source, rules);
  }
  return result;
}

void check_distinct(const std::vector<TensorName>& names, const std::string& source) {
  using Key = std::pair<TensorRole, std::string_view>;
  std::map<Key, const TensorName*> seen;
  for (const TensorName& name : names) {
    if (name.role == TensorRole::Other) continue;
    require(!name.name.empty(),
            "{}: nothing is left of the name {} without its prefixes; keep names as they are with "
            "--strip none",
            source, name.source);
    const auto [first, is_new] = seen.emplace(Key(name.role, name.name), &name);
    require(is_new,
            "{}: {} and {} would both be called {}; choose what is removed from names with --strip",
            source, first->second->source, name.source, name.name);
  }
}

bool is_chosen(const std::vector<std::string>& patterns, const std::string& name) {
  return patterns.empty() ||
         std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
           return ::fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
         });
}

void check_patterns(const std::vector<std::string>& patterns, const std::vector<std::string>& names,
                    std::string_view option, std::string_view of) {
  std::vector<std::string> unused;
  for (const std::string& pattern : patterns) {
    const bool used = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
      return is_chosen({pattern}, name);
    });
    if (!used) unused.push_back(pattern);
  }
  require(unused.empty(), "{}: {} {} no tensor of {}{}", option, fmt::join(unused, ", "),
          unused.size() == 1 ? "fits" : "fit", of,
          names.empty() ? "" : fmt::format(", which are called such as {}", names.front()));
}

}  // namespace tessera::io
