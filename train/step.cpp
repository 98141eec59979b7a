#include "train/step.h"

#include <cmath>
#include <utility>

#include "core/autograd/autograd.h"
#include "core/base/fault_point.h"
#include "core/base/rng.h"
#include "core/base/trace.h"
#include "kernels/elementwise.h"
#include "kernels/optimizer.h"

namespace tessera::train {
namespace {

constexpr std::int64_t kLoss = 1, kExtra = 2;  // indices in totals_

// Element i of a vector as the destination of a kernel.
GradientView element(const Tensor& t, std::int64_t i, bool accumulate) {
  return {t.alias({1}, {1}, i).view(), accumulate, true};
}

}  // namespace

std::vector<double> values_of(const Tensor& t) {
  if (t.device().type == DeviceType::Meta)
    return std::vector<double>(static_cast<std::size_t>(t.numel()));
  return t.to_vector<double>();
}

bool StepTotals::is_finite() const { return std::isfinite(loss) && std::isfinite(grad_norm); }

Step::Step(comm::ShardedModel& model, const StepOptions& options)
    : model_(model),
      options_(options),
      range_(std::make_unique<Range>(*model.context(), fmt::format("step {}", options.step))),
      totals_(Tensor::full(model.context(), {kExtra + options.extra_totals}, DType::F64, 0.0,
                           MemoryCategory::Data, "step totals")) {
  require(options.micro_batches >= 1, "a step needs 1 micro-batch or more, got {}",
          options.micro_batches);
}

Step::~Step() = default;

// A plan runs on a meta context, and is no part of a run.
void Step::test_point(const char* name) const {
  if (model_.context()->device().type != DeviceType::Meta) fault_point(name);
}

void Step::micro_batch(std::int64_t first_sample, const std::function<Tensor()>& loss) {
  require(done_ < options_.micro_batches,
          "step {} has {} micro-batches already; set StepOptions::micro_batches to their number",
          options_.step, done_);
  Context& context = *model_.context();
  context.set_rng_step({options_.seed, static_cast<std::uint64_t>(options_.step),
                        static_cast<std::uint64_t>(first_sample)});
  nn::Module& module = model_.module();
  module.set_training(true);
  model_.begin_micro_batch(done_ == 0, done_ + 1 == options_.micro_batches);
  test_point("forward");
  const Tensor part = loss();
  require(part.defined() && part.numel() == 1, "a micro-batch's loss must be one value; sum it up");
  test_point("backward");
  autograd::backward(part);
  model_.end_micro_batch();
  kernels::cast(context, part.alias({1}, {1}, 0).view(), element(totals_, kLoss, true));
  module.set_training(false);
  ++done_;
}

void Step::set_extra(std::int64_t i, double value) {
  require(i >= 0 && i < options_.extra_totals, "extra total {} of {}", i, options_.extra_totals);
  kernels::fill(*model_.context(), element(totals_, kExtra + i, false).view, value);
}

double Step::local_loss() const { return values_of(totals_)[kLoss]; }

StepTotals Step::read() const {
  const std::vector<double> sums = values_of(totals_);
  model_.mesh().world().check();
  return {sums[kLoss], std::sqrt(sums[0]), {sums.begin() + kExtra, sums.end()}};
}

void Step::sum_once() {
  require(!summed_, "step {} is finished; begin another Step", options_.step);
  summed_ = true;
  model_.sum_totals(totals_);
}

StepTotals Step::sum() {
  sum_once();
  return read();
}

StepTotals Step::finish(const optim::Optimizer& optimizer, const UpdateSettings& settings) {
  require(done_ == options_.micro_batches,
          "step {} ends after {} of {} micro-batches; set StepOptions::micro_batches to their "
          "number",
          options_.step, done_, options_.micro_batches);
  sum_once();
  const Tensor factor =
      Tensor::empty(model_.context(), {1}, DType::F32, MemoryCategory::Data, "clipping factor");
  kernels::clip_factor(*model_.context(),
                       {totals_.alias({kExtra}, {1}, 0).view(), factor.view(), settings.clip_norm});
  test_point("update");
  model_.step(optimizer, {.lr = settings.lr, .step = options_.step + 1, .factor = factor},
              settings.another_follows);
  return read();
}

}  // namespace tessera::train
