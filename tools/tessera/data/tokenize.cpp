#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <array>
#include <chrono>
#include <cstdio>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/base/memory.h"
#include "io/base/file.h"
#include "io/base/json.h"
#include "io/data/dataset.h"
#include "io/data/recognize.h"
#include "io/data/tokenizer.h"
#include "tools/tessera/command.h"
#include "tools/tessera/report/console.h"

namespace tessera::tools {
namespace {

struct TokenizeCommand {
  std::vector<std::string> files;
  std::string tokenizer, out;
  bool no_special = false, overwrite = false, json = false;
};

/// A token file of llm.c; see FORMAT.md.
std::string token_file(const std::vector<std::int32_t>& ids, bool wide) {
  require(ids.size() <= static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()),
          "{} tokens are too many for one token file; tokenize fewer files at a time", ids.size());
  std::array<std::int32_t, 256> header{};
  header[0] = wide ? 20240801 : 20240520;
  header[1] = wide ? 7 : 1;
  header[2] = static_cast<std::int32_t>(ids.size());
  std::string content(reinterpret_cast<const char*>(header.data()), sizeof(header));
  if (wide) {
    content.append(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(std::int32_t));
  } else {
    const std::vector<std::uint16_t> narrow(ids.begin(), ids.end());
    content.append(reinterpret_cast<const char*>(narrow.data()),
                   narrow.size() * sizeof(std::uint16_t));
  }
  return content;
}

int run_tokenize(const TokenizeCommand& options) {
  require(io::is_token_file(options.out), "--out {}: the name of a token file ends in .bin",
          options.out);
  io::require_replaceable(options.out);
  require<IoError>(options.overwrite || !io::is_there(options.out),
                   "{} exists; name another --out, or replace it with --overwrite", options.out);
  const auto tokenizer = options.tokenizer == "bytes" ? io::make_byte_tokenizer()
                                                      : io::load_tokenizer(options.tokenizer);
  std::vector<std::int32_t> ids;
  std::int64_t bytes = 0;
  std::chrono::duration<double> seconds{};
  for (const std::string& file : io::expand_globs(options.files)) {
    const std::string warning = io::inspect_data_file(file, false);
    if (!warning.empty()) fmt::print(stderr, "tessera: warning: {}\n", warning);
    const std::string text = io::read_file(file, std::numeric_limits<std::int64_t>::max());
    const auto start = std::chrono::steady_clock::now();
    const auto document =
        options.no_special ? tokenizer->encode(text, file) : tokenizer->encode_document(text, file);
    seconds += std::chrono::steady_clock::now() - start;
    ids.insert(ids.end(), document.begin(), document.end());
    bytes += std::ssize(text);
  }
  io::write_file_atomically(options.out, token_file(ids, tokenizer->vocab_size() > 65536));
  if (options.json) {
    fmt::print("{}\n", io::dump_json({{"path", options.out},
                                      {"tokens", ids.size()},
                                      {"vocab_size", tokenizer->vocab_size()},
                                      {"bytes", bytes},
                                      {"seconds", seconds.count()}}));
    return 0;
  }
  fmt::print(
      "{}",
      format_rows(detect_console(STDOUT_FILENO),
                  {{"written", options.out},
                   {"tokens", fmt::format("{} of {} ids", ids.size(), tokenizer->vocab_size())},
                   {"text", format_bytes(bytes)},
                   {"time", format_duration(seconds.count())}}));
  return 0;
}

}  // namespace

Command add_data_tokenize(CLI::App& parent) {
  const auto options = std::make_shared<TokenizeCommand>();
  CLI::App* app = parent.add_subcommand(
      "tokenize",
      "Write the token ids of text to a token file (.bin), which training reads faster");
  app->add_option("FILE", options->files, "Text files or globs; each is a document")->required();
  app->add_option("--tokenizer", options->tokenizer,
                  "bytes, a tokenizer file, or a directory with one")
      ->required();
  app->add_option("--out", options->out, "Token file to write, in the format of llm.c")->required();
  app->add_flag("--no-special-tokens", options->no_special,
                "Leave out the special tokens that the tokenizer puts around a document");
  app->add_flag("--overwrite", options->overwrite, "Replace the file");
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app, [options] { return run_tokenize(*options); }};
}

}  // namespace tessera::tools
