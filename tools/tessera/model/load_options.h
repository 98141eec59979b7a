#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "tools/tessera/model/loaded_model.h"

namespace tessera::tools {

/// Declares MODEL and how to load it, for the commands that do; `model` and `options` must outlive
/// the parsing.
inline void add_load_options(CLI::App& app, std::string& model, LoadOptions& options) {
  app.add_option("MODEL", model, "Checkpoint, run, or Hugging Face model directory")->required();
  app.add_option("--step", options.step, "Checkpoint of a run; default: the newest");
  app.add_option("--dtype", options.dtype, "Compute in f32 or bf16")->capture_default_str();
  app.add_option("--device", options.device, "auto, cpu, cuda or cuda:N")->capture_default_str();
  app.add_option("--threads", options.threads, "0: OMP_NUM_THREADS or all processors")
      ->capture_default_str()
      ->check(CLI::Range(0, 4096));
}

}  // namespace tessera::tools
