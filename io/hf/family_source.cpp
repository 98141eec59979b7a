#include "io/hf/family_source.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/source/load_policy.h"

namespace tessera::io {
namespace {

constexpr const char* kHead = "lm_head.weight";

// Names and roles of the tensors of tensors(), then of those of unreadable().
std::vector<TensorName> classify_all(const ShardedSource& source, const NameRules& rules) {
  std::vector<KeyedName> keyed;
  for (std::size_t i = 0; i < source.tensors().size(); ++i)
    keyed.push_back({source.tensors()[i].name, source.top_keys()[i]});
  for (const ShardedSource::Unreadable& tensor : source.unreadable())
    keyed.push_back({tensor.name, tensor.top_key});
  const NameNesting nesting = find_nesting(keyed);
  std::vector<TensorName> names;
  for (const KeyedName& name : keyed) names.push_back(classify(name, nesting, rules));
  return names;
}

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

}  // namespace

std::vector<TensorName> classify_tensors(const ShardedSource& source, const NameRules& rules) {
  std::vector<TensorName> names = classify_all(source, rules);
  names.resize(source.tensors().size());
  check_distinct(names, source.path().string());
  return names;
}

std::vector<TensorName> classify_unreadable(const ShardedSource& source, const NameRules& rules) {
  const std::vector<TensorName> names = classify_all(source, rules);
  return {names.begin() + static_cast<std::ptrdiff_t>(source.tensors().size()), names.end()};
}

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

TensorRecord rows_of_record(const TensorRecord& whole, std::int64_t begin, std::int64_t rows) {
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
    if (from != chunk.begin || to != chunk.end) {
      require<Unsupported>(!stored || !stored->strides,
                           "rows of a tensor that is stored transposed; write the model anew with "
                           "`tessera consolidate`, and use that");
      chunk.storage = std::make_shared<const ChunkStorage>(
          ChunkStorage{own.shape,
                       {},
                       stored ? stored->checked_begin : chunk.byte_begin,
                       stored ? stored->checked_end : chunk.byte_end,
                       stored ? stored->check : std::make_shared<StorageCheck>()});
    }
    chunk.byte_begin += (from - chunk.begin) * whole.width();
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

HfPartsSource::HfPartsSource(const HfFamily& family, const ModelSource& model) : model_(model) {
  std::map<std::string, const TensorInfo*> found;
  for (const TensorInfo& info : model.tensors()) found.emplace(info.name, &info);
  for (const HfTensor& tensor : family.tensors(model.config())) {
    const auto info = found.find(tensor.info.name);
    require(info != found.end(), "{} holds no tensor {}", model.path().string(), tensor.info.name);
    std::int64_t begin = 0;
    for (const HfTensor::Part& part : tensor.parts) {
      rows_[part.name] = {tensor.info.name, begin, part.rows, tensor.parts.size() == 1};
      tensors_.push_back({part.name, tensor.shape_of(part), info->second->dtype});
      begin += part.rows;
    }
  }
}

std::shared_ptr<const TensorRecord> HfPartsSource::record(const std::string& name) const {
  const auto found = rows_.find(name);
  require(found != rows_.end(), "{} holds no tensor {}", path().string(), name);
  const Rows& rows = found->second;
  auto record = model_.record(rows.of);
  if (rows.whole) return record;
  return std::make_shared<const TensorRecord>(rows_of_record(*record, rows.begin, rows.count));
}

FamilySource::FamilySource(const HfFamily& family, std::unique_ptr<ShardedSource> source,
                           Json config, const NameRules& rules, LoadPolicy policy)
    : source_(std::move(source)), config_(std::make_shared<const Json>(std::move(config))) {
  const std::string where = source_->path().string();
  const std::vector<TensorName> unreadable = classify_unreadable(*source_, rules);
  for (std::size_t i = 0; i < unreadable.size(); ++i) {
    require<Unsupported>(unreadable[i].role != TensorRole::Weight ||
                             HfFamily::is_buffer(family.strip(unreadable[i].name)),
                         "{}: tensor {} is stored as {}, which tessera does not read",
                         source_->file_of(source_->unreadable()[i]).string(), unreadable[i].source,
                         source_->unreadable()[i].dtype);
  }
  Places places;
  const std::vector<TensorName> names = classify_tensors(*source_, rules);
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i].role != TensorRole::Weight) continue;
    const std::string name = family.strip(names[i].name);
    if (HfFamily::is_buffer(name)) continue;
    require<CorruptCheckpoint>(places.emplace(name, &source_->tensors()[i]).second,
                               "{}: {} is stored twice, with and without \"{}\"", where, name,
                               family.prefix);
  }
  const std::vector<HfTensor> expected = family.tensors(*config_);
  drop_tied_head(places, family.strip(expected.front().parts.front().name));
  if (policy == LoadPolicy::Exact) {
    std::vector<TensorInfo> wanted, found;
    for (const HfTensor& tensor : expected)
      for (const HfTensor::Part& part : tensor.parts)
        wanted.push_back({family.strip(part.name), tensor.shape_of(part), tensor.info.dtype});
    for (const auto& [name, info] : places) found.push_back({name, info->shape, info->dtype});
    match_tensors(wanted, found, where);
  }
  for (const HfTensor& tensor : expected) add(family, tensor, places);
  // Tensors that the model lacks keep their names, so that they can be reported.
  for (const auto& [name, info] : places) {
    parts_[name] = {info->name};
    tensors_.push_back({name, info->shape, info->dtype});
  }
}

// Moves the parts of a weight from `places` to tensors_, if all are there and fit together.
void FamilySource::add(const HfFamily& family, const HfTensor& tensor, Places& places) {
  std::vector<Places::iterator> found;
  for (const HfTensor::Part& part : tensor.parts) {
    found.push_back(places.find(family.strip(part.name)));
    if (found.back() == places.end()) return;
  }
  TensorInfo info{tensor.info.name, found.front()->second->shape, found.front()->second->dtype};
  for (std::size_t i = 1; i < found.size(); ++i) {
    const TensorInfo& part = *found[i]->second;
    Shape shape = part.shape;
    if (shape.size() != info.shape.size() || shape.empty()) return;
    shape[0] = info.shape[0];
    if (!(shape == info.shape)) return;
    require<Unsupported>(
        part.dtype == info.dtype, "{}: {} is {}, but {} is {}; tessera needs one dtype for both",
        source_->path().string(), part.name, part.dtype, found.front()->second->name, info.dtype);
    info.shape[0] += part.shape[0];
  }
  for (const Places::iterator& at : found) {
    parts_[info.name].push_back(at->second->name);
    places.erase(at);
  }
  tensors_.push_back(std::move(info));
}

std::shared_ptr<const TensorRecord> FamilySource::record(const std::string& name) const {
  const auto found = parts_.find(name);
  require(found != parts_.end(), "{} holds no tensor {}", path().string(), name);
  if (found->second.size() == 1) return source_->record(found->second.front());
  std::vector<std::shared_ptr<const TensorRecord>> records;
  for (const std::string& part : found->second) records.push_back(source_->record(part));
  return std::make_shared<const TensorRecord>(join_records(records));
}

std::string FamilySource::title(const std::string& name) const {
  const auto found = parts_.find(name);
  return found == parts_.end() ? name : fmt::format("{}", fmt::join(found->second, " + "));
}

// Drops the tied head, which some writers store a second time. Throws if it differs from the
// embedding, because dropping it would then change the model.
void FamilySource::drop_tied_head(Places& places, const std::string& embedding_name) {
  const auto flag = config_->find("tied");
  if (flag != config_->end() && *flag == false) return;
  const auto tied = places.find(kHead);
  const auto embedding = places.find(embedding_name);
  if (tied == places.end() || embedding == places.end()) return;
  const TensorInfo& a = *tied->second;
  const TensorInfo& b = *embedding->second;
  bool equal = a.shape == b.shape && a.dtype == b.dtype;
  if (equal) {
    const std::int64_t size = numel(a.shape);
    const auto piece = static_cast<std::int64_t>((std::size_t{1} << 20) / dtype_size(a.dtype));
    std::vector<char> head(static_cast<std::size_t>(std::min(piece, size)) * dtype_size(a.dtype));
    std::vector<char> other(head.size());
    for (std::int64_t begin = 0; equal && begin < size; begin += piece) {
      const std::int64_t end = std::min(size, begin + piece);
      source_->read(a.name, begin, end, head.data(), a.dtype);
      source_->read(b.name, begin, end, other.data(), b.dtype);
      equal = head == other;
    }
  }
  require<Unsupported>(equal,
                       "{}: lm_head.weight differs from {}, but the configuration ties the head to "
                       "the embedding",
                       source_->path().string(), embedding_name);
  places.erase(tied);
}

}  // namespace tessera::io
