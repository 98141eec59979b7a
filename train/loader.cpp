#include "train/loader.h"

#include <algorithm>

#include "core/base/error.h"
#include "kernels/cross_entropy.h"

namespace tessera::train {

Loader::Loader(const io::Samples& samples, const comm::Communicator& world,
               const std::shared_ptr<Context>& context, const LoaderOptions& options)
    : samples_(samples),
      context_(context),
      options_(options),
      rank_(world.rank()),
      world_size_(world.world_size()),
      rows_per_rank_(options.global_batch / world_size_) {
  require(rows_per_rank_ >= 1 && options.global_batch % world_size_ == 0 &&
              options.micro_batch >= 1 && rows_per_rank_ % options.micro_batch == 0,
          "train.global_batch {} must be a multiple of train.micro_batch {} times {} ranks",
          options.global_batch, options.micro_batch, world_size_);
  const Shape shape{options.micro_batch, samples.seq_len()};
  for (int i = 0; i < (samples.is_packed() ? 4 : 2); ++i)
    parts_.push_back(Tensor::empty(context, shape, DType::I32, MemoryCategory::Data, "batch"));
  host_ = Storage::allocate_on_host(
      context, parts_.size() * static_cast<std::size_t>(numel(shape)) * sizeof(std::int32_t),
      MemoryCategory::Data, "batch read ahead");
}

Loader::~Loader() {
  if (reading_.valid()) reading_.wait();
}

void Loader::read(Rows rows) {
  const std::int64_t count = options_.micro_batch * samples_.seq_len();
  auto* const inputs = static_cast<std::int32_t*>(host_->data());
  std::int32_t* const targets = inputs + count;
  std::fill(inputs, targets, 0);
  std::fill(targets, targets + count, kernels::kIgnoreTarget);
  std::int32_t* const documents = targets + count;
  if (samples_.is_packed()) std::fill(documents, documents + 2 * count, 0);
  const std::int64_t real = real_rows(rows);
  if (real > 0) samples_.fill_batch(rows.first, real, inputs, targets);
  if (real > 0 && samples_.is_packed())
    samples_.fill_documents(rows.first, real, documents, documents + count);
}

std::int64_t Loader::real_rows(const Rows& rows) const {
  return std::clamp<std::int64_t>(rows.limit - rows.first, 0, options_.micro_batch);
}

Batch Loader::load(Rows rows, std::optional<Rows> next) {
  Batch batch{parts_[0], parts_[1], rows.first};
  batch.target_count = samples_.count_targets(rows.first, real_rows(rows));
  if (samples_.is_packed()) {
    batch.documents = parts_[2];
    batch.positions = parts_[3];
  }
  if (context_->device().type == DeviceType::Meta) return batch;
  const bool is_read = ahead_ == rows;
  ahead_.reset();
  if (reading_.valid()) {
    if (is_read)
      reading_.get();
    else
      reading_.wait(), reading_ = {};
  }
  if (!is_read) read(rows);
  const auto* from = static_cast<const std::int32_t*>(host_->data());
  for (Tensor& part : parts_) {
    part.copy_from_host(from);
    from += part.numel();
  }
  if (next) {
    reading_ = std::async(std::launch::async, [this, next] { read(*next); });
    ahead_ = next;
  }
  return batch;
}

Batch Loader::micro_batch(std::int64_t position, std::int64_t m) {
  const auto rows = [&](std::int64_t start, std::int64_t i) {
    const std::int64_t first = start + rank_ * rows_per_rank_ + i * options_.micro_batch;
    return Rows{first, first + options_.micro_batch};
  };
  require(m >= 0 && m < micro_batches(), "micro-batch {} of a step with {} of them", m,
          micro_batches());
  const bool last = m + 1 == micro_batches();
  return load(rows(position, m),
              last ? rows(position + options_.global_batch, 0) : rows(position, m + 1));
}

std::int64_t Loader::passes(std::int64_t limit) const {
  const std::int64_t rows = options_.micro_batch * world_size_;
  return (limit + rows - 1) / rows;
}

Loader::Rows Loader::rows_of_pass(std::int64_t i, std::int64_t limit) const {
  return {(i * world_size_ + rank_) * options_.micro_batch, limit};
}

Batch Loader::pass(std::int64_t i, std::int64_t limit) {
  const bool last = i + 1 == passes(limit);
  return load(rows_of_pass(i, limit),
              last ? std::nullopt : std::optional(rows_of_pass(i + 1, limit)));
}

}  // namespace tessera::train
