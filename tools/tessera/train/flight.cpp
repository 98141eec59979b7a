#include "tools/tessera/train/flight.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "comm/control/socket.h"
#include "io/base/file.h"
#include "train/run_lock.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

// Numbers of collectives that a failing rank lists in its log and on standard error.
constexpr int kInLog = 5;
constexpr std::size_t kShown = 3;
constexpr std::chrono::milliseconds kAtOnce{500};

// Removes records of an earlier run with more ranks. Keeps other files and follows no links.
void remove_other_ranks(const fs::path& folder, int world_size) {
  const comm::FileDescriptor dir(
      ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (dir.get() < 0) return;
  constexpr std::string_view kTemporary = ".tmp";
  std::error_code error;
  for (const fs::path& file : io::list_directory(folder, error)) {
    const std::string name = file.filename().string();
    std::string_view stem = name;
    if (stem.ends_with(kTemporary)) stem.remove_suffix(kTemporary.size());
    const auto rank = comm::rank_of_flight_file(stem);
    if (!rank || *rank < world_size) continue;
    struct stat status {};
    if (::fstatat(dir.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 &&
        S_ISREG(status.st_mode)) {
      ::unlinkat(dir.get(), name.c_str(), 0);
    }
  }
}

void write_to_stderr(const std::string& line) {
  [[maybe_unused]] const auto n = ::write(STDERR_FILENO, line.data(), line.size());
}

// Runs work on a detached thread. Unlike std::async's, the future's destructor does not block.
std::future<void> begin(std::function<void()> work) {
  std::packaged_task<void()> task(std::move(work));
  std::future<void> done = task.get_future();
  std::thread(std::move(task)).detach();
  return done;
}

}  // namespace

RankFlight::RankFlight(fs::path run_dir, const comm::LaunchEnvironment& environment,
                       std::shared_ptr<comm::RankStatus> status)
    : run_dir_(std::move(run_dir)),
      status_(std::move(status)),
      identity_{.rank = environment.rank,
                .world_size = environment.world_size,
                .run_id = environment.run_id} {
  if (train::is_idle_run(run_dir_)) make();
}

void RankFlight::make() {
  recorder_ = comm::FlightRecorder::create(
      run_dir_ / "flight" / comm::flight_file_name(identity_.rank), identity_);
  status_->on_enter([recorder = recorder_](const std::string& phase, std::int64_t step) {
    recorder->set_phase(phase, step);
  });
}

void RankFlight::set_start_id(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  identity_.start_id = id;
  if (recorder_) recorder_->set_start_id(id);
}

std::shared_ptr<comm::FlightRecorder> RankFlight::open() {
  const std::lock_guard lock(mutex_);
  if (is_open_) return recorder_;
  is_open_ = true;
  if (identity_.rank == 0) remove_other_ranks(run_dir_ / "flight", identity_.world_size);
  // A second job may have replaced the file before the lock made it fail.
  if (!recorder_ || !recorder_->is_in_place()) make();
  if (identity_.rank != 0 &&
      !recorder_->why_not_in_file().empty()) {  // rank 0 prints a note instead
    RankLog(run_dir_, identity_.rank).write("no flight record: " + recorder_->why_not_in_file());
  }
  return recorder_;
}

std::shared_ptr<comm::FlightRecorder> RankFlight::recorder() const {
  const std::lock_guard lock(mutex_);
  return recorder_;
}

std::string RankFlight::last_collectives() const noexcept {
  try {
    const auto recorder = this->recorder();
    if (!recorder) return {};
    const comm::FlightRecord record = recorder->snapshot();
    const auto& all = record.collectives;
    std::string text;
    for (std::size_t i = all.size() - std::min(kShown, all.size()); i < all.size(); ++i) {
      text += fmt::format("{}{} {}", text.empty() ? "last collectives: " : ", ",
                          all[i].signature.describe(), comm::flight_state_name(all[i].state));
    }
    return text;
  } catch (const std::exception&) {
    return {};
  }
}

void RankFlight::end(const std::string& text) noexcept {
  if (const auto recorder = this->recorder()) recorder->end(comm::FlightEnd::Done, text);
}

void RankFlight::fail(const std::exception& error) noexcept {
  try {
    const auto recorder = this->recorder();
    if (!recorder || recorder->snapshot().end != comm::FlightEnd::Running) return;
    recorder->end(error);
    const RankLog log(run_dir_, identity_.rank);
    log.write(std::string("error: ") + error.what());
    if (dynamic_cast<const CommError*>(&error) != nullptr) {
      log.write("last collectives: " + comm::describe(recorder->snapshot(), kInLog));
    }
  } catch (const std::exception&) {
    // Ignored: the first error is reported.
  }
}

void fail_at_once(const std::shared_ptr<RankFlight>& flight, const CommError& error,
                  const std::function<std::string()>& line) noexcept {
  const auto end = std::chrono::steady_clock::now() + kAtOnce;
  try {
    const auto said = begin([line, flight] {
      write_to_stderr(line() + "\n");
      const std::string last = flight->last_collectives();
      if (!last.empty()) write_to_stderr("  " + last + "\n");
    });
    const auto noted = begin([flight, error] { flight->fail(error); });
    said.wait_until(end);
    noted.wait_until(end);
  } catch (const std::exception&) {
    // Out of threads or memory: exit silently.
  }
}

}  // namespace tessera::tools
