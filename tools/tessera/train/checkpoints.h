#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
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

/// What a run needs beside tensors to go on where it was: content of a checkpoint's trainer.json.
struct TrainerState {
  std::int64_t step = 0;      ///< updates made
  std::int64_t position = 0;  ///< global number of the next sample
  nlohmann::json tokenizer;   ///< null for token files
  nlohmann::json config;      ///< resolved, of the run that saved
  /// Of these weights, if it was measured when they were saved.
  std::optional<double> val_loss{};
};
std::string format_trainer_state(const TrainerState& state);
/// @throws CorruptCheckpoint naming source and field, NewerFormat
TrainerState parse_trainer_state(const std::string& text, const std::string& source);
/// That of a checkpoint, verified. @throws IoError; CorruptCheckpoint, also if it is of another
/// step than the checkpoint, NewerFormat; InvalidArgument if the checkpoint has none
TrainerState read_trainer_state(const io::CheckpointReader& reader);

/// The "model" section that is stored with a checkpoint.
nlohmann::json model_section(const models::Gpt2Config& config);
/// @throws CorruptCheckpoint naming source and field; Unsupported on another architecture
models::Gpt2Config parse_model_section(const nlohmann::json& section, const std::string& source);

/// The validation loss that was stored with a checkpoint; empty if none was.
/// @throws IoError, CorruptCheckpoint if it cannot be told
std::optional<double> stored_val_loss(const std::filesystem::path& checkpoint);

/// Lets ranks talk over the run's store. Each thread of a rank needs one of its own, with a name
/// of its own that the other ranks' counterparts share: exchanges are counted.
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

/// Whether a run that starts at `step` saves beside training, and needs staging for it: what it
/// saves at its end can as well lie where it is.
bool saves_beside_training(const Config& config, std::int64_t step);

/// A save, with the copies that a device's values need in the host's memory.
struct SaveState {
  io::SaveRequest request;
  std::unique_ptr<comm::HostMemory> copies{};
};
/// Parts of this rank for a save; moments only if they are there and wanted.
/// @throws OutOfMemory
SaveState make_save_state(comm::ShardedModel& sharded, bool with_optimizer);
/// The same where they lie, on the device that computes.
io::SaveRequest make_save_request(comm::ShardedModel& sharded, bool with_optimizer);

/// Whether this rank's parts, as make_save_state() gives them, are all finite numbers. A finite
/// gradient can still overflow the second moment, which holds its square.
bool is_finite(const io::SaveRequest& request);

}  // namespace tessera::tools
