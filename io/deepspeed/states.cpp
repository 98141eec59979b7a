#include "io/deepspeed/states.h"

#include <algorithm>
#include <map>

#include "core/base/error.h"
#include "io/pickle/pickle_reader.h"
#include "io/pump/box.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kMaxStates = std::int64_t{256} << 20;

constexpr PickleGlobal kStage{"deepspeed.runtime.zero.config", "ZeroStageEnum"};

/// Classes beyond those of tensors: of DeepSpeed, of the training programs whose state it stores.
constexpr PickleGlobal kStateGlobals[] = {
    kTorchSize,
    kStage,
    {"torch", "device"},
    {"deepspeed.runtime.fp16.loss_scaler", "LossScaler"},
    {"deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"},
    {"deepspeed.utils.tensor_fragment", "fragment_address"},
    {"argparse", "Namespace"},
    {"__builtin__", "set"},  // as protocol 2 names it
    {"builtins", "set"},
    {"collections", "defaultdict"},
    {"pathlib", "PosixPath"},
    {"_codecs", "encode"},
    {"numpy", "dtype"},
    {"numpy", "ndarray"},
    {"numpy.core.multiarray", "_reconstruct"},
    {"numpy.core.multiarray", "scalar"},
    {"numpy._core.multiarray", "_reconstruct"},
    {"numpy._core.multiarray", "scalar"},
    {"lightning.fabric.utilities.data", "AttributeDict"},
    {"lightning_fabric.utilities.data", "AttributeDict"},
    {"pytorch_lightning.utilities.parsing", "AttributeDict"},
};

/// A value of a pickle, and the path to it for errors.
class Node {
 public:
  Node(const PickleValue& value, std::string where) : value_(&value), where_(std::move(where)) {}

  const PickleValue& value() const { return *value_; }
  const std::string& where() const { return where_; }
  bool is_none() const { return value_->is(PickleKind::None); }
  bool is_dict() const { return value_->is(PickleKind::Dict) || value_->is_object(kOrderedDict); }

  const PickleValue& expect(PickleKind kind) const {
    require<CorruptCheckpoint>(value_->is(kind), "{} is {}, expected {}", where_,
                               pickle_kind_name(value_->kind), pickle_kind_name(kind));
    return *value_;
  }
  std::string text() const { return std::string(expect(PickleKind::Str).text()); }
  std::int64_t count() const {
    const std::int64_t n = expect(PickleKind::Int).integer;
    require<CorruptCheckpoint>(n >= 0, "{} is {}, expected 0 or more", where_, n);
    return n;
  }
  /// An entry of a dict; None if absent.
  Node get(std::string_view key) const {
    static const PickleValue kNone{};
    const PickleValue* const found = value_->find(key);
    return {found ? *found : kNone, fmt::format("{}: {}", where_, key)};
  }
  /// Elements of a list; none if it is None.
  std::vector<Node> list() const {
    std::vector<Node> nodes;
    if (is_none()) return nodes;
    for (const PickleValue* item : expect(PickleKind::List).items())
      nodes.emplace_back(*item, fmt::format("{}[{}]", where_, nodes.size()));
    return nodes;
  }
  /// Entries of a dict with strings as keys; none if it is None.
  Named<Node> dict() const {
    Named<Node> nodes;
    if (is_none()) return nodes;
    if (!is_dict()) expect(PickleKind::Dict);
    const auto items = value_->items();
    for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
      const std::string key = Node(*items[i], "a key of " + where_).text();
      nodes.emplace_back(key, Node(*items[i + 1], fmt::format("{}: {}", where_, key)));
    }
    return nodes;
  }
  Named<Shape> shapes() const {
    Named<Shape> shapes;
    for (const auto& [name, node] : dict()) shapes.emplace_back(name, node.shape());
    return shapes;
  }

 private:
  Shape shape() const {
    const PickleValue* sizes = value_;
    if (sizes->is_object(kTorchSize) && sizes->args->items().size() == 1)
      sizes = sizes->args->items().front();
    Node(*sizes, where_).expect(PickleKind::Tuple);
    require<Unsupported>(sizes->items().size() <= Shape::kMaxDims,
                         "{}: {} dims; tessera reads at most {}", where_, sizes->items().size(),
                         int{Shape::kMaxDims});
    Shape shape;
    for (const PickleValue* size : sizes->items()) shape.push_back(Node(*size, where_).count());
    count_elements(shape, where_);
    return shape;
  }

  const PickleValue* value_;
  std::string where_;
};

bool is_tensor(const PickleValue& value) {
  return value.is(PickleKind::Object) && value.global->module.starts_with("torch._");
}

TorchTensor read_tensor(const TorchArchive& file, const Node& node) {
  return file.tensor(node.value(), node.where());
}

bool is_flat(const TorchTensor& tensor) {
  return tensor.shape.size() == 1 && (tensor.shape[0] <= 1 || tensor.strides[0] == 1);
}

TorchTensor read_flat(const TorchArchive& file, const Node& node) {
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
std::map<std::int64_t, Node> state_by_group(const Node& node) {
  std::map<std::int64_t, Node> states;
  if (node.value().is(PickleKind::List)) {
    for (const Node& state : node.list())
      states.emplace(static_cast<std::int64_t>(states.size()), state);
  } else if (!node.is_none()) {
    const Node state = node.get("state");
    if (state.is_none()) return states;
    const auto items = state.expect(PickleKind::Dict).items();
    for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
      const std::int64_t index = Node(*items[i], "a key of " + state.where()).count();
      states.emplace(index, Node(*items[i + 1], fmt::format("{}: {}", state.where(), index)));
    }
  }
  return states;
}

std::string step_of(const TorchArchive& file, const ByteRange& archive, const Node& node) {
  if (node.value().is(PickleKind::Int)) return fmt::format("{} ", node.value().integer);
  if (!is_tensor(node.value())) return "";
  const TorchTensor tensor = read_tensor(file, node);
  if (numel(tensor.shape) != 1 || tensor.carrier != DType::F32) return "";
  float step = 0;
  archive.read(tensor.begin, &step, sizeof(step));
  return fmt::format("{} ", step);
}

const PickleValue& root_dict(const TorchArchive& file, const ByteRange& archive,
                             std::string_view key) {
  require<Unsupported>(file.root().is(PickleKind::Dict) && file.root().find(key) != nullptr,
                       "{} has no \"{}\": it is not a file of a DeepSpeed checkpoint",
                       archive.name(), key);
  return file.root();
}

}  // namespace

DeepSpeedModel read_deepspeed_model(const ByteRange& archive) {
  const TorchArchive file(archive, kMaxStates, kStateGlobals);
  const Node root(root_dict(file, archive, "module"), archive.name());
  refuse_experts(!root.get("ds_autoep_layers").is_none() || !root.get("num_experts").is_none(),
                 archive.name());
  DeepSpeedModel model;
  for (const auto& [key, node] : root.dict())
    if (key != "module" && !node.is_none()) model.objects.push_back(key);
  const Node groups = root.get("param_shapes");
  model.zero = !groups.is_none();
  for (const Node& group : groups.list()) model.groups.push_back(group.shapes());
  model.frozen = root.get("frozen_param_shapes").shapes();
  for (const auto& [name, node] : root.get("frozen_param_fragments").dict())
    model.fragments.emplace_back(name, read_tensor(file, node));
  for (const auto& [name, node] : root.get("module").dict()) {
    if (is_tensor(node.value()))
      model.module.emplace_back(name, read_tensor(file, node));
    else
      model.objects.push_back("module." + name);
  }
  for (const Node& name : root.get("buffer_names").list()) model.buffers.push_back(name.text());
  for (const auto& [name, node] : root.get("shared_params").dict())
    model.shared.emplace_back(name, node.text());
  const Node step = root.get("global_steps");
  if (!step.is_none()) model.step = step.count();
  return model;
}

DeepSpeedOptimizer read_deepspeed_optimizer(const ByteRange& archive) {
  const TorchArchive file(archive, kMaxStates, kStateGlobals);
  const Node root = Node(root_dict(file, archive, "optimizer_state_dict"), archive.name())
                        .get("optimizer_state_dict");
  DeepSpeedOptimizer result;
  const Node weights3 = root.get("fp32_flat_groups");
  const bool parts_of_parameters = !weights3.is_none();
  const Node weights = parts_of_parameters ? weights3 : root.get("single_partition_of_fp32_groups");
  require<Unsupported>(!weights.is_none(),
                       "{} has neither fp32_flat_groups nor single_partition_of_fp32_groups, the "
                       "float32 weights of ZeRO",
                       archive.name());
  const Node stage = root.get("zero_stage");
  if (stage.is_none()) {
    result.stage = parts_of_parameters ? 3 : 1;  // BF16_Optimizer omits it
  } else {
    const bool is_enum = stage.value().is_object(kStage) && stage.value().args->items().size() == 1;
    const Node number(is_enum ? *stage.value().args->items().front() : stage.value(),
                      stage.where());
    const std::int64_t found = number.count();
    require<CorruptCheckpoint>(
        found >= 1 && found <= 3 && (found == 3) == parts_of_parameters,
        "{} is {}, but the weights are under \"{}\"", stage.where(), found,
        parts_of_parameters ? "fp32_flat_groups" : "single_partition_of_fp32_groups");
    result.stage = static_cast<int>(found);
  }
  const Node count = root.get("partition_count");
  if (count.value().is(PickleKind::List)) {
    for (const Node& of_group : count.list()) {
      refuse_experts(result.ranks != 0 && of_group.count() != result.ranks, archive.name());
      result.ranks = of_group.count();
    }
  } else {
    result.ranks = count.count();
  }
  refuse_experts(!root.get("ds_zero_partition_groups").is_none(), archive.name());
  for (const Node& group : root.get("param_alignment_paddings").list()) {
    std::vector<std::int64_t>& paddings = result.paddings.emplace_back();
    for (const Node& padding : group.list()) paddings.push_back(padding.count());
  }
  const std::map<std::int64_t, Node> states = state_by_group(
      root.get(parts_of_parameters ? "optimizer_state_dict" : "base_optimizer_state"));
  for (const Node& node : weights.list()) {
    const auto state = states.find(static_cast<std::int64_t>(result.parts.size()));
    DeepSpeedPart& part = result.parts.emplace_back();
    part.values = read_flat(file, node);
    if (state == states.end()) continue;
    for (const auto& [kind, value] : state->second.dict()) {
      if (kind == "step") {
        result.steps += step_of(file, archive, value);
      } else if (is_tensor(value.value())) {
        TorchTensor moment = read_tensor(file, value);
        // Other state, such as a norm, is not per element.
        if (is_flat(moment) && moment.shape[0] >= part.values.shape[0])
          part.moments.emplace_back(kind, std::move(moment));
      }
    }
  }
  return result;
}

}  // namespace tessera::io
