#pragma once

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <random>
#include <string>

#include "tests/support/cli.h"

namespace tessera::test {

/// Random words: text that a small model can learn.
inline std::string make_text() {
  static constexpr const char* kWords[] = {"all", "and",  "each", "gather", "is",   "loss", "model",
                                           "of",  "rank", "sum",  "shard",  "step", "the",  "to"};
  std::mt19937 random(1);
  std::string text;
  for (int i = 0; i < 3000; ++i) {
    text += kWords[random() % std::size(kWords)];
    text += random() % 12 == 0 ? '\n' : ' ';
  }
  return text;
}

/// `tessera train` of a GPT-2 with 35k parameters on a text file. The learning rate is constant, so
/// that runs of different lengths share their first steps.
inline Arguments small_run(const std::string& text_file, const std::string& run, int world,
                           int steps) {
  Arguments words = {"train"};
  if (world > 1) words = {"train", "--nproc", std::to_string(world)};
  return joined(words, {"--run.out=" + run, "--data.train=" + text_file, "--model.n_layer=2",
                        "--model.n_head=2", "--model.n_embd=32", "--model.seq_len=32",
                        "--train.global_batch=4", "--train.steps=" + std::to_string(steps),
                        "--train.eval_every=25", "--train.eval_batches=1", "--optim.warmup_steps=5",
                        "--optim.schedule=constant", "--optim.lr=0.003"});
}

/// A checkpoint's shard of rank 0, of a run with one rank.
inline std::filesystem::path shard(const std::filesystem::path& run, int step) {
  return run / fmt::format("checkpoints/step-{:08}/rank-00000-of-00001.safetensors", step);
}

/// Sets a process's limit on file sizes, which stands for a full disk. @param pid  0: this process
inline void limit_files(pid_t pid, rlim_t bytes) {
  rlimit limit{};
  REQUIRE(::prlimit(pid, RLIMIT_FSIZE, nullptr, &limit) == 0);
  limit.rlim_cur = std::min(bytes, limit.rlim_max);
  REQUIRE(::prlimit(pid, RLIMIT_FSIZE, &limit, nullptr) == 0);
}

/// A directory with a text file.
struct Fixture {
  Fixture() = default;
  explicit Fixture(const std::filesystem::path& parent) : dir(parent) {}

  TempDir dir;
  std::string text = dir.write("text.txt", make_text());
};

/// For tests with time limits.
struct InMemory : Fixture {
  InMemory() : Fixture(TempDir::in_memory()) {}
};

/// A run in the directory `run` that has completed a step and does not end by itself.
struct LongRun : CliProcess {
  LongRun(const Fixture& fixture, int world, const Arguments& more = {})
      : CliProcess(joined(joined(small_run(fixture.text, fixture.dir.file("run"), world, 100'000),
                                 {"--train.global_batch=12", "--checkpoint.every=0"}),
                          more)) {
    REQUIRE(wait_for("step      1/100000"));
    REQUIRE(ranks().size() == static_cast<std::size_t>(world));
  }
};

}  // namespace tessera::test
