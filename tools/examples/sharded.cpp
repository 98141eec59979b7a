// A small Llama, sharded over ranks: two threads (`sharded threads`), or processes that a launcher
// starts (`tessera run --nproc 2 sharded`, torchrun, ...). Both print the same losses.
#include <tessera/train.h>

#include <cstdio>
#include <string_view>

#include "llama.h"

void train(ts::train::Rank& rank) {
  constexpr int kRows = 8;  // samples per step, over all ranks
  const ts::comm::Mesh mesh(*rank.communicator);
  Llama net;
  ts::comm::ShardedModel model(net, mesh, ts::comm::shard_spec("full"), rank.context);
  model.initialize(/*seed=*/1);
  const ts::optim::AdamW adamw;
  const int own = kRows / rank.world_size();
  for (int n = 0; n < 20; ++n) {
    const std::int64_t first = n * kRows + rank.rank() * own;
    ts::train::Step step(model, {.step = n});
    step.micro_batch(first, [&] { return loss_of(net, rank.context, first, own) / kRows; });
    const auto totals = step.finish(adamw, {.lr = 1e-2, .clip_norm = 1.0});
    if (rank.rank() == 0 && n % 5 == 4) std::printf("step %d: loss %.17g\n", n + 1, totals.loss);
  }
}

int main(int argc, char** argv) try {
  if (argc > 1 && std::string_view(argv[1]) == "threads")
    ts::train::run_threads(2, train);
  else
    ts::train::run(train);
} catch (const ts::Error& error) {
  std::fprintf(stderr, "sharded: %s\n", error.what());
  return 1;
}
