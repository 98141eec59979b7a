#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/file.h"
#include "io/base/json.h"
#include "io/data/dataset.h"
#include "io/data/recognize.h"
#include "io/data/tokenizer.h"
#include "io/tokenizer/train_bpe.h"
#include "tools/tessera/command.h"
#include "tools/tessera/report/console.h"

namespace tessera::tools {
namespace {

struct TrainTokenizerCommand {
  std::vector<std::string> files;
  std::string out = "tokenizer.json";
  io::TrainBpeOptions bpe;
  std::vector<std::string> special_tokens;
  bool overwrite = false, json = false;
};

int run_train_tokenizer(const TrainTokenizerCommand& options) {
  io::require_replaceable(options.out);
  require<IoError>(options.overwrite || !io::is_there(options.out),
                   "{} exists; name another --out, or replace it with --overwrite", options.out);
  const auto start = std::chrono::steady_clock::now();
  io::TrainBpeOptions bpe = options.bpe;
  if (!options.special_tokens.empty()) bpe.special_tokens = options.special_tokens;
  io::BpeTrainer trainer(bpe);
  std::int64_t bytes = 0;
  for (const std::string& file : io::expand_globs(options.files)) {
    const std::string warning = io::inspect_data_file(file, false);
    if (!warning.empty()) fmt::print(stderr, "tessera: warning: {}\n", warning);
    const std::string text = io::read_file(file, std::numeric_limits<std::int64_t>::max());
    bytes += std::ssize(text);
    trainer.add(text);
  }
  io::write_file_atomically(options.out, trainer.finish());
  const auto tokenizer = io::load_tokenizer(options.out);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  if (options.json) {
    fmt::print("{}\n", io::dump_json({{"path", options.out},
                                      {"vocab_size", tokenizer->vocab_size()},
                                      {"bytes", bytes},
                                      {"seconds", seconds.count()}}));
    return 0;
  }
  if (tokenizer->vocab_size() < bpe.vocab_size)
    fmt::print(stderr, "tessera: note: only {} ids: no other pair occurs {} times\n",
               tokenizer->vocab_size(), bpe.min_count);
  fmt::print("{}", format_rows(detect_console(STDOUT_FILENO),
                               {{"written", options.out},
                                {"vocabulary", fmt::format("{} ids", tokenizer->vocab_size())},
                                {"text", fmt::format("{} bytes", bytes)},
                                {"time", format_duration(seconds.count())}}));
  return 0;
}

}  // namespace

Command add_data_train_tokenizer(CLI::App& parent) {
  const auto options = std::make_shared<TrainTokenizerCommand>();
  CLI::App* app = parent.add_subcommand(
      "train-tokenizer",
      "Train a byte-level BPE tokenizer on text and write a tokenizer.json, for data.tokenizer and "
      "for "
      "Hugging Face's tokenizers. The result depends only on the text and the options");
  app->add_option("FILE", options->files, "Text files or globs")->required();
  app->add_option("--vocab-size", options->bpe.vocab_size, "Ids, special tokens and bytes included")
      ->capture_default_str();
  app->add_option("--out", options->out, "File to write")->capture_default_str();
  app->add_option("--pattern", options->bpe.pattern,
                  "Regular expression that matches the words to split text into; default: GPT-2's");
  app->add_option("--special-token", options->special_tokens,
                  "Control token, repeatable; default: <|endoftext|>");
  app->add_option("--min-count", options->bpe.min_count, "Merge no pair that occurs less often")
      ->capture_default_str();
  app->add_flag("--overwrite", options->overwrite, "Replace the file");
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app, [options] { return run_train_tokenizer(*options); }};
}

}  // namespace tessera::tools
