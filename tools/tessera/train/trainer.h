#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/sharding/sharded_model.h"
#include "core/base/replay.h"
#include "core/optim/lr_schedule.h"
#include "io/data/sampler.h"
#include "models/gpt2.h"

namespace tessera::tools {

struct TrainerOptions {
  std::int64_t global_batch = 1;  ///< sequences per step over all ranks
  std::int64_t micro_batch = 1;   ///< sequences per rank and micro-batch; divides global / world
  bool recompute_blocks = false;
  bool dropout = false;    ///< the model drops activations
  bool graphs = false;     ///< capture forward and backward once, then replay; see Replay
  double clip_norm = 1.0;  ///< on the global gradient norm; 0: off
  std::uint64_t seed = 0;
  optim::AdamWOptions adamw;
  optim::LrSchedule schedule;
};

/// What a rank tells the others of its saves, with each step.
struct SaveFlags {
  bool in_flight = false;
  bool failed = false;  ///< so that training must end
};

/// What one optimizer step did; the same on every rank.
struct StepResult {
  double loss = 0;       ///< nats per token over the global batch, before the update
  double grad_norm = 0;  ///< global, before clipping
  double lr = 0;
  bool stop_requested = false;  ///< by any rank
  SaveFlags saves{};            ///< set if any rank set them
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
  /// @param stop   this rank asks to stop after the step; the result says whether any did
  /// @param saves  of this rank; the result says what any told
  /// @throws Error naming the step if loss or gradient norm is not finite; nothing is updated then
  StepResult step(std::int64_t step, std::int64_t position, const io::Sampler& data, bool stop,
                  SaveFlags saves = {});

  /// Mean loss, nats per token, over samples [0, batches * global_batch) in order; at most one
  /// epoch; batches 0: the whole epoch. Same on every rank.
  double evaluate(const io::Sampler& data, std::int64_t batches);

  /// Replays alive: one per kind of micro-batch (first of the step, last of the step); none while
  /// a trace is taken.
  std::size_t graphs() const { return graphs_.size(); }
  /// Why steps run kernel by kernel though graphs were asked for, once it is known; else empty.
  const std::string& why_no_graphs() const { return why_no_graphs_; }

 private:
  struct MicroBatch {
    std::int64_t step, first_sample;
    bool first, last;  ///< of the step
  };
  /// Writes rows [first, first + micro_batch) of the data into inputs_ and targets_; rows past
  /// `limit` get ignored targets.
  void load(const io::Sampler& data, std::int64_t first, std::int64_t limit);
  /// Forward and backward of what is loaded; adds the loss to totals_.
  void run(const MicroBatch& batch);
  void run_or_replay(const MicroBatch& batch);

  models::Gpt2& model_;
  comm::ShardedModel& sharded_;
  comm::Communicator& communicator_;
  std::shared_ptr<Context> context_;
  TrainerOptions options_;
  std::int64_t rows_per_rank_;
  std::vector<std::int32_t> host_inputs_, host_targets_;  // of the last micro-batch
  Tensor inputs_, targets_;                               // [micro_batch, T] i32
  // Sum of squares, loss, requests to stop, flags of saves: summed where the gradients are, and
  // read once the whole step has been queued. [5] f64
  Tensor totals_;
  std::map<std::pair<bool, bool>, std::unique_ptr<Replay>> graphs_;  // by first, last
  std::string why_no_graphs_;
  bool warm_ = false;  // a step has run, so what is made on first use is there
};

}  // namespace tessera::tools
