#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/cli.h"
#include "tests/support/paths.h"

namespace tessera::io {
class CheckpointReader;
}

namespace tessera::test {

inline constexpr int kWorlds[] = {2, 3, 4};

/// Values of LD_PRELOAD: preload.cpp, points.cpp.
inline const std::string kFailingCalls = build_path("tests/faults/tessera_fault_preload.so");
inline const std::string kFaultPoints = build_path("tests/faults/tessera_fault_points.so");
/// The prepared run was saved at kFirstStep; going on, it saves at the next step, beside training,
/// and at kLastStep, as it ends. It keeps one checkpoint and removes its predecessor.
inline constexpr std::int64_t kFirstStep = 2, kLastStep = 4;

/// A system call of a save, as tests/faults/preload.cpp writes it down.
struct LoggedCall {
  int rank = 0;
  std::int64_t number = 0;  ///< in its rank
  std::string name;
  std::uint64_t inode = 0;
  std::int64_t offset = 0, bytes = 0, data_at = 0;
  std::string path, path2;
};

/// A run that was saved once, what a run without faults makes of it, and the calls of its saves in
/// the order in which all ranks made them.
class SavedRun {
 public:
  explicit SavedRun(int world);

  /// A copy of the run as it was saved. @return its directory
  std::string copy(const std::string& name) const;
  /// `tessera train` that goes on to kLastStep.
  Arguments go_on(const std::string& run) const;

  const std::map<std::int64_t, std::string>& content() const { return content_; }  ///< by step
  const std::vector<LoggedCall>& calls() const { return calls_; }
  const std::string& written() const { return written_; }  ///< data that the calls wrote
  /// The run that was logged: its checkpoints, before the first call by inode, and at the end.
  const std::map<std::uint64_t, std::string>& first_inodes() const { return first_inodes_; }
  std::filesystem::path logged_checkpoints() const { return dir_.file("logged/checkpoints"); }
  std::filesystem::path base_checkpoints() const { return dir_.file("base/checkpoints"); }
  const TempDir& dir() const { return dir_; }

 private:
  int world_;
  TempDir dir_;
  std::string text_;
  std::map<std::int64_t, std::string> content_;
  std::vector<LoggedCall> calls_;
  std::string written_;
  std::map<std::uint64_t, std::string> first_inodes_;
};

/// Prepared on first use, for all tests of the process. Any thread.
/// @param world  of kWorlds
const SavedRun& saved_run(int world = 4);

/// Tells checkpoints apart: checksums of all tensors of all sections.
std::string content_of(const io::CheckpointReader& reader);

/// The newest valid checkpoint, all of its data verified.
struct Newest {
  std::int64_t step = -1;  ///< -1: none
  std::string content;
  std::string skipped;  ///< why newer ones are none
};
Newest newest_of(const std::filesystem::path& checkpoints);

/// How long the host of a virtual machine withheld a processor in that time, of the one that it
/// withheld most: what a process did not do then is not its fault. Zero on a machine of its own.
/// The first call starts to watch.
std::chrono::milliseconds stolen_between(std::chrono::steady_clock::time_point from,
                                         std::chrono::steady_clock::time_point to);

/// TESSERA_FAULT_POINTS=all: everything is tried, not a sample.
bool tries_all();

/// TESSERA_CAMPAIGN_SEED, which tools/test.sh takes from the commit; 0 without it.
std::size_t campaign_seed();

/// All of them in a campaign; else `n`, evenly spread, others for each seed.
/// @param salt  distinct for each list of a test
template <typename T>
std::vector<T> sample(std::vector<T> all, std::size_t n, std::size_t salt) {
  if (tries_all() || all.size() <= n) return all;
  std::vector<T> chosen;
  for (std::size_t i = 0; i < n; ++i)
    chosen.push_back(all[(i * all.size() / n + campaign_seed() + salt) % all.size()]);
  return chosen;
}

/// Calls body(i) for all i < n, in TESSERA_FAULT_JOBS threads (default 4: they mostly
/// wait).
void for_all(std::size_t n, const std::function<void(std::size_t)>& body);

}  // namespace tessera::test
