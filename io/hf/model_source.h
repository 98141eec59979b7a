#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "io/base/json.h"
#include "io/checkpoint/reader.h"
#include "io/pump/tensor_source.h"
#include "io/source/load_policy.h"

namespace tessera::io {

/// Weights of a model in tessera's names and layout. With policy Exact, they are those of the
/// family of config().
class ModelSource : public TensorSource {
 public:
  /// Tessera's "model" section.
  virtual const Json& config() const = 0;
  /// The checkpoint behind this source; null for other sources.
  virtual const CheckpointReader* checkpoint() const { return nullptr; }
  /// Whether LoRA adapters are added to the weights as they are read.
  virtual bool is_merged() const { return false; }
  /// Paths of all that is read: of a merged model, its base's, then the adapters'.
  virtual std::vector<fs::path> origins() const { return {path()}; }
  /// Directory of the model's config.json and tokenizer, if it has them.
  virtual const fs::path& config_dir() const { return path(); }
};

/// Opens a command's MODEL argument: a checkpoint, a run or directory of checkpoints (the newest
/// committed one or the one of `step`), a Hugging Face model directory, or a PyTorch Distributed
/// Checkpoint (FSDP, torchtitan, Lightning, its safetensors form) with a config.json in it.
/// Weights of LoRA adapters, in a checkpoint, in PEFT's format or in the state of PEFT's running
/// model, are those of their base plus the adapters'.
/// @param policy   Exact: the tensors must match the configuration; else they are not compared
/// @param base     MODEL of the frozen weights of adapters; empty: the one that they name
/// @param weights  of a checkpoint of tessera at path; other sources have trained weights only
/// @throws InvalidArgument if path is none of these, or listing all tensors that do not match its
///         configuration; Unsupported, IoError, CorruptCheckpoint
std::unique_ptr<ModelSource> open_model(const fs::path& path, std::optional<std::int64_t> step = {},
                                        LoadPolicy policy = LoadPolicy::Exact,
                                        const fs::path& base = {},
                                        WeightKind weights = WeightKind::Trained);
/// @throws InvalidArgument if Average is wanted of a source that is no checkpoint of tessera
void require_trained(WeightKind weights, const fs::path& path);

/// The tensors in a checkpoint: of LoRA adapters, those alone. @throws InvalidArgument if the checkpoint has none or, with Exact, if
/// its tensors do not match its configuration
std::unique_ptr<ModelSource> open_checkpoint_model(const CheckpointReader& reader,
                                                   LoadPolicy policy = LoadPolicy::Exact);

/// Compares a model with the one that adapters were trained on.
/// @param digest  of the checkpoint that it was; empty: it was none
/// @param adapters  named in the error
/// @throws InvalidArgument if the model is another
void check_base(const ModelSource& base, const std::string& digest, const std::string& adapters);

/// Whether a checkpoint holds LoRA adapters alone.
bool has_lora(const CheckpointReader& reader);

/// Tessera's "model" section from a Hugging Face config.json.
/// @throws CorruptCheckpoint; Unsupported naming the model or setting that tessera lacks; IoError
Json read_hf_config(const fs::path& file);

/// @throws IoError if path does not exist; InvalidArgument if it is a file, or Unsupported of a known
///         format
void require_model_directory(const fs::path& path);

}  // namespace tessera::io
