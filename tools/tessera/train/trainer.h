#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/sharding/sharded_model.h"
#include "core/optim/lr_schedule.h"
#include "io/data/sampler.h"
#include "models/gpt2.h"

namespace tessera::tools {

struct TrainerOptions {
  std::int64_t global_batch = 1;  ///< sequences per step over all ranks
  std::int64_t micro_batch = 1;   ///< sequences per rank and micro-batch; divides global / world
  bool recompute_blocks = false;
  double clip_norm = 1.0;  ///< on the global gradient norm; 0: off
  std::uint64_t seed = 0;
  optim::AdamWOptions adamw;
  optim::LrSchedule schedule;
};

/// What one optimizer step did; the same on every rank.
struct StepResult {
  double loss = 0;       ///< nats per token over the global batch, before the update
  double grad_norm = 0;  ///< global, before clipping
  double lr = 0;
  bool stop_requested = false;  ///< by any rank
};

/// Runs steps and evaluations of a sharded GPT-2. Knows no files and prints nothing. All ranks call
/// the same functions in the same order.
class Trainer {
 public:
  /// All references must outlive this.
  Trainer(models::Gpt2& model, comm::ShardedModel& sharded, comm::Communicator& communicator,
          const std::shared_ptr<Context>& context, const TrainerOptions& options);

  /// One step on samples [position, position + global_batch).
  /// @param step  from 0
  /// @param stop  this rank asks to stop after the step; the result says whether any did
  /// @throws Error naming the step if loss or gradient norm is not finite; nothing is updated then
  StepResult step(std::int64_t step, std::int64_t position, const io::Sampler& data, bool stop);

  /// Mean loss, nats per token, over samples [0, batches * global_batch) in order; at most one
  /// epoch; batches 0: the whole epoch. Same on every rank.
  double evaluate(const io::Sampler& data, std::int64_t batches);

 private:
  /// Rows of this rank as tensors [rows, T]; rows past `limit` get ignored targets.
  std::pair<Tensor, Tensor> load(const io::Sampler& data, std::int64_t first, std::int64_t rows,
                                 std::int64_t limit);

  models::Gpt2& model_;
  comm::ShardedModel& sharded_;
  comm::Communicator& communicator_;
  std::shared_ptr<Context> context_;
  TrainerOptions options_;
  std::int64_t rows_per_rank_;
  std::vector<std::int32_t> inputs_, targets_;  // of the last micro-batch, on the host
};

}  // namespace tessera::tools
