#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/base/json.h"
#include "io/checkpoint/reader.h"
#include "io/consolidate/consolidate.h"
#include "io/consolidate/tensor_files.h"
#include "io/hf/family.h"

namespace tessera::io {

/// Tensors to export from a source, with their names in the output.
struct ConsolidateSource {
  std::string kind;  ///< "tessera checkpoint", "Hugging Face model", "PyTorch DCP", ...
  fs::path path;
  std::optional<CheckpointReader> checkpoint;  ///< set if the source is one of tessera
  const HfFamily* family = nullptr;            ///< null if tessera does not know the model
  std::shared_ptr<const Json> config;          ///< tessera's "model" section; null if unknown
  /// Hugging Face config.json of the source. If `config` is null, its model is unknown to tessera.
  std::shared_ptr<const Json> hf_config;
  fs::path hf_config_file;
  /// Names and contents of tokenizer files, if they are not in `path`.
  std::map<std::string, std::string> tokenizer_files;
  bool is_adapter = false;  ///< LoRA adapters alone, to be written in PEFT's format
  std::vector<ExportTensor> weights, optimizer;
  std::vector<SkippedEntry> skipped;
  std::vector<std::string> warnings;  ///< as in ConsolidatePlan

  std::vector<std::unique_ptr<TensorSource>> sources;  ///< pointed to by ExportTensor::source
};

/// Opens a source of any kind and lists the tensors that the options select.
///
/// The model_type of options.config_file, or else of its config.json, says whether tessera knows the
/// model of another program's source. Its tensors are then checked and get tessera's names. Tensors
/// of other models are exported unchanged. Names follow options.names. By default, names in a Hugging Face directory
/// stay; elsewhere, with a config.json, they become those of Hugging Face (see count_model_levels).
/// Without a config.json, only ExportFormat::Safetensors is possible.
///
/// The same holds for a checkpoint of tessera whose "model" section has an unknown arch, but its
/// names stay.
/// @throws InvalidArgument, with advice, if the configuration is missing for HF, the optimizer
///         state is missing, two tensors would get one name, a pattern of options.tensors matches
///         none, or options.dtype might convert scales of quantized weights; CorruptCheckpoint if
///         the configuration has no model_type; Unsupported naming tensors of a dtype that tessera
///         cannot copy, or cannot read in a known model; as open_model
ConsolidateSource open_consolidate_source(const fs::path& path, const ConsolidateOptions& options);

}  // namespace tessera::io
