#include "io/dcp/metadata.h"

#include <algorithm>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "core/base/error.h"
#include "io/base/file.h"
#include "io/pickle/pickle_reader.h"
#include "io/pump/box.h"
#include "io/safetensors/header.h"
#include "io/source/hyperparameters.h"
#include "io/torch/torch_archive.h"

namespace tessera::io {
namespace {

// Minimum bytes per chunk. Limits the work, because a small pickle can repeat one list of chunks.
constexpr std::int64_t kLeastBytesPerChunk = 16;
// Maximum memory for the values of a pickle, by its size. Writers need 1 byte per byte.
constexpr std::int64_t kBaseMemory = std::int64_t{1} << 20, kMemoryPerByte = 16;
// Descriptor of PyTorch's extension ZStandard; a minor version may follow.
constexpr std::string_view kZstd = "stream.zstd/1";
constexpr std::size_t kMaxKey = 256;  // bytes of an outermost key; longer ones are not used
// Maximum number of chunks that share a row of dim 0; no training layout has more.
constexpr std::size_t kMaxSideBySide = 1024;
// Modules of the classes in PyTorch 2; kOld...: in PyTorch 1.13.
constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata";
constexpr std::string_view kOldModule = "torch.distributed._shard.checkpoint.metadata";
constexpr std::string_view kFiles = "torch.distributed.checkpoint.filesystem";
constexpr std::string_view kOldFiles = "torch.distributed._shard.checkpoint.filesystem";
constexpr std::string_view kSharded = "torch.distributed._shard.sharded_tensor.metadata";
// Root of Megatron-core's. It adds the plans of its ranks, which repeat what else the file says.
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

// Numbers of folded objects:
//   torch.Size            the sizes
//   ChunkStorageMetadata  offsets, then sizes
//   MetadataIndex         number of the name; then, for tensors and hyperparameters, 1 and the
//                         offsets
//   _StorageInfo          number of the path, offset, length, whether it is compressed
constexpr std::string_view kChunk = "ChunkStorageMetadata", kIndex = "MetadataIndex",
                           kInfo = "_StorageInfo";
using FoldedNumbers = std::vector<std::int64_t>;

Shape dims_of(std::span<const std::int64_t> numbers) { return {numbers.data(), numbers.size()}; }

Box read_box(const PickleReader& chunk) {
  if (chunk.value().is_folded(kChunk)) {
    const auto numbers = chunk.value().numbers();
    const std::size_t n = numbers.size() / 2;
    return {dims_of(numbers.first(n)), dims_of(numbers.last(n))};
  }
  chunk.expect_object(kChunk);
  return {chunk.at("offsets").shape(), chunk.at("sizes").shape()};
}

/// Distinct strings, numbered in the order of their first use.
class Strings {
 public:
  std::uint32_t number(std::string_view text) {
    const auto [entry, is_new] =
        numbers_.emplace(text, static_cast<std::uint32_t>(strings_.size()));
    if (is_new) strings_.push_back(&entry->first);
    return entry->second;
  }
  std::optional<std::uint32_t> find(const std::string& text) const {
    const auto found = numbers_.find(text);
    return found == numbers_.end() ? std::nullopt : std::optional(found->second);
  }
  const std::string& operator[](std::uint32_t number) const { return *strings_[number]; }

 private:
  std::unordered_map<std::string, std::uint32_t> numbers_;
  std::vector<const std::string*> strings_;
};

/// Storage locations of chunks, by tensor name and offsets. Collects them while the pickle is
/// parsed. Objects that cannot be read stay as they are, for errors that name the tensor.
class StorageLocations final : public PickleFolder {
 public:
  /// @param most  maximum number of locations
  StorageLocations(const std::string& source, std::int64_t most)
      : source_(source), most_(static_cast<std::size_t>(most)) {}

  bool fold(const PickleValue& object, FoldedNumbers& numbers) override {
    const bool is_size = *object.global == kTorchSize;
    if (!is_size && object.state == nullptr) return false;
    try {
      const PickleReader reader(object, source_);
      if (is_size) {
        append(reader.shape(), numbers);
      } else if (reader.is_object(kChunk)) {
        const Box box = read_box(reader);
        append(box.offsets, numbers);
        append(box.shape, numbers);
        return box.offsets.size() == box.shape.size();
      } else if (reader.is_object(kIndex)) {
        read_index(reader, numbers);
      } else if (reader.is_object(kInfo)) {
        read_info(reader, numbers);
      }
    } catch (const CorruptCheckpoint&) {
      return false;
    } catch (const Unsupported&) {
      return false;
    }
    return !numbers.empty() || is_size;
  }
  bool take(const PickleValue& key, const PickleValue& value) override {
    if (!key.is_folded(kIndex) || !value.is_folded(kInfo)) return false;
    add(key.numbers(), value.numbers());
    return true;
  }

  /// Adds the entries that were not taken, and sorts all.
  void finish(const PickleReader& storage_data) {
    storage_data.for_each([&](const PickleValue& key, const PickleValue& value) {
      FoldedNumbers index(key.is_folded(kIndex) ? key.numbers().begin() : key.numbers().end(),
                          key.numbers().end());
      if (index.empty()) read_index(PickleReader(key, storage_data.where()), index);
      if (index.size() == 1) return;  // another object
      const std::string where =
          fmt::format("{}: {}", storage_data.where(), names_[static_cast<std::uint32_t>(index[0])]);
      FoldedNumbers info;
      read_info(PickleReader(value, where), info);
      add(index, info);
    });
    std::ranges::sort(places_, [&](const Place& a, const Place& b) {
      return a.name != b.name ? a.name < b.name : precedes(offsets(a), offsets(b));
    });
    for (std::size_t i = 1; i < places_.size(); ++i) {
      const Place &a = places_[i - 1], &b = places_[i];
      require<CorruptCheckpoint>(a.name != b.name || !std::ranges::equal(offsets(a), offsets(b)),
                                 "{}: {}: the chunk at {} is stored twice", storage_data.where(),
                                 names_[a.name], dims_of(offsets(a)));
    }
  }

  /// Sets the places of all chunks of a tensor.
  void locate(const std::string& name, std::vector<StoredBlock>& chunks, const std::string& where,
              std::vector<std::string>& files) {
    const auto number = names_.find(name);
    std::vector<std::pair<std::uint32_t, std::int64_t>> places;  // file and offset
    for (StoredBlock& chunk : chunks) {
      const std::span wanted(chunk.box.offsets.begin(), chunk.box.offsets.end());
      const auto found = std::ranges::partition_point(places_, [&](const Place& place) {
        return !number || place.name < *number ||
               (place.name == *number && precedes(offsets(place), wanted));
      });
      require<CorruptCheckpoint>(found != places_.end() && found->name == *number &&
                                     std::ranges::equal(offsets(*found), wanted),
                                 "{}: the chunk at {} is not stored", where, chunk.box.offsets);
      if (found->path >= file_numbers_.size()) file_numbers_.resize(found->path + 1);
      auto& file = file_numbers_[found->path];
      if (!file) {
        file = static_cast<std::uint32_t>(files.size());
        files.push_back(paths_[found->path]);
      }
      chunk.file = *file;
      chunk.offset = found->offset;
      chunk.length = found->length;
      chunk.zstd = found->zstd != 0;
      places.emplace_back(chunk.file, chunk.offset);
    }
    // As if a rank's file name is damaged: its bytes are those of another rank.
    std::ranges::sort(places);
    const auto shared = std::ranges::adjacent_find(places);
    require<CorruptCheckpoint>(shared == places.end(), "{}: two chunks are both in byte {} of {}",
                               where, shared == places.end() ? 0 : shared->second,
                               shared == places.end() ? "" : files[shared->first]);
  }

 private:
  struct Place {
    std::uint32_t name = 0, path = 0;
    std::int64_t offset = 0, length = 0;
    std::uint64_t offsets_begin : 55 = 0, dims : 8 = 0;  // part of offsets_
    std::uint64_t zstd : 1 = 0;
  };

  static void append(const Shape& dims, FoldedNumbers& numbers) {
    numbers.insert(numbers.end(), dims.begin(), dims.end());
  }
  static bool precedes(std::span<const std::int64_t> a, std::span<const std::int64_t> b) {
    return std::ranges::lexicographical_compare(a, b);
  }
  std::span<const std::int64_t> offsets(const Place& place) const {
    return std::span(offsets_).subspan(place.offsets_begin, place.dims);
  }

  void read_index(const PickleReader& index, FoldedNumbers& numbers) {
    index.expect_object(kIndex);
    const PickleReader offset = index.get("offset");
    const std::string_view name = index.at("fqn").text();
    if (name.size() > kMaxTensorName) index.fail("a name of {} bytes", name.size());
    std::optional<Shape> offsets;
    if (!offset.is_none()) offsets = offset.shape();
    numbers.push_back(names_.number(name));
    if (!offsets && !HyperparametersReader::is_one(name)) return;
    numbers.push_back(1);
    if (offsets) append(*offsets, numbers);
  }
  void read_info(const PickleReader& info, FoldedNumbers& numbers) {
    if (info.value().is_folded(kInfo)) {
      numbers.assign(info.value().numbers().begin(), info.value().numbers().end());
      return;
    }
    info.expect_object(kInfo);
    const PickleReader transforms = info.get("transform_descriptors");
    std::int64_t zstd = 0;
    if (!transforms.is_none()) {
      const bool is_list =
          transforms.value().is(PickleKind::List) || transforms.value().is(PickleKind::Tuple);
      if (!is_list) transforms.fail("expected a list of names");
      for (const PickleValue* each : transforms.value().items()) {
        const std::string_view name = PickleReader(*each, transforms.where()).text();
        const bool is_zstd = name == kZstd || name.starts_with(std::string(kZstd) + ".");
        require<Unsupported>(is_zstd && zstd == 0,
                             "{}: data that an extension of PyTorch's writer transformed by {}; "
                             "tessera reads data that is plain or compressed once by {}",
                             info.where(), is_zstd ? "zstd twice" : name.substr(0, 300), kZstd);
        zstd = 1;
      }
    }
    const PickleReader path = info.at("relative_path");
    const std::string_view name = path.text();
    if (name.substr(0, 300).find('\0') != std::string_view::npos)
      path.fail("a file name contains a NUL");
    if (!is_plain_name(name)) path.fail("\"{}\" is not a plain file name", name.substr(0, 300));
    const std::int64_t offset = info.at("offset").integer(), length = info.at("length").integer(1);
    numbers.insert(numbers.end(), {paths_.number(name), offset, length, zstd});
  }
  void add(std::span<const std::int64_t> index, std::span<const std::int64_t> info) {
    if (index.size() == 1) return;  // another object
    require<CorruptCheckpoint>(places_.size() < most_,
                               "{}: more than {} stored chunks, too many for a file of its size",
                               source_, most_);
    const auto dims = index.subspan(2);
    places_.push_back({static_cast<std::uint32_t>(index[0]), static_cast<std::uint32_t>(info[0]),
                       info[1], info[2], offsets_.size(), dims.size(),
                       static_cast<std::uint64_t>(info[3])});
    offsets_.insert(offsets_.end(), dims.begin(), dims.end());
  }

  const std::string& source_;
  const std::size_t most_;
  Strings names_, paths_;
  std::vector<Place> places_;
  FoldedNumbers offsets_;
  std::vector<std::optional<std::uint32_t>> file_numbers_;  // by path; empty: holds no chunk yet
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

DcpMetadata parse_dcp_metadata(std::string_view text, const std::string& source) {
  return parse_dcp_metadata(ByteRange(text, source), source);
}

DcpMetadata parse_dcp_metadata(const ByteRange& bytes, const std::string& source) {
  const std::int64_t max_chunks = bytes.size() / kLeastBytesPerChunk;
  static const std::vector<PickleGlobal> kKnown = metadata_globals();
  StorageLocations locations(source, max_chunks);
  const Pickle pickle(bytes, kKnown, source, kBaseMemory + kMemoryPerByte * bytes.size(),
                      UnknownGlobals::Inert, &locations);
  const PickleReader root(pickle.root(), source);
  if (!root.is_object(kMegatronRoot)) root.expect_object("Metadata");
  DcpMetadata metadata;
  locations.finish(root.at("storage_data"));
  std::int64_t visited = 0;
  std::set<std::string_view> names;  // in the pickle, which may repeat one
  const PickleReader entries = root.at("state_dict_metadata");
  entries.for_each([&](const PickleValue& key, const PickleValue& value) {
    const std::string name(PickleReader(key, entries.where()).text());
    const std::string where = fmt::format("{}: tensor {}", source, name.substr(0, kMaxTensorName));
    require<CorruptCheckpoint>(
        !name.empty() && name.size() <= kMaxTensorName && name.find('\0') == std::string::npos,
        "{}: a name has {} bytes or a NUL; 1 to {} bytes are accepted", source, name.size(),
        kMaxTensorName);
    const PickleReader entry(value, where);
    require<CorruptCheckpoint>(names.insert(key.text()).second, "{}: duplicate entry {}", source,
                               name);
    if (entry.is_object("BytesStorageMetadata")) {
      metadata.objects.push_back(name);
      if (!HyperparametersReader::is_one(name)) return;
      std::vector<StoredBlock> place(1);
      locations.locate(name, place, where, metadata.files);
      metadata.hyperparameters.emplace_back(name, std::move(place[0]));
      return;
    }
    entry.expect_object("TensorStorageMetadata");
    DcpTensor tensor;
    tensor.dtype = read_dtype(entry.at("properties"));
    tensor.shape = entry.at("size").shape();
    const auto chunks = entry.at("chunks").expect(PickleKind::List).items();
    tensor.chunks.reserve(std::min(chunks.size(), static_cast<std::size_t>(max_chunks - visited)));
    for (const PickleValue* each : chunks) {
      require<CorruptCheckpoint>(++visited <= max_chunks,
                                 "{}: more than {} chunks, too many for a file of its size", source,
                                 max_chunks);
      tensor.chunks.push_back({read_box(PickleReader(*each, where))});
    }
    check_boxes(tensor.shape, tensor.chunks, where);
    locations.locate(name, tensor.chunks, where, metadata.files);
    metadata.tensors.emplace(name, std::move(tensor));
  });

  // Path of keys to each entry in the saved dict of dicts.
  const PickleReader paths = root.get("planner_data");
  if (paths.value().is(PickleKind::Dict)) {
    paths.for_each([&](const PickleValue& key, const PickleValue& path) {
      if (!key.is(PickleKind::Str) || key.text().size() > kMaxTensorName ||
          !path.is(PickleKind::Tuple) || path.items().size() < 2)
        return;
      const auto tensor = metadata.tensors.find(std::string(key.text()));
      if (tensor != metadata.tensors.end() && path.items()[0]->is(PickleKind::Str) &&
          path.items()[0]->text().size() <= kMaxKey) {
        tensor->second.top_key = path.items()[0]->text();
      }
    });
  }
  return metadata;
}

}  // namespace tessera::io
