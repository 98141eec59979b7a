#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/hf/family.h"
#include "io/hf/model_names.h"
#include "io/hf/model_source.h"
#include "io/hf/parts_source.h"
#include "io/source/sharded_source.h"

namespace tessera::io {

/// A known family's weights in a sharded source, under tessera's names.
class FamilySource : public ModelSource {
 public:
  /// Finds names as match_model does, behind any prefix.
  /// @param config  tessera's "model" section
  /// @param policy  other than Exact: the weights may differ from those of the configuration
  /// @param names   of all tensors of the source; empty: name_all()
  /// @throws InvalidArgument listing all weights that do not match the configuration, or if two
  ///         would get one name, or if there are several models; Unsupported on a weight of a dtype
  ///         that tessera lacks, or parts of different dtypes
  FamilySource(const HfFamily& family, std::shared_ptr<const ShardedSource> source, Json config,
               LoadPolicy policy = LoadPolicy::Exact, std::vector<TensorName> names = {});

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
  std::map<std::string, std::vector<TensorPlace>> parts_;  // by tessera's name
  std::vector<TensorInfo> tensors_;
};

}  // namespace tessera::io
