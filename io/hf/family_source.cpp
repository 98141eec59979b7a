#include "io/hf/family_source.h"

#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <set>

#include "core/base/error.h"
#include "io/megatron/arguments.h"
#include "io/megatron/names.h"
#include "io/source/load_policy.h"

namespace tessera::io {

ForeignModel read_foreign_model(const fs::path& config_file) {
  ForeignModel model;
  model.config = read_hf_config(config_file);
  const HfFamily& family = *find_hf_family(model.config.at("arch").get<std::string>());
  model.names = names_of_family(family, model.config, Json(), config_file.string());
  model.tensors = family.tensors(model.config);
  return model;
}

std::string use_names_of(ForeignModel& model, ShardedSource& source) {
  if (!is_megatron(source)) return "";
  model.warnings = check_megatron_arguments(source.path(), model.config);
  source.set_hyperparameters([dir = source.path()] { return read_megatron_hyperparameters(dir); });
  return use_hugging_face_names(source, model.names, model.config);
}

ForeignModel unknown_model(const ShardedSource& source, const std::vector<TensorName>& names) {
  ForeignModel model;
  model.config = Json::object();
  model.names = names_of_weights(source, names);
  for (const ModelTensor& tensor : model.names.tensors)
    model.tensors.push_back({{tensor.name, tensor.shape}, {{tensor.name}}});
  return model;
}

FamilySource::FamilySource(const ForeignModel& model, std::shared_ptr<const ShardedSource> source,
                           const std::vector<TensorName>& names, LoadPolicy policy)
    : source_(std::move(source)),
      experts_(*source_),
      config_(std::make_shared<const Json>(model.config)) {
  const std::string where = source_->path().string();
  const ModelMatch match = match_model(model.names, *source_, names, true);
  require(match.layout.others.empty(),
          "{} holds several models, in '{}' and '{}'; write one of them with `tessera consolidate "
          "--select`, and use that",
          where, match.layout.prefix, fmt::join(match.layout.others, "', '"));
  const std::size_t readable = source_->tensors().size();
  std::set<std::size_t> left;
  for (std::size_t i = 0; i < names.size(); ++i)
    if (names[i].role == TensorRole::Weight) left.insert(i);
  prefix_ = match.layout.prefix;
  for (const auto& [i, why] : match.ignored) {
    left.erase(i);
    ignored_.emplace_back(names[i].source, why);
  }
  if (!left.empty() && *left.rbegin() >= readable) {
    const ShardedSource::Unreadable& other = source_->unreadable()[*left.rbegin() - readable];
    throw Unsupported("{}: tensor {} is stored as {}, which tessera does not read",
                      source_->file_of(other).string(), other.name, other.dtype);
  }
  if (policy == LoadPolicy::Exact) {
    const std::string problems = match.comparison.str();
    require(problems.empty(), "the tensors of {} do not match its model configuration:{}", where,
            problems);
  }
  std::size_t at = 0;
  for (const HfTensor& tensor : model.tensors) {
    std::vector<TensorPlace> parts;
    const std::size_t end = at + tensor.parts.size();
    for (std::size_t i = at; i < end; ++i) {
      if (!match.found[i]) continue;
      parts.push_back(place_of(model.names.tensors[i], source_->tensors()[*match.found[i]],
                               match.layout, *source_, experts_));
    }
    if (parts.size() == tensor.parts.size() && add(tensor.info, parts))
      for (std::size_t i = at; i < end; ++i) left.erase(*match.found[i]);
    at = end;
  }
  // Tensors that the model lacks keep their names, so that they can be reported.
  for (const std::size_t i : left) {
    TensorInfo info = source_->tensors()[i];
    const TensorPlace place{source_.get(), info};
    info.name = names[i].name.substr(match.layout.prefix.size());
    parts_[info.name] = {place};
    tensors_.push_back(std::move(info));
  }
}

bool FamilySource::add(const TensorInfo& weight, const std::vector<TensorPlace>& parts) {
  TensorInfo info = parts.front().info;
  info.name = weight.name;
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const TensorInfo& part = parts[i].info;
    Shape shape = part.shape;
    if (shape.size() != info.shape.size() || shape.empty()) return false;
    shape[0] = info.shape[0];
    if (!(shape == info.shape)) return false;
    require<Unsupported>(
        part.dtype == info.dtype, "{}: {} is {}, but {} is {}; tessera needs one dtype for both",
        path().string(), part.name, part.dtype, parts.front().info.name, info.dtype);
    info.shape[0] += part.shape[0];
  }
  parts_[info.name] = parts;
  tensors_.push_back(std::move(info));
  return true;
}

std::shared_ptr<const TensorRecord> FamilySource::record(const std::string& name) const {
  const auto found = parts_.find(name);
  require(found != parts_.end(), "{} holds no tensor {}", path().string(), name);
  std::vector<std::shared_ptr<const TensorRecord>> records;
  for (const TensorPlace& part : found->second)
    records.push_back(part.source->record(part.info.name));
  if (records.size() == 1) return records.front();
  return std::make_shared<const TensorRecord>(join_records(records));
}

std::string FamilySource::title(const std::string& name) const {
  const auto found = parts_.find(name);
  if (found == parts_.end()) return name;
  std::vector<std::string> names;
  for (const TensorPlace& part : found->second) names.push_back(part.info.name);
  return fmt::format("{}", fmt::join(names, " + "));
}

}  // namespace tessera::io
