#include "train/trainer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>
#include <utility>

#include "core/autograd/autograd.h"
#include "core/base/trace.h"
#include "kernels/elementwise.h"
#include "train/nonfinite.h"
#include "train/step.h"

namespace tessera::train {
namespace {

// By priority: stop requests outrank a scheduler's warning.
constexpr std::array kStopSignals = {SIGTERM, SIGINT, SIGUSR1};
constexpr std::int64_t kRequests{kStopSignals.size()};

// The signal of highest priority that a rank requested, or 0.
int read_request(std::span<const double> requests) {
  for (std::size_t i = 0; i < kStopSignals.size(); ++i)
    if (requests[i] > 0) return kStopSignals[i];
  return 0;
}

// Number of a signal's request, or -1.
std::int64_t request_of(int signal) {
  const auto* const found = std::ranges::find(kStopSignals, signal);
  return found == kStopSignals.end() ? -1 : found - kStopSignals.begin();
}

TensorView element(const Tensor& t, std::int64_t i) { return t.alias({1}, {1}, i).view(); }

}  // namespace

Trainer::Trainer(comm::ShardedModel& model, const optim::Optimizer& optimizer, LossFunction loss,
                 TrainerOptions options)
    : model_(model), optimizer_(optimizer), loss_(std::move(loss)), options_(std::move(options)) {}

void Trainer::run_all(Step& step, std::int64_t position, Loader& data) {
  const std::int64_t targets = data.targets_of_step(position);
  const double scale = targets > 0 ? 1.0 / static_cast<double>(targets) : 0.0;
  for (std::int64_t m = 0; m < data.micro_batches(); ++m) {
    const Batch batch = data.micro_batch(position, m);
    step.micro_batch(batch.first, [&] { return loss_(batch, scale); });
  }
}

StepResult Trainer::step(std::int64_t number, std::int64_t position, Loader& data,
                         const std::function<int()>& stop_signal) {
  const TracedStep traced(*model_.context(), number);
  StepResult result;
  result.lr = options_.schedule.at(number);
  {
    Step step(model_, {.step = number,
                       .micro_batches = data.micro_batches(),
                       .seed = options_.seed,
                       .extra_totals = kRequests});
    run_all(step, position, data);
    if (const std::int64_t request = request_of(stop_signal ? stop_signal() : 0); request >= 0)
      step.set_extra(request, 1.0);
    const StepTotals totals =
        step.finish(optimizer_, {.lr = result.lr,
                                 .clip_norm = options_.clip_norm,
                                 .another_follows = number + 1 < options_.steps});
    result.loss = totals.loss;
    result.grad_norm = totals.grad_norm;
    result.stop_signal = read_request(totals.extra);
    // The sums are equal on all ranks, so all ranks branch alike.
    if (totals.is_finite()) {
      skipped_ = 0;
      return result;
    }
  }
  result.skipped = find_culprit(number, position, data, result);
  require<NonFiniteLoss>(options_.skip_nonfinite, "{}", result.skipped);
  require<NonFiniteLoss>(++skipped_ <= kMostSkipped, "{} ({} steps in a row were skipped before)",
                         result.skipped, kMostSkipped);
  return result;
}

std::string Trainer::find_culprit(std::int64_t number, std::int64_t position, Loader& data,
                                  const StepResult& result) {
  comm::Communicator& world = model_.mesh().world();
  StepFindings mine;
  Step step(model_, {.step = number, .micro_batches = data.micro_batches(), .seed = options_.seed});
  {
    // Removes the observer on errors, too.
    const auto off = [this](void*) { model_.observe_gradients({}); };
    const std::unique_ptr<void, decltype(off)> guard(this, off);
    model_.observe_gradients(
        [&](const comm::FlatUnit& unit) { mine.gradients.add(comm::non_finite_gradients(unit)); });
    run_all(step, position, data);
  }
  const double loss = step.local_loss();
  if (!std::isfinite(loss)) mine.loss = non_finite_word(loss);
  const StepTotals again = step.sum();
  if (!std::isfinite(again.grad_norm)) mine.sums.add(comm::non_finite_sums(model_));
  mine.weights.add(comm::non_finite_weights(model_));
  for (const auto& unit : model_.units())
    if (unit->is_trainable()) unit->release_gradient();

  std::vector<StepFindings> ranks;
  if (options_.exchange) {
    for (const std::string& text :
         options_.exchange(fmt::format("not finite at step {}", number), encode(mine)))
      ranks.push_back(decode_findings(text));
  } else {
    ranks.resize(static_cast<std::size_t>(world.world_size()));
    ranks[static_cast<std::size_t>(world.rank())] = std::move(mine);
  }
  return describe({number, result.loss, result.grad_norm, again.is_finite(), ranks});
}

Trainer::Evaluation Trainer::evaluate(Loader& data, std::int64_t batches,
                                      const std::function<int()>& stop_signal) {
  const std::shared_ptr<Context>& context = model_.context();
  comm::Communicator& world = model_.mesh().world();
  const NoGradGuard no_grad(*context);
  std::int64_t limit = data.samples().samples_per_epoch();
  if (batches > 0) limit = std::min(limit, batches * data.options().global_batch);
  const Tensor sum =
      Tensor::empty(context, {1}, DType::F64, MemoryCategory::Workspace, "validation loss");
  kernels::fill(*context, sum.view(), 0.0);
  const Tensor requests =
      Tensor::empty(context, {kRequests}, DType::F64, MemoryCategory::Workspace, "stop requests");
  const auto agreed_signal = [&] {
    const int mine = stop_signal ? stop_signal() : 0;
    if (world.world_size() == 1) return mine;
    kernels::fill(*context, requests.view(), 0.0);
    if (const std::int64_t request = request_of(mine); request >= 0)
      kernels::fill(*context, element(requests, request), 1.0);
    world.all_reduce(requests.view(), comm::ReduceOp::Sum, {"all_reduce stop", {}});
    const std::vector<double> sums = values_of(requests);
    world.check();
    return read_request(sums);
  };
  // All ranks make all passes, because gathering is collective.
  for (std::int64_t i = 0; i < data.passes(limit); ++i) {
    if (const int signal = agreed_signal(); signal != 0) {
      model_.end_evaluation();
      return {.stop_signal = signal};
    }
    const Batch batch = data.pass(i, limit);
    model_.begin_evaluation();
    const Tensor part = loss_(batch, 1.0);
    kernels::cast(*context, part.alias({1}, {1}, 0).view(), {element(sum, 0), true, true});
  }
  model_.end_evaluation();
  if (world.world_size() > 1)
    world.all_reduce(sum.view(), comm::ReduceOp::Sum, {"all_reduce val_loss", {}});
  const double total = values_of(sum).front();
  world.check();
  const std::int64_t targets = data.samples().count_targets(0, limit);
  return {.loss = targets > 0 ? total / static_cast<double>(targets) : 0.0};
}

}  // namespace tessera::train
