#include "io/hf/parts_source.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/base/error.h"

namespace tessera::io {
namespace {

// The chunk's box in the whole tensor.
Box box_of(const Chunk& chunk, const Shape& shape) {
  if (chunk.box) return *chunk.box;
  Shape none = shape;
  for (int i = 0; i < none.size(); ++i) none[i] = 0;
  return {none, shape};
}

std::int64_t row_size(const Shape& shape) {
  Shape row = shape;
  row[0] = 1;
  return numel(row);
}

Dims without_first(const Dims& dims) {
  return Dims(dims.begin() + 1, static_cast<std::size_t>(dims.size() - 1));
}

}  // namespace

TensorRecord join_records(const std::vector<std::shared_ptr<const TensorRecord>>& parts) {
  TensorRecord joined = *parts.front();
  if (parts.size() == 1) return joined;
  require<InternalError>(!joined.addend, "a tensor with an addend is joined");
  joined.chunks.clear();
  joined.shape[0] = 0;
  for (const auto& part : parts) {
    for (Chunk chunk : part->chunks) {
      Box box = box_of(chunk, part->shape);
      box.offsets[0] += joined.shape[0];
      chunk.box = box;
      joined.chunks.push_back(std::move(chunk));
    }
    joined.shape[0] += part->shape[0];
  }
  return joined;
}

TensorRecord rows_of_record(const TensorRecord& whole, std::int64_t begin, std::int64_t rows,
                            StorageChecks& checks, const std::string& name) {
  TensorRecord part{whole.dtype,
                    whole.shape,
                    {},
                    whole.addend,
                    whole.addend_begin + begin * row_size(whole.shape)};
  part.shape[0] = rows;
  for (Chunk chunk : whole.chunks) {
    const Box box = box_of(chunk, whole.shape);
    const std::int64_t top = std::max(begin, box.offsets[0]);
    const std::int64_t bottom = std::min(begin + rows, box.offsets[0] + box.shape[0]);
    if (top >= bottom) continue;
    // Elements of the box in these rows.
    const std::int64_t first = (top - box.offsets[0]) * row_size(box.shape);
    const std::int64_t last = (bottom - box.offsets[0]) * row_size(box.shape);
    const std::int64_t from = std::max(chunk.begin, first), to = std::min(chunk.end, last);
    if (from >= to) continue;
    Box own = box;
    own.offsets[0] = top - begin;
    own.shape[0] = bottom - top;
    const std::shared_ptr<const ChunkStorage> stored = chunk.storage;
    const bool is_strided = stored && stored->strides;
    if (from != chunk.begin || to != chunk.end) {
      require<Unsupported>(!is_strided || (from == first && to == last),
                           "{}: a tensor that is stored transposed, of which rows are needed; save "
                           "its .contiguous()",
                           name);
      chunk.storage = std::make_shared<const ChunkStorage>(
          ChunkStorage{own.shape, is_strided ? stored->strides : std::nullopt,
                       stored ? stored->checked_begin : chunk.byte_begin,
                       stored ? stored->checked_end : chunk.byte_end,
                       stored ? stored->check : checks.at(chunk, chunk.byte_begin)});
    }
    chunk.byte_begin +=
        (is_strided ? (top - box.offsets[0]) * (*stored->strides)[0] : from - chunk.begin) *
        whole.width();
    chunk.byte_end = chunk.byte_begin + (to - from) * whole.width();
    chunk.begin = from - first;
    chunk.end = to - first;
    if (own.shape != part.shape)
      chunk.box = own;
    else
      chunk.box.reset();
    part.chunks.push_back(std::move(chunk));
  }
  return part;
}

TensorRecord item_of_record(const TensorRecord& whole, std::int64_t item, StorageChecks& checks,
                            const std::string& name) {
  TensorRecord part = rows_of_record(whole, item, 1, checks, name);
  part.shape = without_first(part.shape);
  for (Chunk& chunk : part.chunks) {
    if (chunk.box)
      chunk.box = Box{without_first(chunk.box->offsets), without_first(chunk.box->shape)};
    if (!chunk.storage) continue;
    ChunkStorage storage = *chunk.storage;
    storage.shape = without_first(storage.shape);
    if (storage.strides) storage.strides = without_first(*storage.strides);
    chunk.storage = std::make_shared<const ChunkStorage>(storage);
  }
  return part;
}

TensorRecord transpose_record(const TensorRecord& whole, StorageChecks& checks) {
  require<InternalError>(whole.shape.size() == 2 && !whole.addend, "not a matrix without addend");
  const auto swapped = [](const Dims& dims) { return Dims{dims[1], dims[0]}; };
  TensorRecord result{whole.dtype, swapped(whole.shape), whole.chunks};
  for (Chunk& chunk : result.chunks) {
    const Box box = box_of(chunk, whole.shape);
    require<InternalError>(chunk.begin == 0 && chunk.end == numel(box.shape),
                           "a chunk with part of its box is transposed");
    const auto stored = chunk.storage;
    const bool is_strided = stored && stored->strides;
    chunk.box = Box{swapped(box.offsets), swapped(box.shape)};
    chunk.storage = std::make_shared<const ChunkStorage>(ChunkStorage{
        chunk.box->shape, swapped(is_strided ? *stored->strides : contiguous_strides(box.shape)),
        stored ? stored->checked_begin : chunk.byte_begin,
        stored ? stored->checked_end : chunk.byte_end,
        stored ? stored->check : checks.at(chunk, chunk.byte_begin)});
  }
  return result;
}

void PartsSource::add(const TensorInfo& info, const TensorSlice& part) {
  if (parts_.emplace(info.name, part).second) tensors_.push_back(info);
}

std::shared_ptr<const TensorRecord> PartsSource::record(const std::string& name) const {
  const auto found = parts_.find(name);
  require(found != parts_.end(), "{} holds no tensor {}", path().string(), name);
  const TensorSlice& part = found->second;
  auto record = whole_.record(part.of);
  const std::string title = fmt::format("{}: {}", path().string(), part.of);
  if (part.item >= 0)
    record =
        std::make_shared<const TensorRecord>(item_of_record(*record, part.item, checks_, title));
  if (part.rows == record->shape[0]) return record;
  return std::make_shared<const TensorRecord>(
      rows_of_record(*record, part.begin, part.rows, checks_, title));
}

std::unique_ptr<PartsSource> split_model(const HfFamily& family, const Json& config,
                                         const TensorSource& model, LoadPolicy policy) {
  std::map<std::string, DType> dtypes;
  for (const TensorInfo& info : model.tensors()) dtypes.emplace(info.name, info.dtype);
  auto parts = std::make_unique<PartsSource>(model);
  for (const HfTensor& tensor : family.tensors(config)) {
    const auto dtype = dtypes.find(tensor.info.name);
    if (dtype == dtypes.end() && policy != LoadPolicy::Exact) continue;
    require(dtype != dtypes.end(), "{} holds no tensor {}", model.path().string(),
            tensor.info.name);
    std::int64_t begin = 0;
    for (const HfTensor::Part& part : tensor.parts) {
      parts->add({part.name, tensor.shape_of(part), dtype->second},
                 {tensor.info.name, -1, begin, part.rows});
      begin += part.rows;
    }
  }
  return parts;
}

}  // namespace tessera::io
