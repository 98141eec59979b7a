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
#include "io/source/hyperparameters.h"

namespace tessera::io {

/// Tensors to export from a source, with their names in the output.
struct ConsolidateSource {
  std::string kind;  ///< "tessera checkpoint", "Hugging Face model", "PyTorch DCP", ...
  fs::path path;
  std::vector<fs::path> bases;                 ///< of adapters that are merged, if not in `path`
  std::optional<CheckpointReader> checkpoint;  ///< set if the source is one of tessera
  const HfFamily* family = nullptr;            ///< null if tessera does not know the model
  std::shared_ptr<const Json> config;          ///< tessera's "model" section; null if unknown
  /// Hugging Face config.json of the source. If `config` is null, its model is unknown to tessera.
  std::shared_ptr<const Json> hf_config;
  fs::path hf_config_file;
  /// Names and contents of tokenizer files, if they are not in `path`.
  std::map<std::string, std::string> tokenizer_files;
  bool is_adapter = false;  ///< LoRA adapters alone, to be written in PEFT's format
  std::vector<ExportTensor> weights, optimizer;  ///< moments are named KIND/WEIGHT
  /// Names of the model's weights, in the order of named_parameters() of its class in transformers;
  /// empty if unknown.
  std::vector<std::string> parameters;
  std::optional<std::int64_t>
      optimizer_step;              ///< number of updates, if it is not among the moments
  std::vector<ParamGroup> groups;  ///< of weights by their names in the output, if recorded
  std::vector<SkippedEntry> skipped;
  std::vector<std::string> warnings;  ///< as in ConsolidatePlan

  std::vector<std::shared_ptr<const TensorSource>> sources;  ///< pointed to by ExportTensor::source
};

/// Opens a source of any kind and lists the tensors that the options select.
///
/// The tensors of another program's source are compared with those of the model: of options.like,
/// or else of the family of the config.json (options.config_file, or the source's own). Any prefix
/// before their names is removed, and experts that a running model stacks are written one by one.
/// Names, shapes and number must then be the model's, and the output has the names that
/// transformers writes. Names of an unknown model follow options.names only, with a warning for
/// Hugging Face directories. Without a config.json, only ExportFormat::Safetensors is possible.
///
/// A checkpoint of tessera whose "model" section has an unknown arch keeps its names.
/// @throws InvalidArgument, with advice, if the configuration is missing for HF, the tensors are not
///         the model's or several models', the optimizer state is missing, a rule matches nothing, two tensors would get one name, a pattern of options.tensors matches
///         none, or options.dtype might convert scales of quantized weights; CorruptCheckpoint if
///         the configuration has no model_type; Unsupported naming tensors of a dtype that tessera
///         cannot copy, or cannot read in a known model; as open_model
ConsolidateSource open_consolidate_source(const fs::path& path, const ConsolidateOptions& options);

}  // namespace tessera::io
