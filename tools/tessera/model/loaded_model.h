#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "io/data/tokenizer.h"
#include "models/language_model.h"
#include "tools/tessera/command.h"
#include "tools/tessera/report/advice.h"
#include "train/ranks.h"

namespace tessera::tools {

struct LoadedModel {
  std::shared_ptr<Context> context;
  std::unique_ptr<models::LanguageModel> model;
  io::TokenizerPtr tokenizer;  ///< null if the model has none that this build reads
  std::string no_tokenizer;    ///< why it is null
  std::filesystem::path path;  ///< resolved source

  /// Whether a token ends a text: by the model's configuration, or as one of `ends`.
  bool ends_text(std::int32_t token, std::span<const std::int32_t> ends) const;
};

struct LoadOptions {
  std::string step = "latest";      ///< of a run; see parse_step
  std::string base;                 ///< MODEL of the frozen weights of LoRA adapters
  std::string weights = "trained";  ///< trained or ema, see io::WeightKind
  std::string dtype = "f32";        ///< f32 or bf16
  std::string device = "auto";      ///< see open_device
  int threads = 0;                  ///< 0: OMP_NUM_THREADS or the number of processors
};

/// Declares MODEL and the load options. `model` and `options` must outlive the parsing.
void add_load_options(CLI::App& app, std::string& model, LoadOptions& options);

/// Loads a checkpoint, a run, or a Hugging Face directory. Prints a note if "auto" chose the CPU in
/// a build with a GPU backend.
/// @throws as io::open_model and parse_step; InvalidArgument on another dtype
LoadedModel load_model(const std::string& path, const LoadOptions& options);

/// Runs `work` and returns its result. Adds advice on saving memory to an OutOfMemory error: first
/// `advice`, then the advice of the load options.
int with_load_advice(const LoadOptions& options, MemoryAdvice advice,
                     const std::function<int()>& work);

}  // namespace tessera::tools
