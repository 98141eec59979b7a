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
/// The prepared run was saved at kFirstStep. Resumed, it saves at the next step, asynchronously,
/// and at kLastStep, when it ends; it keeps one checkpoint.
inline constexpr std::int64_t kFirstStep = 2, kLastStep = 4;

/// A system call of a save, as logged by tests/faults/preload.cpp.
struct LoggedCall {
  int rank = 0;
  std::int64_t number = 0;  ///< within its rank
  std::string name;
  std::uint64_t inode = 0;
  std::int64_t offset = 0, bytes = 0, data_at = 0;
  std::string path, path2;
};

/// A saved run, the expected content of its resumption without faults, and the system calls of its
/// saves in their order across ranks.
class SavedRun {
 public:
  explicit SavedRun(int world);

  /// @return directory of a copy of the run
  std::string copy(const std::string& name) const;
  /// Arguments of `tessera train` that resume the run up to kLastStep.
  Arguments resume_arguments(const std::string& run) const;

  const std::map<std::int64_t, std::string>& content() const { return content_; }  ///< by step
  const std::vector<LoggedCall>& calls() const { return calls_; }
  const std::string& written() const { return written_; }  ///< data of all logged writes
  /// Checkpoint paths of the logged run before its first call, by inode.
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

/// Prepared on first use, shared by all tests of the process. Thread-safe.
/// @param world  one of kWorlds
const SavedRun& saved_run(int world = 4);

/// Checksums of all tensors in all sections: equal for equal checkpoints.
std::string content_of(const io::CheckpointReader& reader);

struct Newest {
  std::int64_t step = -1;  ///< -1: none
  std::string content;
  std::string skipped;  ///< why newer directories are not valid
};
Newest newest_of(const std::filesystem::path& checkpoints);

/// TESSERA_FAULT_POINTS=all: run all trials instead of a sample.
bool tries_all();

/// TESSERA_CAMPAIGN_SEED, which tools/test.sh derives from the commit; 0 if unset.
std::size_t campaign_seed();

/// All items if tries_all(), else `n` evenly spread ones, chosen by the seed.
/// @param salt  distinct for each list of a test
template <typename T>
std::vector<T> sample(std::vector<T> all, std::size_t n, std::size_t salt) {
  if (tries_all() || all.size() <= n) return all;
  std::vector<T> chosen;
  for (std::size_t i = 0; i < n; ++i)
    chosen.push_back(all[(i * all.size() / n + campaign_seed() + salt) % all.size()]);
  return chosen;
}

/// Calls body(i) for all i < n on TESSERA_FAULT_JOBS threads (default 4: they mostly wait).
void for_all(std::size_t n, const std::function<void(std::size_t)>& body);

}  // namespace tessera::test
