#include "core/optim/moving_average.h"

#include <algorithm>
#include <utility>

#include "core/ops/checks.h"
#include "kernels/optimizer.h"

namespace tessera::optim {
namespace {

constexpr const char* kAverageName = "ema";

}  // namespace

MovingAverage::MovingAverage(std::shared_ptr<const Optimizer> optimizer, double decay)
    : optimizer_(std::move(optimizer)), decay_(decay) {
  require(decay >= 0 && decay < 1, "moving average: decay must be in [0, 1), got {}", decay);
  const auto names = optimizer_->state_names();
  require(std::ranges::find(names, kAverageName) == names.end(),
          "moving average: the optimizer has a state {} already", kAverageName);
  index_ = names.size();
}

std::vector<std::string> MovingAverage::state_names() const {
  std::vector<std::string> names = optimizer_->state_names();
  names.emplace_back(kAverageName);
  return names;
}

StateKind MovingAverage::state_kind(std::size_t i) const {
  return i < index_ ? optimizer_->state_kind(i) : StateKind{.starts_as_param = true};
}

bool MovingAverage::has_state(std::size_t i, const ParameterSlot& slot) const {
  return i == index_ || optimizer_->has_state(i, slot);
}

void MovingAverage::update(const Segment& segment, const UpdateOptions& options) const {
  require(segment.state.size() == index_ + 1, "moving average: expected {} state tensors, got {}",
          index_ + 1, segment.state.size());
  const Tensor& average = segment.state[index_];
  ops::check_dense("moving average", "ema", average, DType::F32, segment.param.shape());
  Segment rest = segment;
  rest.state.pop_back();
  optimizer_->update(rest, options);
  const auto t = static_cast<double>(options.step);
  kernels::moving_average(*segment.param.context(),
                          {segment.param.view(), average.view(), options.factor.view(),
                           std::min(decay_, (1 + t) / (10 + t))});
}

}  // namespace tessera::optim
