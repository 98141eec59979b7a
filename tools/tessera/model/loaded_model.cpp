#include "tools/tessera/model/loaded_model.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/choose_device.h"
#include "core/base/device_backend.h"
#include "io/hf/model_source.h"
#include "tools/tessera/train/setup.h"

namespace tessera::tools {

bool LoadedModel::ends_text(std::int32_t token, std::span<const std::int32_t> ends) const {
  const auto& eos = model->arch().eos_tokens;
  return std::ranges::find(eos, token) != eos.end() || std::ranges::find(ends, token) != ends.end();
}

void add_load_options(CLI::App& app, std::string& model, LoadOptions& options) {
  app.add_option("MODEL", model, "Checkpoint, run, or Hugging Face model directory")->required();
  app.add_option("--step", options.step, kStepHelp)->capture_default_str();
  app.add_option("--base", options.base,
                 "Model of LoRA adapters' base, if it is not where they say");
  app.add_option(kWeightsOption, options.weights, kWeightsHelp)
      ->capture_default_str()
      ->check(CLI::IsMember({"trained", "ema"}));
  app.add_option("--dtype", options.dtype, "f32 or bf16")->capture_default_str();
  app.add_option("--device", options.device, "auto, cpu, cuda or cuda:N")->capture_default_str();
  app.add_option("--threads", options.threads, "0: OMP_NUM_THREADS or all processors")
      ->capture_default_str()
      ->check(CLI::Range(0, 4096));
}

LoadedModel load_model(const std::string& path, const LoadOptions& options) {
  require(options.dtype == "f32" || options.dtype == "bf16",
          "--dtype must be f32 or bf16, got '{}'", options.dtype);
  const auto source =
      io::open_model(path, parse_step(path, options.step), io::LoadPolicy::Exact, options.base,
                     options.weights == "ema" ? io::WeightKind::Average : io::WeightKind::Trained);
  LoadedModel loaded;
  loaded.path = source->is_merged() ? std::filesystem::path(path) : source->path();
  ChosenDevice chosen = open_device(options.device, 0, train::default_threads(options.threads, 1));
  loaded.context = std::move(chosen.context);
  if (!chosen.why_cpu.empty() && has_device_backend())
    std::cerr
        << "tessera: note: computing on the CPU; `tessera doctor` explains why no GPU is used\n";
  loaded.context->set_grad_enabled(false);
  const models::Arch config = models::parse_arch(source->config().dump(), loaded.path.string());
  require_head_dim(config, loaded.context->device(), "--device cpu");
  loaded.model = models::make_model(config);
  materialize(*loaded.model, loaded.context, options.dtype == "bf16" ? DType::BF16 : DType::F32,
              [&](const Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
                source->read(p.name, begin, end, out, DType::F32);
              });
  loaded.tokenizer = model_tokenizer(*source, loaded.no_tokenizer);
  return loaded;
}

int with_load_advice(const LoadOptions& options, MemoryAdvice advice,
                     const std::function<int()>& work) {
  try {
    return work();
  } catch (const OutOfMemory& error) {
    if (options.dtype == "f32")
      advice.add("--dtype bf16", "weights and activations of half the size");
    const std::string text = error.what();
    const bool of_gpu = text.find(" on cuda:") != text.npos || text.find("GPU") != text.npos;
    if (of_gpu) advice.add("--device cpu", "the host's memory");
    throw OutOfMemory("{}", advice.after(text));
  }
}

}  // namespace tessera::tools
