// Sources of the formats: torch/_tensor.py, torch/distributed/tensor/_dtensor_spec.py,
// torch/distributed/device_mesh.py and torch/distributed/_shard/sharded_tensor/api.py.

#include "io/torch/saved_state.h"

#include <string_view>
#include <utility>

#include "core/base/error.h"
#include "io/pickle/pickle_reader.h"
#include "io/pump/box.h"
#include "io/safetensors/header.h"
#include "io/torch/mesh.h"

namespace tessera::io {
namespace {

constexpr int kMaxNesting = 16;           // dicts in dicts
constexpr std::size_t kMaxMeshAxes = 16;  // PyTorch's recipes have at most 5
// Minimum bytes of a pickle per entry of its dicts and per tensor. Limits the work, because a small
// pickle can repeat one dict.
constexpr std::int64_t kLeastEntry = 2, kLeastTensor = 32;
// Maximum bytes of all names per byte of the pickle. Names in nested dicts repeat those of the dicts.
constexpr std::int64_t kNameFactor = 16;

// Modules of a class differ between versions of PyTorch, so that its name alone counts.
bool is_torch(const PickleGlobal& global, std::string_view name) {
  return global.module.starts_with("torch.") && global.name == name;
}
bool is_torch(const PickleValue& value, std::string_view name) {
  return value.is(PickleKind::Object) && is_torch(*value.global, name);
}

// One size of a mesh: an integer, or a tuple of its factors.
std::int64_t axis_size(const PickleReader& size) {
  if (size.value().is(PickleKind::Int)) return size.integer(1);
  return count_elements(size.shape(), size.where());
}

std::vector<MeshAxis> read_mesh(const PickleReader& mesh, const TorchArchive& archive) {
  std::vector<MeshAxis> axes;
  const auto add = [&](std::int64_t size) {
    if (axes.size() == kMaxMeshAxes) mesh.fail("a mesh of more than {} axes", kMaxMeshAxes);
    axes.push_back({size});
  };
  const PickleReader ranks = mesh.get("mesh"), layout = mesh.get("_layout");
  if (!ranks.is_none()) {  // until 2.8: a tensor of ranks
    for (const std::int64_t size : archive.tensor(ranks.value(), ranks.where()).shape) add(size);
  } else if (const PickleReader parts = layout.get("axes"); !parts.is_none()) {
    for (std::size_t i = 0; i < parts.elements().size(); ++i)
      add(axis_size(parts.element(i).at("shape")));
  } else {  // 2.9
    const PickleReader sizes = layout.at("shape");
    if (sizes.value().is(PickleKind::Int)) {
      add(axis_size(sizes));
    } else {
      for (std::size_t i = 0; i < sizes.elements().size(); ++i) add(axis_size(sizes.element(i)));
    }
  }
  const PickleReader coordinates = mesh.at("_coordinate_on_dim");
  if (coordinates.is_none()) return {};  // a rank outside the mesh
  if (coordinates.elements().size() != axes.size()) {
    coordinates.fail("{} coordinates on a mesh of {} axes", coordinates.elements().size(),
                     axes.size());
  }
  for (std::size_t i = 0; i < axes.size(); ++i)
    axes[i].coordinate = coordinates.element(i).integer();
  return axes;
}

int read_dim(const PickleReader& dim, int dims) {
  const std::int64_t value = dim.integer(-dims);
  if (value >= dims) dim.fail("dim {} of {} dims is sharded", value, dims);
  return static_cast<int>(value < 0 ? value + dims : value);
}

void read_placements(const PickleReader& spec, int dims, std::vector<MeshAxis>& axes) {
  const PickleReader placements = spec.at("placements");
  if (placements.elements().size() != axes.size()) {
    placements.fail("{} placements on a mesh of {} axes", placements.elements().size(),
                    axes.size());
  }
  for (std::size_t i = 0; i < axes.size(); ++i) {
    const PickleReader placement = placements.element(i);
    const std::string_view name = placement.expect(PickleKind::Object).global->name;
    if (name == "Replicate") continue;
    require<Unsupported>(name == "Shard" || name == "_StridedShard",
                         "{}: {}, which tessera does not assemble; save the tensor with the "
                         "placements Shard or Replicate",
                         placement.where(), name);
    axes[i].dim = read_dim(placement.at("dim"), dims);
    if (name == "_StridedShard") axes[i].split_factor = placement.at("split_factor").integer(1);
  }
  // Since 2.10: the axes that shard a dim, in another order than that of the mesh.
  const PickleReader order = spec.get("shard_order");
  if (order.is_none()) return;
  for (std::size_t i = 0; i < order.elements().size(); ++i) {
    const PickleReader entry = order.element(i), list = entry.argument(1);
    const int dim = read_dim(entry.argument(0), dims);
    std::vector<std::size_t> before;
    for (std::size_t j = 0; j < list.elements().size(); ++j) {
      const auto axis = static_cast<std::size_t>(list.element(j).integer());
      if (axis >= axes.size() || axes[axis].dim != dim || before.size() == axes.size())
        list.fail("axis {} does not shard dim {}", axis, dim);
      axes[axis].split_factor = 1;
      for (const std::size_t other : before) {
        if (other > axis && __builtin_mul_overflow(axes[axis].split_factor, axes[other].size,
                                                   &axes[axis].split_factor)) {
          list.fail("sizes of the mesh have a product over 2^63");
        }
      }
      before.push_back(axis);
    }
  }
}

/// Reader of the values of one archive.
class StateReader {
 public:
  explicit StateReader(const ByteRange& archive)
      : archive_(archive, kMaxTorchDict, {}, UnknownGlobals::Inert),
        where_(archive.name()),
        budget_(archive_.pickle_bytes()),
        names_budget_(kNameFactor * archive_.pickle_bytes()) {}

  SavedState run() {
    const PickleValue& root = archive_.root();
    require<Unsupported>(is_dict(root),
                         "{} holds {}{}, expected a dict of tensors; save the state_dict() of a "
                         "model, not the model itself",
                         where_, pickle_kind_name(root.kind),
                         root.is(PickleKind::Object)
                             ? fmt::format(" of {}.{}", root.global->module, root.global->name)
                             : "");
    state_.lightning = root.find("pytorch-lightning_version") != nullptr;
    walk(root, "", "", 0);
    state_.hyperparameters = hyperparameters_.finish();
    return std::move(state_);
  }

 private:
  static bool is_dict(const PickleValue& value) {
    return value.is(PickleKind::Dict) || value.is_object(kOrderedDict);
  }
  static bool has_names(const PickleValue& dict) {
    for (std::size_t i = 0; i + 1 < dict.items().size(); i += 2)
      if (!dict.items()[i]->is(PickleKind::Str)) return false;
    return true;
  }

  void walk(const PickleValue& dict, const std::string& prefix, const std::string& top_key,
            int depth) {
    require<CorruptCheckpoint>(depth <= kMaxNesting, "{}: dicts nested deeper than {} levels",
                               where_, kMaxNesting);
    for (std::size_t i = 0; i + 1 < dict.items().size(); i += 2) {
      const PickleValue &key = *dict.items()[i], &value = *dict.items()[i + 1];
      require<Unsupported>(key.is(PickleKind::Str), "{}: a key is {}, expected a name", where_,
                           pickle_kind_name(key.kind));
      spend(kLeastEntry);
      require<CorruptCheckpoint>(!key.text().empty() &&
                                     prefix.size() + key.text().size() <= kMaxTensorName &&
                                     key.text().find('\0') == std::string_view::npos,
                                 "{}: a name has {} bytes or a NUL; 1 to {} bytes are accepted",
                                 where_, prefix.size() + key.text().size(), kMaxTensorName);
      const std::string name = prefix + std::string(key.text());
      names_budget_ -= std::ssize(name);
      require<CorruptCheckpoint>(names_budget_ >= 0,
                                 "{}: names that its nested dicts repeat are "
                                 "longer than {} times the pickle of {} bytes",
                                 where_, kNameFactor, archive_.pickle_bytes());
      if (!is_dict(value) || !has_names(value)) {
        add(value, name, top_key);
        continue;
      }
      const std::size_t tensors = state_.tensors.size(), objects = state_.objects.size();
      walk(value, name + ".", depth == 0 ? std::string(key.text()) : top_key, depth + 1);
      if (state_.tensors.size() > tensors) continue;
      state_.objects.resize(objects);  // one for a dict without tensors
      state_.objects.push_back(name);
    }
  }

  void add(const PickleValue& saved, const std::string& name, const std::string& top_key) {
    const PickleGlobal* const function = rebuild_call(saved).function;
    if (function == nullptr || !function->module.starts_with("torch.") ||
        !function->name.starts_with("_rebuild_")) {
      if (HyperparametersReader::is_one(name)) hyperparameters_.add(name, saved);
      return state_.objects.push_back(name);
    }
    const PickleReader value(without_parameter(saved), fmt::format("{}, {}", where_, name));
    require<Unsupported>(
        !name.ends_with("_flat_param"),
        "{}: a flat parameter of FSDP (LOCAL_STATE_DICT), and the file does not record which "
        "weights it consists of; save with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT",
        value.where());
    spend(kLeastTensor);
    SavedTensor& result = state_.tensors.emplace_back(SavedTensor{name, top_key, {}, {}, {}, {}});
    if (is_plain_tensor(saved)) {
      const TorchTensor tensor = archive_.tensor(saved, name);
      result.dtype = tensor.dtype;
      result.shape = tensor.shape;
      const Shape origin(std::vector<std::int64_t>(static_cast<std::size_t>(tensor.shape.size())));
      return add_stored(result, {origin, tensor.shape}, tensor);
    }
    if (function->name != "_rebuild_from_type_v2") {  // sparse, quantized, without memory
      result.dtype = function->name;
      result.shape = {0};
      return;
    }
    // Arguments: function, class, its arguments (class, dtype, size, strides, ...), state.
    const PickleGlobal& type = *value.argument(1).expect(PickleKind::Global).global;
    const bool is_dtensor = is_torch(type, "DTensor");
    require<Unsupported>(is_dtensor || is_torch(type, "ShardedTensor"),
                         "{}: a {}.{}, which tessera does not read; save plain tensors or DTensors",
                         value.where(), type.module, type.name);
    result.dtype = value.argument(2).element(1).expect(PickleKind::Global).global->name;
    result.shape = value.argument(2).element(2).shape();
    result.is_part = true;
    const PickleReader state = value.argument(3);
    if (is_dtensor) {
      const PickleReader spec = state.at("_spec");
      std::vector<MeshAxis> axes = read_mesh(spec.at("mesh"), archive_);
      if (axes.empty()) return;
      read_placements(spec, result.shape.size(), axes);
      add_part(result, state.at("_local_tensor"), local_box(result.shape, axes, value.where()));
      return;
    }
    const PickleReader shards = state.element(0);
    for (std::size_t i = 0; i < shards.elements().size(); ++i) {
      spend(kLeastTensor);
      const PickleReader metadata = shards.element(i).at("metadata");
      add_part(result, shards.element(i).at("tensor"),
               {metadata.at("shard_offsets").shape(), metadata.at("shard_sizes").shape()});
    }
  }

  static const PickleValue& without_parameter(const PickleValue& value) {
    const bool wrapped =
        is_torch(value, "_rebuild_parameter") || is_torch(value, "_rebuild_parameter_with_state");
    return wrapped && !value.args->items().empty() ? *value.args->items().front() : value;
  }

  void add_part(SavedTensor& result, const PickleReader& value, const Box& box) {
    const TorchTensor tensor = archive_.tensor(value.value(), result.name);
    if (tensor.shape != box.shape || tensor.dtype != result.dtype) {
      value.fail("a part of {} {} is stored for the box at {} of shape {} of a tensor of {}",
                 tensor.dtype, tensor.shape, box.offsets, box.shape, result.dtype);
    }
    if (!is_inside(box, result.shape)) {
      value.fail("the box at {} of shape {} is outside the shape {}", box.offsets, box.shape,
                 result.shape);
    }
    add_stored(result, box, tensor);
  }

  static void add_stored(SavedTensor& result, const Box& box, const TorchTensor& tensor) {
    if (numel(box.shape) > 0) result.stored.push_back({box, tensor});
  }

  void spend(std::int64_t bytes) {
    budget_ -= bytes;
    require<CorruptCheckpoint>(budget_ >= 0,
                               "{}: more entries than a pickle of {} bytes holds unless it repeats "
                               "them",
                               where_, archive_.pickle_bytes());
  }

  TorchArchive archive_;
  const std::string where_;
  HyperparametersReader hyperparameters_;
  std::int64_t budget_;  // bytes of the pickle that are left for entries and tensors
  std::int64_t names_budget_;
  SavedState state_;
};

}  // namespace

SavedState read_saved_state(const ByteRange& archive) {
  require_torch_archive(archive);
  return StateReader(archive).run();
}

}  // namespace tessera::io
