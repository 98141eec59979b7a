#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "comm/sharding/shard_spec.h"
#include "core/base/device.h"
#include "core/base/product_tuning.h"
#include "core/optim/optimizer.h"
#include "io/checkpoint/reader.h"
#include "io/data/dataset.h"
#include "io/data/sampler.h"
#include "io/hf/model_source.h"
#include "models/language_model.h"
#include "tools/tessera/config/config.h"
#include "tools/tessera/train/checkpoints.h"
#include "train/load_state.h"
#include "train/trainer.h"

namespace tessera::tools {

/// The configuration resolved against the checkpoint, model and data that it names.
struct RunSetup {
  Config config;       ///< resolved
  models::Arch model;  ///< seq_len: number of positions; rows may be shorter
  io::Dataset dataset;
  std::unique_ptr<io::Samples> train;
  std::unique_ptr<io::Samples> val;  ///< null: no validation data
  /// Packing of conversations; empty for other data.
  std::optional<io::PackingReport> packing, val_packing;

  std::optional<io::CheckpointReader> resume;  ///< checkpoint to resume from
  /// Initial weights, with LoRA of the frozen ones; if both are empty: random weights
  std::unique_ptr<io::ModelSource> init_from;
  std::unique_ptr<io::TensorSource> adapters;  ///< initial LoRA adapters; null: new ones
  train::TrainerState state;                   ///< zeros for a new run
  train::LoadPlan load;                        ///< tensors to load
  TunedProducts tuned_products;                ///< of tuned_products_file()
  std::vector<std::string> notes;              ///< shown before the first step
};

/// For machines: PackingReport by the names of its fields.
nlohmann::ordered_json to_json(const io::PackingReport& report);

/// File that keeps the choice of kernels for matrix products on GPUs; empty: they are not tuned.
std::filesystem::path tuned_products_file(const Config& config);

/// Number of tokens of train.sample_prompt.
std::int64_t prompt_tokens(const RunSetup& setup);

/// Tokenizer of a checkpoint, else of the `tokenizer` folder of its run, or of a model's directory; null if
/// there is none that this build reads.
/// @param gap  set to the reason if it is null
io::TokenizerPtr model_tokenizer(const io::ModelSource& source, std::string& gap);

/// Opens model and data. Unset shape keys come from the checkpoint or model; keys set by the user
/// must match it, unless checkpoint.load_policy or load_tensors allows skipping mismatched tensors.
/// A model.seq_len below the model's positions shortens the rows, not the model.
/// @param resume  checkpoint to resume from, if any
/// @throws InvalidArgument listing all mismatched keys and tensors; IoError, CorruptCheckpoint,
///         Unsupported
RunSetup set_up(Config config, int world_size, const std::optional<std::filesystem::path>& resume);

/// How the configuration distributes the model.
comm::ShardSpec shard_spec_of(const Config& config);
/// @param local_world_size  ranks of this host, the same on all hosts
/// @throws InvalidArgument if groups of that size don't fit
int shard_group_size(const Config& config, int world_size, int local_world_size);

/// The model's loss as the trainer calls it. `model` must outlive the result.
train::LossFunction loss_of(models::LanguageModel& model);

train::TrainerOptions trainer_options(const Config& config);
train::LoaderOptions loader_options(const Config& config);
std::unique_ptr<optim::Optimizer> make_optimizer(const Config& config);

/// The model of model.preset or model.init_from, whose shape the keys that are not given get; nothing
/// without both.
std::optional<models::Arch> adopt_known(Config& config);
models::Arch model_of(const Config& config, const std::optional<models::Arch>& stored = {});
/// The model without memory, with frozen weights and learning rates as the configuration says.
/// @throws InvalidArgument if a pattern matches no weight
std::unique_ptr<models::LanguageModel> make_model(const Config& config, const models::Arch& arch);

/// @param cpu_flag  flag that selects the CPU, for the message: "--device cpu"
/// @throws Unsupported if head_dim exceeds the limit of the GPU kernels
void require_head_dim(const models::Arch& model, Device device, std::string_view cpu_flag);

}  // namespace tessera::tools
