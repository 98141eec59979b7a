#include "io/data/tokenize.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/base/memory.h"
#include "core/base/processors.h"
#include "io/base/file.h"
#include "io/base/json.h"
#include "io/consolidate/options.h"
#include "io/data/dataset.h"
#include "io/data/token_file.h"
#include "io/data/tokenizer.h"
#include "tools/tessera/command.h"
#include "tools/tessera/report/byte_progress.h"
#include "tools/tessera/report/console.h"
#include "tools/tessera/report/utf8.h"
#include "tools/tessera/signal/stop_signal.h"

namespace tessera::tools {
namespace {

struct TokenizeCommand {
  std::vector<std::string> files;
  std::string tokenizer, out, end_token, part;
  io::TokenizeOptions options;
  bool no_special = false, json = false;
};

std::int32_t end_token_id(const io::Tokenizer& tokenizer, const std::string& text) {
  if (text.empty()) return -1;
  for (const io::SpecialToken& token : tokenizer.special_tokens())
    if (token.text == text) return token.id;
  throw InvalidArgument("--end-token {}: the tokenizer has no such special token", text);
}

io::TokenizeReport tokenize(const TokenizeCommand& command, const io::TokenizeOptions& options) {
  if (!io::is_token_file(command.out)) return io::tokenize_to_directory(options, command.out);
  require(options.parts == 1, "--part writes shards; name a directory with --out, not a .bin file");
  io::require_replaceable(command.out);
  require<IoError>(options.overwrite || !io::is_there(command.out),
                   "{} exists; name another --out, or replace it with --overwrite", command.out);
  return io::tokenize_to_file(options, command.out);
}

int run_tokenize(const TokenizeCommand& command) {
  io::TokenizeOptions options = command.options;
  if (!command.part.empty()) {
    const io::ExportShare share = io::parse_share(command.part);
    options.part = share.number;
    options.parts = share.count;
  }
  require(options.parts == 1 || !options.overwrite,
          "--overwrite would remove the shards of other parts; remove {} yourself", command.out);
  options.tokenizer = command.tokenizer == "bytes" ? io::make_byte_tokenizer()
                                                   : io::load_tokenizer(command.tokenizer);
  options.special_tokens = !command.no_special;
  options.end_token = end_token_id(*options.tokenizer, command.end_token);
  options.sources = io::list_corpus(command.files);
  options.warn = [](const std::string& text) {
    fmt::print(stderr, "tessera: warning: {}\n", escaped(text));
  };
  const HeldWarnings held;
  const StopSignal stop;
  ByteProgress progress("read");
  options.progress = [&](const io::TokenizeProgress& at) {
    progress.set_items(at.tokens, "tokens");
    progress.update(at.done, at.total, at.found);
    return stop.received() == 0;
  };
  const auto start = std::chrono::steady_clock::now();
  io::TokenizeReport report;
  try {
    report = tokenize(command, options);
  } catch (const io::TokenizeStopped&) {
    progress.stop();
    const int code = stop_exit_code(stop.received());
    const std::string text = io::is_token_file(command.out)
                                 ? "stopped; nothing was written"
                                 : "stopped; the same command continues after the last whole shard";
    fmt::print(stderr, "tessera: {}\n", text);
    if (command.json) fmt::print("{}\n", io::dump_json({{"error", text}, {"exit_code", code}}));
    return code;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  const std::int64_t vocab_size = options.tokenizer->vocab_size();
  if (command.json) {
    fmt::print("{}\n", io::dump_json({{"path", command.out},
                                      {"tokens", report.tokens},
                                      {"documents", report.documents},
                                      {"skipped", report.skipped},
                                      {"shards", std::max<std::size_t>(report.shards.size(), 1)},
                                      {"vocab_size", vocab_size},
                                      {"bytes", report.text_bytes},
                                      {"seconds", seconds.count()}}));
    return 0;
  }
  std::vector<std::pair<std::string, std::string>> rows{
      {report.was_done ? "was done" : "written", command.out},
      {"tokens", fmt::format("{} of {} ids", report.tokens, vocab_size)},
      {"documents", std::to_string(report.documents)}};
  if (!report.shards.empty()) rows.emplace_back("shards", std::to_string(report.shards.size()));
  if (report.skipped > 0) rows.emplace_back("skipped", std::to_string(report.skipped));
  rows.emplace_back("text", format_bytes(report.text_bytes));
  rows.emplace_back("time", format_duration(seconds.count()));
  fmt::print("{}", format_rows(detect_console(STDOUT_FILENO), rows));
  if (options.parts > 1 && !io::is_there(io::fs::path(command.out) / io::kTokenIndexName))
    fmt::print("When all {} parts are done: tessera data commit {}\n", options.parts, command.out);
  return 0;
}

}  // namespace

Command add_data_tokenize(CLI::App& parent) {
  const auto command = std::make_shared<TokenizeCommand>();
  io::TokenizeOptions& options = command->options;
  options.threads = usable_processors();
  CLI::App* app = parent.add_subcommand(
      "tokenize",
      "Write the token ids of documents to token files, which training reads.\n"
      "After Ctrl-C or a kill, the same command continues after the last whole shard of a "
      "directory.");
  app->footer(
      "Examples:\n"
      "  tessera data tokenize \"books/*.txt\" --tokenizer gpt2/ --out books.bin\n"
      "      one token file\n"
      "  tessera data tokenize \"web/*.jsonl.zst\" --tokenizer gpt2/ --end-token \"<|endoftext|>\" "
      "--out web\n"
      "      a directory of shards; train on it with --data.train web\n"
      "  tessera data tokenize web/ --tokenizer gpt2/ --out /shared/web --part 1/4\n"
      "      one of four jobs; then: tessera data commit /shared/web");
  app->add_option("FILE", command->files,
                  "Files, globs or directories, also compressed (.gz, .zst). Each line of .jsonl, "
                  ".ndjson and .json files and each row of .parquet files is a document; any other "
                  "file is one")
      ->required();
  app->add_option("--tokenizer", command->tokenizer,
                  "bytes, a tokenizer file, or a directory with one")
      ->required();
  app->add_option("--out", command->out,
                  "Token file (.bin) in the format of llm.c, or a directory for shards")
      ->required();
  app->add_option("--field", options.field,
                  "Key of the text in lines of JSON, or column of Parquet files")
      ->capture_default_str();
  app->add_option("--shard-tokens", options.shard_tokens, "Tokens of a shard; the last has fewer")
      ->capture_default_str()
      ->check(CLI::Range(std::int64_t{1}, io::TokenFileWriter::kMaxTokens));
  app->add_option("--end-token", command->end_token,
                  "Special token to put after each document, such as <|endoftext|>");
  app->add_flag("--no-special-tokens", command->no_special,
                "Leave out the special tokens that the tokenizer puts around a document");
  app->add_flag("--skip-bad", options.skip_bad,
                "Skip and count bad lines and rows and the rest of damaged files; default: stop");
  app->add_option("--part", command->part,
                  "K/N: tokenize only part K of N of the files, to shards in the directory");
  app->add_option("--threads", options.threads, "Threads; the output does not depend on them")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  app->add_flag("--overwrite", options.overwrite, "Replace the file or shards");
  app->add_flag("--json", command->json, "Machine-readable output");
  return {app, [command] { return run_tokenize(*command); }};
}

}  // namespace tessera::tools
