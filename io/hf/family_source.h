#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/hf/family.h"
#include "io/hf/model_source.h"
#include "io/source/names.h"
#include "io/source/sharded_source.h"

namespace tessera::io {

/// Names and roles of the tensors of a sharded source, in its order.
/// @throws InvalidArgument naming both if two tensors of a role would get one name
std::vector<TensorName> classify_tensors(const ShardedSource& source, const NameRules& rules);

/// Names and roles of the tensors of unreadable(), in its order.
std::vector<TensorName> classify_unreadable(const ShardedSource& source, const NameRules& rules);

/// Concatenation of tensors along dim 0. @param parts  not empty, of one dtype
TensorRecord join_records(const std::vector<std::shared_ptr<const TensorRecord>>& parts);

/// Rows [begin, begin + rows) of a tensor. Reading a chunk of it verifies the whole stored chunk.
TensorRecord rows_of_record(const TensorRecord& whole, std::int64_t begin, std::int64_t rows);

/// The Hugging Face tensors of a model of tessera: rows of its weights.
class HfPartsSource final : public TensorSource {
 public:
  /// @param model  outlives this
  /// @throws InvalidArgument if the model's tensors are not those of its configuration
  HfPartsSource(const HfFamily& family, const ModelSource& model);

  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  const fs::path& path() const override { return model_.path(); }
  std::shared_ptr<const TensorRecord> record(const std::string& name) const override;
  File open_file(const std::string& name) const override { return model_.open_file(name); }

 private:
  struct Rows {
    std::string of;  // tessera's name
    std::int64_t begin = 0, count = 0;
    bool whole = false;
  };
  const ModelSource& model_;
  std::map<std::string, Rows> rows_;
  std::vector<TensorInfo> tensors_;
};

/// A known family's weights in a sharded source, under tessera's names.
class FamilySource : public ModelSource {
 public:
  /// Accepts Hugging Face names with and without the family's prefix; ignores buffers, and an
  /// lm_head.weight equal to the embedding to which it is tied.
  /// @param config  tessera's "model" section
  /// @param rules   rules for the names of weights; other tensors are ignored
  /// @param policy  other than Exact: the weights may differ from those of the configuration
  /// @throws InvalidArgument listing all weights that do not match the configuration, or if two
  ///         would get one name; Unsupported on an lm_head that differs from the embedding to which
  ///         it is tied, a weight of a dtype that tessera lacks, or parts of different dtypes
  FamilySource(const HfFamily& family, std::unique_ptr<ShardedSource> source, Json config,
               const NameRules& rules, LoadPolicy policy = LoadPolicy::Exact);

  const Json& config() const override { return *config_; }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  const fs::path& path() const override { return source_->path(); }
  std::shared_ptr<const TensorRecord> record(const std::string& name) const override;
  File open_file(const std::string& name) const override { return source_->open_file(name); }
  /// Names at the source, joined by " + ".
  std::string title(const std::string& name) const override;

 private:
  using Places = std::map<std::string, const TensorInfo*>;  // the source's tensors by stripped name
  void drop_tied_head(Places& places, const std::string& embedding);
  void add(const HfFamily& family, const HfTensor& tensor, Places& places);
  std::unique_ptr<ShardedSource> source_;
  std::shared_ptr<const Json> config_;
  std::map<std::string, std::vector<std::string>> parts_;  // names at the source by tessera's name
  std::vector<TensorInfo> tensors_;
};

}  // namespace tessera::io
