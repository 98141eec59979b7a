#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/temp_dir.h"
#include "tests/support/text.h"

namespace tessera::test {

using Arguments = std::vector<std::string>;
/// Variables that are set for the program beside those of the test. Those by which launchers and
/// tessera are told what to do (RANK, OMPI_*, TESSERA_*, ...) are never inherited.
using Variables = std::map<std::string, std::string>;

/// How the program ended.
struct CliResult {
  int code = -1;        ///< exit code; -1 if a signal ended it
  int signal = 0;       ///< that ended it
  bool in_time = true;  ///< false: it was killed at the deadline
  std::string out, err;
  std::chrono::milliseconds time{};

  /// Both streams and how it ended, for INFO.
  std::string describe() const;
};

/// Whether a process has a handler for a signal.
bool catches(pid_t process, int signal);

/// The tessera binary, running as the leader of a process group of its own. What it starts and
/// leaves behind becomes a child of this test, so that wait() can wait for all of it.
class CliProcess {
 public:
  /// @param log  where its standard error goes, if not to err()
  explicit CliProcess(const Arguments& arguments, const Variables& variables = {},
                      const std::string& log = {});
  /// Kills what still runs.
  ~CliProcess();
  CliProcess(const CliProcess&) = delete;
  CliProcess& operator=(const CliProcess&) = delete;

  pid_t pid() const { return pid_; }
  /// Whether the program itself still runs; wait() may be called after false.
  bool running();
  void signal(int number) const;
  void signal_group(int number) const;
  /// The processes that the program has started and that still run, by the number of their rank.
  std::map<int, pid_t> ranks() const;
  /// Standard error so far.
  std::string err() const { return streams_.read("err"); }
  /// Waits until standard error holds `part` so often; false if the program ends before, or 30 s
  /// pass.
  bool wait_for(std::string_view part, int times = 1);
  /// Waits until the program and all that it started are gone, and kills them at the deadline.
  CliResult wait(std::chrono::milliseconds deadline);

 private:
  bool reap();

  TempDir streams_;
  pid_t pid_ = -1;
  std::chrono::steady_clock::time_point start_;
  bool program_ended_ = false;
  CliResult result_;
};

/// Runs `tessera` with arguments to its end.
CliResult run_cli(const Arguments& arguments, const Variables& variables = {},
                  std::chrono::milliseconds deadline = std::chrono::seconds(60));

/// Variables of torchrun for one rank of a run on this host.
Variables rank_variables(int rank, int world, const std::string& port);

/// All words of `first`, then those of `second`.
Arguments joined(Arguments first, const Arguments& second);

/// A run's metrics.jsonl. The numbers are texts that read back to the same double, so == compares
/// them bit for bit.
struct Metrics {
  struct Step {
    std::string loss, grad_norm;
    friend bool operator==(const Step&, const Step&) = default;
  };
  std::vector<Step> steps;
  std::map<std::int64_t, std::string> val_loss;  ///< by step
  friend bool operator==(const Metrics&, const Metrics&) = default;
};
/// @throws std::runtime_error if a line is no JSON object, a step or evaluation stands twice, or a
///   step is left out
Metrics read_metrics(const std::filesystem::path& run);

/// |actual - expected| / |expected|, of numbers or of their texts.
double relative(double actual, double expected);
double relative(const std::string& actual, const std::string& expected);

}  // namespace tessera::test
