#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/optim/optimizer.h"

namespace tessera::optim {

/// Another optimizer, and the exponential moving average of the weights that it trains, in f32.
///
/// The average starts as the weights. Update t, from 1, then adds
///   average += (1 - d) (param - average),  d = min(decay, (1 + t) / (10 + t))
/// so that early weights are soon forgotten. Updates that change nothing (UpdateOptions::factor is NaN)
/// leave it unchanged.
class MovingAverage final : public Optimizer {
 public:
  /// @param decay  in [0, 1)
  /// @throws InvalidArgument if decay is out of range, or the optimizer has an average already
  MovingAverage(std::shared_ptr<const Optimizer> optimizer, double decay);
  /// The optimizer's, then "ema".
  std::vector<std::string> state_names() const override;
  StateKind state_kind(std::size_t i) const override;
  bool has_state(std::size_t i, const ParameterSlot& slot) const override;
  /// @throws as the optimizer
  void update(const Segment& segment, const UpdateOptions& options) const override;

 private:
  std::shared_ptr<const Optimizer> optimizer_;
  double decay_;
  std::size_t index_;  // of the average among the states
};

}  // namespace tessera::optim
