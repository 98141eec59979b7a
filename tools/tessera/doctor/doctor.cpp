#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "comm/shared_memory.h"
#include "core/base/memory.h"
#include "tools/tessera/command.h"
#include "tools/tessera/doctor/examine.h"
#include "tools/tessera/report/console.h"

namespace tessera::tools {
namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "g++ " __VERSION__;
#endif

struct Options {
  bool json = false;
  std::string directory = "runs";
};

struct Findings {
  Machine machine;
  DirectoryState directory;
  ProductResult product;
  Gpus gpus;
  std::vector<Library> libraries;
  std::string shared_memory_problem;  // empty if ranks can share memory
  bool healthy() const { return directory.writable && product.correct && gpus.healthy(); }
};

void print_json(const Options& options, const Findings& found) {
  const Machine& m = found.machine;
  nlohmann::ordered_json out;
  out["version"] = TESSERA_VERSION;
  out["compiler"] = kCompiler;
  out["cpu"] = {{"model", m.processor}, {"level", cpu_level_name(m.level)}, {"threads", m.threads}};
  out["memory"] = {{"total", m.memory_total}, {"available", m.memory_available}};
  out["backends"] = {{"cpu", true},
                     {"cuda", !found.gpus.descriptions.empty() && found.gpus.healthy()},
                     {"shm", found.shared_memory_problem.empty()},
                     {"tcp", true},
                     {"nccl", !found.gpus.nccl.empty()}};
  out["gpus"] = found.gpus.descriptions;
  out["gpu_problem"] = found.gpus.problem;
  out["gpu_notes"] = found.gpus.notes;
  out["nccl_problem"] = found.gpus.nccl_problem;
  for (const Library& library : found.libraries)
    out["libraries"].push_back({{"name", library.name},
                                {"in_build", library.in_build},
                                {"on_machine", library.on_machine},
                                {"problem", library.problem},
                                {"cost_of_missing", library.cost}});
  out["run_directory"] = {{"path", options.directory},
                          {"writable", found.directory.writable},
                          {"problem", found.directory.problem},
                          {"free", found.directory.free_bytes}};
  out["limits"] = {{"open_files", m.open_files}, {"shared_memory_free", m.shared_memory_free}};
  out["matmul"] = {{"correct", found.product.correct},
                   {"largest_error", found.product.largest_error},
                   {"gflops", found.product.gflops}};
  out["healthy"] = found.healthy();
  // error_handler_t::replace, because paths can be invalid UTF-8.
  fmt::print("{}\n", out.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

std::string describe(const Library& library) {
  const auto presence = [](bool there) { return there ? "found" : "missing"; };
  std::string text = fmt::format("{}: {} in this build, {} on this machine", library.name,
                                 presence(library.in_build), presence(library.on_machine));
  if (!library.problem.empty()) text += fmt::format(" ({})", library.problem);
  if (!library.found()) text += fmt::format("; without it {}", library.cost);
  return text;
}

void print_text(const Options& options, const Findings& found) {
  const Machine& m = found.machine;
  const Gpus& gpus = found.gpus;
  const ConsoleStyle style = detect_console(STDOUT_FILENO);
  const auto verdict = [&](bool good, const std::string& text) {
    return paint(style, good ? Tone::Good : Tone::Bad, good ? "ok" : "FAILED") + "  " + text;
  };
  std::string gpu_verdict = "models train on the CPU, many times slower";
  if (!gpus.descriptions.empty()) {
    gpu_verdict = gpus.healthy() ? fmt::format("{}", fmt::join(gpus.notes, "; "))
                                 : verdict(false, gpus.problem);
  } else if (!gpus.healthy()) {
    gpu_verdict = verdict(false,
                          "an NVIDIA driver is loaded, but this process has no GPU; see "
                          "nvidia-smi, and in a container the option that passes GPUs in");
  }
  std::vector<std::pair<std::string, std::string>> rows = {
      {"tessera", fmt::format("{}, built with {}", TESSERA_VERSION, kCompiler)},
      {"processor", fmt::format("{}, kernels for {}, {}", m.processor, cpu_level_name(m.level),
                                counted(m.threads, "thread"))},
      {"memory", fmt::format("{} of {} available", format_bytes(m.memory_available),
                             format_bytes(m.memory_total))},
      {"GPUs", gpus.descriptions.empty() ? "none: " + gpus.problem
                                         : fmt::format("{}", fmt::join(gpus.descriptions, "; "))},
      {"", gpu_verdict}};
  for (const Library& library : found.libraries)
    rows.emplace_back(&library == found.libraries.data() ? "libraries" : "", describe(library));
  rows.emplace_back("communication",
                    found.shared_memory_problem.empty()
                        ? "shm (shared memory of one host), tcp, threads of one process"
                        : "tcp, threads of one process; no shm: " + found.shared_memory_problem);
  if (!gpus.nccl.empty())
    rows.emplace_back("", "nccl " + gpus.nccl + " between GPUs");
  else if (!gpus.descriptions.empty())
    rows.emplace_back(
        "", fmt::format("no nccl: {}; ranks exchange data through host memory", gpus.nccl_problem));
  rows.emplace_back(
      "limits",
      fmt::format("{} open files, {} free in /dev/shm", m.open_files,
                  m.shared_memory_free < 0 ? "nothing" : format_bytes(m.shared_memory_free)));
  rows.emplace_back("run directory",
                    verdict(found.directory.writable,
                            found.directory.writable
                                ? fmt::format("{}, {} free", options.directory,
                                              format_bytes(found.directory.free_bytes))
                                : found.directory.problem + "; choose another with --run.out"));
  rows.emplace_back("matrix product",
                    verdict(found.product.correct,
                            fmt::format("{:.0f} GFLOP/s in float32, largest relative error {:.1e}",
                                        found.product.gflops, found.product.largest_error)));
  fmt::print("{}", format_rows(style, rows));
}

}  // namespace

Command add_doctor(CLI::App& parent) {
  const auto options = std::make_shared<Options>();
  CLI::App* app = parent.add_subcommand("doctor", "Check this machine and build, and measure them");
  app->add_flag("--json", options->json, "Machine-readable output");
  app->add_option("--run.out", options->directory, "Run directory to check")->capture_default_str();
  return {app, [options] {
            Findings found;
            found.machine = examine_machine();
            found.directory = examine_directory(options->directory);
            found.product = examine_product(found.machine.threads, found.machine.level);
            found.libraries = examine_libraries();
            found.gpus = examine_gpus();
            found.shared_memory_problem = comm::shared_memory_problem();
            options->json ? print_json(*options, found) : print_text(*options, found);
            return found.healthy() ? 0 : 1;
          }};
}

}  // namespace tessera::tools
