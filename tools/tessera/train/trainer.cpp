#include "tools/tessera/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/autograd/autograd.h"
#include "kernels/cross_entropy.h"

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
  const auto make = [&](std::int32_t value) {
    Tensor t = Tensor::empty(context_, shape, DType::I32, MemoryCategory::Data, "batch");
    std::fill_n(t.data<std::int32_t>(), t.numel(), value);
    return t;
  };
  const std::int64_t real = std::clamp<std::int64_t>(limit - first, 0, rows);
  const Tensor inputs = make(0);
  const Tensor targets = make(kernels::kIgnoreTarget);
  if (real > 0) {
    data.fill_batch(first, real, inputs.data<std::int32_t>(), targets.data<std::int32_t>());
  }
  return {inputs, targets};
}

StepResult Trainer::step(std::int64_t step, std::int64_t position, const io::Sampler& data,
                         bool stop) {
  const std::int64_t tokens = options_.global_batch * data.seq_len();
  const std::int64_t micro_batches = rows_per_rank_ / options_.micro_batch;
  const std::int64_t first_row = position + communicator_.rank() * rows_per_rank_;
  double loss = 0;
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
    loss += part.item();
  }

  std::vector<double> extra = {loss, stop ? 1.0 : 0.0};
  StepResult result;
  result.grad_norm = std::sqrt(sharded_.gradient_sum_of_squares(extra));
  result.loss = extra[0];
  result.stop_requested = extra[1] > 0;
  result.lr = options_.schedule.at(step);
  // Every rank sees the same sums, so all stop together and before the weights are touched. The
  // sign of a NaN tells nobody anything.
  require<NonFiniteLoss>(std::isfinite(result.loss) && std::isfinite(result.grad_norm),
                         "step {}: loss is {} and the gradient norm {}; nothing was updated. Lower "
                         "optim.lr or resume from an earlier checkpoint",
                         step, std::abs(result.loss), std::abs(result.grad_norm));
  // As torch.nn.utils.clip_grad_norm_ does it.
  const double clip =
      options_.clip_norm > 0 ? std::min(1.0, options_.clip_norm / (result.grad_norm + 1e-6)) : 1.0;
  sharded_.step(options_.adamw, result.lr, step + 1, clip);
  return result;
}

double Trainer::evaluate(const io::Sampler& data, std::int64_t batches) {
  const NoGradGuard no_grad(*context_);
  const std::int64_t rows = options_.micro_batch * communicator_.world_size();
  std::int64_t limit = data.samples_per_epoch();
  if (batches > 0) limit = std::min(limit, batches * options_.global_batch);
  double sum = 0;
  for (std::int64_t first = 0; first < limit; first += rows) {
    // Every rank makes every pass, its rows past the end ignored: gathering is collective.
    const auto [inputs, targets] = load(data, first + communicator_.rank() * options_.micro_batch,
                                        options_.micro_batch, limit);
    sum += model_.loss(inputs, targets, 1.0, {.hooks = &sharded_}).item();
  }
  sharded_.end_evaluation();
  communicator_.all_reduce(dense_view(&sum, DType::F64, {1}), comm::ReduceOp::Sum,
                           {"all_reduce val_loss", {}});
  return sum / static_cast<double>(limit * data.seq_len());
}

}  // namespace tessera::tools
