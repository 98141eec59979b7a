#include "train/checkpoints.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "core/base/thread_pool.h"
#include "io/checkpoint/find.h"
#include "train/load_state.h"
#include "train/run_lock.h"
#include "train/saver.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// Added to the timeout of a save in exchanges, because other ranks may still wait for their save.
constexpr std::chrono::milliseconds kLateForSave{5000};
// Longest wait for a save after an error.
constexpr std::chrono::milliseconds kWithoutPeers{300};

void require_same_model(const io::CheckpointReader& reader, const std::string& model) {
  const Json stored = Json::parse(reader.index().model_config), own = Json::parse(model);
  require(stored == own || own.empty(), "{} is of the model {}, but this one is {}",
          reader.path().string(), stored.dump(), own.dump());
}

}  // namespace

struct Checkpoints::State {
  fs::path run_dir;
  Rank& rank;
  comm::ShardedModel& model;
  const optim::Optimizer& optimizer;
  CheckpointOptions options;
  StoreCoordinator coordinator;
  comm::FileDescriptor lock{};
  std::vector<std::string> skipped{};
  int exceptions = std::uncaught_exceptions();
  std::unique_ptr<Saver> saver{};  // null: a plan
  std::shared_ptr<Storage> planned{};
};

Checkpoints::Checkpoints(std::string run_dir, Rank& rank, comm::ShardedModel& model,
                         const optim::Optimizer& optimizer, const CheckpointOptions& options)
    : state_(std::make_unique<State>(
          State{std::move(run_dir), rank, model, optimizer, options,
                StoreCoordinator(rank.store, rank.unique_name("checkpoints"), rank.rank(),
                                 rank.world_size(), options.timeout + kLateForSave)})) {
  State& s = *state_;
  if (rank.context->device().type == DeviceType::Meta) {  // a plan
    model.create_optimizer_state(optimizer);
    if (options.in_background)
      s.planned = Storage::allocate_on_host(
          model.state_context(),
          io::AsyncSaver::staging_bytes(make_save_request(model, options.with_optimizer)),
          MemoryCategory::Staging, "checkpoint");
    return;
  }
  std::string problem;
  if (rank.rank() == 0) {
    try {
      io::make_directories_durably(s.run_dir);
      s.lock = lock_run_directory(s.run_dir, "choose another directory");
    } catch (const Error& error) {
      problem = error.what();
    }
  }
  problem = s.coordinator.exchange("lock", problem)[0];
  require(problem.empty(), "{}", problem);
  model.create_optimizer_state(optimizer);
  s.saver = std::make_unique<Saver>(SaverOptions{.checkpoints_dir = s.run_dir / "checkpoints",
                                                 .name = rank.unique_name("save"),
                                                 .run_id = rank.run_id,
                                                 .rank = rank.rank(),
                                                 .world_size = rank.world_size(),
                                                 .model = options.model,
                                                 .with_optimizer = options.with_optimizer,
                                                 .with_trainer = false,
                                                 .in_background = options.in_background,
                                                 .stop_on_error = true,
                                                 .retention = {.keep = options.keep},
                                                 .timeout = options.timeout},
                                    rank.store, s.coordinator, model);
}

Checkpoints::~Checkpoints() {
  if (state_->saver && std::uncaught_exceptions() > state_->exceptions)
    state_->saver->leave(kWithoutPeers);
}

const std::vector<std::string>& Checkpoints::skipped() const { return state_->skipped; }

std::int64_t Checkpoints::load_latest() {
  State& s = *state_;
  if (!s.saver) return 0;
  std::set<fs::path> unreadable;
  s.saver->wait_copied();
  s.skipped.clear();
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
          for (const std::string& why : newest.skipped)
            if (std::ranges::find(s.skipped, why) == s.skipped.end()) s.skipped.push_back(why);
          require<CorruptCheckpoint>(newest.reader.has_value(),
                                     "none of the checkpoints of {} can be used ({})",
                                     s.run_dir.string(), fmt::join(s.skipped, "; "));
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
      require_same_model(reader, s.options.model);
      const nn::Module& module = s.model.module();
      const LoadPlan plan = plan_resume(
          reader, tensors_of(module),
          s.options.with_optimizer ? state_tensors(module, s.optimizer) : StateTensors(),
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
      s.skipped.push_back(answer);
      break;
    }
    if (good) {
      // Rank 0 alone knows why newer ones are not readable.
      const std::string all = s.coordinator.exchange("skipped", Json(s.skipped).dump())[0];
      s.skipped = Json::parse(all).get<std::vector<std::string>>();
      return step;
    }
    unreadable.insert(path);
  }
}

void Checkpoints::save(std::int64_t step) {
  const TrainerState state{.step = step};
  if (!state_->saver) return;
  Saver& saver = *state_->saver;
  if (saver.agree(step)) saver.finish(state);  // throws the error of the former save
  saver.save(state);
  if (saver.agree(step)) saver.finish(state);
}

void Checkpoints::finish(std::int64_t step) {
  if (state_->saver) state_->saver->finish({.step = step});
}

}  // namespace tessera::train
