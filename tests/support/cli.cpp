#include "tests/support/cli.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include "tests/support/fault_log.h"
#include "tests/support/paths.h"

namespace tessera::test {
namespace {

using Clock = std::chrono::steady_clock;

bool is_inherited(std::string_view variable) {
  for (const char* prefix : {"RANK=", "WORLD_SIZE=", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMPI_",
                             "PMI_", "MPI_", "SLURM_", "TESSERA_", "OMP_NUM_THREADS="}) {
    if (variable.starts_with(prefix)) return false;
  }
  return true;
}

std::vector<std::string> environment(const Variables& variables) {
  std::vector<std::string> lines;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (is_inherited(*entry)) lines.emplace_back(*entry);
  }
  // Tests run in parallel and share the machine.
  if (!variables.contains("OMP_NUM_THREADS")) lines.emplace_back("OMP_NUM_THREADS=1");
  for (const auto& [name, value] : variables) lines.push_back(name + "=" + value);
  return lines;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Logs runs of `tessera train`, including single ranks that the test starts itself.
void log_run(const Arguments& words, const Variables& variables) {
  if (words.empty() || words[0] != "train") return;
  int world = 1;
  bool one_rank = false;
  for (std::size_t i = 0; i + 1 < words.size(); ++i) {
    if (words[i] != "--nproc" && words[i] != "--world-size") continue;
    world = std::stoi(words[i + 1]);
    one_rank = words[i] == "--world-size";
  }
  if (const auto set = variables.find("WORLD_SIZE"); set != variables.end()) {
    world = std::stoi(set->second);
    one_rank = true;
  }
  log_fault(fmt::format(R"({{"world": {}, "share": {}}})", world, one_rank ? 1.0 / world : 1.0));
}

thread_local std::string last_result;

// Prints the last result at the first failed assertion after it.
struct ResultPrinter : doctest::IReporter {
  explicit ResultPrinter(const doctest::ContextOptions&) {}
  void log_assert(const doctest::AssertData& assertion) override {
    if (assertion.m_failed) std::cout << std::exchange(last_result, {}) << std::endl;
  }
  void test_case_start(const doctest::TestCaseData&) override { last_result.clear(); }
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_end(const doctest::CurrentTestCaseStats&) override {}
  void test_case_exception(const doctest::TestCaseException&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}
};
REGISTER_LISTENER("result", 1, ResultPrinter);

}  // namespace

std::string CliResult::describe() const {
  return fmt::format("code {}, signal {}{}, {} ms\n--- stdout\n{}--- stderr\n{}---", code, signal,
                     in_time ? "" : ", past the deadline", time.count(), out, err);
}

CliProcess::CliProcess(const Arguments& arguments, const Variables& variables,
                       const std::string& log)
    : start_(Clock::now()) {
  if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) throw std::runtime_error("prctl failed");
  log_run(arguments, variables);
  std::vector<std::string> words = {tessera_program()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<std::string> lines = environment(variables);
  const auto argv = pointers(words);
  const auto envp = pointers(lines);
  const std::string out = streams_.file("out"), err = log.empty() ? streams_.file("err") : log;
  pid_ = ::fork();
  if (pid_ < 0) throw std::runtime_error("fork failed");
  if (pid_ == 0) {
    ::setpgid(0, 0);
    const int flags = O_WRONLY | O_CREAT | O_APPEND;
    ::dup2(::open("/dev/null", O_RDONLY), STDIN_FILENO);
    ::dup2(::open(out.c_str(), flags, 0600), STDOUT_FILENO);
    ::dup2(::open(err.c_str(), flags, 0600), STDERR_FILENO);
    ::execve(argv[0], argv.data(), envp.data());
    ::_exit(127);
  }
  ::setpgid(pid_, pid_);  // also done by the parent, in case it runs first
}

CliProcess::~CliProcess() {
  if (!reap()) wait(std::chrono::milliseconds(0));
}

// Reaps the group's exited processes; true if none is left.
bool CliProcess::reap() {
  while (true) {
    int status = 0;
    const pid_t ended = ::waitpid(-pid_, &status, WNOHANG);
    if (ended == 0) return false;
    // Orphans of a killed launcher become our children slightly after its exit is visible.
    if (ended < 0) return ::kill(-pid_, 0) != 0;
    if (ended != pid_) continue;
    program_ended_ = true;
    result_.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    result_.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    result_.time = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start_);
  }
}

bool CliProcess::running() {
  reap();
  return !program_ended_;
}

void CliProcess::signal(int number) const { ::kill(pid_, number); }
void CliProcess::signal_group(int number) const { ::kill(-pid_, number); }

std::map<int, pid_t> CliProcess::ranks() const {
  std::map<int, pid_t> result;
  const std::string self = std::to_string(pid_);
  std::istringstream children(read_file("/proc/" + self + "/task/" + self + "/children"));
  for (pid_t child; children >> child;) {
    const std::string variables = read_file(fmt::format("/proc/{}/environ", child));
    constexpr std::string_view kName("\0RANK=", 6);
    const auto at = variables.find(kName);
    if (at != variables.npos) result[std::stoi(variables.substr(at + kName.size()))] = child;
  }
  return result;
}

bool CliProcess::wait_for(std::string_view part, int times) {
  return wait_until([&] { return count(err(), part) >= times || !running(); }) &&
         count(err(), part) >= times;
}

CliResult CliProcess::wait(std::chrono::milliseconds deadline) {
  const auto end = Clock::now() + deadline;
  while (!reap()) {
    if (Clock::now() >= end) {
      result_.in_time = false;
      signal_group(SIGKILL);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  result_.out = streams_.read("out");
  result_.err = streams_.read("err");
  last_result = result_.describe();
  return result_;
}

CliResult run_cli(const Arguments& arguments, const Variables& variables,
                  std::chrono::milliseconds deadline) {
  return CliProcess(arguments, variables).wait(deadline);
}

CliResult run_to(int code, const Arguments& arguments, const Variables& variables) {
  auto result = run_cli(arguments, variables);
  REQUIRE(result.code == code);
  return result;
}

CliResult end_of(CliProcess& process, int code) {
  auto result = process.wait(std::chrono::seconds(60));
  REQUIRE(result.in_time);
  REQUIRE(result.code == code);
  return result;
}

nlohmann::json json_of(Arguments arguments, int code) {
  arguments.emplace_back("--json");
  return nlohmann::json::parse(run_to(code, arguments).out);
}

nlohmann::json inspect(const std::string& run) { return json_of({"checkpoint", "inspect", run}); }

bool wait_until(const std::function<bool()>& condition) {
  const auto end = Clock::now() + std::chrono::seconds(30);
  while (!condition()) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

Variables rank_variables(int rank, int world, const std::string& port) {
  return {{"RANK", std::to_string(rank)},       {"WORLD_SIZE", std::to_string(world)},
          {"LOCAL_RANK", std::to_string(rank)}, {"LOCAL_WORLD_SIZE", std::to_string(world)},
          {"MASTER_ADDR", "127.0.0.1"},         {"MASTER_PORT", port}};
}

Arguments joined(Arguments first, const Arguments& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

Metrics read_metrics(const std::filesystem::path& run) {
  std::istringstream lines(read_file(run / "metrics.jsonl"));
  Metrics result;
  for (std::string text; std::getline(lines, text);) {
    const auto line = nlohmann::json::parse(text);
    const auto step = line.at("step").get<std::int64_t>();
    bool in_order = false;
    // dump() gives the shortest text that reads back to the same double, as the writer does.
    if (line.contains("val_loss")) {
      in_order = result.val_loss.emplace(step, line["val_loss"].dump()).second;
    } else {
      in_order = step == static_cast<std::int64_t>(result.steps.size());
      result.steps.push_back({line.at("loss").dump(), line.at("grad_norm").dump()});
    }
    if (!in_order) throw std::runtime_error(run.string() + ": twice, or out of order: " + text);
  }
  return result;
}

double relative(double actual, double expected) {
  return std::abs(actual - expected) / std::abs(expected);
}

double relative(const std::string& actual, const std::string& expected) {
  return relative(std::stod(actual), std::stod(expected));
}

bool catches(pid_t process, int signal) {
  std::ifstream in(fmt::format("/proc/{}/status", process));
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with("SigCgt:")) continue;
    return (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1) != 0;
  }
  return false;
}

}  // namespace tessera::test
