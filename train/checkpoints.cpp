#include "train/checkpoints.h"

#include <fmt/ranges.h>

#include <set>
#include <utility>

#include "io/checkpoint/find.h"
#include "train/load_state.h"
#include "train/saver.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

}  // namespace

struct Checkpoints::State {
  fs::path run_dir;
  Rank& rank;
  comm::ShardedModel& model;
  const optim::Optimizer& optimizer;
  StoreCoordinator coordinator;
  std::unique_ptr<Saver> saver{};
};

Checkpoints::Checkpoints(std::string run_dir, Rank& rank, comm::ShardedModel& model,
                         const optim::Optimizer& optimizer, const CheckpointOptions& options)
    : state_(std::make_unique<State>(
          State{std::move(run_dir),
                rank,
                model,
                optimizer,
                StoreCoordinator(rank.store, rank.unique_name("checkpoints"), rank.rank(),
                                 rank.world_size(), options.timeout),
                {}})) {
  State& s = *state_;
  model.create_optimizer_state(optimizer);
  s.saver = std::make_unique<Saver>(SaverOptions{.checkpoints_dir = s.run_dir / "checkpoints",
                                                 .name = rank.unique_name("save"),
                                                 .run_id = "run",
                                                 .rank = rank.rank(),
                                                 .world_size = rank.world_size(),
                                                 .model = options.model,
                                                 .with_optimizer = options.with_optimizer,
                                                 .in_background = options.in_background,
                                                 .stop_on_error = true,
                                                 .retention = {.keep = options.keep},
                                                 .timeout = options.timeout},
                                    rank.store, s.coordinator, model);
}

Checkpoints::~Checkpoints() = default;

std::int64_t Checkpoints::load_latest() {
  State& s = *state_;
  std::set<fs::path> unreadable;
  std::vector<std::string> reasons;
  for (;;) {
    // Rank 0 chooses: "+PATH", "+" if there is none, "-ERROR".
    std::string choice;
    if (s.rank.rank() == 0) {
      try {
        std::error_code absent;
        const bool any = fs::is_directory(s.run_dir / "checkpoints", absent) &&
                         !io::find_checkpoints(s.run_dir).empty();
        choice = "+";
        if (any) {
          const auto newest = io::newest_valid(s.run_dir, {.passed_over = unreadable});
          reasons.insert(reasons.end(), newest.skipped.begin(), newest.skipped.end());
          require<CorruptCheckpoint>(newest.reader.has_value(),
                                     "none of the checkpoints of {} can be used ({})",
                                     s.run_dir.string(), fmt::join(reasons, "; "));
          choice += newest.reader->path().string();
        }
      } catch (const std::exception& error) {
        choice = std::string("-") + error.what();
      }
    }
    choice = s.coordinator.exchange("choice", choice)[0];
    require<CorruptCheckpoint>(choice.starts_with('+'), "{}", choice.substr(1));
    if (choice == "+") return 0;
    const fs::path path = choice.substr(1);

    std::string problem;
    std::int64_t step = 0;
    try {
      const auto reader = io::open_patiently(path);
      step = reader.index().step;
      const LoadPlan plan = plan_resume(reader, tensors_of(s.model.module()), s.model.state_names(),
                                        io::LoadPolicy::Exact);
      load_training_state(s.model, s.optimizer, reader, plan, s.rank.context->threads().size(), 0);
    } catch (const CorruptCheckpoint& error) {
      problem = error.what();
    } catch (const IoError& error) {
      problem = error.what();
    }
    bool good = true;
    for (const std::string& answer : s.coordinator.exchange("loaded", problem)) {
      if (answer.empty()) continue;
      good = false;
      reasons.push_back(answer);
      break;
    }
    if (good) return step;
    unreadable.insert(path);
  }
}

void Checkpoints::save(std::int64_t step) {
  const TrainerState state{.step = step, .position = step};
  Saver& saver = *state_->saver;
  if (saver.agree(step)) saver.finish(state);  // throws the error of the former save
  saver.save(state);
  if (saver.agree(step)) saver.finish(state);
}

void Checkpoints::finish(std::int64_t step) {
  state_->saver->finish({.step = step, .position = step});
}

}  // namespace tessera::train
