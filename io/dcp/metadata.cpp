#include "io/dcp/metadata.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "core/base/error.h"
#include "io/base/file.h"
#include "io/pickle/pickle_reader.h"
#include "io/pump/box.h"
#include "io/safetensors/header.h"
#include "io/torch/torch_archive.h"

namespace tessera::io {
namespace {

// Minimum bytes per chunk. Limits the work, because a small pickle can repeat one list of chunks.
constexpr std::int64_t kLeastBytesPerChunk = 16;
// Maximum number of chunks that share a row of dim 0; no training layout has more.
constexpr std::size_t kMaxSideBySide = 1024;
// Modules of the classes in PyTorch 2; kOld...: in PyTorch 1.13.
constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata";
constexpr std::string_view kOldModule = "torch.distributed._shard.checkpoint.metadata";
constexpr std::string_view kFiles = "torch.distributed.checkpoint.filesystem";
constexpr std::string_view kOldFiles = "torch.distributed._shard.checkpoint.filesystem";
constexpr std::string_view kSharded = "torch.distributed._shard.sharded_tensor.metadata";
// Megatron-core adds the plans of its ranks, which repeat what else the file says.
constexpr std::string_view kPlanner = "torch.distributed.checkpoint.planner";
constexpr std::string_view kMegatron = "megatron.core.dist_checkpointing.strategies.torch";
constexpr std::string_view kMegatronRoot = "MCoreMetadata";

std::vector<PickleGlobal> metadata_globals() {
  std::vector<PickleGlobal> known = {{kModule, "TensorProperties"},
                                     {kModule, "StorageMeta"},
                                     {kModule, "_MEM_FORMAT_ENCODING"},
                                     {kSharded, "TensorProperties"},
                                     {kSharded, "MEM_FORMAT_ENCODING"},
                                     {kFiles, "_StorageInfo"},
                                     {kOldFiles, "_StorageInfo"},
                                     {"torch.serialization", "_get_layout"},
                                     {"pathlib", "PosixPath"},
                                     {"pathlib", "PurePosixPath"},
                                     {"pathlib", "WindowsPath"},
                                     {"pathlib._local", "PosixPath"},
                                     {"pathlib._local", "WindowsPath"},
                                     {kPlanner, "SavePlan"},
                                     {kPlanner, "WriteItem"},
                                     {kPlanner, "WriteItemType"},
                                     {kPlanner, "TensorWriteData"},
                                     {kPlanner, "BytesIOWriteData"},
                                     {kMegatron, "MCoreSavePlan"},
                                     {kMegatron, kMegatronRoot},
                                     kTorchSize,
                                     kOrderedDict};
  for (const std::string_view module : {kModule, kOldModule}) {
    for (const char* name : {"Metadata", "TensorStorageMetadata", "BytesStorageMetadata",
                             "ChunkStorageMetadata", "MetadataIndex"}) {
      known.push_back({module, name});
    }
  }
  for (const TorchDType& dtype : kTorchDTypes) known.push_back({"torch", dtype.name});
  return known;
}

/// Storage locations of chunks, by tensor name and offsets.
class StorageLocations {
 public:
  StorageLocations(const PickleReader& storage_data, std::vector<std::string>& files)
      : files_(files) {
    storage_data.for_each([&](const PickleValue& key, const PickleValue& value) {
      const PickleReader index(key, storage_data.where());
      index.expect_object("MetadataIndex");
      const PickleReader fqn = index.at("fqn");
      const PickleReader offset = index.get("offset");
      if (offset.is_none()) return;  // not a tensor
      const std::string where = fmt::format("{}: {}", storage_data.where(), fqn.text());
      const Shape offsets = offset.shape();
      require<CorruptCheckpoint>(
          locations_.emplace(std::pair(fqn.text(), offsets.str()), PickleReader(value, where))
              .second,
          "{}: the chunk at {} is stored twice", where, offsets);
    });
  }

  void locate(std::string_view name, StoredBlock& chunk, const std::string& where) {
    const auto found = locations_.find(std::pair(name, chunk.box.offsets.str()));
    require<CorruptCheckpoint>(found != locations_.end(), "{}: the chunk at {} is not stored",
                               where, chunk.box.offsets);
    const PickleReader& info = found->second;
    info.expect_object("_StorageInfo");
    const PickleReader transforms = info.get("transform_descriptors");
    if (!transforms.is_none()) {
      const bool none =
          (transforms.value().is(PickleKind::List) || transforms.value().is(PickleKind::Tuple)) &&
          transforms.value().items().empty();
      require<Unsupported>(none,
                           "{}: compressed or otherwise transformed data, which tessera does not "
                           "read",
                           info.where());
    }
    chunk.file = file_index(info.at("relative_path"));
    chunk.offset = info.at("offset").integer();
    chunk.length = info.at("length").integer(1);
  }

 private:
  std::uint32_t file_index(const PickleReader& path) {
    const std::string_view name = path.text();
    if (name.find('\0') != std::string_view::npos) path.fail("a file name contains a NUL");
    if (!is_plain_name(name)) path.fail("\"{}\" is not a plain file name", name.substr(0, 300));
    const auto [entry, is_new] = numbers_.emplace(name, static_cast<std::uint32_t>(files_.size()));
    if (is_new) files_.emplace_back(name);
    return entry->second;
  }

  std::vector<std::string>& files_;
  std::map<std::pair<std::string_view, std::string>, PickleReader> locations_;
  std::unordered_map<std::string_view, std::uint32_t> numbers_;
};

// State of TensorProperties: dtype, layout, requires_grad, memory format, pin_memory[, strides]
std::string read_dtype(const PickleReader& properties) {
  properties.expect_object("TensorProperties");
  const PickleValue* const state = properties.value().state;
  if (state == nullptr || !state->is(PickleKind::Tuple) || state->items().size() < 2) {
    properties.fail("expected a tuple of dtype, layout and others");
  }
  const PickleReader dtype(*state->items()[0], properties.where());
  const PickleGlobal& global = *dtype.expect(PickleKind::Global).global;
  if (global.module != "torch") dtype.fail("{}.{} is not a dtype", global.module, global.name);
  const PickleReader layout(*state->items()[1], properties.where());
  layout.expect_object("_get_layout");
  const auto args = layout.value().args->items();
  if (args.size() != 1) layout.fail("a layout of {} values", args.size());
  const std::string_view name = PickleReader(*args[0], layout.where()).text();
  require<Unsupported>(name == "torch.strided", "{}: layout {}; tessera reads dense tensors",
                       layout.where(), name);
  return std::string(global.name);
}

}  // namespace

void check_boxes(const Shape& shape, std::vector<StoredBlock>& chunks, const std::string& where) {
  std::erase_if(chunks, [&](const StoredBlock& chunk) {
    return count_elements(chunk.box.shape, where) == 0;
  });
  std::sort(chunks.begin(), chunks.end(), [](const StoredBlock& a, const StoredBlock& b) {
    return std::ranges::lexicographical_compare(a.box.offsets, b.box.offsets);
  });
  // Some planners list a replicated chunk once per rank, but store it once.
  const auto same_box = [](const StoredBlock& a, const StoredBlock& b) { return a.box == b.box; };
  chunks.erase(std::unique(chunks.begin(), chunks.end(), same_box), chunks.end());
  std::vector<const Box*> boxes;
  for (const StoredBlock& chunk : chunks) boxes.push_back(&chunk.box);
  check_boxes(shape, boxes, kMaxSideBySide, where);
}

DcpMetadata parse_dcp_metadata(std::string text, const std::string& source) {
  const std::int64_t max_chunks = static_cast<std::int64_t>(text.size()) / kLeastBytesPerChunk;
  static const std::vector<PickleGlobal> kKnown = metadata_globals();
  const Pickle pickle(std::move(text), kKnown, source);
  const PickleReader root(pickle.root(), source);
  if (!root.is_object(kMegatronRoot)) root.expect_object("Metadata");
  DcpMetadata metadata;
  StorageLocations locations(root.at("storage_data"), metadata.files);
  std::int64_t visited = 0;
  const PickleReader entries = root.at("state_dict_metadata");
  entries.for_each([&](const PickleValue& key, const PickleValue& value) {
    const std::string name(PickleReader(key, entries.where()).text());
    const std::string where = fmt::format("{}: tensor {}", source, name.substr(0, kMaxTensorName));
    require<CorruptCheckpoint>(
        !name.empty() && name.size() <= kMaxTensorName && name.find('\0') == std::string::npos,
        "{}: a name has {} bytes or a NUL; 1 to {} bytes are accepted", source, name.size(),
        kMaxTensorName);
    const PickleReader entry(value, where);
    if (entry.is_object("BytesStorageMetadata")) {
      metadata.objects.push_back(name);
      return;
    }
    entry.expect_object("TensorStorageMetadata");
    DcpTensor tensor;
    tensor.dtype = read_dtype(entry.at("properties"));
    tensor.shape = entry.at("size").shape();
    const PickleReader chunks = entry.at("chunks");
    for (const PickleValue* each : chunks.expect(PickleKind::List).items()) {
      require<CorruptCheckpoint>(++visited <= max_chunks,
                                 "{}: more than {} chunks, too many for a file of its size", source,
                                 max_chunks);
      const PickleReader chunk(*each, where);
      chunk.expect_object("ChunkStorageMetadata");
      tensor.chunks.push_back({{chunk.at("offsets").shape(), chunk.at("sizes").shape()}});
    }
    check_boxes(tensor.shape, tensor.chunks, where);
    for (StoredBlock& chunk : tensor.chunks) locations.locate(name, chunk, where);
    require<CorruptCheckpoint>(metadata.tensors.emplace(name, std::move(tensor)).second,
                               "{}: duplicate tensor {}", source, name);
  });

  // Path of keys to each entry in the saved dict of dicts.
  const PickleReader paths = root.get("planner_data");
  if (paths.value().is(PickleKind::Dict)) {
    paths.for_each([&](const PickleValue& key, const PickleValue& path) {
      if (!key.is(PickleKind::Str) || !path.is(PickleKind::Tuple) || path.items().size() < 2)
        return;
      const auto tensor = metadata.tensors.find(std::string(key.text()));
      if (tensor != metadata.tensors.end() && path.items()[0]->is(PickleKind::Str)) {
        tensor->second.top_key = path.items()[0]->text();
      }
    });
  }
  return metadata;
}

}  // namespace tessera::io
