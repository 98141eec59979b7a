#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "comm/control/store.h"
#include "comm/sharding/sharded_model.h"
#include "core/base/storage.h"
#include "io/checkpoint/reader.h"
#include "io/checkpoint/save.h"
#include "models/gpt2_config.h"
#include "tools/tessera/config/config.h"

namespace tessera::tools {

/// Content of a checkpoint's trainer.json.
struct TrainerState {
  std::int64_t step = 0;             ///< updates made
  std::int64_t position = 0;         ///< global index of the next sample
  std::string tokenizer = "null";    ///< JSON; null for token files
  std::string config = "null";       ///< JSON: resolved configuration of the run
  std::optional<double> val_loss{};  ///< of these weights, if measured
};
std::string format_trainer_state(const TrainerState& state);
/// @throws CorruptCheckpoint naming source and field, NewerFormat
TrainerState parse_trainer_state(const std::string& text, const std::string& source);
/// Reads and verifies the trainer state of a checkpoint.
/// @throws IoError; CorruptCheckpoint, also on a step other than the checkpoint's; NewerFormat;
///         InvalidArgument if the checkpoint has none
TrainerState read_trainer_state(const io::CheckpointReader& reader);

nlohmann::json model_section(const models::Gpt2Config& config);
/// @throws CorruptCheckpoint naming source and field; Unsupported on another architecture
models::Gpt2Config parse_model_section(const nlohmann::json& section, const std::string& source);

/// Step of a run's newest committed checkpoint; empty if there is none or it cannot be listed.
std::optional<std::int64_t> newest_step(const std::filesystem::path& run_dir);

/// The validation loss stored with a checkpoint, if any. @throws IoError, CorruptCheckpoint
std::optional<double> stored_val_loss(const std::filesystem::path& checkpoint);

/// Resolves --step for a run: "latest", "best" (lowest stored validation loss), or a number.
/// @return the step; empty for the newest
/// @throws InvalidArgument on other text, or on "best" without a stored validation loss; IoError,
///         CorruptCheckpoint
std::optional<std::int64_t> parse_step(const std::filesystem::path& path, const std::string& text);
inline constexpr const char* kStepHelp =
    "Of a run: latest, best (the lowest validation loss), or a step's number";

/// Exchanges text between ranks over the run's store. Use one per thread, with the same name on the
/// corresponding threads of all ranks. All ranks must make the same calls in the same order.
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

/// Whether a run that starts at `step` saves in the background and needs staging memory. False for
/// a run that saves only at the end.
bool saves_beside_training(const Config& config, std::int64_t step);

/// A save request and the host copies of GPU values that it refers to.
struct SaveState {
  io::SaveRequest request;
  std::shared_ptr<Storage> copies{};
};
/// This rank's part of a save. @throws OutOfMemory
SaveState make_save_state(comm::ShardedModel& sharded, bool with_optimizer);
/// The same without host copies; the request refers to device memory.
io::SaveRequest make_save_request(comm::ShardedModel& sharded, bool with_optimizer);

/// Whether all values are finite. Needed although gradients are checked: the square of a finite
/// gradient can overflow the second moment.
/// @param request  its values must be in host memory
bool is_finite(const io::SaveRequest& request);

}  // namespace tessera::tools
