#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/checkpoint/async_saver.h"
#include "io/checkpoint/retention.h"
#include "train/save_state.h"
#include "train/trainer_state.h"

namespace tessera::train {

struct SaverOptions {
  std::filesystem::path checkpoints_dir;
  std::string name = "save";  ///< of exchanges over the store; unique for each Saver of a run
  std::string run_id;
  int rank = 0;
  int world_size = 1;
  std::string model = "{}";  ///< JSON object that describes the model
  bool with_optimizer = true;
  bool trainable_only = false;  ///< see make_save_state()
  bool with_trainer = true;     ///< save the trainer section
  bool in_background = true;    ///< save during training, except in finish()
  bool stop_on_error = false;   ///< end training after a failed or damaged save
  io::Retention retention{};
  /// Time without progress after which a save counts as hanging; also the deadline of exchanges.
  std::chrono::milliseconds timeout{};
  std::int64_t saved_step = -1;  ///< step of the checkpoint that the run resumed from
  /// See io::SaveRequest.
  std::function<void(std::string_view point)> at_point{};
  /// Gets the step of the newest good checkpoint at each change, also on the thread that saves.
  std::function<void(std::int64_t step)> at_commit{};
};

struct Saved {
  std::int64_t step = 0;
  std::filesystem::path path;
  std::int64_t bytes = 0;    ///< over all ranks
  double seconds = 0;        ///< from the end of the step to the commit
  double stall_seconds = 0;  ///< for which training waited on this rank
};

/// Saves checkpoints in the background or between steps, and applies retention.
///
/// All ranks call agree(), save() and finish() at the same steps; they communicate over the control
/// channel only. A background save may end at different steps on different ranks; agree() makes all
/// ranks act on it at the same step.
class Saver {
 public:
  /// Allocates staging memory for background saves. The references must outlive this. Becomes the
  /// model's before_update callback.
  /// @param coordinator  of the training threads
  /// @throws OutOfMemory
  Saver(SaverOptions options, std::shared_ptr<comm::Store> store, io::SaveCoordinator& coordinator,
        comm::ShardedModel& sharded);
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  /// Exchanges the state of the save in flight between ranks. Call it after each step, before
  /// save(). Costs nothing while no save is in flight.
  /// @return whether a failed save must end training; equal on all ranks
  /// @throws CommError
  bool agree(std::int64_t step);
  /// Waits for the previous save, then saves or starts a background save. A failure becomes a note;
  /// with stop_on_error it also ends training at the next agree().
  /// @throws NonFiniteLoss, CommError
  void save(const TrainerState& state);
  /// Waits until the background save has copied weights and state; ShardedModel::step() calls it.
  void wait_copied();
  /// Takes the result of a background save, if it has ended. Never blocks.
  void poll();

  /// Ends the run: waits for the save in flight and saves `state` unless already saved; retries
  /// once if the checkpoint is damaged when read back.
  /// @param hurry  cut the removal of old checkpoints short
  /// @throws IoError if `state` could not be saved, or a failed save ended training; NonFiniteLoss;
  ///         CommError
  void finish(const TrainerState& state, bool hurry = false);
  /// After an error: waits at most `at_most` for the save in flight, so that ~Saver() won't block.
  void leave(std::chrono::milliseconds at_most) noexcept;
  /// Step of the save in flight on this rank, if any.
  std::optional<std::int64_t> in_flight() const;

  /// Committed saves, and notes for the user, since the last call.
  std::vector<Saved> take_saved() { return std::exchange(saved_, {}); }
  std::vector<std::string> take_notes() { return std::exchange(notes_, {}); }

 private:
  using Clock = std::chrono::steady_clock;

  io::SaveRequest complete(io::SaveRequest request, const TrainerState& state) const;
  void start(const TrainerState& state, Clock::time_point begin);
  void save_here(const TrainerState& state);
  void save_last(const TrainerState& state);
  bool save_and_wait(const TrainerState& state);
  void note_pulse();
  bool wait_for_writer(Clock::time_point at_most);
  bool wait_for_former(std::int64_t step);
  void finish_in_background(const TrainerState& state);
  void saved(const io::SaveReport& report, std::int64_t step, double seconds, double stall,
             const std::string& warning);
  void failed(std::int64_t step, const std::string& why);

  SaverOptions options_;
  const std::shared_ptr<comm::Store> store_;
  io::SaveCoordinator& coordinator_;
  comm::ShardedModel& sharded_;
  std::unique_ptr<io::AsyncSaver> async_;  // null: saves run between steps

  std::int64_t saved_step_;
  std::int64_t saves_ = 0;  // started saves; equal on all ranks
  // agree() has not yet seen the started save end on all ranks; equal on all ranks.
  bool pending_ = false;
  // State of the save in flight:
  std::int64_t step_ = -1;
  double stall_ = 0;
  std::shared_ptr<std::string> warning_;  // set by the writer; read it after the save has ended
  std::shared_ptr<std::atomic<bool>> committed_;
  std::shared_ptr<std::atomic<std::uint64_t>> pulse_;
  const std::shared_ptr<std::atomic<bool>> hurry_ = std::make_shared<std::atomic<bool>>(false);
  std::uint64_t last_pulse_ = 0;
  Clock::time_point last_moved_;

  std::vector<Saved> saved_;
  std::vector<std::string> notes_;
  bool leaving_ = false;
  std::string noted_;  // last noted failure, without digits
  std::int64_t noted_step_ = -1;
  std::string failure_;            // error that ends training; empty: none
  std::int64_t failed_step_ = -1;  // step of the failed save
  std::int64_t last_step_ = -1;    // set when the run ends
  std::exception_ptr fatal_;       // error that ends training under any checkpoint.on_error
};

}  // namespace tessera::train
