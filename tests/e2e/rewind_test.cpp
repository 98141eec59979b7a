// Where a run goes on from when its newest checkpoint is not the place, and what then becomes of
// it.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "tests/e2e/small_run.h"

using namespace tessera;
using test::Arguments;
using test::joined;
using test::run_cli;
using test::small_run;
namespace fs = std::filesystem;

namespace {

struct Fixture {
  test::TempDir dir;
  std::string text = dir.write("text.txt", test::make_text(1500));

  std::string run(const Arguments& arguments) const {
    const auto result = run_cli(arguments);
    INFO(result.describe());
    REQUIRE(result.code == 0);
    return result.err;
  }
  // Runs that must be refused as wrong usage; returns what they say.
  std::string refuse(const Arguments& arguments) const {
    const auto result = run_cli(arguments);
    INFO(result.describe());
    CHECK(result.code == 2);
    CHECK(std::count(result.err.begin(), result.err.end(), '\n') == 1);
    return result.err;
  }
};

fs::path shard(const fs::path& run, int step) {
  return run / "checkpoints" / fmt::format("step-{:08}", step) / "rank-00000-of-00001.safetensors";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE_FIXTURE(Fixture, "a broken newest checkpoint is set aside and pushes no good one out") {
  const std::string out = dir.file("run");
  run(joined(small_run(text, out, 1, 20), {"--checkpoint.every=10"}));
  fs::resize_file(shard(out, 20), 100);
  const auto said =
      run(joined(small_run(text, out, 1, 14), {"--checkpoint.every=1", "--checkpoint.keep=1"}));
  CHECK(contains(said, "step-00000020 is set aside as step-00000020.unusable"));
  CHECK(fs::exists(shard(out, 14)));
  CHECK_FALSE(fs::exists(shard(out, 20)));
  const auto again = run(small_run(text, out, 1, 15));
  CHECK(contains(again, "step 14 of 15"));
}

TEST_CASE_FIXTURE(Fixture, "checkpoints that a slip copied into others are none of the run's") {
  const std::string out = dir.file("run");
  run(joined(small_run(text, out, 1, 20), {"--checkpoint.every=10"}));
  const fs::path checkpoints = out + "/checkpoints";
  fs::create_directory(checkpoints / "checkpoints");
  fs::copy(checkpoints / "step-00000010", checkpoints / "checkpoints/step-00000010",
           fs::copy_options::recursive);
  fs::remove_all(checkpoints / "step-00000010");
  CHECK(contains(run(small_run(text, out, 1, 22)), "step 20 of 22"));
}

TEST_CASE_FIXTURE(Fixture, "a run does not go back behind checkpoints that it has") {
  const std::string out = dir.file("run");
  run(joined(small_run(text, out, 1, 20), {"--checkpoint.every=10"}));
  const std::string first = out + "/checkpoints/step-00000010";
  CHECK(contains(refuse(joined(small_run(text, out, 1, 30), {"--checkpoint.resume=" + first})),
                 "step-00000020 is later than"));
  CHECK(fs::exists(shard(out, 20)));
  // Elsewhere it may.
  run(joined(small_run(text, dir.file("branch"), 1, 12), {"--checkpoint.resume=" + first}));
  CHECK(fs::exists(shard(dir.file("branch"), 12)));
  // The same command again, as after a kill, goes on.
  const auto again =
      run(joined(small_run(text, dir.file("branch"), 1, 14), {"--checkpoint.resume=" + first}));
  CHECK(contains(again, "has checkpoints of its own by now"));
  CHECK(contains(again, "step 12 of 14"));
}

TEST_CASE_FIXTURE(Fixture, "a run without checkpoints leaves its metrics to the one after it") {
  const std::string out = dir.file("run");
  run(joined(small_run(text, out, 1, 5), {"--checkpoint.every=0"}));
  CHECK(contains(refuse(joined(small_run(text, out, 1, 5), {"--checkpoint.resume=never"})),
                 "holds a run (metrics.jsonl)"));
  run(joined(small_run(text, out, 1, 3), {"--checkpoint.every=0"}));
  CHECK(test::read_metrics(out).steps.size() == 3);
  CHECK(fs::file_size(out + "/metrics.previous.jsonl") > 0);
}

TEST_CASE_FIXTURE(Fixture, "what differs from the run so far is said when it goes on") {
  const std::string out = dir.file("run");
  run(small_run(text, out, 1, 5));
  const auto said = run(joined(small_run(text, out, 1, 7), {"--optim.lr=0.001"}));
  CHECK(contains(said, "train.steps changes from 5 to 7"));
  CHECK(contains(said, "optim.lr changes from 0.003 to 0.001"));
}

TEST_CASE_FIXTURE(Fixture, "a tokenizer that the model does not have is not assumed") {
  const std::string golden = std::string(TESSERA_SOURCE_DIR) + "/tests/golden/gpt2-tiny";
  CHECK(contains(refuse({"eval", golden, "--data", text, "--device", "cpu"}),
                 "came without a tokenizer"));
  CHECK(contains(refuse({"train", "--model.init_from=" + golden, "--data.train=" + text,
                         "--run.out=" + dir.file("none")}),
                 "came without a tokenizer"));
  const std::string out = dir.file("run");
  run(joined(small_run(text, out, 1, 2), {"--data.tokenizer=chars"}));
  CHECK(contains(refuse(joined(small_run(text, dir.file("other"), 1, 2),
                               {"--model.init_from=" + out, "--data.tokenizer=bytes"})),
                 "data.tokenizer is bytes, but the model was trained with chars"));
  CHECK(contains(refuse(joined(small_run(text, dir.file("prompt"), 1, 2),
                               {"--data.tokenizer=chars", "--train.sample_prompt=Z"})),
                 "train.sample_prompt"));
}

TEST_CASE_FIXTURE(Fixture, "text is sampled at evaluations by ranks that share the model") {
  const auto said = run(joined(small_run(text, dir.file("run"), 2, 2),
                               {"--train.sample_prompt=the ", "--train.sample_tokens=30"}));
  CHECK(contains(said, "step 2: sample\nthe "));
}
