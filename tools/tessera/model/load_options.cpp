#include "tools/tessera/model/load_options.h"

#include <CLI/CLI.hpp>

#include "tools/tessera/train/checkpoints.h"

namespace tessera::tools {

void add_load_options(CLI::App& app, std::string& model, LoadOptions& options) {
  app.add_option("MODEL", model, "Checkpoint, run, or Hugging Face model directory")->required();
  app.add_option("--step", options.step, kStepHelp)->capture_default_str();
  app.add_option("--dtype", options.dtype, "f32 or bf16")->capture_default_str();
  app.add_option("--device", options.device, "auto, cpu, cuda or cuda:N")->capture_default_str();
  app.add_option("--threads", options.threads, "0: OMP_NUM_THREADS or all processors")
      ->capture_default_str()
      ->check(CLI::Range(0, 4096));
}

}  // namespace tessera::tools
