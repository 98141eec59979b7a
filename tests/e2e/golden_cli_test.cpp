// The command line against PyTorch's float64 reference: train, consolidate, evaluate.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "tests/support/cli.h"
#include "tests/support/golden.h"
#include "tests/support/safetensors_reader.h"

using namespace tessera;
using namespace tessera::test;

namespace {

struct Setting {
  std::string set;
  int world = 1;
  std::string mode = "full";
  std::string recompute = "none";
  std::int64_t micro_batch = 0;
  std::string precision = "fp32";
};

Arguments command(const Golden& golden, const Setting& setting, const std::string& run,
                  const std::string& weights) {
  Arguments words = {"train"};
  if (setting.world > 1) words = {"train", "--nproc", std::to_string(setting.world)};
  const auto text = [](auto value) { return fmt::format("{}", value); };
  return joined(words,
                {"--run.out=" + run,
                 "--model.init_from=" + weights,
                 "--data.train=" + golden.folder + "/tokens.bin",
                 "--data.order=sequential",
                 "--model.seq_len=" + text(golden.seq),
                 "--train.global_batch=" + text(golden.batch),
                 "--train.micro_batch=" + text(setting.micro_batch),
                 "--train.steps=" + text(golden.steps),
                 "--train.precision=" + setting.precision,
                 "--train.recompute=" + setting.recompute,
                 "--shard.mode=" + setting.mode,
                 "--comm.backend=" + std::string(setting.recompute == "none" ? "auto" : "gloo"),
                 "--optim.schedule=constant",
                 "--optim.warmup_steps=0",
                 "--optim.lr=" + text(golden.lr),
                 "--optim.beta1=" + text(golden.beta1),
                 "--optim.beta2=" + text(golden.beta2),
                 "--optim.eps=" + text(golden.eps),
                 "--optim.weight_decay=" + text(golden.weight_decay),
                 "--optim.clip_norm=" + text(golden.clip_norm)});
}

void check_weights(const Golden& golden, const std::string& model) {
  const SafetensorsReader reader(model + "/model.safetensors");
  CHECK(reader.header().tensors.size() == golden.after.size());
  for (const auto& after : golden.after) {
    const std::string& name = after.first;
    const auto& expected = after.second;
    CAPTURE(name);
    const auto* entry = reader.find("transformer." + name);
    REQUIRE(entry != nullptr);
    std::vector<float> values(expected.size());
    REQUIRE(numel(entry->shape) == static_cast<std::int64_t>(values.size()));
    reader.read(entry->name, 0, numel(entry->shape), values.data(), DType::F32);
    CHECK(relative_error(values, expected) < golden.tolerance(name));
  }
}

}  // namespace

// golden_threads_test.cpp covers all combinations in one process.
TEST_CASE("runs and their exported weights match the reference, in float32 and bf16") {
  const TempDir dir;
  const Setting settings[] = {{"gpt2-tiny", 1},
                              {"gpt2-tiny", 2, "full", "block", 1},
                              {"gpt2-tiny", 4, "none"},
                              {"gpt2-tiny", 2, "full", "none", 0, "bf16"},
                              {"gpt2-odd", 3, "full", "block"},
                              {"gpt2-odd", 3, "none", "none", 0, "bf16"}};
  int number = 0;
  for (const Setting& setting : settings) {
    const auto golden = load_golden(setting.set);
    const bool exact = setting.precision == "fp32";
    const std::string run = dir.file(std::to_string(number++));
    INFO(fmt::format("{} world {} mode {} recompute {} micro_batch {} {}", setting.set,
                     setting.world, setting.mode, setting.recompute, setting.micro_batch,
                     setting.precision));
    run_to(0, command(golden, setting, run, golden.folder));
    const auto metrics = read_metrics(run).steps;
    REQUIRE(metrics.size() == golden.loss.size());
    for (std::size_t i = 0; i < metrics.size(); ++i) {
      CAPTURE(i);
      CHECK(relative(std::stod(metrics[i].loss), golden.loss[i]) < (exact ? 1e-6 : 5e-3));
      if (exact) CHECK(relative(std::stod(metrics[i].grad_norm), golden.grad_norm[i]) < 5e-6);
    }
    if (!exact) continue;
    run_to(0, {"consolidate", run, run + "-model"});
    check_weights(golden, run + "-model");
  }
}

TEST_CASE("a consolidated model evaluates like the run's checkpoint, and starts a new run") {
  const TempDir dir;
  const auto golden = load_golden("gpt2-odd");
  const Setting setting{"gpt2-odd", 3};
  const std::string run = dir.file("run"), model = dir.file("model");
  run_to(0, command(golden, setting, run, golden.folder));
  run_to(0, {"consolidate", run, model});
  const auto evaluate = [&](const std::string& what) {
    const auto result = run_to(
        0, {"eval", what, "--data", golden.folder + "/tokens.bin", "--seq-len",
            std::to_string(golden.seq), "--max-rows", std::to_string(golden.batch), "--json"});
    return nlohmann::json::parse(result.out).at("loss").get<double>();
  };
  const double loss = evaluate(model);
  CHECK(loss == evaluate(run));
  // The first batch is step 0's training batch.
  CHECK(loss < golden.loss[0]);
  CHECK(relative(evaluate(golden.folder), golden.loss[0]) < 1e-6);

  run_to(0, command(golden, setting, dir.file("again"), model));
  CHECK(relative(std::stod(read_metrics(dir.file("again")).steps.at(0).loss), loss) < 1e-6);
}
