#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/sharding/sharded_model.h"
#include "core/optim/lr_schedule.h"
#include "io/data/sampler.h"
#include "models/gpt2.h"

namespace tessera::tools {

struct TrainerOptions {
  std::int64_t global_batch = 1;  ///< sequences per step over all ranks
  std::int64_t micro_batch = 1;   ///< sequences per rank and micro-batch; divides global / world
  bool skip_nonfinite = false;    ///< skip the update of a non-finite step instead of throwing
  /// Returns `text` of all ranks, in rank order, without using the communicator; for the culprit of
  /// a non-finite step. `name` is unique per call. Empty: each rank reports only its own findings.
  std::function<std::vector<std::string>(const std::string& name, const std::string& text)>
      exchange;
  double clip_norm = 1.0;  ///< on the global gradient norm; 0: off
  std::uint64_t seed = 0;
  optim::AdamWOptions adamw;
  optim::LrSchedule schedule;
};

/// Outcome of one optimizer step; equal on all ranks.
struct StepResult {
  double loss = 0;       ///< nats per token over the global batch, before the update
  double grad_norm = 0;  ///< global, before clipping
  double lr = 0;
  int stop_signal = 0;  ///< received by any rank, see Trainer::step(); 0: none
  /// Why the update was skipped, with the culprit; empty: weights and moments were updated.
  std::string skipped;
};

/// Limit of consecutive skipped steps; the next non-finite step ends training.
constexpr int kMostSkipped = 10;

/// Trains and evaluates a sharded GPT-2, without files or output. Collective. On a meta context,
/// losses are 0.
class Trainer {
 public:
  /// The references must outlive this. Sets the model's training mode during steps.
  Trainer(models::Gpt2& model, comm::ShardedModel& sharded, comm::Communicator& communicator,
          const std::shared_ptr<Context>& context, const TrainerOptions& options);

  /// One step on samples [position, position + global_batch).
  /// @param step  from 0
  /// @param stop_signal  returns the signal received by this rank, or 0; called after backward.
  ///   The result holds the signal of any rank, by priority: SIGTERM, SIGINT, SIGUSR1
  /// @param before_update  called before weights and moments change
  ///
  /// If loss or gradient norm is not finite, nothing is updated. All ranks then repeat the step,
  /// check their local gradients and weights, and exchange the findings.
  /// @throws NonFiniteLoss naming rank and parameter, unless skip_nonfinite is set and at most
  ///   kMostSkipped steps in a row were skipped; CommError
  StepResult step(std::int64_t step, std::int64_t position, const io::Sampler& data,
                  const std::function<int()>& stop_signal,
                  const std::function<void()>& before_update = {});

  struct Evaluation {
    double loss = 0;      ///< mean, nats per token
    int stop_signal = 0;  ///< as in StepResult; if set, the evaluation ended early without a loss
  };
  /// Evaluates samples [0, batches * global_batch), at most one epoch; batches 0: the whole epoch.
  /// The result is equal on all ranks.
  /// @param stop_signal  as in step(), called before each micro-batch
  Evaluation evaluate(const io::Sampler& data, std::int64_t batches,
                      const std::function<int()>& stop_signal);

 private:
  void test_point(const char* name) const;
  /// Copies rows [first, first + micro_batch) to inputs_ and targets_; rows past `limit` get
  /// ignored targets.
  void load(const io::Sampler& data, std::int64_t first, std::int64_t limit);
  /// Forward and backward of all micro-batches of a step; adds the loss to totals_.
  void run_all(std::int64_t step, std::int64_t position, const io::Sampler& data);
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
  // totals_: [5] f64, sum of squared gradients, loss, requests by stop signal; read once per step.
  Tensor totals_, factor_;
  int skipped_ = 0;  // consecutive steps
};

}  // namespace tessera::tools
