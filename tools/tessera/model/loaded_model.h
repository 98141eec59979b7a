#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "io/data/tokenizer.h"
#include "models/gpt2.h"
#include "tools/tessera/report/advice.h"

namespace tessera::tools {

/// A whole model in memory, ready to evaluate or generate.
struct LoadedModel {
  std::shared_ptr<Context> context;
  std::unique_ptr<models::Gpt2> model;
  io::TokenizerPtr tokenizer;  ///< null if the model came without one that this build reads
  std::filesystem::path path;  ///< what was opened
};

struct LoadOptions {
  std::optional<std::int64_t> step;  ///< of a run; default: its newest checkpoint
  std::string dtype = "f32";         ///< f32 or bf16
  std::string device = "auto";       ///< see open_device
  int threads = 0;                   ///< 0: OMP_NUM_THREADS or the number of processors
};

/// Loads a MODEL: a checkpoint, a run, or a Hugging Face directory. Says on standard error why
/// "auto" took the processor, where this build has a backend for GPUs.
/// @throws what io::open_model throws; InvalidArgument on another dtype
LoadedModel load_model(const std::string& path, const LoadOptions& options);

/// What `work` returns; an OutOfMemory that it throws, with its ledger, gets advice.
/// @param advice  of the command's own, before what these options leave
int with_load_advice(const LoadOptions& options, MemoryAdvice advice,
                     const std::function<int()>& work);

/// Threads that a single process computes with: `asked`, else OMP_NUM_THREADS, else the number of
/// processors divided by the ranks of this host. @throws InvalidArgument on a malformed variable
int default_threads(std::int64_t asked, int local_ranks);

}  // namespace tessera::tools
