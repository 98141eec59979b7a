// The program on a device; its kernels run as fibers here.

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "tests/support/cli.h"
#include "tests/support/golden.h"
#include "tests/support/paths.h"

using namespace tessera;
using namespace tessera::test;

namespace {

const Variables kFibers = {{"TESSERA_CUDA_PLUGIN", fiber_plugin()}};

Arguments train(const Golden& golden, const std::string& run, int steps) {
  return {"train",
          "--run.out=" + run,
          "--model.init_from=" + golden.folder,
          "--data.train=" + golden.folder + "/tokens.bin",
          "--data.order=sequential",
          "--model.seq_len=" + std::to_string(golden.seq),
          "--train.global_batch=" + std::to_string(golden.batch),
          "--train.steps=" + std::to_string(steps),
          "--optim.schedule=constant",
          "--optim.warmup_steps=0"};
}

}  // namespace

TEST_CASE("a run moves from the CPU to a device, to three ranks there, with offload, and back") {
  const TempDir dir;
  const auto golden = load_golden("gpt2-odd");
  const std::string reference = dir.file("cpu"), moved = dir.file("moved");
  REQUIRE(golden.batch % 3 == 0);
  const Arguments devices[] = {{"--train.device=cpu"},
                               {"--train.device=cuda"},
                               {"--train.device=cuda", "--shard.offload=optimizer"},
                               {"--train.device=cuda", "--nproc=3"},
                               {"--train.device=cuda", "--nproc=3", "--shard.offload=optimizer"},
                               {"--train.device=cpu", "--shard.offload=optimizer"}};
  constexpr int kSteps = std::size(devices);
  run_to(0, joined(train(golden, reference, kSteps), {"--train.device=cpu"}));
  for (int steps = 1; steps <= kSteps; ++steps) {
    const Arguments& device = devices[steps - 1];
    const auto result = run_to(0, joined(train(golden, moved, steps), device), kFibers);
    const auto has = [&](const char* word) {
      return std::find(device.begin(), device.end(), word) != device.end();
    };
    const bool on_device = has("--train.device=cuda");
    CHECK(holds(result.err, "cuda:0 (fibers on the host)") == on_device);
    CHECK(holds(result.err, "host-staged") == has("--nproc=3"));
    CHECK(holds(result.err, "offloaded: up to ") ==
          (on_device && has("--shard.offload=optimizer")));
  }
  const auto want = read_metrics(reference).steps, got = read_metrics(moved).steps;
  REQUIRE(got.size() == want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    CHECK(relative(std::stod(got[i].loss), std::stod(want[i].loss)) < 1e-6);
    CHECK(relative(std::stod(got[i].grad_norm), std::stod(want[i].grad_norm)) < 1e-5);
  }
}

TEST_CASE("a run on a device is reproducible bit for bit, also when interrupted") {
  const auto golden = load_golden("gpt2-odd");
  for (const std::string offload : {"none", "optimizer"}) {
    CAPTURE(offload);
    const TempDir dir;
    const std::string whole = dir.file("whole"), parts = dir.file("parts");
    // Saves in the background, except for the last.
    const auto run = [&](const std::string& out, int steps) {
      run_to(0,
             joined(train(golden, out, steps),
                    {"--train.device=cuda", "--checkpoint.every=1", "--shard.offload=" + offload}),
             kFibers);
    };
    run(whole, 3);
    run(parts, 1);
    run(parts, 3);
    CHECK(read_metrics(whole).steps == read_metrics(parts).steps);
    CHECK(inspect(whole).at("digest") == inspect(parts).at("digest"));
    run_to(0, {"checkpoint", "diff", "--what=all", whole + "/checkpoints/step-00000002",
               parts + "/checkpoints/step-00000002"});
  }
}

TEST_CASE("products are tuned in the first step; all ranks, and later runs, use the same kernels") {
  const TempDir dir;
  const auto golden = load_golden("gpt2-odd");
  const std::string file = dir.file("tuned.json");
  const Arguments on_three = {"--train.device=cuda", "--nproc=3"};
  const Arguments tuned = joined(on_three, {"--train.tuned_products=" + file});
  const auto run = [&](const std::string& out, int steps, const Arguments& words) {
    const auto result = run_to(0, joined(train(golden, dir.file(out), steps), words), kFibers);
    return std::pair(read_metrics(dir.file(out)).steps, result.err);
  };
  const auto [untuned, silent] = run("named-first", 2, on_three);
  CHECK(!holds(silent, "matrix product"));

  // Another GPU's entries stay in the file.
  dir.write("tuned.json", R"({"format": "tessera-tuned-products", "version": 1, "gpus": {"other": {
    "a": {"algorithm": "00", "workspace_bytes": 0, "microseconds": 1}}}})");
  const auto [first, notes] = run("first", 2, tuned);
  CHECK(holds(notes, " matrix products and added them to " + file));
  CHECK(first[0] == untuned[0]);
  CHECK(first[1] != untuned[1]);
  const std::string text = dir.read("tuned.json");
  const auto gpus = nlohmann::json::parse(text).at("gpus");
  CHECK(gpus.at("other").at("a").at("algorithm") == "00");
  const auto& entries = gpus.at("fibers on the host, version 1");
  CHECK(entries.size() > 5);
  for (const auto& entry : entries) CHECK(entry.at("algorithm") == "01");

  // With all entries nothing is timed, and the first step uses them, on all ranks.
  const auto [second, nothing] = run("second", 1, tuned);
  CHECK(!holds(nothing, "matrix product"));
  CHECK(second[0] != untuned[0]);
  run("resumed", 1, on_three);
  CHECK(run("resumed", 2, tuned).first == first);
  CHECK(dir.read("tuned.json") == text);

  // An algorithm that the library refuses is timed again.
  std::string refused = text;
  refused.replace(refused.find("\"01\""), 4, "\"02\"");
  dir.write("tuned.json", refused);
  CHECK(holds(run("third", 1, tuned).second, "tuned 1 matrix product and added it to "));
  CHECK(dir.read("tuned.json") == text);

  run("not-deterministic", 1, {"--train.device=cuda", "--train.deterministic=off"});
  CHECK(
      nlohmann::json::parse(dir.read("not-deterministic/tuned_products.json")).at("gpus").size() ==
      1);
}

TEST_CASE("a file of tuned products that can't be used ends a run before the first step") {
  const TempDir dir;
  const auto golden = load_golden("gpt2-odd");
  const auto words = [&](const std::string& file) {
    return joined(train(golden, dir.file("run"), 1), {"--train.tuned_products=" + file});
  };
  const std::string damaged = dir.write("damaged.json", "{}");
  const auto refused =
      run_to(2, joined(words(damaged), {"--train.device=cuda", "--nproc=3"}), kFibers);
  CHECK(holds(refused.err, damaged + ": "));
  CHECK(holds(refused.err, "no valid file of tuned products"));
  const auto homeless =
      run_to(3, joined(words(dir.file("no/a.json")), {"--train.device=cuda"}), kFibers);
  CHECK(holds(homeless.err, "train.tuned_products: cannot write a file in " + dir.file("no")));
  const auto on_cpu = run_to(0, joined(words(damaged), {"--train.device=cpu"}));
  CHECK(holds(on_cpu.err, "note: train.tuned_products has no effect on the CPU"));
}

namespace {

Variables limited(std::int64_t bytes) {
  Variables variables = kFibers;
  variables["TESSERA_FIBER_MEMORY"] = std::to_string(bytes);
  return variables;
}

}  // namespace

TEST_CASE("a run that exceeds any device memory is refused before it starts") {
  const TempDir dir;
  const auto golden = load_golden("gpt2-tiny");
  const auto result = run_to(5, joined(train(golden, dir.file("run"), 2), {"--train.device=cuda"}),
                             limited(1000000));
  CHECK(holds(result.err, "this run needs up to "));
  CHECK(holds(result.err, "cuda:0 has 976.6 KiB; a rank's share: parameters "));
  CHECK(holds(result.err, "Nothing was started"));
  CHECK(holds(result.err, "\n  --train.micro_batch 2 "));
}

TEST_CASE("a device without enough memory: exit code 5, the request, the ledger and advice") {
  const TempDir dir;
  const auto golden = load_golden("gpt2-tiny");
  const auto result = run_to(5,
                             joined(train(golden, dir.file("run"), 2),
                                    {"--train.device=cuda", "--train.memory_check=warn"}),
                             limited(1000000));
  CHECK(holds(result.err, "memory of fibers is exhausted"));
  CHECK(holds(result.err, "optimizer state"));
  const auto advice = result.err.find("to use less memory, set one or more of:");
  REQUIRE(advice != std::string::npos);
  CHECK(advice > result.err.find("total"));
  CHECK(holds(result.err, "\n  --train.micro_batch 2 "));
  CHECK(holds(result.err, "\n  --train.recompute block "));
  CHECK(holds(result.err, "\n  --train.precision bf16 "));
  CHECK(result.err.ends_with("  --nproc 2                      # more ranks, one per GPU\n"));
}

TEST_CASE("a head_dim beyond the GPU's limit is refused before any computation") {
  const TempDir dir;
  const auto golden = load_golden("gpt2-odd");
  const auto trained = run_to(
      2,
      {"train", "--nproc=2", "--data.train=" + golden.folder + "/tokens.bin", "--model.n_layer=1",
       "--model.n_embd=264", "--model.n_head=1", "--model.vocab_size=97", "--model.seq_len=4",
       "--train.global_batch=2", "--run.out=" + dir.file("none"), "--train.device=cuda"},
      kFibers);
  CHECK(holds(trained.err, "is a head_dim of 264, and the GPU kernels support at most 256"));
  CHECK(holds(trained.err, "compute on the CPU (--train.device cpu)"));
}

TEST_CASE("a missing device is named; without an explicit request the CPU is used") {
  const TempDir dir;
  const auto golden = load_golden("gpt2-tiny");
  const Variables absent = {{"TESSERA_CUDA_PLUGIN", dir.file("absent.so")}};
  const auto asked =
      run_to(2, joined(train(golden, dir.file("a"), 1), {"--train.device=cuda"}), absent);
  CHECK(holds(asked.err, "absent.so"));
  const auto beyond =
      run_to(2, joined(train(golden, dir.file("b"), 1), {"--train.device=cuda:9"}), kFibers);
  CHECK(holds(beyond.err, "there is no cuda:9"));
  const auto other =
      run_to(2, joined(train(golden, dir.file("c"), 1), {"--nproc=2", "--train.device=gpu"}));
  CHECK(!holds(other.err, "rank"));
  const auto silent = run_to(0, train(golden, dir.file("d"), 1), absent);
  CHECK(holds(silent.err, "note: training on the CPU; `tessera doctor` explains why"));
}

TEST_CASE("a model that doesn't fit: exit code 5, the ledger, and advice") {
  const auto golden = load_golden("gpt2-odd");
  const Arguments eval = {"eval",    golden.folder, "--data",   golden.folder + "/tokens.bin",
                          "--batch", "4",           "--device", "cuda"};
  const Arguments generate = {"generate", golden.folder, "--prompt-tokens", "3", "1",
                              "--device", "cuda"};
  for (const Arguments& words : {eval, generate}) {
    for (const std::int64_t bytes : {10'000, 300'000}) {  // limits hit by weights, by activations
      const auto result = run_cli(words, limited(bytes));
      if (result.code == 0) continue;
      CHECK(result.code == 5);
      CHECK(holds(result.err, "memory of fibers is exhausted"));
      CHECK(holds(result.err, "\nto use less memory, set one or more of:\n"));
      CHECK(holds(result.err, "\n  --dtype bf16 "));
      CHECK(holds(result.err, "\n  --batch 2 ") == (words == eval));
      CHECK(result.err.ends_with("  --device cpu                   # the host's memory\n"));
    }
  }
}

TEST_CASE("a model evaluates and generates on a device as on the CPU") {
  const auto golden = load_golden("gpt2-odd");
  const auto both = [&](const Arguments& words, const std::string& key) {
    const auto read = [&](const std::string& device) {
      const auto result = run_to(0, joined(words, {"--device", device, "--json"}), kFibers);
      return nlohmann::json::parse(result.out).at(key);
    };
    return std::pair{read("cpu"), read("cuda")};
  };
  const auto [cpu, fibers] = both({"eval", golden.folder, "--data", golden.folder + "/tokens.bin",
                                   "--seq-len", std::to_string(golden.seq), "--max-rows", "5"},
                                  "loss");
  const double want = cpu, got = fibers;
  CHECK(relative(got, want) < 1e-6);
  const auto [tokens, drawn] = both({"generate", golden.folder, "--prompt-tokens", "3", "1", "4",
                                     "--max-new-tokens", "12", "--top-k", "9"},
                                    "tokens");
  CHECK(tokens == drawn);
}
