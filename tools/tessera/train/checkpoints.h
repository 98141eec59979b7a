#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "comm/control/store.h"
#include "comm/host_memory.h"
#include "comm/sharding/sharded_model.h"
#include "io/checkpoint/reader.h"
#include "io/checkpoint/save.h"
#include "models/gpt2_config.h"
#include "tools/tessera/config/config.h"

namespace tessera::tools {

/// State of a run beside its tensors: the content of a checkpoint's trainer.json.
struct TrainerState {
  std::int64_t step = 0;             ///< updates made
  std::int64_t position = 0;         ///< global number of the next sample
  std::string tokenizer = "null";    ///< JSON; null for token files
  std::string config = "null";       ///< JSON: the resolved configuration of the run that saved
  std::optional<double> val_loss{};  ///< of these weights, if measured when they were saved
};
std::string format_trainer_state(const TrainerState& state);
/// @throws CorruptCheckpoint naming source and field, NewerFormat
TrainerState parse_trainer_state(const std::string& text, const std::string& source);
/// The verified trainer state of a checkpoint.
/// @throws IoError; CorruptCheckpoint, also if its step is not the checkpoint's; NewerFormat;
///         InvalidArgument if the checkpoint has none
TrainerState read_trainer_state(const io::CheckpointReader& reader);

/// The "model" section that is stored with a checkpoint.
nlohmann::json model_section(const models::Gpt2Config& config);
/// @throws CorruptCheckpoint naming source and field; Unsupported on another architecture
models::Gpt2Config parse_model_section(const nlohmann::json& section, const std::string& source);

/// The validation loss stored with a checkpoint, if any. @throws IoError, CorruptCheckpoint
std::optional<double> stored_val_loss(const std::filesystem::path& checkpoint);

/// The step that --step names among the checkpoints of a run: "latest", "best" (the lowest stored
/// validation loss), or a number.
/// @return empty: the newest
/// @throws InvalidArgument on anything else, or if `path` is no run with a stored validation loss;
///         IoError, CorruptCheckpoint
std::optional<std::int64_t> parse_step(const std::filesystem::path& path, const std::string& text);
inline constexpr const char* kStepHelp =
    "Of a run: latest, best (the lowest validation loss), or a step's number";

/// Exchanges texts between ranks over the run's store. Each thread of a rank needs its own, under a
/// name that the matching threads of the other ranks share: exchanges are counted.
class StoreCoordinator final : public io::SaveCoordinator {
 public:
  StoreCoordinator(std::shared_ptr<comm::Store> store, std::string name, int rank, int world_size,
                   std::chrono::milliseconds deadline)
      : store_(std::move(store)),
        name_(std::move(name)),
        rank_(rank),
        world_size_(world_size),
        deadline_(deadline) {}
  std::vector<std::string> exchange(const std::string& phase, std::string_view mine) override;

 private:
  std::shared_ptr<comm::Store> store_;
  std::string name_;
  int rank_, world_size_;
  std::chrono::milliseconds deadline_;
  std::int64_t calls_ = 0;
};

/// Whether a run that starts at `step` saves in the background, and needs staging memory for it. A
/// run that saves only at its end does not.
bool saves_beside_training(const Config& config, std::int64_t step);

/// A save and its host copies of a GPU's values.
struct SaveState {
  io::SaveRequest request;
  std::unique_ptr<comm::HostMemory> copies{};
};
/// This rank's part of a save, with the moments if wanted. @throws OutOfMemory
SaveState make_save_state(comm::ShardedModel& sharded, bool with_optimizer);
/// The same without copies: values stay on the device.
io::SaveRequest make_save_request(comm::ShardedModel& sharded, bool with_optimizer);

/// Whether this rank's parts, as make_save_state() gives them, are all finite numbers. A finite
/// gradient can still overflow the second moment, which holds its square.
bool is_finite(const io::SaveRequest& request);

}  // namespace tessera::tools
