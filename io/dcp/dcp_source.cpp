#include "io/dcp/dcp_source.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/base/open_files.h"
#include "io/dcp/metadata.h"
#include "io/dcp/shard_names.h"
#include "io/dcp/torch_tensor.h"
#include "io/pump/box.h"
#include "io/safetensors/dtype.h"
#include "io/safetensors/header.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kMaxMetadata = std::int64_t{256} << 20;
constexpr const char* kMetadataFile = ".metadata";
constexpr const char* kLightningFile = "meta.pt";
constexpr const char* kShardingInfo = "DCP_SHARDING_INFO";

/// Location of a chunk's elements in its file.
struct Location {
  std::int64_t begin = 0;                  ///< byte
  std::shared_ptr<const Strides> strides;  ///< null: row-major in its box
  /// Bytes covered by the checksum: the chunk, or the storage around it.
  std::int64_t checked_begin = 0, checked_end = 0;
  std::optional<std::uint32_t> crc32;
};

/// Null if the elements are row-major without gaps.
std::shared_ptr<const Strides> shared_strides(const TorchTensor& tensor) {
  std::int64_t expected = 1;
  for (int i = tensor.shape.size() - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) {
      return std::make_shared<const Strides>(tensor.strides);
    }
    expected *= tensor.shape[i];
  }
  return nullptr;
}

struct StoredTensor {
  Shape shape;
  std::string dtype_name;    // in PyTorch or safetensors
  bool is_readable = false;  // tessera has the dtype
  DType dtype = DType::F32;  // if not readable: the integer of its size
  std::vector<DcpChunk> chunks;
  std::size_t first_chunk = 0;  // index of chunks[0] among the chunks of all tensors
};

class Source final : public ShardedSource {
 public:
  Source(fs::path dir, std::string kind)
      : dir_(std::move(dir)), kind_(std::move(kind)), open_files_(dir_, Links::Follow) {}

  /// @param safetensors_dtype  safetensors name of the dtype; empty if there is none
  void add(const std::string& name, const std::string& dtype, std::string_view safetensors_dtype,
           const Shape& shape, std::vector<DcpChunk> chunks, const std::string& top_key) {
    const bool is_readable = dtype_from_safetensors(safetensors_dtype).has_value();
    const std::optional<DType> carrier = carrier_of_safetensors(safetensors_dtype);
    if (is_readable) {
      infos_.push_back({name, shape, *carrier});
      top_keys_.push_back(top_key);
    } else {
      unreadable_.push_back({name, dtype, top_key, shape, std::string(safetensors_dtype), carrier});
      if (!carrier) return;
    }
    const std::size_t n = chunks.size();
    tensors_.emplace(
        name, StoredTensor{shape, dtype, is_readable, *carrier, std::move(chunks), chunk_count_});
    chunk_count_ += n;
  }
  /// @param archives  whether chunks are torch.save archives, not bare elements
  void finish(std::vector<std::string> files, std::vector<std::string> objects, bool archives) {
    files_ = std::move(files);
    objects_ = std::move(objects);
    archives_ = archives;
    locations_.resize(chunk_count_);
  }
  void warn(std::vector<std::string> warnings) { warnings_ = std::move(warnings); }
  std::shared_ptr<const File> file(const std::string& name) const { return open_files_.get(name); }

  const fs::path& path() const override { return dir_; }
  const std::string& kind() const override { return kind_; }
  const std::vector<TensorInfo>& tensors() const override { return infos_; }
  const std::vector<std::string>& objects() const override { return objects_; }
  const std::vector<Unreadable>& unreadable() const override { return unreadable_; }
  const std::vector<std::string>& top_keys() const override { return top_keys_; }
  std::vector<std::string> warnings() const override { return warnings_; }

  File open_file(const std::string& name) const override { return open_files_.open(name); }

  std::shared_ptr<const TensorRecord> record(const std::string& name) const override {
    const StoredTensor& tensor = find(name);
    const auto width = static_cast<std::int64_t>(dtype_size(tensor.dtype));
    auto record = std::make_shared<TensorRecord>(TensorRecord{tensor.dtype, tensor.shape, {}});
    record->chunks.reserve(tensor.chunks.size());
    for (std::size_t i = 0; i < tensor.chunks.size(); ++i) {
      const DcpChunk& stored = tensor.chunks[i];
      const Location location = locate(name, tensor, i);
      Chunk& chunk = record->chunks.emplace_back();
      const std::int64_t n = numel(stored.box.shape);
      const bool one_run = is_one_run(stored.box, tensor.shape);
      chunk.file = files_[stored.file];
      chunk.byte_begin = location.begin;
      chunk.byte_end = location.begin + n * width;
      chunk.begin = one_run ? first_element(stored.box, tensor.shape) : 0;
      chunk.end = chunk.begin + n;
      if (!one_run) chunk.box = stored.box;
      chunk.crc64 = location.crc32.value_or(0);
      chunk.checksum = location.crc32 ? Checksum::Crc32 : Checksum::None;
      const bool checks_more =
          location.crc32 && location.checked_end - location.checked_begin != n * width;
      if (!location.strides && !checks_more) continue;
      ChunkStorage storage{stored.box.shape, {}, location.checked_begin, location.checked_end};
      if (location.strides) storage.strides = *location.strides;
      chunk.storage = std::make_shared<const ChunkStorage>(storage);
    }
    return record;
  }

 private:
  const StoredTensor& find(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found != tensors_.end()) return found->second;
    for (const Unreadable& other : unreadable_) {
      if (other.name == name) refuse_dtype(name, other.dtype);
    }
    throw InvalidArgument("{} holds no tensor {}", dir_.string(), name);
  }
  [[noreturn]] void refuse_dtype(const std::string& name, const std::string& dtype) const {
    throw Unsupported("{}: tensor {} has dtype {}, which tessera does not read", dir_.string(),
                      name, dtype);
  }

  // Reads the archive's directory on first use; two threads may do so concurrently.
  Location locate(const std::string& name, const StoredTensor& tensor, std::size_t i) const {
    const DcpChunk& chunk = tensor.chunks[i];
    if (!archives_) return {chunk.offset, nullptr, 0, 0, std::nullopt};
    const std::size_t number = tensor.first_chunk + i;
    {
      const std::lock_guard lock(mutex_);
      if (locations_[number]) return *locations_[number];
    }
    const auto file = open_files_.get(files_[chunk.file]);
    const ByteRange archive(*file, chunk.offset, chunk.length);
    const TorchTensor stored = read_torch_tensor(archive);
    require<CorruptCheckpoint>(stored.shape == chunk.box.shape && stored.dtype == tensor.dtype_name,
                               "{}: tensor {} has a chunk of {} {} at {}, but its archive holds {} "
                               "{}",
                               archive.name(), name, tensor.dtype_name, chunk.box.shape,
                               chunk.box.offsets, stored.dtype, stored.shape);
    Location location{chunk.offset + stored.begin, shared_strides(stored),
                      chunk.offset + stored.storage_begin, chunk.offset + stored.storage_end,
                      stored.crc32};
    const std::lock_guard lock(mutex_);
    locations_[number] = location;
    return location;
  }

  fs::path dir_;
  std::string kind_;
  std::vector<TensorInfo> infos_;
  std::vector<std::string> top_keys_, objects_, files_, warnings_;
  std::vector<Unreadable> unreadable_;
  std::map<std::string, StoredTensor> tensors_;
  std::size_t chunk_count_ = 0;
  bool archives_ = false;
  mutable OpenFiles open_files_;
  mutable std::mutex mutex_;  // guards locations_
  mutable std::vector<std::optional<Location>> locations_;
};

std::vector<std::string> list_files(const fs::path& dir) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator items(dir, error);
  for (; !error && items != fs::directory_iterator(); items.increment(error)) {
    names.push_back(items->path().filename().string());
  }
  require<IoError>(!error, "cannot list {}: {}", dir.string(), error.message());
  std::sort(names.begin(), names.end());
  return names;
}

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

// Offsets of each part in its tensor, by name.
Json sharding_info(const SafetensorsHeader& header, const std::string& path) {
  const auto found = header.metadata.find(kShardingInfo);
  require<CorruptCheckpoint>(found != header.metadata.end(),
                             "{}: its metadata has no {} (offsets of its parts)", path,
                             kShardingInfo);
  return parse_json(found->second, fmt::format("{}: {}", path, kShardingInfo));
}

Shape saved_offsets(const JsonReader& info, const SafetensorsEntry& entry) {
  const JsonReader list = info.at(entry.name).at("saved_offsets");
  require<CorruptCheckpoint>(list.array_size() == static_cast<std::size_t>(entry.shape.size()),
                             "{}: {} offsets for shape {}", list.where(), list.array_size(),
                             entry.shape);
  Shape offsets;
  for (int i = 0; i < entry.shape.size(); ++i) {
    offsets.push_back(list.at(static_cast<std::size_t>(i)).integer());
    std::int64_t end = 0;
    require<CorruptCheckpoint>(!__builtin_add_overflow(offsets[i], entry.shape[i], &end),
                               "{}: the chunk at {} of shape {} ends past 2^63", list.where(),
                               offsets, entry.shape);
  }
  return offsets;
}

// Checks that an archive is long enough for all elements of its chunk.
void check_length(const DcpTensor& tensor, const DcpChunk& chunk, const std::string& where) {
  const std::optional<DType> dtype = carrier_of_safetensors(safetensors_from_torch(tensor.dtype));
  std::int64_t bytes = 0;
  require<CorruptCheckpoint>(
      !dtype || (!__builtin_mul_overflow(numel(chunk.box.shape),
                                         static_cast<std::int64_t>(dtype_size(*dtype)), &bytes) &&
                 bytes <= chunk.length),
      "{}: the chunk at {} of shape {} does not fit in {} bytes", where, chunk.box.offsets,
      chunk.box.shape, chunk.length);
}

}  // namespace

bool is_dcp(const fs::path& dir) {
  if (is_there(dir / kMetadataFile)) return true;
  const std::vector<std::string> names = list_files(dir);
  return std::any_of(names.begin(), names.end(),
                     [](const std::string& name) { return name.ends_with(".distcp"); });
}

std::unique_ptr<ShardedSource> open_dcp(const fs::path& dir) {
  const fs::path metadata_path = dir / kMetadataFile;
  require<CorruptCheckpoint>(is_there(metadata_path),
                             "{} has shards, but no {}: PyTorch writes it last, so this save was "
                             "not finished",
                             dir.string(), kMetadataFile);
  DcpMetadata metadata =
      parse_dcp_metadata(read_file(metadata_path, kMaxMetadata), metadata_path.string());
  auto source = std::make_unique<Source>(
      dir, is_there(dir / kLightningFile) ? "Lightning FSDP (PyTorch DCP)" : "PyTorch DCP");
  std::vector<std::int64_t> needed(metadata.files.size());
  for (auto& [name, tensor] : metadata.tensors) {
    for (const DcpChunk& chunk : tensor.chunks) {
      std::int64_t end = 0;
      require<CorruptCheckpoint>(!__builtin_add_overflow(chunk.offset, chunk.length, &end),
                                 "{}: tensor {} has {} bytes at {}, past 2^63",
                                 metadata_path.string(), name, chunk.length, chunk.offset);
      check_length(tensor, chunk, fmt::format("{}: tensor {}", metadata_path.string(), name));
      needed[chunk.file] = std::max(needed[chunk.file], end);
    }
    source->add(name, tensor.dtype, safetensors_from_torch(tensor.dtype), tensor.shape,
                std::move(tensor.chunks), tensor.top_key);
  }
  for (std::size_t i = 0; i < needed.size(); ++i) {
    const fs::path path = dir / metadata.files[i];
    require<CorruptCheckpoint>(is_there(path), "{} is missing; {} lists it", path.string(),
                               metadata_path.string());
    const std::int64_t size = source->file(metadata.files[i])->size();
    require<CorruptCheckpoint>(size >= needed[i],
                               "{} has {} bytes, but {} needs at least {}: it was truncated or "
                               "replaced",
                               path.string(), size, metadata_path.string(), needed[i]);
  }
  source->finish(std::move(metadata.files), std::move(metadata.objects), true);
  return source;
}

bool is_dcp_safetensors(const fs::path& dir) {
  if (is_there(dir / "model.safetensors") || is_there(dir / "model.safetensors.index.json")) {
    return false;
  }
  const std::vector<std::string> names = list_files(dir);
  return std::any_of(names.begin(), names.end(), is_dcp_shard_name);
}

std::unique_ptr<ShardedSource> open_dcp_safetensors(const fs::path& dir,
                                                    std::optional<std::int64_t> shards) {
  struct Found {
    std::string dtype;
    Shape shape;  // of the chunks so far
    std::vector<DcpChunk> chunks;
  };
  std::map<std::string, Found> tensors;
  DcpShards found_shards = find_dcp_shards(list_files(dir), dir, shards);
  auto source = std::make_unique<Source>(dir, "PyTorch DCP as safetensors");
  source->warn(std::move(found_shards.warnings));
  const std::vector<std::string>& files = found_shards.names;
  for (std::size_t f = 0; f < files.size(); ++f) {
    const std::string& name = files[f];
    const std::string path = (dir / name).string();
    const SafetensorsHeader header = read_safetensors_header(*source->file(name));
    const Json info = sharding_info(header, path);
    const JsonReader offsets(info, fmt::format("{}: {}", path, kShardingInfo));
    for (const SafetensorsEntry& entry : header.tensors) {
      const Box box{saved_offsets(offsets, entry), entry.shape};
      const auto [found, is_new] =
          tensors.try_emplace(entry.name, Found{entry.stored_dtype, entry.shape, {}});
      Found& tensor = found->second;
      require<CorruptCheckpoint>(
          tensor.dtype == entry.stored_dtype && tensor.shape.size() == box.shape.size(),
          "{}: tensor {} is {} of {} dims, but {} of {} in another file", path, entry.name,
          entry.stored_dtype, box.shape.size(), tensor.dtype, tensor.shape.size());
      for (int i = 0; i < box.shape.size(); ++i) {
        tensor.shape[i] = std::max(tensor.shape[i], box.offsets[i] + box.shape[i]);
      }
      tensor.chunks.push_back(
          {box, static_cast<std::uint32_t>(f), entry.begin, entry.end - entry.begin});
    }
  }
  for (auto& [name, tensor] : tensors) {
    check_boxes(tensor.shape, tensor.chunks, fmt::format("{}: tensor {}", dir.string(), name));
    source->add(name, tensor.dtype, tensor.dtype, tensor.shape, std::move(tensor.chunks), "");
  }
  source->finish(std::move(found_shards.names), {}, false);
  return source;
}

}  // namespace tessera::io
