#pragma once

#include <filesystem>
#include <string>

#include "comm/control/socket.h"

namespace tessera::tools {

/// Creates and locks the directory of a run (rank 0). The lock ends with the process.
///
///   config.json    resolved configuration
///   metrics.jsonl  see train/metrics.h
///   saves.jsonl    a line per committed save, see Rank::report_saves()
///   checkpoints/   see io/FORMAT.md
///   logs/          one file per rank
///   flight/        one record per rank, see comm/flight_recorder.h
///   tuned_products.json  see train/tuned_products.h, with train.deterministic off
///   loss.svg       loss curve, written at the end
///   .lock          host and pid of the lock's holder
///   tokenizer/     copied from model.init_from, for exports
///
/// @throws IoError if that fails; InvalidArgument naming the holder if another job has the lock
comm::FileDescriptor open_run_directory(const std::filesystem::path& path);

/// Appends lines with UTC times to logs/rank-N.log. Ignores errors, which must not stop a run.
class RankLog {
 public:
  RankLog(const std::filesystem::path& run_dir, int rank);
  void write(const std::string& line) const;

 private:
  std::filesystem::path path_;
};

}  // namespace tessera::tools
