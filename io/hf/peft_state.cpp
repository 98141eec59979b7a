// Source of the names: peft/utils/save_and_load.py of PEFT 0.14 to 0.21.

#include "io/hf/peft_state.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/hf/model_names.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kMaxAdapterConfig = std::int64_t{1} << 20;  // bytes
constexpr std::string_view kRunningPrefix = "base_model.model.";
constexpr std::string_view kBaseLayer = ".base_layer.";
constexpr std::string_view kSaved = "modules_to_save", kMagnitude = "lora_magnitude_vector";

/// A weight of an adapter.
struct PeftName {
  std::string adapter;  ///< "default"; empty if the name has none, as in files
  std::string name;     ///< in PEFT's files
};

// Empty for a weight of the base.
std::optional<PeftName> parse_peft_name(const std::string& name) {
  for (const std::string_view part : {std::string_view("lora_A"), std::string_view("lora_B"),
                                      std::string_view("lora_embedding_A"),
                                      std::string_view("lora_embedding_B"), kMagnitude, kSaved}) {
    const std::string middle = fmt::format(".{}.", part);
    const std::size_t at = name.find(middle);
    const std::size_t begin = name.find(kRunningPrefix);
    if (at == std::string::npos || begin == std::string::npos || begin > at) continue;
    const std::string layer = name.substr(begin, at - begin);
    const std::string rest = name.substr(at + middle.size());  // ADAPTER.weight, or without either
    const bool is_bare = rest == "weight" || rest == "bias";
    const std::size_t dot = is_bare ? std::string::npos : rest.find('.');
    const std::string tail = is_bare                    ? "." + rest
                             : dot == std::string::npos ? ""
                                                        : rest.substr(dot);
    std::string adapter = is_bare ? "" : rest.substr(0, dot);
    if (part == kSaved) return PeftName{std::move(adapter), layer + tail};
    return PeftName{std::move(adapter),
                    fmt::format("{}.{}{}", layer, part, part == kMagnitude ? "" : tail)};
  }
  return std::nullopt;
}

void read_adapter_config(PeftTensors& result, const std::optional<fs::path>& given) {
  const std::string where = result.source->where();
  const fs::path file = given.value_or(result.source->config_dir() / "adapter_config.json");
  require(is_there(file),
          "{} holds LoRA adapters of PEFT without adapter_config.json; give it with --config FILE",
          where);
  Json config = parse_json(read_file(file, kMaxAdapterConfig), file.string());
  require(
      config.is_object() && config.value("peft_type", Json()) == "LORA" &&
          config.value("r", Json()).is_number_integer(),
      "{} holds LoRA adapters of PEFT, but {} is no adapter_config.json of LoRA; give that with "
      "--config FILE",
      where, file.string());
  // Trained weights that are not of the adapters' layers, which PEFT writes, too.
  const Json bias = config.value("bias", Json("none"));
  const Json tokens = config.value("trainable_token_indices", Json());
  require<Unsupported>(
      bias.is_null() || bias == "none",
      "{} has \"bias\": {}, and tessera does not write trained biases of the base; "
      "use PEFT's save_pretrained",
      file.string(), bias.dump());
  require<Unsupported>(tokens.is_null() || tokens.empty(),
                       "{} has \"trainable_token_indices\", which tessera does not write; use "
                       "PEFT's save_pretrained",
                       file.string());
  result.config_file = file;
  result.config = std::make_shared<const Json>(std::move(config));
}

// Each `A` [rank, in] needs its `B` [outputs, rank].
void check_halves(const PeftTensors& result) {
  const Json& config = *result.config;
  const std::string where = result.source->where();
  const bool one_rank = config.value("rank_pattern", Json::object()).empty();
  const auto rank = config.at("r").get<std::int64_t>();
  constexpr std::string_view kA = ".lora_A.weight", kB = ".lora_B.weight";
  for (const auto& [name, info] : result.tensors) {
    const bool is_a = name.ends_with(kA);
    if (!is_a && !name.ends_with(kB)) continue;
    const std::string layer = name.substr(0, name.size() - kA.size());
    const auto other = result.tensors.find(layer + std::string(is_a ? kB : kA));
    require(other != result.tensors.end(), "{} holds {} without {}", where, name,
            layer + std::string(is_a ? kB : kA));
    const Shape &shape = info.shape, &second = other->second.shape;
    if (!is_a || shape.empty() || second.size() < 2) continue;
    require(shape[0] == second[1] && (!one_rank || shape[0] == rank),
            "{}: {} has shape {} and its other half {}, but {} has rank {}", where, name, shape,
            second, result.config_file.string(), rank);
  }
}

}  // namespace

bool has_peft_names(const ShardedSource& source, const NameRules& rules) {
  return std::ranges::any_of(name_all(source, rules), [](const TensorName& name) {
    return name.role == TensorRole::Weight && parse_peft_name(name.name).has_value();
  });
}

PeftTensors peft_of_state(std::shared_ptr<const ShardedSource> source, const NameRules& rules,
                          const std::optional<fs::path>& config_file) {
  PeftTensors result;
  result.source = std::move(source);
  const std::string where = result.source->where();
  std::set<std::string> adapters;
  const std::vector<TensorName> names = name_all(*result.source, rules);
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::optional<PeftName> found =
        names[i].role == TensorRole::Weight ? parse_peft_name(names[i].name) : std::nullopt;
    if (!found) continue;
    require<Unsupported>(i < result.source->tensors().size(),
                         "{}: {} has a dtype that tessera does not read", where, names[i].source);
    adapters.insert(found->adapter);
    const auto [first, is_new] = result.tensors.emplace(found->name, result.source->tensors()[i]);
    require(is_new || adapters.size() > 1,
            "{}: {} and {} are both {} of an adapter; choose one with --select", where,
            first->second.name, names[i].source, found->name);
  }
  require(!adapters.empty(), "{} holds no LoRA adapters of PEFT; omit --merge-lora", where);
  read_adapter_config(result, config_file);
  require(adapters.size() == 1, "{} holds the adapters '{}'; choose one with --select '*.{}.*'",
          where, fmt::join(adapters, "', '"), *adapters.rbegin());
  check_halves(result);
  return result;
}

std::vector<TensorName> names_of_base(const PeftTensors& adapters) {
  const ShardedSource& source = *adapters.source;
  std::set<std::string> chosen;
  for (const auto& [ignored, info] : adapters.tensors) chosen.insert(info.name);
  std::vector<TensorName> names = name_all(source, {});
  // Models of one state, such as that of an EMA, differ in what precedes base_model.model.
  std::set<std::string> with_adapters, with_layers;
  for (const TensorName& name : names) {
    const std::string model = name.name.substr(0, name.name.find(kRunningPrefix));
    if (chosen.contains(name.source))
      with_adapters.insert(model);
    else if (name.role == TensorRole::Weight && name.name.find(kBaseLayer) != std::string::npos)
      with_layers.insert(model);
  }
  const std::set<std::string>& models = with_layers.size() > 1 ? with_adapters : with_layers;
  bool has_layers = false;
  for (TensorName& name : names) {
    if (name.role != TensorRole::Weight) continue;
    const std::size_t prefix = name.name.find(kRunningPrefix), layer = name.name.find(kBaseLayer);
    const bool is_other =
        prefix != std::string::npos && !models.contains(name.name.substr(0, prefix));
    if (is_other || parse_peft_name(name.name)) {
      name.role = TensorRole::Other;
    } else if (layer != std::string::npos) {
      name.name.erase(layer, kBaseLayer.size() - 1);
      has_layers = true;
    }
  }
  if (!has_layers) return {};
  check_distinct(names, source.where());
  return names;
}

}  // namespace tessera::io
