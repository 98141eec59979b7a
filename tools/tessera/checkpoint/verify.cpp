#include "io/checkpoint/verify.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/memory.h"
#include "io/base/json.h"
#include "io/checkpoint/find.h"
#include "io/seal/seal.h"
#include "io/source/find_sharded.h"
#include "io/source/open_sharded.h"
#include "io/source/sharded_source.h"
#include "tools/tessera/command.h"
#include "tools/tessera/report/byte_progress.h"
#include "tools/tessera/report/console.h"
#include "tools/tessera/report/utf8.h"
#include "tools/tessera/train/checkpoints.h"

namespace tessera::tools {
namespace {

struct VerifyCommand {
  std::string path, step = "latest";
  int jobs = 1;
  bool json = false;
};

// Reports a checkpoint that cannot be opened as a problem instead of throwing.
io::VerifyReport examine(const io::fs::path& dir, const io::VerifyOptions& options,
                         std::optional<std::int64_t> step) {
  const auto check_step = [&](const io::CheckpointIndex& index) {
    require(!step || *step == index.step, "{} is the checkpoint of step {}, not of {}",
            dir.string(), index.step, step.value_or(0));
  };
  try {
    const auto reader = io::CheckpointReader::open(dir);
    check_step(reader.index());
    return io::verify_checkpoint(reader, options);
  } catch (const io::CorruptFile&) {
    // The index is valid, but a file is missing or truncated: verify the others.
    const std::string source = (dir / "index.json").string();
    const auto index =
        io::parse_index(io::read_file(source, io::kMaxIndexBytes, io::Links::Refuse), source);
    check_step(index);
    return io::verify_checkpoint(dir, index, options);
  } catch (const CorruptCheckpoint& error) {
    io::VerifyProblem problem{"index.json", "", 0, 0, error.what()};
    if (const auto* tensor = dynamic_cast<const io::CorruptTensor*>(&error))
      problem = {"index.json", tensor->tensor(), tensor->begin(), tensor->end(), error.what()};
    io::VerifyReport report;
    report.problems.push_back(std::move(problem));
    return report;
  }
}

/// Report on files of another program.
struct ForeignReport {
  io::VerifyReport verify;
  std::string sealed;                   ///< time of the seal; empty: none
  std::vector<std::string> additional;  ///< files that the seal does not list
  std::string unread;                   ///< why the tensors of intact files were not read
};

std::vector<std::string> names_of(const io::TensorSource& source) {
  std::vector<std::string> names;
  for (const io::TensorInfo& info : source.tensors()) names.push_back(info.name);
  if (const auto* sharded = dynamic_cast<const io::ShardedSource*>(&source))
    for (const auto& other : sharded->unreadable())
      if (other.carrier) names.push_back(other.name);
  return names;
}

io::fs::path normal(const io::fs::path& path) { return io::fs::absolute(path).lexically_normal(); }

// Reads the tensors in files that have checksums or that the seal does not list, and names the
// tensors in the bytes that differ from it. Values may be infinite, such as the best loss so far.
void examine_tensors(const io::TensorSource& source, const io::Seal* seal,
                     io::VerifyOptions options, io::VerifyReport& report) {
  const std::vector<std::string> names = names_of(source);
  options.check_finite = false;
  if (seal != nullptr) {
    options.files.emplace();
    std::map<io::fs::path, std::vector<io::VerifyProblem*>> damaged;
    std::set<const io::VerifyProblem*> named;
    for (io::VerifyProblem& problem : report.problems)
      damaged[normal(seal->root / problem.file)].push_back(&problem);
    for (const std::string& name : names) {
      const auto record = source.record(name);
      for (const io::Chunk& chunk : record->chunks) {
        const io::fs::path file = normal(source.path() / chunk.file);
        // A checksum of the format also shows damage from before the seal.
        if (chunk.checksum != io::Checksum::None ||
            !seal->files.contains(file.lexically_relative(normal(seal->root)).string()))
          options.files->insert(chunk.file);
        const auto found = damaged.find(file);
        if (found == damaged.end()) continue;
        for (io::VerifyProblem* problem : found->second)
          if (chunk.byte_begin < problem->byte_end && problem->byte_begin < chunk.byte_end &&
              named.insert(problem).second)
            problem->what += fmt::format(" (tensor {}, and others there)", name);
      }
    }
  }
  io::VerifyReport read = io::verify_tensors(source, names, options);
  report.tensors = read.tensors;
  report.bytes += read.bytes;
  report.unverifiable = read.unverifiable;
  report.problems.insert(report.problems.end(), read.problems.begin(), read.problems.end());
}

ForeignReport examine_foreign(const VerifyCommand& command, const io::VerifyOptions& options) {
  require(command.step == "latest", "{} is not a tessera checkpoint and has no step {}",
          command.path, command.step);
  ForeignReport report;
  const auto add_error = [&](const Error& error) {
    report.verify.problems.push_back({command.path, "", 0, 0, error.what()});
  };
  std::optional<io::Seal> seal;
  try {
    seal = io::find_seal(command.path);
    if (seal) {
      report.sealed = seal->created;
      io::SealReport sealed = io::check_seal(
          command.path, *seal, {.threads = options.threads, .progress = options.progress});
      report.verify.problems = std::move(sealed.problems);
      report.verify.bytes = sealed.bytes;
      report.additional = std::move(sealed.additional);
    }
  } catch (const CorruptCheckpoint& error) {
    add_error(error);
  }
  try {
    // Any directory may have a seal.
    if (const auto source = io::open_foreign(command.path))
      examine_tensors(*source, seal ? &*seal : nullptr, options, report.verify);
  } catch (const CorruptCheckpoint& error) {
    add_error(error);
  } catch (const Error& error) {
    if (!seal) throw;
    if (report.verify.problems.empty())
      report.unread = error.what();
    else
      add_error(error);  // damage may be the reason
  }
  return report;
}

void print_json(const std::string& path, const ForeignReport& foreign) {
  const io::VerifyReport& report = foreign.verify;
  io::Json problems = io::Json::array();
  for (const io::VerifyProblem& problem : report.problems) {
    problems.push_back({{"file", problem.file},
                        {"tensor", problem.tensor},
                        {"elements", {problem.begin, problem.end}},
                        {"bytes", {problem.byte_begin, problem.byte_end}},
                        {"problem", problem.what}});
  }
  const io::Json json{{"path", path},
                      {"valid", report.problems.empty()},
                      {"tensors", report.tensors},
                      {"bytes", report.bytes},
                      {"unverifiable_bytes", report.unverifiable},
                      {"sealed", foreign.sealed.empty() ? io::Json() : io::Json(foreign.sealed)},
                      {"additional_files", foreign.additional},
                      {"note", foreign.unread.empty() ? io::Json() : io::Json(foreign.unread)},
                      {"problems", std::move(problems)}};
  fmt::print("{}\n", io::dump_json(json));
}

int run_verify(const VerifyCommand& options) {
  require(options.jobs >= 1, "--jobs {}: expected at least 1", options.jobs);
  std::error_code absent;
  const bool is_foreign =
      io::is_foreign(options.path) ||
      (io::fs::exists(options.path, absent) && io::is_there(io::seal_path(options.path)));
  if (!is_foreign) io::refuse_parent_of_shards(options.path);
  const auto step = is_foreign ? std::nullopt : parse_step(options.path, options.step);
  const io::fs::path path =
      is_foreign ? io::fs::path(options.path) : io::locate_checkpoint(options.path, step);
  ByteProgress progress("read");
  io::VerifyOptions verify;
  verify.threads = options.jobs;
  verify.progress = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
  const ForeignReport foreign = is_foreign ? examine_foreign(options, verify)
                                           : ForeignReport{examine(path, verify, step), "", {}, ""};
  const io::VerifyReport& report = foreign.verify;
  const bool good = report.problems.empty();
  if (options.json) {
    print_json(path.string(), foreign);
    return good ? 0 : 1;
  }
  for (const io::VerifyProblem& problem : report.problems)
    fmt::print("{}\n", escaped(problem.str()));
  for (const std::string& name : foreign.additional)
    fmt::print("note: {} is not in the seal\n", escaped(name));
  if (!foreign.unread.empty()) fmt::print("note: {}\n", escaped(foreign.unread));
  const std::string sealed =
      foreign.sealed.empty() ? "" : fmt::format(", as sealed on {}", escaped(foreign.sealed));
  fmt::print("{}: {} tensors, {} read, {}\n", escaped(path.string()), report.tensors,
             format_bytes(report.bytes),
             good ? fmt::format("complete{}{}{}",
                                report.unverifiable < report.bytes ? ", checksums right" : "",
                                sealed, is_foreign ? "" : ", values finite")
                  : counted(std::ssize(report.problems), "problem"));
  if (report.unverifiable > 0)
    fmt::print("{} have no checksum; `tessera checkpoint seal {}{}` records {}\n",
               format_bytes(report.unverifiable), escaped(path.string()),
               foreign.sealed.empty() ? "" : " --overwrite",
               foreign.sealed.empty() ? "them" : "theirs");
  return good ? 0 : 1;
}

}  // namespace

Command add_checkpoint_verify(CLI::App& parent) {
  const auto options = std::make_shared<VerifyCommand>();
  options->jobs = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 8U));
  CLI::App* app = parent.add_subcommand(
      "verify",
      "Read everything and check coverage, checksums and finite values; exit 1 and name file, "
      "tensor and bytes of any damage. Files of other programs, too, by the checksums that they "
      "have and by their seal");
  app->add_option("PATH", options->path, kAnyCheckpoint)->required();
  app->add_option("--step", options->step, kStepHelp)->capture_default_str();
  app->add_option("--jobs", options->jobs, "Threads that read, with 1 MiB of memory each")
      ->capture_default_str();
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app, [options] { return run_verify(*options); }};
}

}  // namespace tessera::tools
