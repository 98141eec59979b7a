#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "io/checkpoint/reader.h"
#include "io/hf/gpt2.h"
#include "io/source/tensor_source.h"

namespace tessera::io {

/// Weights of a model, wherever they are stored: by our names, in our layout, exactly the tensors
/// of gpt2_tensors(config()).
class ModelSource : public TensorSource {
 public:
  /// Our "model" section.
  virtual const Json& config() const = 0;
  /// The checkpoint behind this source, or null if it is something else.
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
