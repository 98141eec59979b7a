#include "tools/tessera/train/trainer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>
#include <vector>

#include "core/autograd/autograd.h"
#include "core/base/fault_point.h"
#include "core/base/rng.h"
#include "core/base/trace.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/optimizer.h"
#include "tools/tessera/train/nonfinite.h"

namespace tessera::tools {

Trainer::Trainer(models::Gpt2& model, comm::ShardedModel& sharded, comm::Communicator& communicator,
                 const std::shared_ptr<Context>& context, const TrainerOptions& options)
    : model_(model),
      sharded_(sharded),
      communicator_(communicator),
      context_(context),
      options_(options),
      rows_per_rank_(options.global_batch / communicator.world_size()) {
  require(rows_per_rank_ >= 1 && options.global_batch % communicator.world_size() == 0 &&
              options.micro_batch >= 1 && rows_per_rank_ % options.micro_batch == 0,
          "train.global_batch {} must be a multiple of train.micro_batch {} times {} ranks",
          options.global_batch, options.micro_batch, communicator.world_size());
}

// A plan runs on a meta context, and is no part of a run.
void Trainer::test_point(const char* name) const {
  if (context_->device().type != DeviceType::Meta) fault_point(name);
}

void Trainer::load(const io::Sampler& data, std::int64_t first, std::int64_t limit) {
  const std::int64_t rows = options_.micro_batch;
  const Shape shape{rows, data.seq_len()};
  if (!inputs_.defined() || inputs_.shape() != shape) {
    inputs_ = Tensor::empty(context_, shape, DType::I32, MemoryCategory::Data, "batch");
    targets_ = Tensor::empty(context_, shape, DType::I32, MemoryCategory::Data, "batch");
  }
  if (context_->device().type == DeviceType::Meta) return;
  const auto count = static_cast<std::size_t>(numel(shape));
  host_inputs_.assign(count, 0);
  host_targets_.assign(count, kernels::kIgnoreTarget);
  const std::int64_t real = std::clamp<std::int64_t>(limit - first, 0, rows);
  if (real > 0) data.fill_batch(first, real, host_inputs_.data(), host_targets_.data());
  inputs_.copy_from_host(host_inputs_.data());
  targets_.copy_from_host(host_targets_.data());
}

namespace {

// Element i of a vector as the destination of a kernel.
GradientView element(const Tensor& t, std::int64_t i, bool accumulate) {
  return {t.alias({1}, {1}, i).view(), accumulate, true};
}

constexpr std::int64_t kLoss = 1, kStop = 2;  // indices in totals_
// Signals counted from totals_[kStop] on, by priority: stop requests outrank a scheduler's warning.
constexpr std::array kStopSignals = {SIGTERM, SIGINT, SIGUSR1};
constexpr std::int64_t kTotals = kStop + std::int64_t{kStopSignals.size()};

// A tensor's values; zeros on the meta device, which has none.
std::vector<double> values_of(const Tensor& t) {
  if (t.device().type == DeviceType::Meta)
    return std::vector<double>(static_cast<std::size_t>(t.numel()));
  return t.to_vector<double>();
}

// Sets one of `requests`, zeros for each of kStopSignals; no signal: 0.
void write_request(const Tensor& requests, std::int64_t first, int signal) {
  for (std::size_t i = 0; i < kStopSignals.size(); ++i) {
    if (signal != kStopSignals[i]) continue;
    kernels::fill(*requests.context(),
                  element(requests, first + static_cast<std::int64_t>(i), false).view, 1.0);
  }
}

// The signal of highest priority that a rank requested, or 0.
int read_request(std::span<const double> requests) {
  for (std::size_t i = 0; i < kStopSignals.size(); ++i)
    if (requests[i] > 0) return kStopSignals[i];
  return 0;
}

bool is_finite(const StepResult& result) {
  return std::isfinite(result.loss) && std::isfinite(result.grad_norm);
}

}  // namespace

void Trainer::run_all(std::int64_t step, std::int64_t position, const io::Sampler& data) {
  const std::int64_t micro_batches = rows_per_rank_ / options_.micro_batch;
  const std::int64_t first_row = position + communicator_.rank() * rows_per_rank_;
  const auto tokens = static_cast<double>(options_.global_batch * data.seq_len());
  model_.set_training(true);
  for (std::int64_t m = 0; m < micro_batches; ++m) {
    const std::int64_t first = first_row + m * options_.micro_batch;
    load(data, first, first + options_.micro_batch);
    context_->set_rng_step(
        {options_.seed, static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(first)});
    sharded_.begin_micro_batch(m == 0, m + 1 == micro_batches);
    test_point("forward");
    const Tensor part = model_.loss(inputs_, targets_, 1.0 / tokens);
    test_point("backward");
    autograd::backward(part);
    sharded_.end_micro_batch();
    kernels::cast(*context_, part.view(), element(totals_, kLoss, true));
  }
  model_.set_training(false);
}

StepResult Trainer::step(std::int64_t step, std::int64_t position, const io::Sampler& data,
                         const std::function<int()>& stop_signal,
                         const std::function<void()>& before_update) {
  const Range range(*context_, fmt::format("step {}", step));
  if (!totals_.defined()) {
    totals_ = Tensor::empty(context_, {kTotals}, DType::F64, MemoryCategory::Data, "step totals");
    factor_ = Tensor::empty(context_, {1}, DType::F32, MemoryCategory::Data, "clipping factor");
  }
  kernels::fill(*context_, totals_.view(), 0.0);
  run_all(step, position, data);
  write_request(totals_, kStop, stop_signal());
  StepResult result;
  result.lr = options_.schedule.at(step);
  sharded_.sum_totals(totals_);
  kernels::clip_factor(*context_, {totals_.view(), factor_.view(), options_.clip_norm});
  if (before_update) before_update();
  test_point("update");
  sharded_.step(options_.adamw, result.lr, step + 1, factor_);

  const std::vector<double> sums = values_of(totals_);
  communicator_.check();
  result.grad_norm = std::sqrt(sums[0]);
  result.loss = sums[kLoss];
  result.stop_signal = read_request(std::span(sums).subspan(kStop));
  // The sums are equal on all ranks, so all ranks branch alike. With a NaN clipping factor, weights
  // and moments are unchanged.
  if (is_finite(result)) {
    skipped_ = 0;
    return result;
  }
  result.skipped = find_culprit(step, position, data, result);
  require<NonFiniteLoss>(options_.skip_nonfinite, "{}", result.skipped);
  require<NonFiniteLoss>(++skipped_ <= kMostSkipped, "{} ({} steps in a row were skipped before)",
                         result.skipped, kMostSkipped);
  return result;
}

std::string Trainer::find_culprit(std::int64_t step, std::int64_t position, const io::Sampler& data,
                                  const StepResult& result) {
  StepFindings mine;
  StepResult again;
  kernels::fill(*context_, totals_.view(), 0.0);
  {
    // Removes the observer on errors, too.
    const auto off = [this](void*) { sharded_.observe_gradients({}); };
    const std::unique_ptr<void, decltype(off)> guard(this, off);
    sharded_.observe_gradients([&](const comm::FlatUnit& unit) {
      mine.gradients.add(comm::non_finite_gradients(*context_, unit));
    });
    run_all(step, position, data);
  }
  const double loss = totals_.to_vector<double>()[kLoss];
  if (!std::isfinite(loss)) mine.loss = non_finite_word(loss);
  sharded_.sum_totals(totals_);
  const std::vector<double> sums = totals_.to_vector<double>();
  communicator_.check();
  again.grad_norm = std::sqrt(sums[0]);
  again.loss = sums[kLoss];
  if (!std::isfinite(again.grad_norm)) mine.sums.add(comm::non_finite_sums(*context_, sharded_));
  mine.weights.add(comm::non_finite_weights(*context_, sharded_));

  std::vector<StepFindings> ranks;
  if (options_.exchange) {
    for (const std::string& text :
         options_.exchange(fmt::format("not finite at step {}", step), encode(mine)))
      ranks.push_back(decode_findings(text));
  } else {
    ranks.resize(static_cast<std::size_t>(communicator_.world_size()));
    ranks[static_cast<std::size_t>(communicator_.rank())] = std::move(mine);
  }
  return describe({step, result.loss, result.grad_norm, is_finite(again), ranks});
}

Trainer::Evaluation Trainer::evaluate(const io::Sampler& data, std::int64_t batches,
                                      const std::function<int()>& stop_signal) {
  const NoGradGuard no_grad(*context_);
  const std::int64_t rows = options_.micro_batch * communicator_.world_size();
  std::int64_t limit = data.samples_per_epoch();
  if (batches > 0) limit = std::min(limit, batches * options_.global_batch);
  const Tensor sum =
      Tensor::empty(context_, {1}, DType::F64, MemoryCategory::Workspace, "validation loss");
  kernels::fill(*context_, sum.view(), 0.0);
  const Tensor requests = Tensor::empty(context_, {std::int64_t{kStopSignals.size()}}, DType::F64,
                                        MemoryCategory::Workspace, "stop requests");
  const auto agreed_signal = [&] {
    const int mine = stop_signal();
    if (communicator_.world_size() == 1) return mine;
    kernels::fill(*context_, requests.view(), 0.0);
    write_request(requests, 0, mine);
    communicator_.all_reduce(requests.view(), comm::ReduceOp::Sum, {"all_reduce stop", {}});
    const std::vector<double> sums = values_of(requests);
    communicator_.check();
    return read_request(sums);
  };
  for (std::int64_t first = 0; first < limit; first += rows) {
    if (const int signal = agreed_signal(); signal != 0) {
      sharded_.end_evaluation();
      return {.stop_signal = signal};
    }
    // All ranks make all passes, because gathering is collective; rows past the end are ignored.
    load(data, first + communicator_.rank() * options_.micro_batch, limit);
    sharded_.begin_evaluation();
    const Tensor part = model_.loss(inputs_, targets_, 1.0);
    kernels::cast(*context_, part.view(), element(sum, 0, true));
  }
  sharded_.end_evaluation();
  if (communicator_.world_size() > 1)
    communicator_.all_reduce(sum.view(), comm::ReduceOp::Sum, {"all_reduce val_loss", {}});
  const double total = values_of(sum).front();
  communicator_.check();
  return {.loss = total / static_cast<double>(limit * data.seq_len())};
}

}  // namespace tessera::tools
