#pragma once

#include <filesystem>
#include <string>

namespace tessera::tools {

/// The directory of a run, held by one job at a time. Made by rank 0.
///
///   config.json    resolved configuration
///   metrics.jsonl  see report/metrics.h
///   saves.jsonl    see report/saves.h
///   checkpoints/   see io/FORMAT.md
///   logs/          one file per rank
///   flight/        one record per rank, see comm/flight_recorder.h
///   loss.svg       at the end
///   .lock          the process that holds the directory
class RunDirectory {
 public:
  /// Makes and locks it. The lock goes with the process, however it ends.
  /// @throws IoError if it cannot be made; InvalidArgument naming the holder if another job has it
  explicit RunDirectory(std::filesystem::path path);
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  int lock_ = -1;
};

/// Whether it is a run's directory that no job holds now. Keeps nobody from taking it.
bool is_idle_run(const std::filesystem::path& path);

/// Appends lines with UTC times to logs/rank-N.log of a run. A log that cannot be written is no
/// reason to stop a run: errors are ignored.
class RankLog {
 public:
  RankLog(const std::filesystem::path& run_dir, int rank);
  void write(const std::string& line) const;

 private:
  std::filesystem::path path_;
};

}  // namespace tessera::tools
