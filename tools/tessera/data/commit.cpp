#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "io/base/json.h"
#include "io/data/token_index.h"
#include "tools/tessera/command.h"
#include "tools/tessera/report/console.h"

namespace tessera::tools {
namespace {

struct CommitCommand {
  std::string dir;
  bool json = false;
};

int run_commit(const CommitCommand& options) {
  const io::TokenIndex index = io::commit_token_parts(options.dir);
  if (options.json) {
    fmt::print("{}\n", io::dump_json({{"path", options.dir},
                                      {"tokens", index.tokens()},
                                      {"documents", index.documents()},
                                      {"skipped", index.skipped},
                                      {"shards", index.shards.size()}}));
    return 0;
  }
  fmt::print("{}", format_rows(detect_console(STDOUT_FILENO),
                               {{"committed", options.dir},
                                {"tokens", std::to_string(index.tokens())},
                                {"documents", std::to_string(index.documents())},
                                {"shards", std::to_string(index.shards.size())}}));
  return 0;
}

}  // namespace

Command add_data_commit(CLI::App& parent) {
  const auto options = std::make_shared<CommitCommand>();
  CLI::App* app = parent.add_subcommand("commit",
                                        "Complete a directory that `data tokenize --part` wrote: "
                                        "check that all parts are done and of "
                                        "the same command, and write the index of all shards");
  app->add_option("DIR", options->dir, "Directory with the shards of all parts")->required();
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app, [options] { return run_commit(*options); }};
}

}  // namespace tessera::tools
