#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "comm/sharding/sharded_model.h"
#include "core/optim/optimizer.h"

namespace tessera::train {

struct StepOptions {
  std::int64_t step = 0;           ///< from 0: updates made before
  std::int64_t micro_batches = 1;  ///< of each rank
  std::uint64_t seed = 0;          ///< of dropout and stochastic rounding
  std::int64_t extra_totals = 0;   ///< number of further values to sum over ranks
};

struct UpdateSettings {
  double lr = 0;
  double clip_norm = 0;          ///< on the global gradient norm; 0: off
  bool another_follows = false;  ///< see ShardedModel::step()
};

/// Values of an f64 tensor; zeros on the meta device, which has none.
std::vector<double> values_of(const Tensor& tensor);

/// Sums over ranks and micro-batches.
struct StepTotals {
  double loss = 0;
  double grad_norm = 0;  ///< global, before clipping
  std::vector<double> extra;
  bool is_finite() const;  ///< loss and gradient norm
};

/// One optimizer step. Collective: all ranks make the same calls.
///
///   train::Step step(model, {.step = n, .micro_batches = 2, .seed = 1});
///   for (int m = 0; m < 2; ++m)
///     step.micro_batch(first_sample + m, [&] { return loss(net, batch[m]) / global_batch; });
///   const auto totals = step.finish(adamw, {.lr = 1e-3, .clip_norm = 1.0});
class Step {
 public:
  /// `model` must outlive this.
  Step(comm::ShardedModel& model, const StepOptions& options);
  ~Step();
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  /// Forward and backward pass.
  /// @param first_sample  global number of the micro-batch's first sample; dropout depends on it
  /// @param loss  returns [1] or [], this micro-batch's share of the loss, which is summed over ranks and
  ///   micro-batches: divide by the number of samples or tokens of the whole step
  /// @throws InvalidArgument on more micro-batches than announced; what `loss` throws
  void micro_batch(std::int64_t first_sample, const std::function<Tensor()>& loss);
  /// Sets this rank's part of an extra total, zero before.
  void set_extra(std::int64_t i, double value);
  /// This rank's loss so far. Waits for the device.
  double local_loss() const;

  /// Ends the step without an update.
  StepTotals sum();
  /// Ends the step: sums up the totals, clips the gradient and updates the weights. If loss or gradient norm is
  /// not finite, nothing changes. @throws InvalidArgument on fewer micro-batches than announced;
  ///         CommError
  StepTotals finish(const optim::Optimizer& optimizer, const UpdateSettings& settings);

 private:
  void sum_once();
  StepTotals read() const;
  void test_point(const char* name) const;

  comm::ShardedModel& model_;
  StepOptions options_;
  std::unique_ptr<Range> range_;
  Tensor totals_;          // [2 + extra] f64: sum of squared gradients, loss, extra
  std::int64_t done_ = 0;  // micro-batches
  bool summed_ = false;
};

}  // namespace tessera::train
