// Training a tokenizer, and training, exporting and generating with it.
#include <doctest/doctest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/support/cli.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"
#include "tests/support/text.h"

namespace test = tessera::test;
using test::run_to;

namespace {

std::string verse() {
  std::string text;
  for (int i = 0; i < 300; ++i)
    text +=
        "The cat number " + std::to_string(i % 17) + " sat on the mat; d\xC3\xA9j\xC3\xA0 vu.\n";
  return text;
}

}  // namespace

TEST_CASE("a tokenizer is trained, used, exported byte for byte, and read from the export") {
  const test::TempDir dir;
  const auto text = dir.write("text.txt", verse());
  const auto tokenizer = dir.file("tokenizer.json");
  const auto report =
      test::json_of({"data", "train-tokenizer", text, "--vocab-size", "300", "--out", tokenizer});
  CHECK(report["vocab_size"] == 300);
  CHECK(test::holds(run_to(3, {"data", "train-tokenizer", text, "--out", tokenizer}).err,
                    "--overwrite"));

  for (const std::string family : {"gpt2", "llama", "gemma3"}) {
    CAPTURE(family);
    const auto run = dir.file(family + "-run");
    const test::Arguments train = {"train",   "--data.train",
                                   text,      "--data.tokenizer",
                                   tokenizer, "--run.out",
                                   run,       "--model.arch",
                                   family,    "--model.n_layer",
                                   "1",       "--model.n_head",
                                   "1",       "--model.n_embd",
                                   "8",       "--model.seq_len",
                                   "8",       "--train.global_batch",
                                   "2",       "--optim.warmup_steps",
                                   "0"};
    run_to(0, test::joined(train, {"--train.steps", "1"}));
    // Resuming without the key changes nothing.
    const auto resumed =
        run_to(0, {"train", "--data.train", text, "--run.out", run, "--train.global_batch", "2",
                   "--train.steps", "2", "--optim.warmup_steps", "0"});
    CHECK(!test::holds(resumed.err, "data.tokenizer changes"));

    const auto out = dir.file(family + "-out");
    run_to(0, {"consolidate", run, out});
    CHECK(dir.read(family + "-out/tokenizer.json") == dir.read("tokenizer.json"));
    CHECK(test::holds(dir.read(family + "-out/tokenizer_config.json"), "PreTrainedTokenizerFast"));
    CHECK(!std::filesystem::exists(dir.path() / (family + "-out/tokenizer_tessera.json")));
    for (const std::string& model : {run, out}) {
      const auto generated = test::json_of({"generate", model, "--prompt", "The cat",
                                            "--max-new-tokens", "3", "--temperature", "0"});
      CHECK(generated["tokens"].size() == 3);
      CHECK(generated["prompt_tokens"].size() < 7);
      CHECK(
          run_to(0, {"generate", model, "--prompt", "d\xC3\xA9j\xC3\xA0", "--max-new-tokens", "0"})
              .out == "d\xC3\xA9j\xC3\xA0\n");
      run_to(0, {"eval", model, "--data", text});
    }
  }
}

TEST_CASE("text becomes a token file that trains like the text") {
  const test::TempDir dir;
  const auto text = dir.write("text.txt", verse());
  const auto fixture = test::source_path("tests/io/tokenizer/fixtures/llama3.json");
  const auto out = dir.file("text.bin");
  const auto report =
      test::json_of({"data", "tokenize", text, text, "--tokenizer", fixture, "--out", out});
  const auto plain = test::json_of({"data", "tokenize", text, "--tokenizer", fixture, "--out",
                                    dir.file("plain.bin"), "--no-special-tokens"});
  CHECK(report["tokens"] == 2 * (plain["tokens"].get<int>() + 2));
  run_to(0, {"train", "--data.train", dir.file("plain.bin"), "--run.out", dir.file("run"),
             "--train.steps", "1", "--model.n_layer", "1", "--model.n_head", "1", "--model.n_embd",
             "8", "--model.seq_len", "8", "--train.global_batch", "2"});
  CHECK(test::holds(run_to(3, {"data", "tokenize", text, "--tokenizer", fixture, "--out", out}).err,
                    "--overwrite"));
  CHECK(test::holds(run_to(2, {"data", "tokenize", text, "--tokenizer", fixture, "--out",
                               dir.file("x.bin"), "--part", "1/2"})
                        .err,
                    "name a directory"));
  CHECK(test::holds(
      run_to(2, {"data", "tokenize", text, "--tokenizer", text, "--out", dir.file("y.bin")}).err,
      "expected a tokenizer"));
}
