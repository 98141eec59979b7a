#include "io/source/sharded_source.h"

#include "core/base/error.h"
#include "io/pump/box.h"
#include "io/safetensors/dtype.h"

namespace tessera::io {
namespace {

/// Strides of a tensor; null if the elements are row-major without gaps.
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

}  // namespace

void ShardedSource::add(const std::string& name, const std::string& dtype,
                        std::string_view safetensors_dtype, const Shape& shape,
                        std::vector<StoredBlock> blocks, const std::string& top_key) {
  const std::optional<DType> carrier = carrier_of_safetensors(safetensors_dtype);
  if (dtype_from_safetensors(safetensors_dtype)) {
    infos_.push_back({name, shape, *carrier});
    top_keys_.push_back(top_key);
  } else {
    unreadable_.push_back({name, dtype, top_key, shape, std::string(safetensors_dtype), carrier,
                           blocks.empty() ? std::nullopt : std::optional(blocks[0].file)});
    if (!carrier) return;
  }
  const std::size_t n = blocks.size();
  tensors_.emplace(name, StoredTensor{shape, dtype, *carrier, std::move(blocks), block_count_});
  block_count_ += n;
}

void ShardedSource::finish(std::vector<std::string> files, std::vector<std::string> objects,
                           bool archives) {
  files_ = std::move(files);
  objects_ = std::move(objects);
  archives_ = archives;
  if (archives) locations_.resize(block_count_);
}

std::shared_ptr<const TensorRecord> ShardedSource::record(const std::string& name) const {
  const StoredTensor& tensor = find(name);
  const auto width = static_cast<std::int64_t>(dtype_size(tensor.dtype));
  auto record = std::make_shared<TensorRecord>(TensorRecord{tensor.dtype, tensor.shape, {}});
  record->chunks.reserve(tensor.blocks.size());
  for (std::size_t i = 0; i < tensor.blocks.size(); ++i) {
    const StoredBlock& stored = tensor.blocks[i];
    const Location location = locate(name, tensor, i);
    Chunk& chunk = record->chunks.emplace_back();
    const std::int64_t n = numel(stored.box.shape);
    const bool one_run = stored.flat || is_one_run(stored.box, tensor.shape);
    chunk.file = files_[stored.file];
    chunk.byte_begin = location.begin;
    chunk.byte_end = location.begin + n * width;
    chunk.begin = stored.flat ? stored.box.offsets[0]
                  : one_run   ? first_element(stored.box, tensor.shape)
                              : 0;
    chunk.end = chunk.begin + n;
    if (!one_run) chunk.box = stored.box;
    chunk.crc64 = location.crc32.value_or(0);
    chunk.checksum = location.crc32 ? Checksum::Crc32 : Checksum::None;
    const bool checks_more =
        location.crc32 && location.checked_end - location.checked_begin != n * width;
    if (!location.strides && !checks_more) continue;
    ChunkStorage storage{stored.box.shape,
                         {},
                         location.checked_begin,
                         location.checked_end,
                         checks_.at(chunk.file, location.checked_begin)};
    if (location.strides) storage.strides = *location.strides;
    chunk.storage = std::make_shared<const ChunkStorage>(storage);
  }
  return record;
}

const ShardedSource::StoredTensor& ShardedSource::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found != tensors_.end()) return found->second;
  for (const Unreadable& other : unreadable_) {
    require<Unsupported>(other.name != name,
                         "{}: tensor {} has dtype {}, which tessera does not read",
                         file_of(other).string(), name, other.dtype);
  }
  throw InvalidArgument("{} holds no tensor {}", where_, name);
}

// Reads the directory of the block's archive on first use. Threads may do so concurrently.
ShardedSource::Location ShardedSource::locate(const std::string& name, const StoredTensor& tensor,
                                              std::size_t i) const {
  const StoredBlock& block = tensor.blocks[i];
  const auto location_of = [&](const TorchTensor& stored, std::int64_t offset) {
    return Location{offset + stored.begin, shared_strides(stored), offset + stored.storage_begin,
                    offset + stored.storage_end, stored.crc32};
  };
  if (block.known) {
    Location location = location_of(*block.known, 0);
    location.begin += block.offset;
    return location;
  }
  if (!archives_) return {block.offset, nullptr, 0, 0, std::nullopt};
  const std::size_t number = tensor.first_block + i;
  {
    const std::lock_guard lock(mutex_);
    if (locations_[number]) return *locations_[number];
  }
  const auto file = open_files_.get(files_[block.file]);
  const ByteRange archive(*file, block.offset, block.length);
  const TorchTensor stored = read_torch_tensor(archive);
  require<CorruptCheckpoint>(stored.shape == block.box.shape && stored.dtype == tensor.dtype_name,
                             "{}: tensor {} has a chunk of {} {} at {}, but its archive holds {} "
                             "{}",
                             archive.name(), name, tensor.dtype_name, block.box.shape,
                             block.box.offsets, stored.dtype, stored.shape);
  Location location = location_of(stored, block.offset);
  const std::lock_guard lock(mutex_);
  locations_[number] = location;
  return location;
}

}  // namespace tessera::io
