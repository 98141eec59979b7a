#pragma once

#include <random>
#include <string>

#include "tests/support/cli.h"

namespace tessera::test {

/// Random words, determined by the seed: text that a small model can learn.
inline std::string make_text(int words, unsigned seed = 1) {
  static constexpr const char* kWords[] = {"all", "and",  "each", "gather", "is",   "loss", "model",
                                           "of",  "rank", "sum",  "shard",  "step", "the",  "to"};
  std::mt19937 random(seed);
  std::string text;
  for (int i = 0; i < words; ++i) {
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

}  // namespace tessera::test
