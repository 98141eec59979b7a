// Trains on two ranks, saves, goes on with three, and writes the result as a whole model. Usage: resume RUN_DIR
#include <tessera/checkpoint.h>
#include <tessera/consolidate.h>
#include <tessera/train.h>

#include <cstdio>
#include <string>

#include "llama.h"

void train(ts::train::Rank& rank, const std::string& run_dir, std::int64_t steps) {
  constexpr int kRows = 6;
  const ts::comm::Mesh mesh(*rank.communicator);
  Llama net;
  ts::comm::ShardedModel model(net, mesh, ts::comm::shard_spec("full"), rank.context);
  model.initialize(/*seed=*/1);
  const ts::optim::AdamW adamw;
  ts::train::Checkpoints checkpoints(run_dir, rank, model, adamw,
                                     {.model = R"({"arch": "small-llama"})"});
  const std::int64_t start = checkpoints.load_latest();  // 0: nothing is saved yet
  const int own = kRows / rank.world_size();
  for (std::int64_t n = start; n < steps; ++n) {
    const std::int64_t first = n * kRows + rank.rank() * own;
    ts::train::Step step(model, {.step = n});
    step.micro_batch(first, [&] { return loss_of(net, rank.context, first, own) / kRows; });
    const auto totals = step.finish(adamw, {.lr = 1e-2, .clip_norm = 1.0});
    if (rank.rank() == 0 && (n == start || n + 1 == steps))
      std::printf("%d ranks, step %d: loss %g\n", rank.world_size(), static_cast<int>(n),
                  totals.loss);
  }
  checkpoints.finish(steps);
}

int main(int argc, char** argv) try {
  if (argc != 2) throw ts::InvalidArgument("usage: resume RUN_DIR");
  const std::string dir = argv[1];
  ts::train::run_threads(2, [&](ts::train::Rank& rank) { train(rank, dir, 10); });
  ts::train::run_threads(3, [&](ts::train::Rank& rank) { train(rank, dir, 20); });
  ts::io::ConsolidateOptions options;
  options.format = ts::io::ExportFormat::Safetensors;
  options.progress = [](const ts::io::ConsolidateProgress& at) {
    std::printf("%lld of %lld bytes\n", static_cast<long long>(at.done),
                static_cast<long long>(at.total));
    return true;  // false: stop; a later call goes on
  };
  const auto report = ts::io::consolidate(dir, dir + "/whole", options);
  std::printf("step %d, %d tensors\n", static_cast<int>(report.step.value_or(-1)),
              static_cast<int>(report.tensors));
  return report.step == 20 ? 0 : 1;
} catch (const ts::Error& error) {
  std::fprintf(stderr, "resume: %s\n", error.what());
  return 1;
}
