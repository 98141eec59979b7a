#include "core/optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/base/error.h"

namespace tessera::optim {
namespace {

constexpr double kStablePart = 0.8;

}  // namespace

double LrSchedule::at(std::int64_t step) const {
  if (step < warmup_steps) {
    return lr * static_cast<double>(step + 1) / static_cast<double>(warmup_steps + 1);
  }
  if (kind == Kind::Constant) return lr;
  const auto span = static_cast<double>(std::max<std::int64_t>(total_steps - warmup_steps, 1));
  const double done = std::min(1.0, static_cast<double>(step - warmup_steps) / span);
  switch (kind) {
    case Kind::Constant:
      return lr;
    case Kind::Linear:
      return lr + (min_lr - lr) * done;
    case Kind::Cosine:
      return min_lr + 0.5 * (lr - min_lr) * (1.0 + std::cos(std::numbers::pi * done));
    case Kind::Wsd: {
      const double decay = std::max(0.0, (done - kStablePart) / (1.0 - kStablePart));
      return lr + (min_lr - lr) * decay;
    }
  }
  return lr;
}

LrSchedule::Kind LrSchedule::parse(const std::string& name) {
  if (name == "constant") return Kind::Constant;
  if (name == "linear") return Kind::Linear;
  if (name == "cosine") return Kind::Cosine;
  if (name == "wsd") return Kind::Wsd;
  throw InvalidArgument("optim.schedule must be constant, cosine, linear or wsd, got '{}'", name);
}

}  // namespace tessera::optim
