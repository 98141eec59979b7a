#include "io/source/names.h"

#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "core/base/error.h"

namespace tessera::io {
namespace {

constexpr std::array<std::string_view, 3> kWrappers = {"_orig_mod", "_fsdp_wrapped_module",
                                                       "_checkpoint_wrapped_module"};
constexpr std::string_view kModelPrefix = "model.", kModulePrefix = "module.";
constexpr std::array<std::string_view, 5> kModelKeys = {"model", "module", "models", "state_dict",
                                                        "model_state_dict"};
constexpr std::array<std::string_view, 9> kOptimizerKeys = {
    "optimizer",        "optimizers",           "optim",       "optims",          "optimizer_state",
    "optimizer_states", "optimizer_state_dict", "optim_state", "optim_state_dict"};
constexpr std::array<std::string_view, 13> kOtherKeys = {
    "train_state",   "trainer",    "lr_scheduler", "lr_schedulers", "scheduler",
    "schedulers",    "dataloader", "data_loader",  "rng",           "rng_state",
    "random_states", "callbacks",  "loops"};

constexpr int kAllLevels = std::numeric_limits<int>::max();

template <std::size_t N>
bool contains(const std::array<std::string_view, N>& list, std::string_view text) {
  return std::find(list.begin(), list.end(), text) != list.end();
}

bool is_model_key(std::string_view key) { return contains(kModelKeys, key); }

bool is_optimizer_key(std::string_view key) {
  if (contains(kOptimizerKeys, key)) return true;
  constexpr std::string_view kNumbered = "optimizer_";  // Lightning
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

// Removes all leading `module.` and at most `levels` leading `model.`.
std::string_view without_front(std::string_view name, int levels) {
  while (true) {
    if (name.starts_with(kModulePrefix)) {
      name.remove_prefix(kModulePrefix.size());
    } else if (levels > 0 && name.starts_with(kModelPrefix)) {
      name.remove_prefix(kModelPrefix.size());
      --levels;
    } else {
      return name;
    }
  }
}

// As without_front; for negative `levels`, adds -levels leading `model.` instead.
std::string at_level(std::string_view name, int levels) {
  std::string result;
  for (int level = levels; level < 0; ++level) result += kModelPrefix;
  result += without_front(name, levels);
  return result;
}

std::string strip(std::string_view source, const NameRules& rules, int levels) {
  if (!rules.prefixes.empty()) {
    for (const std::string& prefix : rules.prefixes) {
      if (source.starts_with(prefix)) source.remove_prefix(prefix.size());
    }
    return std::string(source);
  }
  if (!rules.strip_wrappers) return std::string(source);
  return at_level(without_wrappers(source), levels);
}

std::string_view first_part(std::string_view name) { return name.substr(0, name.find('.')); }

// The outermost key of a tensor's path. In a flat dict, the first part of the name may be one.
std::string_view key_of(std::string_view name, std::string_view top_key) {
  return top_key.empty() ? first_part(name) : top_key;
}

// Whether these are names of a Hugging Face decoder (or encoder and decoder) without a head, with
// `layers` outermost. In models with a head, `layers` is in `model`, and both belong to the names.
// Architectures without `model` use `transformer`, `gpt_neox` or the like, or `block` for `layers`.
bool is_headless_decoder(const std::vector<std::string_view>& names) {
  constexpr std::array<std::string_view, 2> kHeads = {"lm_head", "output"};
  constexpr std::array<std::string_view, 4> kAround = {"encoder", "decoder", "language_model",
                                                       "text_model"};
  bool layers = false;
  for (std::string_view name : names) {
    if (contains(kHeads, first_part(name))) return false;
    while (contains(kAround, first_part(name))) {
      name.remove_prefix(std::min(first_part(name).size() + 1, name.size()));
    }
    layers = layers || first_part(name) == "layers";
  }
  return layers;
}

int weight_levels(const std::vector<std::string_view>& weights, bool headless) {
  for (int levels = 0; !weights.empty(); ++levels) {
    std::vector<std::string_view> below;
    for (const std::string_view weight : weights) {
      if (!without_front(weight, levels).starts_with(kModelPrefix)) return levels;
      below.push_back(without_front(weight, levels + 1));
    }
    if (!headless && is_headless_decoder(below)) return levels;
  }
  return 0;
}

// The number of `model.` to remove so that most names of optimizer state match names of weights.
int state_levels(const std::vector<std::string_view>& state, const std::set<std::string>& weights,
                 int of_weights) {
  int best = of_weights;
  std::ptrdiff_t most = 0;
  // The first of equally good numbers is taken. No program nests deeper than 4.
  for (const int levels : {of_weights, 0, 1, 2, 3, 4, -1, -2, -3, -4}) {
    const auto known = std::count_if(state.begin(), state.end(), [&](std::string_view name) {
      return weights.contains(at_level(name, levels));
    });
    if (known > most) {
      best = levels;
      most = known;
    }
  }
  return best;
}

// Derives the name of a weight from its full name in a nested dict. The result may be empty.
std::string strip_name(std::string_view source, const NameRules& rules) {
  return strip(source, rules, rules.model_levels ? rules.model_levels->weights : kAllLevels);
}

}  // namespace

NameRules::ModelLevels count_model_levels(const std::vector<TensorName>& names, bool headless) {
  std::vector<std::string_view> weights, state;
  for (const TensorName& name : names) {
    if (name.role == TensorRole::Weight) weights.push_back(name.name);
    if (name.role == TensorRole::OptimizerState && name.name != name.source) {
      state.push_back(std::string_view(name.name).substr(name.name.find('/') + 1));
    }
  }
  if (weights.empty()) {  // a checkpoint of optimizer state only
    const int levels = weight_levels(state, headless);
    return {levels, levels};
  }
  const int levels = weight_levels(weights, headless);
  std::set<std::string> exported;
  for (const std::string_view weight : weights) exported.insert(at_level(weight, levels));
  return {levels, state_levels(state, exported, levels)};
}

TensorName classify(std::string_view source, std::string_view top_key, bool keyed,
                    const NameRules& rules) {
  TensorName result{std::string(source), std::string(source), TensorRole::Weight};
  const std::string_view first = key_of(source, top_key);
  if (is_optimizer_key(first)) {
    result.role = TensorRole::OptimizerState;
    std::string_view rest = source;
    rest.remove_prefix(std::min(first.size() + 1, rest.size()));
    constexpr std::string_view kState = "state.";
    const std::size_t dot = rest.rfind('.');
    if (rest.starts_with(kState) && dot != std::string_view::npos && dot > kState.size()) {
      const std::string name = strip(rest.substr(kState.size(), dot - kState.size()), rules,
                                     rules.model_levels ? rules.model_levels->state : kAllLevels);
      if (!name.empty()) result.name = fmt::format("{}/{}", rest.substr(dot + 1), name);
    }
  } else if (contains(kOtherKeys, first) || (keyed && !is_model_key(top_key))) {
    result.role = TensorRole::Other;
  } else {
    const bool strips = rules.strip_wrappers && rules.prefixes.empty();
    if (strips && is_model_key(top_key) && source.size() > top_key.size() &&
        source.starts_with(top_key) && source[top_key.size()] == '.') {
      source.remove_prefix(top_key.size() + 1);
    }
    result.name = strip_name(source, rules);
  }
  return result;
}

NameNesting find_nesting(const std::vector<KeyedName>& names) {
  NameNesting result;
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

TensorName classify(const KeyedName& tensor, const NameNesting& nesting, const NameRules& rules) {
  const std::string_view first = key_of(tensor.name, tensor.top_key);
  if (nesting.outer.empty() || first != nesting.outer) {
    return classify(tensor.name, tensor.top_key, nesting.keyed, rules);
  }
  const std::string_view below = tensor.name.substr(first.size() + 1);
  // Without other state, `model` may be a key or a part of the weights' names.
  const std::string_view key = nesting.keyed ? first_part(below) : std::string_view();
  TensorName result = classify(below, key, nesting.keyed, rules);
  result.source = tensor.name;
  const bool as_user_says = !rules.strip_wrappers || !rules.prefixes.empty();
  if (result.role == TensorRole::Weight && as_user_says) {
    result.name = strip_name(tensor.name, rules);
  } else if (result.role != TensorRole::Weight && result.name == below) {
    result.name = tensor.name;
  }
  return result;
}

void check_distinct(const std::vector<TensorName>& names, const std::string& source) {
  using Key = std::pair<TensorRole, std::string_view>;
  std::map<Key, const TensorName*> seen;
  for (const TensorName& name : names) {
    if (name.role == TensorRole::Other) continue;
    require(
        !name.name.empty(), "{}: {}", source,
        name.source.empty()
            ? "a tensor has an empty name"
            : fmt::format("the name {} is empty without its prefixes; keep names unchanged with "
                          "--strip none",
                          name.source));
    const auto [first, is_new] = seen.emplace(Key(name.role, name.name), &name);
    require(is_new,
            "{}: {} and {} would both get the name {}; choose the prefixes to remove with --strip",
            source, first->second->source, name.source, name.name);
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
  require(unused.empty(), "{}: {} {} no tensor of {}{}", option, fmt::join(unused, ", "),
          unused.size() == 1 ? "matches" : "match", of,
          names.empty() ? "" : fmt::format(", with names such as {}", names.front()));
}

std::vector<std::string> unused_prefixes(const std::vector<std::string_view>& names,
                                         const NameRules& rules) {
  std::vector<std::string> unused;
  NameRules before, with;  // rules without and with the current prefix
  before.strip_wrappers = with.strip_wrappers = false;
  for (const std::string& prefix : rules.prefixes) {
    with.prefixes.push_back(prefix);
    const bool used = std::ranges::any_of(names, [&](std::string_view name) {
      return strip(name, with, 0) != strip(name, before, 0);
    });
    if (!used) unused.push_back(prefix);
    before = with;
  }
  return unused;
}

}  // namespace tessera::io
