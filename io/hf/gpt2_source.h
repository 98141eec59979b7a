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

/// The tensors of a sharded source with their names and roles, in its order.
/// @throws InvalidArgument naming both if two tensors of a role would have one name
std::vector<TensorName> classify_tensors(const ShardedSource& source, const NameRules& rules);

/// The same of those of unreadable().
std::vector<TensorName> classify_unreadable(const ShardedSource& source, const NameRules& rules);

/// A GPT-2 in a sharded source: a ModelSource by our names.
class Gpt2Source : public ModelSource {
 public:
  /// Accepts names of Hugging Face's GPT-2 with and without "transformer.", ignores its buffers,
  /// and a stored lm_head.weight that equals wte.weight.
  /// @param config  our "model" section
  /// @param rules   for the names of weights; other tensors are ignored
  /// @param policy  other than Exact: the weights may differ from those of the configuration
  /// @throws InvalidArgument if the weights are not those of the configuration, listing all that
  ///         differ, or two would have one name; Unsupported on a head that is not tied or a weight
  ///         of a dtype that tessera lacks
  Gpt2Source(std::unique_ptr<ShardedSource> source, Json config, const NameRules& rules,
             LoadPolicy policy = LoadPolicy::Exact);

  const ShardedSource& source() const { return *source_; }
  /// The source's name of one of our tensors.
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
  std::map<std::string, const TensorInfo*> places_;  // by our names
  std::vector<TensorInfo> tensors_;
};

}  // namespace tessera::io
