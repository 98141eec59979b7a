#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/base/json.h"
#include "io/data/token_file.h"
#include "io/data/token_index.h"
#include "io/data/tokenizer.h"
#include "tools/tessera/command.h"
#include "tools/tessera/report/console.h"
#include "tools/tessera/report/utf8.h"

namespace tessera::tools {
namespace {

constexpr std::int64_t kShownTokens = 64;
constexpr std::size_t kShownShards = 10;

struct InspectTokensCommand {
  std::string path, tokenizer;
  bool json = false;
};

std::vector<std::int32_t> first_tokens(const std::string& file) {
  const io::TokenSourcePtr source = io::open_token_file(file);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(std::min(source->size(), kShownTokens)));
  source->read(0, std::ssize(ids), ids.data());
  return ids;
}

/// The tokenizer of the option, or of the directory; null if there is none.
io::TokenizerPtr tokenizer_of(const InspectTokensCommand& options, bool is_directory) {
  if (options.tokenizer == "bytes") return io::make_byte_tokenizer();
  if (!options.tokenizer.empty()) return io::load_tokenizer(options.tokenizer);
  const io::fs::path own = io::fs::path(options.path) / io::kTokenizerName;
  return is_directory && io::is_there(own) ? io::load_tokenizer(own.string()) : nullptr;
}

int run_inspect_tokens(const InspectTokensCommand& options) {
  std::error_code error;
  const bool is_directory = io::fs::is_directory(options.path, error);
  const io::TokenizerPtr tokenizer = tokenizer_of(options, is_directory);
  io::Json json{{"path", options.path}};
  std::string first = options.path;
  std::vector<std::pair<std::string, std::string>> rows{{"tokens of", options.path}};
  if (is_directory) {
    const io::TokenIndex index = io::read_token_directory(options.path);
    io::Json shards = io::Json::array();
    for (const io::TokenShard& shard : index.shards)
      shards.push_back({{"file", shard.file},
                        {"tokens", shard.tokens},
                        {"documents", shard.documents},
                        {"checksum", io::format_checksum(shard.crc64)}});
    json["shards"] = std::move(shards);
    json["documents"] = index.documents();
    json["skipped"] = index.skipped;
    json["tokens"] = index.tokens();
    json["dtype"] = index.is_wide() ? "uint32" : "uint16";
    json["command"] = io::Json::parse(index.command.dump());
    first = (io::fs::path(options.path) / index.shards.front().file).string();
    rows.emplace_back("documents", std::to_string(index.documents()));
    if (index.skipped > 0) rows.emplace_back("skipped", std::to_string(index.skipped));
    const io::Json& known = json["command"]["tokenizer"];
    rows.emplace_back("tokenizer",
                      fmt::format("{}, {} ids, {}", known["kind"].get<std::string>(),
                                  index.vocab_size(), known["checksum"].get<std::string>()));
    rows.emplace_back("sources", std::to_string(json["command"]["sources"].size()));
    rows.emplace_back("shards", std::to_string(index.shards.size()));
    for (std::size_t i = 0; i < std::min(index.shards.size(), kShownShards); ++i)
      rows.emplace_back(
          "", fmt::format("{}: {} tokens, {}", index.shards[i].file, index.shards[i].tokens,
                          counted(index.shards[i].documents, "document")));
    if (index.shards.size() > kShownShards) rows.emplace_back("", "...");
  } else {
    json["tokens"] = io::open_token_file(options.path)->size();
    json["dtype"] = io::is_wide_token_file(options.path) ? "uint32" : "uint16";
  }
  rows.emplace_back("tokens", std::to_string(json["tokens"].get<std::int64_t>()) + " of " +
                                  json["dtype"].get<std::string>());
  const std::vector<std::int32_t> ids = first_tokens(first);
  json["first"] = ids;
  if (tokenizer) {
    json["text"] = tokenizer->decode(ids);
    rows.emplace_back("begin", escaped(json["text"].get<std::string>()));
  } else {
    rows.emplace_back("begin", json["first"].dump());
  }
  if (options.json)
    fmt::print("{}\n", io::dump_json(json));
  else
    fmt::print("{}", format_rows(detect_console(STDOUT_FILENO), rows));
  return 0;
}

}  // namespace

Command add_data_inspect(CLI::App& parent) {
  const auto options = std::make_shared<InspectTokensCommand>();
  CLI::App* app = parent.add_subcommand(
      "inspect", "Show the shards, tokenizer and first tokens of a directory or token file");
  app->add_option("PATH", options->path, "Directory of token shards, or a token file")->required();
  app->add_option("--tokenizer", options->tokenizer,
                  "Tokenizer to show tokens as text with; default: that of the directory");
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app, [options] { return run_inspect_tokens(*options); }};
}

}  // namespace tessera::tools
