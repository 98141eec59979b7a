#pragma once

#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "comm/control/launch_environment.h"
#include "comm/control/rank_status.h"
#include "comm/flight_recorder.h"
#include "core/base/error.h"
#include "tools/tessera/train/run_directory.h"

namespace tessera::tools {

/// This rank's flight record, `<run_dir>/flight/rank-00003.bin`, from the rank's first moment on:
/// a start that fails before its ranks have met must not leave the word of an earlier one.
/// Thread-safe.
class RankFlight {
 public:
  /// Begins the record at once if `run_dir` is a run's already and no job has it: the records of a
  /// job that runs stay as they are. Else there is none before open(). `status` tells it of phases.
  RankFlight(std::filesystem::path run_dir, const comm::LaunchEnvironment& environment,
             std::shared_ptr<comm::RankStatus> status);
  RankFlight(const RankFlight&) = delete;
  RankFlight& operator=(const RankFlight&) = delete;

  /// See BootstrapOptions::on_start_id.
  void set_start_id(std::uint64_t id);
  /// To be called once rank 0 has made and locked the directory: the record, in memory where there
  /// is no such directory or no room (the rank's log says so). Rank 0 removes those of ranks that
  /// this run has not. A second call gives the same.
  std::shared_ptr<comm::FlightRecorder> open();

  /// "last collectives: all_gather#175 (h.0) f32[96] done, all_gather#176 (root) f32[96] failed",
  /// for below a line of failure; empty if there were none. May wait for a disk.
  std::string last_collectives() const noexcept;

  /// Notes how the rank ends, and after an error of communication its last collectives in its log.
  /// Only the first call of a rank does something, and only if it has a record.
  void fail(const std::exception& error) noexcept;
  /// Notes, if there is a record, that the rank ends well, and how.
  void end(const std::string& text) noexcept;

 private:
  std::shared_ptr<comm::FlightRecorder> recorder() const;
  void make();

  const std::filesystem::path run_dir_;
  const std::shared_ptr<comm::RankStatus> status_;
  mutable std::mutex mutex_;
  comm::FlightIdentity identity_;
  std::shared_ptr<comm::FlightRecorder> recorder_;
  bool is_open_ = false;
};

/// The same on a record and a log that are at hand.
void record_failure(comm::FlightRecorder& recorder, const RankLog& log,
                    const std::exception& error) noexcept;

/// RankFlight::fail() for a process that must end now, though any of its threads may hang, in a
/// disk, say, and with what locks: writes `line()` and the last collectives to standard error and
/// notes the error, each on a thread of its own, and is back within 500 ms whatever becomes of
/// them.
void fail_at_once(const std::shared_ptr<RankFlight>& flight, const CommError& error,
                  const std::function<std::string()>& line) noexcept;

}  // namespace tessera::tools
