#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/temp_dir.h"
#include "tests/support/text.h"

namespace tessera::test {

using Arguments = std::vector<std::string>;
/// Environment variables added to the test's own. Launcher and tessera variables (RANK, OMPI_*,
/// TESSERA_*, ...) are never inherited.
using Variables = std::map<std::string, std::string>;

struct CliResult {
  int code = -1;        ///< -1 if a signal ended it
  int signal = 0;       ///< signal that ended it, or 0
  bool in_time = true;  ///< false: killed at the deadline
  std::string out, err;
  std::chrono::milliseconds time{};

  /// Both streams, exit code and signal. Printed for the last result when an assertion fails.
  std::string describe() const;
};

bool catches(pid_t process, int signal);

/// The tessera binary as leader of its own process group. Orphaned descendants become children of
/// the test, so that wait() covers them too.
class CliProcess {
 public:
  /// @param log  file for standard error; default: captured for err()
  explicit CliProcess(const Arguments& arguments, const Variables& variables = {},
                      const std::string& log = {});
  ~CliProcess();
  CliProcess(const CliProcess&) = delete;
  CliProcess& operator=(const CliProcess&) = delete;

  pid_t pid() const { return pid_; }
  bool running();
  void signal(int number) const;
  void signal_group(int number) const;
  /// Running rank processes by rank.
  std::map<int, pid_t> ranks() const;
  std::string err() const { return streams_.read("err"); }
  /// Waits until standard error contains `part` `times` times; false if the program ends first or
  /// after 30 s.
  bool wait_for(std::string_view part, int times = 1);
  /// Waits for the program and all its descendants; kills them at the deadline.
  CliResult wait(std::chrono::milliseconds deadline);

 private:
  bool reap();

  TempDir streams_;
  pid_t pid_ = -1;
  std::chrono::steady_clock::time_point start_;
  bool program_ended_ = false;
  CliResult result_;
};

CliResult run_cli(const Arguments& arguments, const Variables& variables = {},
                  std::chrono::milliseconds deadline = std::chrono::seconds(60));

/// Runs the program and requires its exit code.
CliResult run_to(int code, const Arguments& arguments, const Variables& variables = {});
/// Waits at most 60 s for a process and its descendants, and requires its exit code.
CliResult end_of(CliProcess& process, int code);
/// Output of a command with --json.
nlohmann::json json_of(Arguments arguments, int code = 0);
nlohmann::json inspect(const std::string& run);  ///< of `checkpoint inspect`

/// Waits at most 30 s for a condition.
bool wait_until(const std::function<bool()>& condition);

/// torchrun's variables for one rank of a single-host run.
Variables rank_variables(int rank, int world, const std::string& port);

Arguments joined(Arguments first, const Arguments& second);

/// A run's metrics.jsonl. Numbers are kept as round-trip texts, so == compares them bit for bit.
struct Metrics {
  struct Step {
    std::string loss, grad_norm;
    friend bool operator==(const Step&, const Step&) = default;
  };
  std::vector<Step> steps;
  std::map<std::int64_t, std::string> val_loss;  ///< by step
  friend bool operator==(const Metrics&, const Metrics&) = default;
};
/// @throws std::runtime_error on a line that is no JSON object, or a duplicate or missing step
Metrics read_metrics(const std::filesystem::path& run);

/// |actual - expected| / |expected|, of numbers or their texts.
double relative(double actual, double expected);
double relative(const std::string& actual, const std::string& expected);

}  // namespace tessera::test
