// Runs with a moving average of the weights, and commands that use it.

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "tests/e2e/small_run.h"

using namespace tessera;
using namespace tessera::test;

namespace fs = std::filesystem;

namespace {

double loss_of(const Fixture& fixture, const std::string& model, const Arguments& more = {}) {
  return json_of(joined({"eval", model, "--data", fixture.text, "--max-rows", "8"}, more))["loss"];
}

}  // namespace

TEST_CASE_FIXTURE(Fixture, "commands read a run's moving average, which is exported as a model") {
  const std::string run = dir.file("run"), out = dir.file("average"), gguf = dir.file("gguf");
  run_to(0, joined(small_run(text, run, 2, 30),
                   {"--optim.ema=0.99", "--optim.name=muon", "--train.precision=bf16-true"}));
  const Arguments average = {"--weights", "ema"};
  const double trained = loss_of(*this, run), averaged = loss_of(*this, run, average);
  CHECK(trained != averaged);
  CHECK(loss_of(*this, run, {"--weights", "trained"}) == trained);
  run_to(0, joined({"consolidate", run, out}, average));
  CHECK(loss_of(*this, out) == averaged);
  const Arguments prompt = {"--prompt=the ", "--temperature=0", "--max-new-tokens=20"};
  CHECK(run_to(0, joined(joined({"generate", run}, prompt), average)).out ==
        run_to(0, joined({"generate", out}, prompt)).out);

  // The average is no state of a torch optimizer.
  const auto state = json_of(
      {"consolidate", run, dir.file("dcp"), "--format=dcp", "--what=all", "--json", "--dry-run"});
  for (const auto& tensor : state["tensors"])
    CHECK_FALSE(holds(tensor["name"].get<std::string>(), "ema"));

  CHECK(holds(run_to(2, joined({"eval", out, "--data", text}, average)).err,
              "is no checkpoint of tessera, and holds no moving average; omit --weights ema"));
  CHECK(holds(run_to(2, joined(small_run(text, dir.file("b"), 1, 2),
                               {"--optim.ema=0.9", "--checkpoint.what=model"}))
                  .err,
              "optim.ema is saved with the optimizer's state, and checkpoint.what is model"));
}

TEST_CASE_FIXTURE(Fixture, "a run can take up a moving average, and leave it") {
  const std::string run = dir.file("run");
  const auto command = [&](int steps, const char* ema) {
    return joined(small_run(text, run, 2, steps), {std::string("--optim.ema=") + ema});
  };
  run_to(0, command(4, "0"));
  CHECK(holds(run_to(2, {"eval", run, "--data", text, "--weights", "ema"}).err,
              "holds no moving average of the weights (it was trained without optim.ema)"));
  const auto taken_up = run_to(0, command(8, "0.9")).err;
  CHECK(holds(taken_up, "holds no ema, which starts as the weights as they are now"));
  CHECK(holds(taken_up, "since step 4, optim.ema changes from 0.0 to 0.9"));
  CHECK(loss_of(*this, run) != loss_of(*this, run, {"--weights", "ema"}));
  CHECK(holds(run_to(0, command(12, "0")).err, "is dropped: the optimizer has no such state"));
}

TEST_CASE_FIXTURE(Fixture, "LoRA adapters have a moving average, too") {
  const std::string base = dir.file("base"), run = dir.file("run"), merged = dir.file("merged");
  run_to(0, small_run(text, base, 1, 4));
  run_to(0, joined(small_run(text, run, 2, 12),
                   {"--model.init_from=" + base, "--lora.rank=2", "--optim.ema=0.5"}));
  const double averaged = loss_of(*this, run, {"--weights", "ema"});
  CHECK(averaged != loss_of(*this, run));
  run_to(0, {"consolidate", run, merged, "--merge-lora", "--weights", "ema"});
  CHECK(relative(loss_of(*this, merged), averaged) < 1e-6);
}
