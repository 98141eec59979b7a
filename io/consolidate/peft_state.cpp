// Source of the names: peft/utils/save_and_load.py of PEFT 0.14 to 0.21.

#include "io/consolidate/peft_state.h"

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
#include "io/consolidate/sharded.h"
#include "io/hf/model_names.h"

namespace tessera::io {
namespace {

constexpr std::string_view kRunningPrefix = "base_model.model.";
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

void read_adapter_config(ConsolidateSource& result, const ShardedSource& source,
                         const ConsolidateOptions& options) {
  const fs::path file = options.config_file.value_or(source.config_dir() / "adapter_config.json");
  require(is_there(file),
          "{} holds LoRA adapters of PEFT without adapter_config.json; give it with --config FILE",
          result.path.string());
  const Json config = parse_json(read_file(file, kMaxConfig), file.string());
  require(
      config.is_object() && config.value("peft_type", Json()) == "LORA" &&
          config.value("r", Json()).is_number_integer(),
      "{} holds LoRA adapters of PEFT, but {} is no adapter_config.json of LoRA; give that with "
      "--config FILE",
      result.path.string(), file.string());
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
  result.hf_config_file = file;
  result.hf_config = std::make_shared<const Json>(config);
}

// Each `A` [rank, in] needs its `B` [outputs, rank].
void check_halves(const ConsolidateSource& result) {
  std::map<std::string, Shape> shapes;
  for (const ExportTensor& weight : result.weights) shapes[weight.name] = weight.shape;
  const Json& config = *result.hf_config;
  const bool one_rank = config.value("rank_pattern", Json::object()).empty();
  const auto rank = config.at("r").get<std::int64_t>();
  constexpr std::string_view kA = ".lora_A.weight", kB = ".lora_B.weight";
  for (const auto& [name, shape] : shapes) {
    const bool is_a = name.ends_with(kA);
    if (!is_a && !name.ends_with(kB)) continue;
    const std::string layer = name.substr(0, name.size() - kA.size());
    const auto other = shapes.find(layer + std::string(is_a ? kB : kA));
    require(other != shapes.end(), "{} holds {} without {}", result.path.string(), name,
            layer + std::string(is_a ? kB : kA));
    const Shape& second = other->second;
    if (!is_a || shape.empty() || second.size() < 2) continue;
    require(shape[0] == second[1] && (!one_rank || shape[0] == rank),
            "{}: {} has shape {} and its other half {}, but {} has rank {}", result.path.string(),
            name, shape, second, result.hf_config_file.string(), rank);
  }
}

}  // namespace

bool has_peft_names(const ShardedSource& source, const ConsolidateOptions& options) {
  return std::ranges::any_of(name_all(source, options.names), [](const TensorName& name) {
    return name.role == TensorRole::Weight && parse_peft_name(name.name).has_value();
  });
}

void add_peft_adapters(ConsolidateSource& result, const ShardedSource& source,
                       const ConsolidateOptions& options) {
  read_adapter_config(result, source, options);
  result.is_adapter = true;
  std::set<std::string> adapters;
  const std::vector<TensorName> names = name_all(source, options.names);
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::optional<PeftName> found =
        names[i].role == TensorRole::Weight ? parse_peft_name(names[i].name) : std::nullopt;
    if (!found) {
      result.skipped.push_back({names[i].source, "not of the adapters"});
      continue;
    }
    require<Unsupported>(i < source.tensors().size(),
                         "{}: {} has a dtype that tessera does not read", result.path.string(),
                         names[i].source);
    adapters.insert(found->adapter);
    const TensorInfo& info = source.tensors()[i];
    const bool converts = options.dtype && is_floating(info.dtype);
    result.weights.push_back({found->name, info.shape, info.dtype,
                              converts ? *options.dtype : info.dtype, &source, info.name});
  }
  for (const std::string& name : source.objects()) result.skipped.push_back({name, "not a tensor"});
  require(adapters.size() == 1, "{} holds the adapters '{}'; choose one with --select '*.{}.*'",
          result.path.string(), fmt::join(adapters, "', '"), *adapters.rbegin());
  check_halves(result);
}

}  // namespace tessera::io
