// Choice of the checkpoint to resume from, and the fate of newer ones.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "tests/e2e/small_run.h"
#include "tests/support/paths.h"

using namespace tessera;
using namespace tessera::test;
namespace fs = std::filesystem;

namespace {

// Expects exit code 2 and one line of errors; returns it.
std::string refuse(const Arguments& arguments) {
  const auto result = run_to(2, arguments);
  CHECK(count(result.err, "\n") == 1);
  return result.err;
}

}  // namespace

TEST_CASE_FIXTURE(Fixture, "a run with several checkpoints resumes from the right one") {
  const std::string out = dir.file("run"), first = out + "/checkpoints/step-00000010";
  run_to(0, joined(small_run(text, out, 1, 20),
                   {"--checkpoint.every=10", "--checkpoint.keep_best=1", "--train.eval_every=10"}));
  const auto copy = [&](const std::string& name) {
    fs::copy(out, dir.path() / name, fs::copy_options::recursive);
    return dir.file(name);
  };

  SUBCASE("a damaged newest checkpoint is set aside, and does not count for retention") {
    fs::resize_file(shard(out, 20), 100);
    const auto said = run_to(
        0, joined(small_run(text, out, 1, 14), {"--checkpoint.every=1", "--checkpoint.keep=1"}));
    CHECK(holds(said.err, "step-00000020 is set aside as step-00000020.unusable"));
    CHECK(fs::exists(shard(out, 14)));
    CHECK_FALSE(fs::exists(shard(out, 20)));
    CHECK(holds(dir.read("run/saves.jsonl"), "\"step\":14,"));
    CHECK_FALSE(holds(dir.read("run/saves.jsonl"), "\"step\":20,"));
    CHECK(holds(run_to(0, small_run(text, out, 1, 15)).err, "step 14 of 15"));
  }
  SUBCASE("a run does not resume behind its newest checkpoint, and ignores nested copies") {
    CHECK(holds(refuse(joined(small_run(text, out, 1, 30), {"--checkpoint.resume=" + first})),
                "step-00000020 is later than"));
    // A new run directory may branch off; the same command then resumes the branch.
    const auto branch = [&](int steps) {
      return run_to(0, joined(small_run(text, dir.file("branch"), 1, steps),
                              {"--checkpoint.resume=" + first}));
    };
    branch(12);
    CHECK(fs::exists(shard(dir.file("branch"), 12)));
    const auto again = branch(14);
    CHECK(holds(again.err, "already has its own checkpoints"));
    CHECK(holds(again.err, "step 12 of 14"));

    const fs::path checkpoints = copy("slip") + "/checkpoints";
    fs::create_directory(checkpoints / "checkpoints");
    fs::rename(checkpoints / "step-00000010", checkpoints / "checkpoints/step-00000010");
    CHECK(holds(run_to(0, small_run(text, dir.file("slip"), 1, 22)).err, "step 20 of 22"));
  }
  SUBCASE("--step selects the newest, the best, or one; metrics decide which is best") {
    const auto losses = read_metrics(out).val_loss;
    const std::string best = std::stod(losses.at(10)) < std::stod(losses.at(20)) ? "10" : "20";
    CHECK(holds(run_cli({"checkpoint", "diff", out, out, "--step", "best"}).out,
                "(step " + best + ", 1 ranks)"));
    CHECK(
        holds(run_cli({"eval", out, "--data", text, "--step", "best"}).out, "step-000000" + best));
    CHECK(holds(refuse({"checkpoint", "inspect", first, "--step", "best"}), "one checkpoint"));
    CHECK(holds(refuse({"generate", out, "--prompt=x", "--step", "7"}), "no checkpoint of step 7"));
    const auto differ = run_cli({"checkpoint", "diff", out, first});
    CHECK(std::count(differ.out.begin(), differ.out.end(), '\n') == 2 + 10 + 2);
    CHECK(holds(differ.out,
                "... and 18 with smaller differences; --all shows them\n28 of 28 "
                "tensors differ, in "));
  }
}

TEST_CASE_FIXTURE(
    Fixture, "a run without checkpoints is replaced, and its metrics are kept under another name") {
  const std::string out = dir.file("run");
  run_to(0, joined(small_run(text, out, 1, 5), {"--checkpoint.every=0"}));
  CHECK(holds(refuse(joined(small_run(text, out, 1, 5), {"--checkpoint.resume=never"})),
              "holds a run (metrics.jsonl)"));
  run_to(0, joined(small_run(text, out, 1, 3), {"--checkpoint.every=0"}));
  CHECK(read_metrics(out).steps.size() == 3);
  CHECK(fs::file_size(out + "/metrics.previous.jsonl") > 0);
}

TEST_CASE_FIXTURE(Fixture, "changed settings are reported on resume") {
  const std::string out = dir.file("run");
  run_to(0, small_run(text, out, 1, 5));
  const auto said = run_to(0, joined(small_run(text, out, 1, 7), {"--optim.lr=0.001"}));
  CHECK(holds(said.err, "train.steps changes from 5 to 7"));
  CHECK(holds(said.err, "optim.lr changes from 0.003 to 0.001"));
}

TEST_CASE_FIXTURE(Fixture, "a missing tokenizer is an error") {
  const std::string golden = source_path("tests/golden/gpt2-tiny");
  CHECK(holds(refuse({"eval", golden, "--data", text, "--device", "cpu"}),
              "came without a tokenizer"));
  CHECK(holds(refuse({"train", "--model.init_from=" + golden, "--data.train=" + text,
                      "--run.out=" + dir.file("none")}),
              "came without a tokenizer"));
  const std::string out = dir.file("run");
  run_to(0, joined(small_run(text, out, 1, 2), {"--data.tokenizer=chars"}));
  CHECK(holds(refuse(joined(small_run(text, dir.file("other"), 1, 2),
                            {"--model.init_from=" + out, "--data.tokenizer=bytes"})),
              "data.tokenizer is bytes, but the model was trained with chars"));
  CHECK(holds(refuse(joined(small_run(text, dir.file("prompt"), 1, 2),
                            {"--data.tokenizer=chars", "--train.sample_prompt=Z"})),
              "train.sample_prompt"));
}

TEST_CASE_FIXTURE(Fixture,
                  "the tokenizer files of a Hugging Face model are copied to runs and exports") {
  const std::string golden = source_path("tests/golden/gpt2-tiny");
  const fs::path model = dir.path() / "model";
  fs::create_directory(model);
  for (const char* file : {"config.json", "model.safetensors"})
    fs::copy_file(golden + "/" + file, model / file);
  dir.write("model/tokenizer.json", "{\"any\": 1}");
  dir.write("model/vocab.json", "{}");
  std::string from = model;
  for (const std::string name : {"first", "second"}) {
    const auto said =
        run_to(0, {"train", "--model.init_from=" + from, "--run.out=" + dir.file(name),
                   "--data.train=" + golden + "/tokens.bin", "--train.steps=1",
                   "--train.global_batch=1", "--train.device=cpu"});
    CHECK(holds(said.err, "note: no validation: token files are not split"));
    from = dir.file(name);
  }
  run_to(0, {"consolidate", from, dir.file("export")});
  CHECK(dir.read("export/tokenizer.json") == "{\"any\": 1}");
  CHECK(dir.read("export/vocab.json") == "{}");
}

TEST_CASE_FIXTURE(Fixture, "evaluating tokens that do not fit the model prints a warning") {
  const std::string tokens = source_path("tests/golden/gpt2-tiny/tokens.bin");
  run_to(0, joined(small_run(tokens, dir.file("run"), 1, 60),
                   {"--model.vocab_size=600", "--optim.lr=0.01", "--train.device=cpu"}));
  const auto wrong =
      run_cli({"eval", dir.file("run"), "--data", text, "--tokenizer", "bytes", "--device=cpu"});
  CHECK(holds(wrong.err, "the bytes tokenizer has 256 tokens, the model 600"));
  CHECK(holds(wrong.err, "is worse than a uniform guess, ln 600"));
  const auto right = run_to(0, {"eval", dir.file("run"), "--data", tokens, "--device=cpu"});
  CHECK_FALSE(holds(right.err, "worse than"));
}

TEST_CASE_FIXTURE(Fixture, "ranks that share the model sample text at evaluations") {
  const auto said = run_to(0, joined(small_run(text, dir.file("run"), 2, 2),
                                     {"--train.sample_prompt=the ", "--train.sample_tokens=30"}));
  CHECK(holds(said.err, "step 2: sample\nthe "));
}
