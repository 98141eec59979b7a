#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/base/json.h"
#include "io/hf/model_source.h"
#include "io/source/names.h"
#include "io/source/sharded_source.h"

namespace tessera::io {

/// Names and roles of the tensors of a sharded source, in its order.
/// @throws InvalidArgument naming both if two tensors of a role would get one name
std::vector<TensorName> classify_tensors(const ShardedSource& source, const NameRules& rules);

/// Names and roles of the tensors of unreadable(), in its order.
std::vector<TensorName> classify_unreadable(const ShardedSource& source, const NameRules& rules);

/// The weights of a GPT-2 in a sharded source.
class Gpt2Source : public ModelSource {
 public:
  /// Accepts Hugging Face names with and without "transformer."; ignores buffers, and an
  /// lm_head.weight equal to wte.weight.
  /// @param config  tessera's "model" section
  /// @param rules   rules for the names of weights; other tensors are ignored
  /// @param policy  other than Exact: the weights may differ from those of the configuration
  /// @throws InvalidArgument listing all weights that do not match the configuration, or if two
  ///         would get one name; Unsupported on an untied head or a weight of a dtype that tessera
  ///         lacks
  Gpt2Source(std::unique_ptr<ShardedSource> source, Json config, const NameRules& rules,
             LoadPolicy policy = LoadPolicy::Exact);

  /// Name of a tensor at the source.
  const std::string& source_name(const std::string& name) const;

  const Json& config() const override { return *config_; }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  const fs::path& path() const override { return source_->path(); }
  std::shared_ptr<const TensorRecord> record(const std::string& name) const override {
    return source_->record(source_name(name));
  }
  File open_file(const std::string& name) const override { return source_->open_file(name); }
  std::string title(const std::string& name) const override { return source_name(name); }

 private:
  void drop_tied_head();
  std::unique_ptr<ShardedSource> source_;
  std::shared_ptr<const Json> config_;
  std::map<std::string, const TensorInfo*> places_;  // the source's tensors by tessera's name
  std::vector<TensorInfo> tensors_;
};

}  // namespace tessera::io
