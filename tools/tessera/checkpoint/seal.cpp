#include "io/seal/seal.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>

#include "core/base/error.h"
#include "core/base/memory.h"
#include "core/base/processors.h"
#include "io/base/json.h"
#include "io/checkpoint/find.h"
#include "io/source/find_sharded.h"
#include "tools/tessera/command.h"
#include "tools/tessera/report/byte_progress.h"
#include "tools/tessera/report/console.h"
#include "tools/tessera/report/utf8.h"

namespace tessera::tools {
namespace {

struct SealCommand {
  std::string path;
  int jobs = 1;
  bool overwrite = false, json = false;
};

bool has_own_checksums(const io::fs::path& path) {
  if (io::is_foreign(path)) return false;
  std::error_code error;
  return io::is_there(path / "index.json") ||
         (io::fs::is_directory(path, error) && !io::find_checkpoints(path).empty());
}

int run_seal(const SealCommand& options) {
  require(options.jobs >= 1, "--jobs {}: expected at least 1", options.jobs);
  require(!has_own_checksums(options.path),
          "{} is of tessera, whose checkpoints have checksums: `tessera checkpoint verify` reads "
          "them",
          options.path);
  ByteProgress progress("read");
  const io::Seal seal = io::write_seal(
      options.path, options.overwrite,
      {.threads = options.jobs,
       .progress = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); }});
  std::int64_t bytes = 0;
  for (const auto& [name, entry] : seal.files) bytes += entry.size;
  if (options.json) {
    const io::Json json{{"path", options.path},
                        {"seal", seal.file.string()},
                        {"created", seal.created},
                        {"files", seal.files.size()},
                        {"bytes", bytes}};
    fmt::print("{}\n", io::dump_json(json));
  } else {
    fmt::print("{}: checksums of {}, {}\n", escaped(seal.file.string()),
               counted(std::ssize(seal.files), "file"), format_bytes(bytes));
  }
  return 0;
}

}  // namespace

Command add_checkpoint_seal(CLI::App& parent) {
  const auto options = std::make_shared<SealCommand>();
  options->jobs = std::min(usable_processors(), 8);
  CLI::App* app = parent.add_subcommand(
      "seal",
      "Record checksums of the files of another program, next to them (tessera.seal.json or "
      "FILE.seal.json). From then on, verify, consolidate and diff find every changed bit");
  app->add_option("PATH", options->path,
                  "A directory, with its subdirectories whose names begin with no dot, or a file")
      ->required();
  app->add_option("--jobs", options->jobs, "Threads that read, with 128 KiB of memory each")
      ->capture_default_str();
  app->add_flag("--overwrite", options->overwrite,
                "Replace a seal, if the files that it lists are intact");
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app, [options] { return run_seal(*options); }};
}

}  // namespace tessera::tools
