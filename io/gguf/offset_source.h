#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/pump/tensor_source.h"

namespace tessera::io {

/// Tensors of another source with a number added to all values, computed in f32.
class OffsetSource final : public TensorSource {
 public:
  /// @param source  outlives this
  explicit OffsetSource(const TensorSource* source) : source_(source) {}
  void add(const std::string& name, float offset) { offsets_[name] = offset; }

  const fs::path& path() const override { return source_->path(); }
  const std::vector<TensorInfo>& tensors() const override { return source_->tensors(); }
  /// @throws Unsupported if values are added to the source's tensor already
  std::shared_ptr<const TensorRecord> record(const std::string& name) const override;
  File open_file(const std::string& name) const override { return source_->open_file(name); }
  std::string title(const std::string& name) const override { return source_->title(name); }

 private:
  const TensorSource* source_;
  std::map<std::string, float> offsets_;
};

}  // namespace tessera::io
