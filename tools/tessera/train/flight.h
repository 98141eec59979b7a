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

/// This rank's flight record, `<run_dir>/flight/rank-00003.bin`. Begins before the rendezvous,
/// so that a failed start replaces the record of an earlier start. Thread-safe.
class RankFlight {
 public:
  /// Begins the record now if `run_dir` is an unlocked run, else in open(). Phases come from
  /// `status`.
  RankFlight(std::filesystem::path run_dir, const comm::LaunchEnvironment& environment,
             std::shared_ptr<comm::RankStatus> status);
  RankFlight(const RankFlight&) = delete;
  RankFlight& operator=(const RankFlight&) = delete;

  /// See BootstrapOptions::on_start_id.
  void set_start_id(std::uint64_t id);
  /// Returns the record; call it after rank 0 has locked the directory. If the file can't be
  /// created, the record is kept in memory and ranks other than 0 log the reason. Rank 0 removes
  /// the files of ranks that this run does not have. Idempotent.
  std::shared_ptr<comm::FlightRecorder> open();

  /// "last collectives: all_gather#175 (h.0) f32[96] done, all_gather#176 (root) f32[96] failed",
  /// or empty. May block on a disk.
  std::string last_collectives() const noexcept;

  /// Records and logs the error; logs the last collectives, too, after a communication error. Only
  /// the first call has an effect.
  void fail(const std::exception& error) noexcept;
  /// Records an end without error.
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

/// RankFlight::fail() for a process that must exit now although its threads may hang with locks
/// held: prints `line()` and the last collectives, records the error, and returns within 500 ms.
void fail_at_once(const std::shared_ptr<RankFlight>& flight, const CommError& error,
                  const std::function<std::string()>& line) noexcept;

}  // namespace tessera::tools
