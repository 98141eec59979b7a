#include "io/source/sharded_source.h"

#include "core/base/error.h"
#include "io/hf/parts_source.h"
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

Dims dims_from(const Dims& dims, int first) {
  return Dims(dims.begin() + first, static_cast<std::size_t>(dims.size() - first));
}

Dims first_dims(const Dims& dims, int count) {
  return Dims(dims.begin(), static_cast<std::size_t>(count));
}

std::string item_name(const std::string& of, const Shape& item) {
  std::string name = of;
  for (const std::int64_t position : item) name += fmt::format("[{}]", position);
  return name;
}

/// Cuts a block's part out of a stored tensor.
TorchTensor part_of(const TorchTensor& stored, const StoredBlock& block) {
  if (!block.lead) return stored;
  const int lead = block.lead->shape.size();
  TorchTensor part = stored;
  part.shape = dims_from(stored.shape, lead);
  part.strides = dims_from(stored.strides, lead);
  for (int i = 0; i < lead; ++i)
    part.begin += block.lead->offsets[i] * stored.strides[i] *
                  static_cast<std::int64_t>(dtype_size(stored.carrier));
  return part;
}

Shape stored_shape(const StoredBlock& block) {
  Shape shape = block.lead ? block.lead->shape : Shape{};
  for (const std::int64_t extent : block.box.shape) shape.push_back(extent);
  return shape;
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

// Adds items of a tensor that stacks them, with those of its blocks that they are in.
void ShardedSource::add_items(const std::string& name, const std::vector<Shape>& items) {
  const StoredTensor whole = find(name);
  const int lead = items.front().size();
  std::map<std::string, StoredTensor> added;
  for (const Shape& item : items)
    added.try_emplace(
        item_name(name, item),
        StoredTensor{dims_from(whole.shape, lead), whole.dtype_name, whole.dtype, {}});
  for (const StoredBlock& block : whole.blocks) {
    require<Unsupported>(!block.flat, "{}: {} is stored flat", dir_.string(), name);
    const Shape extents = first_dims(block.box.shape, lead);
    const Shape offsets = first_dims(block.box.offsets, lead);
    const std::int64_t positions = numel(extents);
    for (std::int64_t n = 0; n < positions; ++n) {
      Shape at = extents, item = offsets;
      for (std::int64_t i = lead - 1, rest = n; i >= 0; --i) {
        at[static_cast<int>(i)] = rest % extents[static_cast<int>(i)];
        item[static_cast<int>(i)] += at[static_cast<int>(i)];
        rest /= extents[static_cast<int>(i)];
      }
      const auto found = added.find(item_name(name, item));
      if (found == added.end()) continue;
      StoredBlock& part = found->second.blocks.emplace_back(block);
      part.box = {dims_from(block.box.offsets, lead), dims_from(block.box.shape, lead)};
      part.lead = std::make_shared<const Box>(Box{at, extents});
    }
  }
  for (auto& [key, tensor] : added) {
    tensor.first_block = block_count_;
    block_count_ += tensor.blocks.size();
    require<CorruptCheckpoint>(tensors_.emplace(key, std::move(tensor)).second,
                               "{}: {} is the name of a tensor, and of an item of {}",
                               dir_.string(), key, name);
  }
}

void ShardedSource::make(std::vector<MadeTensor> made) {
  std::map<std::string, std::vector<Shape>> used;  // items of each tensor
  for (const MadeTensor& tensor : made) used[tensor.of].push_back(tensor.item);
  std::map<std::string, TensorInfo> whole;
  std::vector<TensorInfo> infos;
  std::vector<std::string> keys;
  for (std::size_t i = 0; i < infos_.size(); ++i) {
    if (used.contains(infos_[i].name)) {
      whole.emplace(infos_[i].name, infos_[i]);
      continue;
    }
    infos.push_back(std::move(infos_[i]));
    keys.push_back(std::move(top_keys_[i]));
  }
  for (const auto& [name, items] : used)
    if (!items.front().empty()) add_items(name, items);
  if (archives_) locations_.resize(block_count_);
  for (MadeTensor& tensor : made) {
    const TensorInfo& of = whole.at(tensor.of);
    Shape shape = dims_from(of.shape, tensor.item.size());
    shape[0] = 0;
    for (const auto& [begin, rows] : tensor.rows) shape[0] += rows;
    if (tensor.transposed) shape = {shape[1], shape[0]};
    infos.push_back({tensor.name, shape, of.dtype});
    keys.emplace_back();
    std::string name = tensor.name;
    made_.emplace(std::move(name), std::move(tensor));
  }
  infos_ = std::move(infos);
  top_keys_ = std::move(keys);
}

std::string ShardedSource::title(const std::string& name) const {
  const auto made = made_.find(name);
  return made == made_.end()
             ? name
             : fmt::format("{} (of {})", name, item_name(made->second.of, made->second.item));
}

std::shared_ptr<const TensorRecord> ShardedSource::record(const std::string& name) const {
  const auto found = made_.find(name);
  if (found == made_.end()) return std::make_shared<const TensorRecord>(stored_record(name, false));
  const MadeTensor& made = found->second;
  const std::string of = item_name(made.of, made.item);
  const TensorRecord whole = stored_record(of, true);
  std::vector<std::shared_ptr<const TensorRecord>> parts;
  for (const auto& [begin, rows] : made.rows)
    parts.push_back(std::make_shared<const TensorRecord>(
        rows_of_record(whole, begin, rows, checks_, title(name))));
  TensorRecord joined = join_records(parts);
  return std::make_shared<const TensorRecord>(made.transposed ? transpose_record(joined, checks_)
                                                              : std::move(joined));
}

TensorRecord ShardedSource::stored_record(const std::string& name, bool boxes) const {
  const StoredTensor& tensor = find(name);
  const auto width = static_cast<std::int64_t>(dtype_size(tensor.dtype));
  TensorRecord record{tensor.dtype, tensor.shape, {}};
  record.chunks.reserve(tensor.blocks.size());
  for (std::size_t i = 0; i < tensor.blocks.size(); ++i) {
    const StoredBlock& stored = tensor.blocks[i];
    const Location location = locate(name, tensor, i);
    Chunk& chunk = record.chunks.emplace_back();
    const std::int64_t n = numel(stored.box.shape);
    const bool one_run = stored.flat || (!boxes && is_one_run(stored.box, tensor.shape));
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
    chunk.zstd = location.zstd;
    const bool checks_more =
        location.crc32 && location.checked_end - location.checked_begin != n * width;
    if (!location.strides && !checks_more) continue;
    ChunkStorage storage{stored.box.shape,
                         {},
                         location.checked_begin,
                         location.checked_end,
                         checks_.at(chunk, location.checked_begin)};
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
                    offset + stored.storage_end, stored.crc32};  // bytes of the file
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
  const TorchTensor stored = read_archive(name, tensor, block);
  const fs::path path = dir_ / files_[block.file];
  require<CorruptCheckpoint>(
      stored.shape == stored_shape(block) && stored.dtype == tensor.dtype_name,
      "{}, bytes {} to {}: tensor {} has a chunk of {} {} at {}, but its archive holds {} {}",
      path.string(), block.offset, block.offset + block.length, name, tensor.dtype_name,
      stored_shape(block), block.box.offsets, stored.dtype, stored.shape);
  Location location = location_of(part_of(stored, block), block.zstd ? 0 : block.offset);
  if (block.zstd) {
    location.zstd = std::make_shared<const ZstdItem>(ZstdItem{zstd_, {block.offset, block.length}});
  }
  const std::lock_guard lock(mutex_);
  locations_[number] = location;
  return location;
}

// Decodes a compressed archive completely, because its directory is at its end.
TorchTensor ShardedSource::read_archive(const std::string& name, const StoredTensor& tensor,
                                        const StoredBlock& block) const {
  const auto file = open_files_.get(files_[block.file]);
  const ZstdRange range{block.offset, block.length};
  if (!block.zstd) return read_torch_tensor(ByteRange(*file, range.offset, range.length));
  const std::pair key(block.file, range);
  {
    const std::lock_guard lock(mutex_);
    const auto found = decoded_.find(key);
    if (found != decoded_.end()) return found->second;
  }
  constexpr std::int64_t kMaxRest = std::int64_t{1} << 20;  // bytes besides the tensor's
  std::int64_t most = 0;
  const Shape shape = stored_shape(block);
  try {
    require<CorruptCheckpoint>(
        !__builtin_mul_overflow(numel(shape), static_cast<std::int64_t>(dtype_size(tensor.dtype)),
                                &most) &&
            !__builtin_add_overflow(most, kMaxRest, &most),
        "a chunk of shape {} has more than 2^63 bytes", shape);
    ZstdDecoder decoder(file, range);
    const ZstdEnds ends = read_zstd_ends(decoder, most);
    const TorchTensor stored =
        read_torch_tensor(ByteRange(ends.head, ends.tail, ends.size, decoder.name()));
    const std::lock_guard lock(mutex_);
    return decoded_.emplace(key, stored).first->second;
  } catch (const CorruptCheckpoint& error) {
    throw CorruptCheckpoint("tensor {}: {}", name, error.what());
  } catch (const Unsupported& error) {
    throw Unsupported("tensor {}: {}", name, error.what());
  }
}

}  // namespace tessera::io
