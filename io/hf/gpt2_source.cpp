#include "io/hf/gpt2_source.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/json.h"

namespace tessera::io {
namespace {

constexpr const char* kHead = "lm_head.weight";
constexpr const char* kEmbedding = "wte.weight";

// Names and roles of the tensors of tensors(), then of those of unreadable().
std::vector<TensorName> classify_all(const ShardedSource& source, const NameRules& rules) {
  std::vector<KeyedName> keyed;
  for (std::size_t i = 0; i < source.tensors().size(); ++i) {
    keyed.push_back({source.tensors()[i].name, source.top_keys()[i]});
  }
  for (const ShardedSource::Unreadable& tensor : source.unreadable()) {
    keyed.push_back({tensor.name, tensor.top_key});
  }
  const NameNesting nesting = find_nesting(keyed);
  std::vector<TensorName> names;
  for (const KeyedName& name : keyed) names.push_back(classify(name, nesting, rules));
  return names;
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

Gpt2Source::Gpt2Source(std::unique_ptr<ShardedSource> source, Json config, const NameRules& rules,
                       LoadPolicy policy)
    : source_(std::move(source)), config_(std::make_shared<const Json>(std::move(config))) {
  const std::string where = source_->path().string();
  const std::vector<TensorName> unreadable = classify_unreadable(*source_, rules);
  for (std::size_t i = 0; i < unreadable.size(); ++i) {
    require<Unsupported>(
        unreadable[i].role != TensorRole::Weight || gpt2_name_from_hf(unreadable[i].name).empty(),
        "{}: tensor {} is stored as {}, which tessera does not read",
        source_->file_of(source_->unreadable()[i]).string(), unreadable[i].source,
        source_->unreadable()[i].dtype);
  }
  const std::vector<TensorName> names = classify_tensors(*source_, rules);
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i].role != TensorRole::Weight) continue;
    const std::string ours = gpt2_name_from_hf(names[i].name);
    if (ours.empty()) continue;
    require<CorruptCheckpoint>(places_.emplace(ours, &source_->tensors()[i]).second,
                               "{}: {} is stored twice, with and without \"transformer.\"", where,
                               ours);
  }
  drop_tied_head();
  for (const auto& [name, info] : places_) tensors_.push_back({name, info->shape, info->dtype});
  if (policy == LoadPolicy::Exact) match_tensors(gpt2_tensors(*config_), tensors_, where);
}

const std::string& Gpt2Source::source_name(const std::string& name) const {
  const auto found = places_.find(name);
  require(found != places_.end(), "{} holds no tensor {}", path().string(), name);
  return found->second->name;
}

// Drops the tied head, which some writers store a second time. Throws if it differs from the
// embedding, because dropping it would then change the model.
void Gpt2Source::drop_tied_head() {
  const auto tied = places_.find(kHead);
  const auto embedding = places_.find(kEmbedding);
  if (tied == places_.end() || embedding == places_.end()) return;
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
                       "{}: lm_head.weight differs from wte.weight; tessera's GPT-2 ties "
                       "the head to the embedding",
                       source_->path().string());
  places_.erase(tied);
}

}  // namespace tessera::io
