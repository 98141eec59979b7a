#include "io/deepspeed/states.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/base/error.h"
#include "io/pickle/pickle_reader.h"
#include "io/pump/box.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kMaxStates = std::int64_t{256} << 20;

constexpr PickleGlobal kStage{"deepspeed.runtime.zero.config", "ZeroStageEnum"};

/// A file of states. Client state may hold objects of any class, so unknown ones are inert.
struct PickledStates {
  /// @param key  entry that the root must have
  PickledStates(const ByteRange& bytes, std::string_view key)
      : archive(bytes, kMaxStates, {}, UnknownGlobals::Inert),
        budget(archive.pickle_bytes(), bytes.name()),
        root(archive.root(), bytes.name(), &budget) {
    require<Unsupported>(archive.root().is(PickleKind::Dict) && archive.root().find(key) != nullptr,
                         "{} has no \"{}\": it is not a file of a DeepSpeed checkpoint",
                         bytes.name(), key);
  }

  const TorchArchive archive;
  PickleBudget budget;
  const PickleReader root;
};

Named<Shape> read_shapes(const PickleReader& dict) {
  Named<Shape> shapes;
  dict.for_each_entry([&](std::string_view name, const PickleReader& value) {
    const Shape shape = value.shape();
    count_elements(shape, value.where());
    shapes.emplace_back(name, shape);
  });
  return shapes;
}

bool is_tensor(const PickleValue& value) {
  return value.is(PickleKind::Object) && value.global->module.starts_with("torch._");
}

TorchTensor read_tensor(const TorchArchive& file, const PickleReader& node) {
  return file.tensor(node.value(), node.where());
}

bool is_flat(const TorchTensor& tensor) {
  return tensor.shape.size() == 1 && (tensor.shape[0] <= 1 || tensor.strides[0] == 1);
}

TorchTensor read_flat(const TorchArchive& file, const PickleReader& node) {
  TorchTensor tensor = read_tensor(file, node);
  require<CorruptCheckpoint>(is_flat(tensor), "{} has shape {} and strides {}, expected one dim",
                             node.where(), tensor.shape, tensor.strides);
  return tensor;
}

void refuse_experts(bool has_experts, const std::string& where) {
  require<Unsupported>(!has_experts,
                       "{} is of a model whose experts are spread over ranks, which tessera does "
                       "not join; DeepSpeed's ds_to_universal writes each parameter whole",
                       where);
}

// The optimizer's state by index of the group: {"state": {0: {...}}, ...} or a list.
std::map<std::int64_t, PickleReader> state_by_group(const PickleReader& node) {
  std::map<std::int64_t, PickleReader> states;
  if (node.value().is(PickleKind::List)) {
    node.for_each_element([&](const PickleReader& state) {
      states.emplace(static_cast<std::int64_t>(states.size()), state);
    });
  } else if (!node.is_none()) {
    const PickleReader state = node.get("state");
    if (state.is_none()) return states;
    state.for_each([&](const PickleValue& key, const PickleValue& value) {
      const std::int64_t index = state.child(key, "a key of " + state.where()).integer();
      states.emplace(index, state.child(value, fmt::format("{}: {}", state.where(), index)));
    });
  }
  return states;
}

std::string step_of(const TorchArchive& file, const ByteRange& archive, const PickleReader& node) {
  if (node.value().is(PickleKind::Int)) return fmt::format("{} ", node.value().integer);
  if (!is_tensor(node.value())) return "";
  const TorchTensor tensor = read_tensor(file, node);
  if (numel(tensor.shape) != 1 || tensor.carrier != DType::F32) return "";
  float step = 0;
  archive.read(tensor.begin, &step, sizeof(step));
  return fmt::format("{} ", step);
}

}  // namespace

DeepSpeedModel read_deepspeed_model(const ByteRange& archive) {
  const PickledStates file(archive, "module");
  const PickleReader& root = file.root;
  refuse_experts(!root.get("ds_autoep_layers").is_none() || !root.get("num_experts").is_none(),
                 archive.name());
  DeepSpeedModel model;
  root.for_each_entry([&](std::string_view key, const PickleReader& value) {
    if (key != "module" && !value.is_none()) model.objects.emplace_back(key);
  });
  const PickleReader groups = root.get("param_shapes");
  model.zero = !groups.is_none();
  groups.for_each_element(
      [&](const PickleReader& group) { model.groups.push_back(read_shapes(group)); });
  model.frozen = read_shapes(root.get("frozen_param_shapes"));
  root.get("frozen_param_fragments")
      .for_each_entry([&](std::string_view name, const PickleReader& value) {
        model.fragments.emplace_back(name, read_tensor(file.archive, value));
      });
  root.get("module").for_each_entry([&](std::string_view name, const PickleReader& value) {
    if (is_tensor(value.value()))
      model.module.emplace_back(name, read_tensor(file.archive, value));
    else
      model.objects.push_back(fmt::format("module.{}", name));
  });
  root.get("buffer_names").for_each_element([&](const PickleReader& name) {
    model.buffers.emplace_back(name.text());
  });
  root.get("shared_params").for_each_entry([&](std::string_view name, const PickleReader& of) {
    model.shared.emplace_back(name, of.text());
  });
  const PickleReader step = root.get("global_steps");
  if (!step.is_none()) model.step = step.integer();
  return model;
}

DeepSpeedOptimizer read_deepspeed_optimizer(const ByteRange& archive) {
  const PickledStates file(archive, "optimizer_state_dict");
  const PickleReader root = file.root.get("optimizer_state_dict");
  DeepSpeedOptimizer result;
  const PickleReader weights3 = root.get("fp32_flat_groups");
  const bool parts_of_parameters = !weights3.is_none();
  const PickleReader weights =
      parts_of_parameters ? weights3 : root.get("single_partition_of_fp32_groups");
  require<Unsupported>(!weights.is_none(),
                       "{} has neither fp32_flat_groups nor single_partition_of_fp32_groups, the "
                       "float32 weights of ZeRO",
                       archive.name());
  const PickleReader stage = root.get("zero_stage");
  if (stage.is_none()) {
    result.stage = parts_of_parameters ? 3 : 1;  // BF16_Optimizer omits it
  } else {
    const PickleReader number = stage.value().is_object(kStage) ? stage.argument(0) : stage;
    const std::int64_t found = number.integer();
    require<CorruptCheckpoint>(
        found >= 1 && found <= 3 && (found == 3) == parts_of_parameters,
        "{} is {}, but the weights are under \"{}\"", stage.where(), found,
        parts_of_parameters ? "fp32_flat_groups" : "single_partition_of_fp32_groups");
    result.stage = static_cast<int>(found);
  }
  const PickleReader count = root.get("partition_count");
  if (count.value().is(PickleKind::List)) {
    count.for_each_element([&](const PickleReader& of_group) {
      const std::int64_t ranks = of_group.integer();
      refuse_experts(result.ranks != 0 && ranks != result.ranks, archive.name());
      result.ranks = ranks;
    });
  } else {
    result.ranks = count.integer();
  }
  refuse_experts(!root.get("ds_zero_partition_groups").is_none(), archive.name());
  root.get("param_alignment_paddings").for_each_element([&](const PickleReader& group) {
    std::vector<std::int64_t>& paddings = result.paddings.emplace_back();
    group.for_each_element(
        [&](const PickleReader& padding) { paddings.push_back(padding.integer()); });
  });
  const PickleReader inner =
      root.get(parts_of_parameters ? "optimizer_state_dict" : "base_optimizer_state");
  const std::map<std::int64_t, PickleReader> states = state_by_group(inner);
  HyperparametersReader hyperparameters;
  const PickleReader groups = inner.get("param_groups");
  if (groups.value().is(PickleKind::List))
    for (const PickleValue* group : groups.value().items())
      if (!hyperparameters.is_full()) result.settings.push_back(hyperparameters.read_group(*group));
  Hyperparameters others = hyperparameters.finish();
  result.left_out = std::move(others.left_out);
  result.too_many = others.too_many;
  if (result.too_many) result.settings.clear();
  weights.for_each_element([&](const PickleReader& node) {
    const auto state = states.find(static_cast<std::int64_t>(result.parts.size()));
    DeepSpeedPart& part = result.parts.emplace_back();
    part.values = read_flat(file.archive, node);
    if (state == states.end()) return;
    state->second.for_each_entry([&](std::string_view kind, const PickleReader& value) {
      if (kind == "step") {
        result.steps += step_of(file.archive, archive, value);
      } else if (is_tensor(value.value())) {
        TorchTensor moment = read_tensor(file.archive, value);
        // Other state, such as a norm, is not per element.
        if (is_flat(moment) && moment.shape[0] >= part.values.shape[0])
          part.moments.emplace_back(kind, std::move(moment));
      }
    });
  });
  return result;
}

}  // namespace tessera::io
