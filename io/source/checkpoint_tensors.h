#pragma once

#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "io/checkpoint/reader.h"
#include "io/source/tensor_source.h"

namespace tessera::io {

/// The tensors of one section of a checkpoint.
class CheckpointTensors : public TensorSource {
 public:
  /// @throws InvalidArgument if the checkpoint does not hold the section
  CheckpointTensors(CheckpointReader reader, Section section);

  const fs::path& path() const override { return reader_.path(); }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  void read(const std::string& name, std::int64_t begin, std::int64_t end, void* out,
            DType dtype) const override;
  void stream(const std::string& name, std::size_t buffer_bytes, const Sink& sink) const override;
  std::optional<TensorLayout> layout(const std::string& name) const override;
  File open_file(const std::string& name) const override;

 private:
  CheckpointReader reader_;
  Section section_;
  std::vector<TensorInfo> tensors_;
  mutable std::mutex mutex_;
  mutable std::set<std::string> checked_;  // files whose header was read; guarded by mutex_
};

}  // namespace tessera::io
