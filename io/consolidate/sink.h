#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "io/consolidate/consolidate.h"
#include "io/consolidate/side_files.h"
#include "io/consolidate/source.h"
#include "io/consolidate/tensor_files.h"

namespace tessera::io {

/// All files of an export.
struct ExportLayout {
  std::vector<ExportFile> files;  ///< with tensors
  std::vector<SideFile> others;   ///< indexes, configuration, tokenizer

  /// Adds files and, of several, their index. @param whole  name of a single such file
  void add(std::vector<ExportFile> added, const std::string& whole);
};

/// A format of exports.
struct ExportSink {
  std::string_view name;        ///< of --format
  bool needs_config = false;    ///< the model's config.json must be known
  bool has_hf_names = true;     ///< else a checkpoint of tessera keeps its names
  bool has_optimizer = false;   ///< --what optimizer and all
  bool takes_adapters = false;  ///< LoRA adapters alone
  /// Lays out the files with tensors. May change weights and moments of the source, and adds
  /// warnings. @param layout  has the files of compose_side_files()
  void (*plan)(ConsolidateSource& source, const ConsolidateOptions& options,
               ExportLayout& layout) = nullptr;
  /// Whether a file of this name holds tensors of the format, or lists them.
  bool (*is_tensor_file)(std::string_view name) = nullptr;
  /// Whether such a file may be replaced, because it names tessera as its writer or holds no tensors.
  bool (*is_own)(const fs::path& file) = nullptr;
};

const ExportSink& sink_of(ExportFormat format);
/// The format whose files with tensors have names like this one; null: none.
const ExportSink* sink_with_file(std::string_view name);

/// "safetensors, dcp or bin": the formats with optimizer state.
std::string formats_with_optimizer();

}  // namespace tessera::io
