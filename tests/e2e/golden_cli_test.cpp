// The command line against PyTorch's float64 reference: train, consolidate, evaluate.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "io/safetensors/reader.h"
#include "tests/support/cli.h"
#include "tests/support/golden.h"

using namespace tessera;
using test::Arguments;
using test::run_cli;

namespace {

struct Setting {
  std::string set;
  int world = 1;
  std::string mode = "full";
  std::string recompute = "none";
  std::int64_t micro_batch = 0;
  std::string precision = "fp32";
};

std::vector<Setting> settings(const std::string& set, std::int64_t batch) {
  std::vector<Setting> result;
  for (const int world : {1, 2, 3, 4}) {
    if (batch % world != 0) continue;
    for (const std::string mode : {"full", "none"}) {
      for (const std::string recompute : {"none", "block"}) {
        for (const std::int64_t micro : {std::int64_t{0}, std::int64_t{1}}) {
          if (world == 1 && mode == "none") continue;  // the same as full
          if (micro == 1 && batch == world) continue;  // the same as 0
          result.push_back({set, world, mode, recompute, micro, "fp32"});
        }
      }
    }
  }
  return result;
}

Arguments command(const testing::Golden& golden, const Setting& setting, const std::string& run,
                  const std::string& weights) {
  Arguments words = {"train"};
  if (setting.world > 1) words = {"train", "--nproc", std::to_string(setting.world)};
  const auto text = [](auto value) { return fmt::format("{}", value); };
  return test::joined(
      words, {"--run.out=" + run,
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

// AdamW divides the rounding noise of gradients that are exactly zero by its own size.
double weight_bound(const std::string& set, const std::string& name) {
  return set == "gpt2-tiny" && name.ends_with(".bias") ? 2e-3 : 5e-5;
}

void check_weights(const testing::Golden& golden, const std::string& set,
                   const std::string& model) {
  const io::SafetensorsReader reader(model + "/model.safetensors");
  CHECK(reader.header().tensors.size() == golden.after.size());
  for (const auto& after : golden.after) {
    const std::string& name = after.first;
    const auto& expected = after.second;
    CAPTURE(name);
    const auto* entry = reader.header().find("transformer." + name);
    REQUIRE(entry != nullptr);
    std::vector<float> values(expected.size());
    REQUIRE(numel(entry->shape) == static_cast<std::int64_t>(values.size()));
    reader.read(entry->name, 0, numel(entry->shape), values.data(), DType::F32);
    CHECK(testing::relative_error(values, expected) < weight_bound(set, name));
  }
}

}  // namespace

TEST_CASE("runs of any world size, mode and split follow the reference, as do their weights") {
  const test::TempDir dir;
  for (const std::string set : {"gpt2-tiny", "gpt2-odd"}) {
    const auto golden = testing::load_golden(set);
    int number = 0;
    for (const Setting& setting : settings(set, golden.batch)) {
      const std::string run = dir.file(fmt::format("{}-{}", set, number++));
      INFO(fmt::format("{} world {} mode {} recompute {} micro_batch {}", set, setting.world,
                       setting.mode, setting.recompute, setting.micro_batch));
      const auto trained = run_cli(command(golden, setting, run, golden.folder));
      INFO(trained.describe());
      REQUIRE(trained.code == 0);
      const auto metrics = test::read_metrics(run).steps;
      REQUIRE(metrics.size() == golden.loss.size());
      for (std::size_t i = 0; i < metrics.size(); ++i) {
        CAPTURE(i);
        CHECK(test::relative(std::stod(metrics[i].loss), golden.loss[i]) < 1e-6);
        CHECK(test::relative(std::stod(metrics[i].grad_norm), golden.grad_norm[i]) < 5e-6);
      }
      const std::string model = run + "-model";
      const auto consolidated = run_cli({"consolidate", run, model});
      INFO(consolidated.describe());
      REQUIRE(consolidated.code == 0);
      check_weights(golden, set, model);
    }
  }
}

TEST_CASE("a consolidated model evaluates as the run's checkpoint does, and starts a new run") {
  const test::TempDir dir;
  const auto golden = testing::load_golden("gpt2-odd");
  const Setting setting{"gpt2-odd", 3};
  const std::string run = dir.file("run"), model = dir.file("model");
  REQUIRE(run_cli(command(golden, setting, run, golden.folder)).code == 0);
  REQUIRE(run_cli({"consolidate", run, model}).code == 0);
  const auto evaluate = [&](const std::string& what) {
    const auto result =
        run_cli({"eval", what, "--data", golden.folder + "/tokens.bin", "--seq-len",
                 std::to_string(golden.seq), "--max-rows", std::to_string(golden.batch), "--json"});
    INFO(result.describe());
    REQUIRE(result.code == 0);
    return nlohmann::json::parse(result.out).at("loss").get<double>();
  };
  const double loss = evaluate(model);
  CHECK(loss == evaluate(run));
  // The first batch is that of step 0, which the run has trained on.
  CHECK(loss < golden.loss[0]);
  CHECK(test::relative(evaluate(golden.folder), golden.loss[0]) < 1e-6);

  const auto result = run_cli(command(golden, setting, dir.file("again"), model));
  INFO(result.describe());
  REQUIRE(result.code == 0);
  CHECK(test::relative(std::stod(test::read_metrics(dir.file("again")).steps.at(0).loss), loss) <
        1e-6);
}

TEST_CASE("bf16 runs follow the reference losses") {
  const test::TempDir dir;
  for (const std::string set : {"gpt2-tiny", "gpt2-odd"}) {
    const auto golden = testing::load_golden(set);
    for (const int world : {1, static_cast<int>(golden.batch)}) {
      for (const std::string mode : {"full", "none"}) {
        const std::string run = dir.file(fmt::format("{}-{}-{}", set, world, mode));
        const auto trained =
            run_cli(command(golden, {set, world, mode, "none", 0, "bf16"}, run, golden.folder));
        INFO(trained.describe());
        REQUIRE(trained.code == 0);
        const auto metrics = test::read_metrics(run).steps;
        REQUIRE(metrics.size() == golden.loss.size());
        for (std::size_t i = 0; i < metrics.size(); ++i) {
          CHECK(test::relative(std::stod(metrics[i].loss), golden.loss[i]) < 5e-3);
        }
      }
    }
  }
}
