#include "tools/tessera/train/run.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iostream>
#include <map>

#include "comm/bootstrap.h"
#include "tools/tessera/device/choose_device.h"
#include "tools/tessera/device/head_dim.h"
#include "tools/tessera/model/loaded_model.h"
#include "tools/tessera/train/memory_advice.h"
#include "tools/tessera/train/rank.h"
#include "tools/tessera/train/rank_zero.h"
#include "tools/tessera/train/run_directory.h"
#include "tools/tessera/train/setup.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

// What must be equal on all ranks: everything but threads, which may differ between hosts, and the
// number of the device.
std::string fingerprint(const Config& config, Device device) {
  std::string text = fmt::format("tessera = {}\ndevice = {}\n", TESSERA_VERSION,
                                 device.type == DeviceType::CUDA ? "cuda" : "cpu");
  const auto json = to_json(config);
  for (const auto& [section, keys] : json.items()) {
    for (const auto& [key, value] : keys.items()) {
      if (section == "train" && (key == "threads" || key == "device")) continue;
      text += fmt::format("{}.{} = {}\n", section, key, value.dump());
    }
  }
  return text;
}

// Better at the start than after the steps that were to be traced.
void check_profile(const Config& config, int rank) {
  if (config.train.profile.empty()) return;
  const fs::path file = fs::absolute(profile_file(config, rank));
  io::require_replaceable(file);
  const fs::path folder = file.parent_path();
  require<IoError>(::access(folder.c_str(), W_OK | X_OK) == 0,
                   "train.profile: no file can be written in {}: {}", folder.string(),
                   std::strerror(errno));
}

// What people should know of where the ranks compute and how they talk.
std::vector<std::string> start_notes(const comm::RankGroup& group, const ChosenDevice& chosen) {
  std::vector<std::string> notes;
  const std::string_view backend = group.communicator->backend();
  if (!group.why_not_nccl.empty()) {
    notes.push_back(fmt::format("note: ranks talk through {}, not through NCCL: {}", backend,
                                group.why_not_nccl));
  }
  if (!group.why_not_shared_memory.empty()) {
    notes.push_back(fmt::format("note: ranks talk through {}, not through shared memory: {}",
                                backend, group.why_not_shared_memory));
  }
  if (!chosen.why_cpu.empty()) notes.push_back("note: training runs on the CPU: " + chosen.why_cpu);
  return notes;
}

}  // namespace

int run_rank(Config config, const comm::LaunchEnvironment& environment, bool json) {
  const ChosenDevice chosen =
      open_device(config.train.device, environment.local_rank,
                  default_threads(config.train.threads, environment.local_world_size));
  const std::shared_ptr<Context>& context = chosen.context;
  comm::BootstrapOptions options;
  options.backend = config.comm.backend;
  options.init_timeout = to_milliseconds(config.comm.init_timeout);
  options.communicator = {to_milliseconds(config.comm.timeout), context};
  options.fingerprint = fingerprint(config, context->device());
  comm::RankGroup group = comm::bootstrap(environment, options);

  check_profile(config, environment.rank);
  const bool is_zero = environment.rank == 0;
  const auto warn = [is_zero](const std::string& text) {
    if (is_zero) std::cerr << "tessera: warning: " << text << "\n";
  };
  std::unique_ptr<RunDirectory> directory;
  std::map<fs::path, std::string> unusable;  // checkpoints, and why
  // Each attempt goes on from an older checkpoint, until the ranks can read one.
  for (int attempt = 0;; ++attempt) {
    const std::string resume = decide_on_rank_zero(
        *group.store, fmt::format("resume/{}", attempt), environment.rank,
        to_milliseconds(config.checkpoint.timeout), [&] {
          if (!directory) directory = std::make_unique<RunDirectory>(config.run.out);
          std::vector<std::string> notes;
          const auto found = find_resume(config.run.out, config.checkpoint.resume, unusable, notes);
          for (const std::string& note : notes) warn(note);
          return found ? found->string() : std::string();
        });
    RunSetup setup = set_up(config, environment.world_size,
                            resume.empty() ? std::nullopt : std::optional<fs::path>(resume));
    require_head_dim(setup.model, context->device(), "--train.device cpu");
    for (std::string& note : start_notes(group, chosen)) setup.notes.push_back(std::move(note));
    require(setup.config.checkpoint.keep_best == 0 || setup.val,
            "checkpoint.keep_best is {}, but there is no validation data to tell the best by; name "
            "some with --data.val FILE, or leave the key out",
            setup.config.checkpoint.keep_best);
    const bool done = setup.resume && setup.state.step >= setup.config.train.steps;
    const std::string done_text =
        fmt::format("{} is at step {} of {} already; raise --train.steps to go on\n", resume,
                    setup.state.step, setup.config.train.steps);

    std::string why;
    const Config resolved = setup.config;
    const int code = with_memory_advice(resolved, environment.world_size, *context, [&] {
      Rank rank(std::move(setup), environment, group, context, attempt, json);
      why = rank.load();
      if (!why.empty()) return -1;
      if (done && is_zero) std::cerr << done_text;
      return rank.run();
    });
    if (why.empty()) return code;
    require<CorruptCheckpoint>(config.checkpoint.resume == "auto", "{} cannot be read: {}", resume,
                               why);
    unusable[resume] = fmt::format("{} is skipped: {}", resume, why);
    warn(unusable[resume]);
  }
}

}  // namespace tessera::tools
