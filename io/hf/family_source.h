#pragma once

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "io/hf/family.h"
#include "io/hf/model_names.h"
#include "io/hf/model_source.h"
#include "io/hf/parts_source.h"
#include "io/source/sharded_source.h"

namespace tessera::io {

/// A model whose weights are in another program's checkpoint.
struct ForeignModel {
  Json config;                    ///< tessera's "model" section
  ModelNames names;               ///< at Hugging Face
  std::vector<HfTensor> tensors;  ///< those of tessera, made of `names` in the same order
  std::vector<std::string> warnings;
};
/// A model of a family that tessera knows. @throws as read_hf_config
ForeignModel read_foreign_model(const fs::path& config_file);
/// Gives a source with Megatron's names those of a model.
/// @return name of optimizer state that ranks share flattened, which is not renamed; empty: none
/// @throws InvalidArgument on arguments of Megatron that differ from the model's
std::string use_names_of(ForeignModel& model, ShardedSource& source);
/// An unknown model, which has the weights of the source under their names.
/// @param names  from name_all()
ForeignModel unknown_model(const ShardedSource& source, const std::vector<TensorName>& names);

/// Weights in a sharded source, or their moments of one kind, under tessera's names.
class FamilySource : public ModelSource {
 public:
  /// Finds names as match_model does, behind any prefix.
  /// @param names   of the source's tensors, from name_all(); those with the role Weight are taken
  /// @param policy  other than Exact: the weights may differ from those of the model
  /// @throws InvalidArgument listing all weights that do not match the model, or if two would get one
  ///         name, or if there are several models; Unsupported on a weight of a dtype that tessera
  ///         lacks, or parts of different dtypes
  FamilySource(const ForeignModel& model, std::shared_ptr<const ShardedSource> source,
               const std::vector<TensorName>& names, LoadPolicy policy = LoadPolicy::Exact);

  /// Before the names in the source.
  const std::string& prefix() const { return prefix_; }
  /// Names of weights in the source that the model does without, and why.
  const std::vector<std::pair<std::string, std::string>>& ignored() const { return ignored_; }

  const Json& config() const override { return *config_; }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  const fs::path& path() const override { return source_->path(); }
  const fs::path& config_dir() const override { return source_->config_dir(); }
  std::shared_ptr<const TensorRecord> record(const std::string& name) const override;
  File open_file(const std::string& name) const override { return source_->open_file(name); }
  /// Names at the source, joined by " + ".
  std::string title(const std::string& name) const override;

 private:
  // @return whether all parts are there and fit together
  bool add(const TensorInfo& weight, const std::vector<TensorPlace>& parts);
  std::shared_ptr<const ShardedSource> source_;
  PartsSource experts_;  // parts of tensors that stack experts
  std::shared_ptr<const Json> config_;
  std::string prefix_;
  std::vector<std::pair<std::string, std::string>> ignored_;
  std::map<std::string, std::vector<TensorPlace>> parts_;  // by tessera's name
  std::vector<TensorInfo> tensors_;
};

}  // namespace tessera::io
