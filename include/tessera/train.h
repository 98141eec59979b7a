#pragma once

/// Training loops of one's own: ranks, steps, checkpoints that load at any number of ranks, and the
/// trainer. Start programs alone, or with `tessera run --nproc N`, torchrun, srun or mpirun.
///
///     train::Rank rank = train::join();
///     const comm::Mesh mesh(*rank.communicator);
///     comm::ShardedModel model(net, mesh, comm::shard_spec("full"), rank.context);
///     model.initialize(/*seed=*/1);
///     const optim::AdamW adamw;
///     train::Checkpoints checkpoints("runs/a", rank, model, adamw);
///     for (std::int64_t n = checkpoints.load_latest(); n < steps; ++n) {
///       train::Step step(model, {.step = n});
///       step.micro_batch(first_sample, [&] { return loss(net, batch) / global_batch; });
///       step.finish(adamw, {.lr = 1e-3, .clip_norm = 1.0});
///     }
///     checkpoints.finish(steps);

#include "comm/communicator.h"
#include "train/checkpoints.h"
#include "train/loader.h"
#include "train/plan.h"
#include "train/ranks.h"
#include "train/step.h"
#include "train/trainer.h"
