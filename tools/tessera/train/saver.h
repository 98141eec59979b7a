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
#include "tools/tessera/train/checkpoints.h"
#include "tools/tessera/train/trainer.h"

namespace tessera::tools {

struct SaverOptions {
  std::filesystem::path checkpoints_dir;
  std::string run_id;
  int rank = 0;
  int world_size = 1;
  models::Gpt2Config model;
  bool with_optimizer = true;
  bool in_background = true;   ///< save while training goes on, except in finish()
  bool stop_on_error = false;  ///< end training after a failed or damaged save
  io::Retention retention{};
  /// Time without progress after which a save counts as hanging, and deadline between ranks.
  std::chrono::milliseconds timeout{};
  std::int64_t saved_step = -1;  ///< step of the checkpoint that the run continues
  /// See io::SaveRequest.
  std::function<void(std::string_view point)> at_point{};
};

/// A committed checkpoint.
struct Saved {
  std::int64_t step = 0;
  std::filesystem::path path;
  std::int64_t bytes = 0;    ///< of all ranks' shards
  double seconds = 0;        ///< from the end of the step to the commit
  double stall_seconds = 0;  ///< training time that this rank lost to it
};

/// Saves a run's checkpoints, in the background or between steps, and applies retention.
///
/// All ranks call agree(), save() and finish() at the same steps; they communicate over the control
/// channel only. Ranks may learn of a save's end at different steps; agree() makes them act on it
/// at the same one.
class Saver {
 public:
  /// Allocates staging memory for background saves. The references must outlive this.
  /// @param meeting  exchanges of the training threads
  /// @throws OutOfMemory
  Saver(SaverOptions options, std::shared_ptr<comm::Store> store, io::SaveCoordinator& meeting,
        const std::shared_ptr<Context>& context, comm::ShardedModel& sharded);

  /// Exchanges the state of the save in flight between ranks. Call it after each step, before a
  /// save that is due. Free while no save is in flight.
  /// @return whether training must end because a save failed; equal on all ranks
  /// @throws CommError
  bool agree(std::int64_t step);
  /// Saves, or begins to, after the previous save has ended. A failure becomes a note, and with
  /// stop_on_error ends training at the next agree().
  /// @throws NonFiniteLoss, CommError
  void save(const TrainerState& state);
  /// Waits until a background save has copied weights and moments. Call it before they change.
  void before_update();
  /// Processes the end of a background save. Never waits.
  void poll();

  /// Ends the run: waits for the save in flight, and saves `state` unless it is saved, again if the
  /// checkpoint reads back damaged.
  /// @param hurry  leave old checkpoints in place
  /// @throws IoError if it could not be saved, or training ended because of a save; NonFiniteLoss;
  ///         CommError
  void finish(const TrainerState& state, bool hurry = false);
  /// Ends after an error: waits at most `at_most` for the save in flight. The destructor then does
  /// not wait.
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

  const SaverOptions options_;
  const std::shared_ptr<comm::Store> store_;
  io::SaveCoordinator& meeting_;
  comm::ShardedModel& sharded_;
  std::unique_ptr<io::AsyncSaver> async_;  // null: saves run between steps

  std::int64_t saved_step_;
  std::int64_t saves_ = 0;  // begun; equal on all ranks
  // A save has begun and the ranks have not agreed that it ended; equal on all ranks.
  bool pending_ = false;
  // Of the save in flight:
  std::int64_t step_ = -1;
  double stall_ = 0;
  std::shared_ptr<std::string> warning_;  // written by the writer until it ends
  std::shared_ptr<std::atomic<bool>> committed_;
  std::shared_ptr<std::atomic<std::uint64_t>> pulse_;
  const std::shared_ptr<std::atomic<bool>> hurry_ = std::make_shared<std::atomic<bool>>(false);
  std::uint64_t last_pulse_ = 0;
  Clock::time_point last_moved_;

  std::vector<Saved> saved_;
  std::vector<std::string> notes_;
  bool leaving_ = false;
  std::string told_;  // the last failure in a note, without its numbers
  std::int64_t told_step_ = -1;
  std::string failure_;            // ends training
  std::int64_t failed_step_ = -1;  // step of the failed save
  std::int64_t last_step_ = -1;    // set when the run ends
  std::exception_ptr fatal_;       // ends training under any policy
};

}  // namespace tessera::tools
