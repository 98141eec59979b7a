#include "tools/tessera/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/autograd/autograd.h"
#include "core/base/trace.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/optimizer.h"

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

std::pair<Tensor, Tensor> Trainer::load(const io::Sampler& data, std::int64_t first,
                                        std::int64_t rows, std::int64_t limit) {
  const Shape shape{rows, data.seq_len()};
  const auto count = static_cast<std::size_t>(numel(shape));
  inputs_.assign(count, 0);
  targets_.assign(count, kernels::kIgnoreTarget);
  const std::int64_t real = std::clamp<std::int64_t>(limit - first, 0, rows);
  if (real > 0) data.fill_batch(first, real, inputs_.data(), targets_.data());
  const auto make = [&](const std::vector<std::int32_t>& values) {
    Tensor t = Tensor::empty(context_, shape, DType::I32, MemoryCategory::Data, "batch");
    t.copy_from_host(values.data());
    return t;
  };
  return {make(inputs_), make(targets_)};
}

namespace {

// Element i of a vector, as a place that kernels add to.
GradientView element(const Tensor& t, std::int64_t i, bool accumulate) {
  return {t.alias({1}, {1}, i).view(), accumulate, true};
}

}  // namespace

StepResult Trainer::step(std::int64_t step, std::int64_t position, const io::Sampler& data,
                         bool stop) {
  const Range range(*context_, fmt::format("step {}", step));
  const std::int64_t tokens = options_.global_batch * data.seq_len();
  const std::int64_t micro_batches = rows_per_rank_ / options_.micro_batch;
  const std::int64_t first_row = position + communicator_.rank() * rows_per_rank_;
  // Sum of squares, loss, requests to stop: summed where the gradients are, and read once the whole
  // step has been queued.
  constexpr std::int64_t kLoss = 1, kStop = 2;
  const Tensor totals =
      Tensor::empty(context_, {3}, DType::F64, MemoryCategory::Workspace, "step totals");
  kernels::fill(*context_, totals.view(), 0.0);
  if (stop) kernels::fill(*context_, element(totals, kStop, false).view, 1.0);
  for (std::int64_t m = 0; m < micro_batches; ++m) {
    const std::int64_t first = first_row + m * options_.micro_batch;
    const auto [inputs, targets] =
        load(data, first, options_.micro_batch, first + options_.micro_batch);
    sharded_.begin_micro_batch(m == 0, m + 1 == micro_batches);
    const Tensor part = model_.loss(inputs, targets, 1.0 / static_cast<double>(tokens),
                                    {.training = true,
                                     .recompute_blocks = options_.recompute_blocks,
                                     .seed = options_.seed,
                                     .step = step,
                                     .first_sample = first,
                                     .hooks = &sharded_});
    autograd::backward(part);
    sharded_.end_micro_batch();
    kernels::cast(*context_, part.view(), element(totals, kLoss, true));
  }
  sharded_.sum_totals(totals);

  const Tensor factor =
      Tensor::empty(context_, {1}, DType::F32, MemoryCategory::Workspace, "clipping factor");
  kernels::clip_factor(*context_, {totals.view(), factor.view(), options_.clip_norm});
  StepResult result;
  result.lr = options_.schedule.at(step);
  sharded_.step(options_.adamw, result.lr, step + 1, factor);

  const std::vector<double> sums = totals.to_vector<double>();
  communicator_.check();
  result.grad_norm = std::sqrt(sums[0]);
  result.loss = sums[kLoss];
  result.stop_requested = sums[kStop] > 0;
  // Every rank sees the same sums, so all stop together; the factor has kept the weights as they
  // were. The sign of a NaN tells nobody anything.
  require<NonFiniteLoss>(std::isfinite(result.loss) && std::isfinite(result.grad_norm),
                         "step {}: loss is {} and the gradient norm {}; nothing was updated. Lower "
                         "optim.lr or resume from an earlier checkpoint",
                         step, std::abs(result.loss), std::abs(result.grad_norm));
  return result;
}

double Trainer::evaluate(const io::Sampler& data, std::int64_t batches) {
  const NoGradGuard no_grad(*context_);
  const std::int64_t rows = options_.micro_batch * communicator_.world_size();
  std::int64_t limit = data.samples_per_epoch();
  if (batches > 0) limit = std::min(limit, batches * options_.global_batch);
  const Tensor sum =
      Tensor::empty(context_, {1}, DType::F64, MemoryCategory::Workspace, "validation loss");
  kernels::fill(*context_, sum.view(), 0.0);
  for (std::int64_t first = 0; first < limit; first += rows) {
    // Every rank makes every pass, its rows past the end ignored: gathering is collective.
    const auto [inputs, targets] = load(data, first + communicator_.rank() * options_.micro_batch,
                                        options_.micro_batch, limit);
    const Tensor part = model_.loss(inputs, targets, 1.0, {.hooks = &sharded_});
    kernels::cast(*context_, part.view(), element(sum, 0, true));
  }
  sharded_.end_evaluation();
  if (communicator_.world_size() > 1)
    communicator_.all_reduce(sum.view(), comm::ReduceOp::Sum, {"all_reduce val_loss", {}});
  const double total = sum.item();
  communicator_.check();
  return total / static_cast<double>(limit * data.seq_len());
}

}  // namespace tessera::tools
