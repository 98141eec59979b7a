#include <doctest/doctest.h>
#include <fmt/format.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "io/hf/family.h"
#include "tests/io/support.h"
#include "tests/support/cli.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;

/// 26 MB of weights: a small file, and one of 400 blocks with little memory.
fs::path make_checkpoint(const fs::path& dir) {
  SampleModel model;
  const io::Json config = {{"arch", "gpt2"},         {"n_layer", 1},         {"n_head", 1},
                           {"n_embd", 64},           {"vocab_size", 100000}, {"seq_len", 8},
                           {"layer_norm_eps", 1e-5}, {"dropout", 0.0}};
  model.config = config.dump();
  float next = 0;
  for (const io::TensorInfo& info : io::model_tensors(config)) {
    SampleModel::Tensor tensor{info.name, info.shape, {}, {}, {}};
    for (std::int64_t i = 0; i < numel(info.shape); ++i) tensor.weight.push_back(next += 0.5F);
    model.tensors.push_back(std::move(tensor));
  }
  return save(model, dir, {.world_size = 2, .optimizer = false});
}

TEST_CASE("after Ctrl-C the same command resumes the export") {
  TempDir dir;
  const std::string checkpoint = make_checkpoint(dir.path() / "run").string();
  const fs::path out = dir.path() / "out", attempt = dir.path() / "out.tmp";
  const auto command = [&](const fs::path& target) {
    return Arguments{"consolidate", checkpoint, target.string(), "--memory",         "128KiB",
                     "--jobs",      "1",        "--json",        "--max-shard-size", "1MB"};
  };
  for (const int number : {SIGINT, SIGTERM}) {
    CliResult stopped;
    for (int tries = 0; stopped.code != 128 + number; ++tries) {
      REQUIRE(tries < 20);  // the export may end before the signal
      for (const fs::path& former : {out, attempt, fs::path(attempt.string() + ".journal")})
        fs::remove_all(former);
      CliProcess process(command(out));
      const auto writes = [&] {  // excludes the forked test before exec
        return fs::exists(attempt / "model-00002-of-00002.safetensors") &&
               catches(process.pid(), number);
      };
      while (process.running() && !writes()) {
      }
      process.signal(number);
      stopped = process.wait(std::chrono::seconds(60));
    }
    CHECK(holds(stopped.err, "the same command continues from there"));
    CHECK(holds(stopped.err, attempt.string()));
    CHECK_FALSE(fs::exists(out));
    REQUIRE(fs::exists(attempt));

    const auto other = run_to(0, command(dir.path() / "whole"));
    CHECK(nlohmann::json::parse(other.out)["reused_bytes"] == 0);
    const auto resumed = run_to(0, command(out));
    CHECK(nlohmann::json::parse(resumed.out)["reused_bytes"] > 0);
    CHECK_FALSE(fs::exists(attempt));
    CHECK_FALSE(fs::exists(dir.path() / "out.tmp.journal"));
    for (const auto& item : fs::directory_iterator(dir.path() / "whole")) {
      CHECK(read_text(item.path()) == read_text(out / item.path().filename()));
    }
    fs::remove_all(dir.path() / "whole");
  }
}

TEST_CASE("a signal ends the planning of many tensors at once") {
  TempDir dir;
  std::string json = "{";
  const int n = 400'000;
  for (int i = 0; i < n; ++i) {
    json += fmt::format(R"({}"layer.{}":{{"dtype":"U8","shape":[1],"data_offsets":[{},{}]}})",
                        i == 0 ? "" : ",", i, i, i + 1);
  }
  json += '}';
  const std::uint64_t length = json.size();
  const fs::path source = dir.path() / "source";
  fs::create_directory(source);
  write_text(source / "model.safetensors",
             std::string(reinterpret_cast<const char*>(&length), 8) + json + std::string(n, 'x'));
  for (const int number : {SIGINT, SIGTERM, SIGUSR1}) {
    CliProcess process(
        {"consolidate", source.string(), (dir.path() / "out").string(), "--format", "safetensors"});
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    while (number == SIGUSR1 && !catches(process.pid(), number))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    process.signal(number);
    const CliResult ended = process.wait(std::chrono::seconds(60));
    if (number == SIGUSR1) {  // a scheduler's warning, which waits for the first safe point
      CHECK(ended.code == 128 + SIGTERM);
      continue;
    }
    CHECK(ended.signal == number);
    CHECK_FALSE(fs::exists(dir.path() / "out.tmp"));
  }
}

}  // namespace
}  // namespace tessera::test
