#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
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
  nlohmann::json model;  ///< section that is stored with a checkpoint
  bool with_optimizer = true;
  bool in_background = true;   ///< saves but that of finish() may run beside training
  bool stop_on_error = false;  ///< also by a checkpoint that is found damaged as it is read back
  io::Retention retention{};
  /// That a save may stand still before it counts as hanging, and that ranks wait for each other.
  std::chrono::milliseconds timeout{};
  std::int64_t saved_step = -1;  ///< the checkpoint that the run goes on from
  /// See io::SaveRequest.
  std::function<void(std::string_view point)> at_point{};
};

/// A committed checkpoint.
struct Saved {
  std::int64_t step = 0;
  std::filesystem::path path;
  std::int64_t bytes = 0;    ///< of all ranks' shards
  double seconds = 0;        ///< from the end of the step to the commit
  double stall_seconds = 0;  ///< that this rank did not train for it
};

/// Saves a run's checkpoints, beside training or between steps, and keeps those that are to stay.
///
/// All ranks make the same calls of agree(), save() and finish() at the same steps, and talk to
/// each other over the control channel alone. Each rank may learn at another step how a save ended;
/// only agree() lets it act on that, and then on all ranks at once.
class Saver {
 public:
  /// Takes the staging for saves in the background. The references must outlive this.
  /// @param meeting  of the training threads
  /// @throws OutOfMemory
  Saver(SaverOptions options, std::shared_ptr<comm::Store> store, io::SaveCoordinator& meeting,
        const std::shared_ptr<Context>& context, comm::ShardedModel& sharded);

  /// After each step, and before a save that is due then: ranks tell each other how the save in
  /// flight stands, from its start to the step at which it has ended on all of them. In between
  /// saves this costs nothing.
  /// @return whether training is to end, because a save failed; the same on all ranks
  /// @throws CommError
  bool agree(std::int64_t step);
  /// Saves, or begins to, once the former save has ended. What fails becomes a note; with
  /// stop_on_error it also ends training at the next agree().
  /// @throws NonFiniteLoss, CommError
  void save(const TrainerState& state);
  /// To be called before weights or moments change: a save in the background may still be copying
  /// them. Waits for that, and helps with it.
  void before_update();
  /// Takes note of a save that has ended meanwhile. Never waits.
  void poll();

  /// The end of the run: waits for the save in flight, and saves if `state` is not yet, a second
  /// time if what it saves is found damaged.
  /// @param hurry  whoever stops the run won't wait long: old checkpoints stay
  /// @throws IoError if it could not be saved, or training ended because of a save; NonFiniteLoss;
  ///         CommError
  void finish(const TrainerState& state, bool hurry = false);
  /// The end by an error that this rank does not share: waits for the save in flight, no longer
  /// than `at_most`, and never throws. After that the destructor does not wait.
  void leave(std::chrono::milliseconds at_most) noexcept;
  /// Whether a save is in flight on this rank, and of which step.
  std::optional<std::int64_t> in_flight() const;

  /// What was saved, and what people should know, since the last call.
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
  std::int64_t saves_ = 0;  // begun, the same on all ranks
  // A save has begun, and the ranks have not agreed yet that it has ended; the same on all ranks.
  bool pending_ = false;
  // Of the save in flight:
  std::int64_t step_ = -1;
  double stall_ = 0;
  std::shared_ptr<std::string> warning_;  // the writer's, until it has ended
  std::shared_ptr<std::atomic<bool>> committed_;
  std::shared_ptr<std::atomic<std::uint64_t>> pulse_;
  const std::shared_ptr<std::atomic<bool>> hurry_ = std::make_shared<std::atomic<bool>>(false);
  std::uint64_t last_pulse_ = 0;
  Clock::time_point last_moved_;

  std::vector<Saved> saved_;
  std::vector<std::string> notes_;
  bool leaving_ = false;
  std::string failure_;            // ends training
  std::int64_t failed_step_ = -1;  // whose save it was
  std::int64_t last_step_ = -1;    // once the run ends
  std::exception_ptr fatal_;       // ends training, whatever the policy
};

}  // namespace tessera::tools
