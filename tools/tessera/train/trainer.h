#pragma once

#include <cstdint>
#include <functional>
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
  bool dropout = false;         ///< the model drops activations
  bool graphs = false;          ///< capture the step once, then replay, collectives started anew
                                ///< between its parts; see Replay. A rank's own affair
  bool skip_nonfinite = false;  ///< go on after a step whose loss or gradients are not finite
  /// Shows every rank's text to all, in rank order, and not over the communicator: for naming who
  /// spoiled a step. `name` is new for each call. Empty: each rank knows of itself alone.
  std::function<std::vector<std::string>(const std::string& name, const std::string& text)>
      exchange;
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
  int stop_signal = 0;  ///< by which any rank asks to stop: see Trainer::step(); 0: none
  /// Why weights and moments stay as they were: the sentence that names who spoiled the step.
  /// Empty: they were updated.
  std::string skipped;
};

/// Steps in a row that are skipped, since a Trainer was made, before the next of their kind ends
/// training.
constexpr int kMostSkipped = 10;

/// Runs steps and evaluations of a sharded GPT-2. Knows no files and prints nothing. All ranks call
/// the same functions in the same order.
class Trainer {
 public:
  /// All references must outlive this.
  Trainer(models::Gpt2& model, comm::ShardedModel& sharded, comm::Communicator& communicator,
          const std::shared_ptr<Context>& context, const TrainerOptions& options);

  /// One step on samples [position, position + global_batch).
  /// @param step  from 0
  /// @param stop_signal  by which this rank was asked to stop after the step, or 0; the result
  ///   tells what any was: SIGTERM before SIGINT before SIGUSR1
  /// @param before_update  called when weights and moments are about to change
  ///
  /// If loss or gradient norm is not finite, nothing is updated. All ranks compute the step again
  /// then, without graphs, and look at their own gradients before these are reduced, and at their
  /// weights; each tells the others, and all say the same. Good steps pay nothing for it.
  /// @throws NonFiniteLoss that names rank and parameter, unless skip_nonfinite and not yet
  ///   kMostSkipped in a row; CommError
  StepResult step(std::int64_t step, std::int64_t position, const io::Sampler& data,
                  int stop_signal, const std::function<void()>& before_update = {});

  /// Mean loss, nats per token, over samples [0, batches * global_batch) in order; at most one
  /// epoch; batches 0: the whole epoch. Same on every rank. Gives back the memory of graphs.
  double evaluate(const io::Sampler& data, std::int64_t batches);

  /// Replays alive: one per kind of micro-batch (first of the step, last of the step), and one of
  /// the update; none while a trace is taken, or after an evaluation until the next step.
  std::size_t graphs() const { return graphs_.size() + (update_graph_ ? 1 : 0); }
  /// Of all these; between two parts lie collectives.
  std::size_t graph_parts() const;
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
  /// All micro-batches of a step; `run_one` is run() or run_or_replay().
  void run_all(std::int64_t step, std::int64_t position, const io::Sampler& data,
               void (Trainer::*run_one)(const MicroBatch&));
  /// What a step is judged by: sums over all ranks, and the clipping factor.
  void judge();
  void update(std::int64_t step, double lr, const std::function<void()>& before_update);
  bool uses_graphs() const;
  void clear_graphs();
  /// @return null if it could not be: without graphs from then on
  std::unique_ptr<Replay> capture(const std::function<void()>& work);
  void write_dropout_table(const MicroBatch& batch);
  std::string find_culprit(std::int64_t step, std::int64_t position, const io::Sampler& data,
                           const StepResult& result);

  models::Gpt2& model_;
  comm::ShardedModel& sharded_;
  comm::Communicator& communicator_;
  std::shared_ptr<Context> context_;
  TrainerOptions options_;
  std::int64_t rows_per_rank_;
  std::vector<std::int32_t> host_inputs_, host_targets_;  // of the last micro-batch
  Tensor inputs_, targets_;                               // [micro_batch, T] i32
  // Sum of squares, loss, requests to stop by signal: summed where the gradients are, and read once
  // the whole step has been queued. [5] f64
  Tensor totals_, factor_;
  Tensor dropout_table_;  // see models::ForwardOptions; for graphs
  std::map<std::pair<bool, bool>, std::unique_ptr<Replay>> graphs_;  // by first, last
  std::unique_ptr<Replay> update_graph_;  // shares their memory, as they do each other's
  std::string why_no_graphs_;
  int skipped_ = 0;    // steps in a row
  bool warm_ = false;  // a step has run, so what is made on first use is there
};

}  // namespace tessera::tools
