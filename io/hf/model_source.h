#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "io/base/json.h"
#include "io/checkpoint/reader.h"
#include "io/hf/gpt2.h"
#include "io/pump/tensor_source.h"
#include "io/source/load_policy.h"

namespace tessera::io {

/// Weights of a model, wherever they are stored: by our names, in our layout, exactly the tensors
/// of gpt2_tensors(config()) unless a policy let others pass.
class ModelSource : public TensorSource {
 public:
  /// Our "model" section.
  virtual const Json& config() const = 0;
  /// The checkpoint behind this source, or null if it is something else.
  virtual const CheckpointReader* checkpoint() const { return nullptr; }
};

/// Opens what a user names as MODEL: a checkpoint, a run or directory of checkpoints (its newest
/// committed one, or that of `step`), a Hugging Face model directory, or a PyTorch Distributed
/// Checkpoint (FSDP, torchtitan, Lightning, its safetensors form) with a config.json in it.
/// @param policy  other than Exact: its tensors need not be those of its configuration, and the
///         caller compares them with what he needs
/// @throws InvalidArgument if path is none of these, or its tensors are not those of its
///         configuration (all of them listed at once); Unsupported, IoError, CorruptCheckpoint
std::unique_ptr<ModelSource> open_model(const fs::path& path, std::optional<std::int64_t> step = {},
                                        LoadPolicy policy = LoadPolicy::Exact);

/// The model in a checkpoint. @throws InvalidArgument if it holds none, or other tensors than its
/// configuration says, unless the policy is another than Exact
std::unique_ptr<ModelSource> open_checkpoint_model(const CheckpointReader& reader,
                                                   LoadPolicy policy = LoadPolicy::Exact);

/// Our "model" section from a Hugging Face config.json.
/// @throws as gpt2_config_from_hf; IoError
Json read_hf_config(const fs::path& file);

/// @throws IoError if path does not exist, InvalidArgument if it is a file
void require_model_directory(const fs::path& path);

}  // namespace tessera::io
