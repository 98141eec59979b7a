#include "io/hf/training_source.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/hf/family_source.h"

namespace tessera::io {
namespace {

constexpr std::string_view kStep = "step";

// Names with those of one kind of state as weights.
std::vector<TensorName> names_of_state(std::vector<TensorName> names, const std::string& kind) {
  for (TensorName& name : names) {
    const bool is_state = name.role == TensorRole::OptimizerState && name.kind == kind;
    name.role = is_state ? TensorRole::Weight : TensorRole::Other;
  }
  return names;
}

// Whether a config.json is of a family that tessera knows; else warns.
bool is_known_model(const fs::path& file, std::vector<std::string>& warnings) {
  constexpr std::int64_t kMost = std::int64_t{64} << 20;
  const Json config = parse_json(read_file(file, kMost), file.string());
  const std::string& type = JsonReader(config, file.string()).at("model_type").string();
  if (hf_family_of(config) != nullptr) return true;
  warnings.push_back(fmt::format(
      "{} has the model_type \"{}\", which tessera does not know: tensors keep their names",
      file.string(), type));
  return false;
}

// The optimizer's number of updates, which torch.optim has for each weight.
std::optional<std::int64_t> read_step(const ShardedSource& source,
                                      const std::vector<TensorName>& names,
                                      std::vector<std::string>& warnings) {
  std::set<std::int64_t> steps;
  for (std::size_t i = 0; i < source.tensors().size(); ++i) {
    const TensorInfo& info = source.tensors()[i];
    if (names[i].role != TensorRole::OptimizerState || names[i].kind != kStep) continue;
    if (numel(info.shape) != 1) continue;
    float step = 0;
    source.read(info.name, 0, 1, &step, DType::F32);
    // Beyond 2^24, float32 does not count on.
    require<CorruptCheckpoint>(step >= 0 && step <= float{1 << 24}, "{}: {} is {}",
                               source.path().string(), info.name, step);
    steps.insert(static_cast<std::int64_t>(step));
  }
  if (steps.size() > 1) {
    warnings.push_back(
        fmt::format("{}: the optimizer updated some weights {} times and others {} times; the "
                    "result has the larger number for all",
                    source.path().string(), *steps.begin(), *steps.rbegin()));
  }
  if (!steps.empty()) return *steps.rbegin();
  return source.optimizer_step() ? source.optimizer_step() : source.hyperparameters().take_step();
}

// Throws on state that tessera has no place for.
void check_state(const TensorSource& weights, const TensorSource& state, const std::string& kind) {
  std::map<std::string, Shape> shapes;
  for (const TensorInfo& weight : weights.tensors()) shapes.emplace(weight.name, weight.shape);
  for (const TensorInfo& tensor : state.tensors()) {
    const auto weight = shapes.find(tensor.name);
    require<Unsupported>(
        weight != shapes.end() && weight->second == tensor.shape,
        "{}: {} {} of {}{}; tessera keeps optimizer state of the shape of its weight",
        state.path().string(), kind, tensor.shape, state.title(tensor.name),
        weight == shapes.end() ? " belongs to no weight"
                               : fmt::format(", which has the shape {}", weight->second));
  }
}

}  // namespace

TrainingSource open_training_source(std::unique_ptr<ShardedSource> source,
                                    const std::optional<fs::path>& config_file) {
  const std::shared_ptr<ShardedSource> shared = std::move(source);
  TrainingSource result;
  const auto add = [&](const std::vector<std::string>& warnings) {
    result.warnings.insert(result.warnings.end(), warnings.begin(), warnings.end());
  };
  const bool is_known = config_file && is_known_model(*config_file, result.warnings);
  ForeignModel model;
  if (is_known) {
    model = read_foreign_model(*config_file);
    const std::string flattened = use_names_of(model, *shared);
    require<Unsupported>(
        flattened.empty(),
        "{} holds {} flattened, as its ranks share it, which tessera does not take "
        "apart; save with Megatron's --dist-ckpt-optim-fully-reshardable",
        shared->path().string(), flattened);
  }
  const std::vector<TensorName> names = name_all(*shared, {});
  if (!is_known) {
    model = unknown_model(*shared, names);
    add(shared->loss_warnings());
  }
  add(model.warnings);
  add(shared->warnings());
  std::set<std::string> kinds;
  std::size_t without_kind = 0;
  for (const TensorName& name : names) {
    if (name.role != TensorRole::OptimizerState || name.kind == kStep) continue;
    if (is_state_name(name.kind))
      kinds.insert(name.kind);
    else
      ++without_kind;
  }
  if (without_kind > 0) {
    result.warnings.push_back(fmt::format(
        "{} tensors of the optimizer of {} are not state of a weight by their names, and left out",
        without_kind, shared->path().string()));
  }
  const auto open = [&](const std::vector<TensorName>& chosen, LoadPolicy policy) {
    return std::make_unique<FamilySource>(model, shared, chosen, policy);
  };
  auto weights = open(names, is_known ? LoadPolicy::Exact : LoadPolicy::Partial);
  require(!weights->tensors().empty(), "{} holds no weights", shared->path().string());
  for (const std::string& kind : kinds) {
    auto state = open(names_of_state(names, kind), LoadPolicy::Partial);
    check_state(*weights, *state, kind);
    result.tensors[Section{kind}] = std::move(state);
  }
  result.tensors[kModelSection] = std::move(weights);
  result.step = read_step(*shared, names, result.warnings);
  if (!kinds.empty() && !result.step) {
    result.warnings.push_back(
        fmt::format("{} does not say how many updates the optimizer made; the result says 0",
                    shared->path().string()));
  }
  result.model_config = model.config.dump();
  return result;
}

}  // namespace tessera::io
