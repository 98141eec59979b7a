#pragma once

#include <cstdint>
#include <string>

namespace tessera::optim {

/// Learning rate as a pure function of the step, so that a resumed run needs no state.
///
/// Warm-up: linear, lr * (step + 1) / (warmup_steps + 1). Then, with p the finished
/// fraction of the remaining steps:
///   constant  lr
///   linear    from lr to min_lr
///   cosine    min_lr + (lr - min_lr) (1 + cos(pi p)) / 2
///   wsd       lr for 80% of the remaining steps, then linear to min_lr (warm-up, stable, decay)
struct LrSchedule {
  enum class Kind : std::uint8_t { Constant, Linear, Cosine, Wsd };
  Kind kind = Kind::Constant;
  double lr = 1e-3;
  double min_lr = 0.0;
  std::int64_t warmup_steps = 0;
  std::int64_t total_steps = 1;

  /// @param step  from 0
  double at(std::int64_t step) const;
  /// @throws InvalidArgument on a name other than constant, linear, cosine, wsd
  static Kind parse(const std::string& name);
};

}  // namespace tessera::optim
