#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "core/tensor.h"
#include "io/data/sampler.h"

namespace tessera::train {

/// A micro-batch of this rank.
struct Batch {
  Tensor tokens;           ///< [rows, seq_len] i32
  Tensor targets;          ///< [rows, seq_len] i32; kernels::kIgnoreTarget: no target
  std::int64_t first = 0;  ///< global number of the first sample
  /// [rows, seq_len] i32, see io::Samples::fill_documents(); undefined: rows are single documents.
  Tensor documents{}, positions{};
  std::int64_t target_count = 0;  ///< of targets that are not ignored
};

struct LoaderOptions {
  std::int64_t global_batch = 1;  ///< samples per step over all ranks
  std::int64_t micro_batch = 1;   ///< samples per rank and micro-batch; divides global / world
};

/// Copies this rank's micro-batches to the device. Reads the next one on a thread meanwhile.
class Loader {
 public:
  /// `samples` must outlive this.
  /// @throws InvalidArgument if the batch sizes don't fit the world size
  Loader(const io::Samples& samples, const comm::Communicator& world,
         const std::shared_ptr<Context>& context, const LoaderOptions& options);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  const io::Samples& samples() const { return samples_; }
  const LoaderOptions& options() const { return options_; }
  /// Micro-batches of this rank in a step.
  std::int64_t micro_batches() const { return rows_per_rank_ / options_.micro_batch; }
  /// Targets of the step on samples [position, position + global_batch), over all ranks.
  std::int64_t targets_of_step(std::int64_t position) const {
    return samples_.count_targets(position, options_.global_batch);
  }

  /// Micro-batch m of the step on samples [position, position + global_batch), of which each rank
  /// has a contiguous part. Valid until the next call. @throws what the samples throw
  Batch micro_batch(std::int64_t position, std::int64_t m);

  /// Passes of an evaluation of samples [0, limit) in order.
  std::int64_t passes(std::int64_t limit) const;
  /// This rank's micro-batch of a pass; samples past `limit` have no targets.
  Batch pass(std::int64_t i, std::int64_t limit);

 private:
  struct Rows {
    std::int64_t first = 0;
    std::int64_t limit = 0;  // rows from here on get ignored targets
    bool operator==(const Rows&) const = default;
  };
  Rows rows_of_pass(std::int64_t i, std::int64_t limit) const;
  void read(Rows rows);
  std::int64_t real_rows(const Rows& rows) const;
  Batch load(Rows rows, std::optional<Rows> next);

  const io::Samples& samples_;
  std::shared_ptr<Context> context_;
  LoaderOptions options_;
  int rank_, world_size_;
  std::int64_t rows_per_rank_;
  std::vector<Tensor> parts_;      // inputs, targets, and of packed rows documents and positions
  std::shared_ptr<Storage> host_;  // the same of the micro-batch that is read ahead
  std::optional<Rows> ahead_;
  std::future<void> reading_;
};

}  // namespace tessera::train
