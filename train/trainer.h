#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/sharding/sharded_model.h"
#include "core/optim/lr_schedule.h"
#include "core/optim/optimizer.h"
#include "train/loader.h"

namespace tessera::train {

class Step;

/// scale * sum of a micro-batch's losses: [1]. Reads parameters within nn::unit only.
using LossFunction = std::function<Tensor(const Batch& batch, double scale)>;

struct TrainerOptions {
  bool skip_nonfinite = false;  ///< skip the update of a non-finite step instead of throwing
  /// Returns `text` of all ranks, in rank order, without using the communicator; for the culprit of
  /// a non-finite step. `name` is unique per call. Empty: each rank reports only its own findings.
  std::function<std::vector<std::string>(const std::string& name, const std::string& text)>
      exchange;
  double clip_norm = 1.0;  ///< on the global gradient norm; 0: off
  std::uint64_t seed = 0;
  optim::LrSchedule schedule;
  /// Number of the run. Each step but the last one starts to gather the next one's first units; if
  /// training ends earlier, call ShardedModel::release(). 0: no step gathers for the next one
  std::int64_t steps = 0;
};

/// Outcome of one optimizer step; equal on all ranks.
struct StepResult {
  double loss = 0;       ///< nats per target over the global batch, before the update
  double grad_norm = 0;  ///< global, before clipping
  double lr = 0;
  int stop_signal = 0;  ///< received by any rank, see Trainer::step(); 0: none
  /// Why the update was skipped, with the culprit; empty: weights and state were updated.
  std::string skipped;
};

/// Limit of consecutive skipped steps; the next non-finite step ends training.
constexpr int kMostSkipped = 10;

/// Trains and evaluates a sharded model, without files or output. Collective. On a meta context,
/// losses are 0.
class Trainer {
 public:
  /// The references must outlive this.
  Trainer(comm::ShardedModel& model, const optim::Optimizer& optimizer, LossFunction loss,
          TrainerOptions options);

  /// One step on samples [position, position + global_batch) of the loader.
  /// @param step  from 0
  /// @param stop_signal  returns the signal received by this rank, or 0; called after backward.
  ///   The result holds the signal of any rank, by priority: SIGTERM, SIGINT, SIGUSR1
  ///
  /// If loss or gradient norm is not finite, nothing is updated. All ranks then repeat the step,
  /// check their local gradients and weights, and exchange the findings.
  /// @throws NonFiniteLoss naming rank and parameter, unless skip_nonfinite is set and at most
  ///   kMostSkipped steps in a row were skipped; CommError
  StepResult step(std::int64_t step, std::int64_t position, Loader& data,
                  const std::function<int()>& stop_signal = {});

  struct Evaluation {
    double loss = 0;      ///< mean, nats per target; 0 without targets
    int stop_signal = 0;  ///< as in StepResult; if set, the evaluation ended early without a loss
  };
  /// Evaluates samples [0, batches * global_batch), at most one epoch; batches 0: the whole epoch.
  /// The result is equal on all ranks.
  /// @param stop_signal  as in step(), called before each micro-batch
  Evaluation evaluate(Loader& data, std::int64_t batches,
                      const std::function<int()>& stop_signal = {});

 private:
  void run_all(Step& step, std::int64_t position, Loader& data);
  std::string find_culprit(std::int64_t step, std::int64_t position, Loader& data,
                           const StepResult& result);

  comm::ShardedModel& model_;
  const optim::Optimizer& optimizer_;
  LossFunction loss_;
  TrainerOptions options_;
  int skipped_ = 0;  // consecutive steps
};

}  // namespace tessera::train
