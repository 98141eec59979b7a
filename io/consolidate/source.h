#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/base/json.h"
#include "io/checkpoint/reader.h"
#include "io/consolidate/consolidate.h"
#include "io/consolidate/tensor_files.h"

namespace tessera::io {

/// Tensors to export from a source, with their names in the output.
struct ConsolidateSource {
  std::string kind;  ///< "tessera checkpoint", "Hugging Face model", "PyTorch DCP", ...
  fs::path path;
  std::optional<CheckpointReader> checkpoint;  ///< if it is one of tessera's
  std::shared_ptr<const Json> config;          ///< our "model" section; null if it is not known
  /// Hugging Face's config.json: `config` was made of it, or, where that is null, it is of a model
  /// that tessera does not know.
  std::shared_ptr<const Json> hf_config;
  fs::path hf_config_file;  ///< where it was read
  std::vector<ExportTensor> weights, optimizer;
  std::vector<SkippedEntry> skipped;
  std::vector<std::string> warnings;  ///< as in ConsolidatePlan

  std::vector<std::unique_ptr<TensorSource>> sources;  ///< owns what the tensors refer to
};

/// Opens a source of any kind and lists the tensors that the options select.
///
/// Another program's source is a GPT-2 if options.config_file, or else its config.json, names that
/// model_type: its tensors are then checked and get our names. Tensors of other models are exported
/// unchanged: names of a Hugging Face directory stay, others follow options.names; with default
/// rules and a config.json they become the names of that Hugging Face model (see
/// count_model_levels). Without a config.json, only ExportFormat::Safetensors is possible.
/// @throws InvalidArgument in one sentence that says what to do if HF is asked for and the
///         configuration is missing, if there is no optimizer state, if two tensors would have one
///         name, if patterns of options.tensors fit none, or if options.dtype would convert what
///         may belong to quantized weights; CorruptCheckpoint if the configuration says no model;
///         Unsupported naming tensors of a dtype that tessera lacks and cannot copy as it is, or
///         lacks and would need for a GPT-2; as open_model
ConsolidateSource open_consolidate_source(const fs::path& path, const ConsolidateOptions& options);

}  // namespace tessera::io
