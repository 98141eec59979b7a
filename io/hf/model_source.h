#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/checkpoint/reader.h"
#include "io/hf/gpt2.h"

namespace tessera::io {

/// Weights of a model, wherever they are stored: by our names, in our layout. Reads on demand, so a
/// rank that needs a part reads a part. Threads may read at once.
class ModelSource {
 public:
  virtual ~ModelSource() = default;
  /// Our "model" section.
  virtual const Json& config() const = 0;
  /// Tensors with their stored dtype: exactly those of gpt2_tensors(config()).
  virtual const std::vector<TensorInfo>& tensors() const = 0;
  /// Reads elements [begin, end) of a tensor, in row-major order, as f32 or bf16.
  /// @throws InvalidArgument on an unknown name or a range outside the tensor, IoError,
  ///         CorruptCheckpoint
  virtual void read(const std::string& name, std::int64_t begin, std::int64_t end, void* out,
                    DType dtype) const = 0;
  /// Passes a whole tensor in its stored dtype through a buffer; see CheckpointReader::stream.
  virtual void stream(const std::string& name, std::size_t buffer_bytes,
                      const CheckpointReader::Sink& sink) const = 0;
  /// The file or directory the weights come from.
  virtual const fs::path& path() const = 0;
  /// The checkpoint behind this source, or null if it is a Hugging Face directory.
  virtual const CheckpointReader* checkpoint() const { return nullptr; }
};

/// Opens what a user names as MODEL: a checkpoint, a run or directory of checkpoints (its newest
/// committed one, or that of `step`), or a Hugging Face model directory (config.json beside
/// model.safetensors or its sharded form).
/// @throws InvalidArgument if path is none of these, or its tensors are not those of its
///         configuration (all of them listed at once); Unsupported, IoError, CorruptCheckpoint
std::unique_ptr<ModelSource> open_model(const fs::path& path,
                                        std::optional<std::int64_t> step = {});

/// Opens a Hugging Face model directory. @throws as open_model
std::unique_ptr<ModelSource> open_hf_model(const fs::path& dir);

}  // namespace tessera::io
