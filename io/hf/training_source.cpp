#include "io/hf/training_source.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
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
  const auto type = config.is_object() ? config.find("model_type") : config.end();
  const bool has_type = type != config.end() && type->is_string();
  if (has_type && hf_family_of(config) != nullptr) return true;
  warnings.push_back(
      fmt::format("{} has {}: tensors keep their names", file.string(),
                  has_type ? fmt::format("the model_type \"{}\", which tessera does not know",
                                         type->get<std::string>())
                           : "no model_type"));
  return false;
}

double read_number(const ShardedSource& source, const TensorInfo& info) {
  const auto read = [&]<typename T>(T value) {
    source.read(info.name, 0, 1, &value, is_floating(info.dtype) ? DType::F32 : info.dtype);
    return static_cast<double>(value);
  };
  if (is_floating(info.dtype)) return read(0.0F);
  switch (dtype_size(info.dtype)) {
    case 8:
      return read(std::int64_t{0});
    case 4:
      return read(std::int32_t{0});
    case 2:
      return read(std::int16_t{0});
    default:
      return read(std::int8_t{0});
  }
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
    const double step = read_number(source, info);
    require<CorruptCheckpoint>(step >= 0 && step < 1e15 && step == std::floor(step),
                               "{}: {} is {}, which is no number of updates",
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

constexpr const char* kWeightsAlone = "; --what model takes the weights alone";

// A prefix without the parts that programs add to the names of weights or of state.
std::string plain_prefix(std::string_view prefix) {
  std::string plain;
  while (!prefix.empty()) {
    const std::string_view part = prefix.substr(0, prefix.find('.') + 1);
    if (part != "module." && part != "model." && part != "_forward_module.") plain += part;
    prefix.remove_prefix(part.size());
  }
  return plain;
}

// Throws on state that tessera has no place for.
void check_state(const FamilySource& weights, const FamilySource& state, const std::string& kind) {
  std::map<std::string, Shape> shapes;
  for (const TensorInfo& weight : weights.tensors()) shapes.emplace(weight.name, weight.shape);
  for (const TensorInfo& tensor : state.tensors()) {
    const auto weight = shapes.find(tensor.name);
    require<Unsupported>(
        weight != shapes.end() && weight->second == tensor.shape,
        "{}: {} {} of {}{}; tessera keeps optimizer state of the shape of its weight{}",
        state.path().string(), kind, tensor.shape, state.title(tensor.name),
        weight == shapes.end() ? " belongs to no weight"
                               : fmt::format(", which has the shape {}", weight->second),
        kWeightsAlone);
  }
  // The names of a state may lack outer modules of the weights'.
  require<Unsupported>(
      ("." + plain_prefix(weights.prefix())).ends_with("." + plain_prefix(state.prefix())) ||
          plain_prefix(state.prefix()).empty(),
      "{}: {} is of the model in '{}', but the weights are of that in '{}'{}",
      state.path().string(), kind, state.prefix(), weights.prefix(), kWeightsAlone);
}

// Throws unless all kinds of state are there for the same weights.
void check_kinds(const TrainingSource& source, const std::string& where) {
  const std::string* first = nullptr;
  std::set<std::string> expected;
  for (const auto& [section, state] : source.tensors) {
    std::set<std::string> found;
    for (const TensorInfo& tensor : state->tensors()) found.insert(tensor.name);
    if (first == nullptr) {
      first = &section.state;
      expected = found;
    }
    std::vector<std::string> differ;
    std::ranges::set_symmetric_difference(expected, found, std::back_inserter(differ));
    require<Unsupported>(differ.empty(),
                         "{}: of {} and {}, {} has one; tessera keeps the same state for each "
                         "weight{}",
                         where, *first, section.state, differ.empty() ? "" : differ.front(),
                         kWeightsAlone);
  }
}

bool is_moment(std::string_view name) {
  return name.ends_with(".exp_avg") || name.ends_with(".exp_avg_sq") ||
         name.ends_with(".momentum_buffer");
}

// Throws on a weight that is state of an optimizer by its name.
void check_weights(const FamilySource& weights) {
  for (const TensorInfo& weight : weights.tensors())
    require<Unsupported>(!is_moment(weight.name),
                         "{}: {} is optimizer state by its name, but under a key that tessera "
                         "does not know; write the weights alone with `tessera consolidate "
                         "--exclude`, and reshard those",
                         weights.path().string(), weight.name);
}

// Throws if all moments would be left out; warns of some.
void check_left_out(TrainingSource& result, const std::string& where) {
  std::size_t count = 0;
  const std::string* first = nullptr;
  for (const auto& [name, why] : result.skipped) {
    if (!is_moment(name)) continue;
    if (count++ == 0) first = &name;
  }
  if (count == 0) return;
  require<Unsupported>(result.tensors.size() > 1,
                       "{}: {} is optimizer state by its name, but under a key or name that "
                       "tessera does not know{}",
                       where, *first, kWeightsAlone);
  result.warnings.push_back(fmt::format(
      "{}: {} tensors of optimizer state are left out, such as {}", where, count, *first));
}

}  // namespace

TrainingSource open_training_source(std::unique_ptr<ShardedSource> source,
                                    const std::optional<fs::path>& config_file, bool with_state) {
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
        flattened.empty() || !with_state,
        "{} holds {} flattened, as its ranks share it, which tessera does not take "
        "apart; save with Megatron's --dist-ckpt-optim-fully-reshardable{}",
        shared->path().string(), flattened, kWeightsAlone);
  }
  const std::vector<TensorName> names = name_all(*shared, {});
  if (!is_known) {
    model = unknown_model(*shared, names);
    add(shared->loss_warnings());
  }
  add(model.warnings);
  add(shared->warnings());
  std::set<std::string> kinds;
  for (const TensorName& name : names) {
    const bool is_state = name.role == TensorRole::OptimizerState;
    if (is_state && with_state && name.kind == kStep) continue;
    if (is_state && with_state && is_state_name(name.kind))
      kinds.insert(name.kind);
    else if (is_state)
      result.skipped.emplace_back(
          name.source, with_state ? "not state of a weight, by its name" : "optimizer state");
    else if (name.role == TensorRole::Other)
      result.skipped.emplace_back(name.source, name.why);
  }
  const auto open = [&](const std::vector<TensorName>& chosen, LoadPolicy policy) {
    return std::make_unique<FamilySource>(model, shared, chosen, policy);
  };
  auto weights = open(names, is_known ? LoadPolicy::Exact : LoadPolicy::Partial);
  require(!weights->tensors().empty(), "{} holds no weights", shared->path().string());
  check_weights(*weights);
  result.skipped.insert(result.skipped.end(), weights->ignored().begin(), weights->ignored().end());
  for (const std::string& kind : kinds) {
    auto state = open(names_of_state(names, kind), LoadPolicy::Partial);
    check_state(*weights, *state, kind);
    result.skipped.insert(result.skipped.end(), state->ignored().begin(), state->ignored().end());
    result.tensors[Section{kind}] = std::move(state);
  }
  check_kinds(result, shared->path().string());
  result.tensors[kModelSection] = std::move(weights);
  if (with_state) check_left_out(result, shared->path().string());
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
