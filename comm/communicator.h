#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "core/base/tensor_view.h"

namespace tessera::comm {

enum class ReduceOp : std::uint8_t { Sum, Max };

/// What every collective carries: a name for messages ("all_gather h.3") and a deadline counted
/// from the moment the collective starts to run. Zero: the communicator's default.
struct CollectiveOptions {
  std::string label;
  std::chrono::milliseconds deadline{0};
};

/// A collective under way. Move-only in spirit: wait once.
class Work {
 public:
  virtual ~Work() = default;
  virtual bool is_done() const = 0;
  /// For buffers on the host: blocks until done, at most to the collective's deadline. For buffers
  /// on a device: from here on the context's work on the device, and only that, sees the collective
  /// done; the host may have to wait for that, as in the case of staging through it, or may not,
  /// and then a failure that comes later is thrown by a later call or by Communicator::check().
  /// @throws CommError with the label, the sequence number and the culprits
  virtual void wait() = 0;
};
using WorkPtr = std::shared_ptr<Work>;

/// Collectives over a fixed group of ranks.
///
/// Every rank of the group calls the same collectives in the same order; each has a sequence number
/// from 0. The start_ functions queue a collective on the communicator's own thread (the
/// counterpart of a communication stream): collectives run one after the other, and the buffers
/// belong to it until wait() returns. The plain functions start and wait. Buffers are contiguous.
/// They lie on the host; those that are made for a device's context take buffers on that device
/// too, in the order of its work: what was queued before start_ is seen, and what is queued after
/// wait() sees the result.
///
/// After an error the communicator is dead: every later call throws CommError(Aborted) at once, and
/// so do works that are still queued. Destruction never runs a collective; it aborts what is under
/// way, in bounded time. One thread at a time may call.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// "shm", "gloo", "threads", "single", "nccl", "host-staged shm"
  virtual std::string_view backend() const = 0;

  /// In place: `buffer` has world_size equal parts; part rank() is filled before, all are after.
  virtual WorkPtr start_all_gather(const TensorView& buffer, CollectiveOptions options) = 0;
  /// `in` has world_size equal parts; `out` (f32) receives the sum over ranks, in rank order and in
  /// float32, of part rank(). in: f32 or bf16. out may not overlap in.
  virtual WorkPtr start_reduce_scatter(const TensorView& in, const TensorView& out,
                                       CollectiveOptions options) = 0;
  /// In place; f64, f32 or i64. Sums in rank order: the same bits on every rank.
  virtual WorkPtr start_all_reduce(const TensorView& buffer, ReduceOp op,
                                   CollectiveOptions options) = 0;
  /// In place: root's contents reach every rank.
  virtual WorkPtr start_broadcast(const TensorView& buffer, int root,
                                  CollectiveOptions options) = 0;
  virtual WorkPtr start_barrier(CollectiveOptions options) = 0;

  void all_gather(const TensorView& buffer, CollectiveOptions options) {
    start_all_gather(buffer, std::move(options))->wait();
  }
  void reduce_scatter(const TensorView& in, const TensorView& out, CollectiveOptions options) {
    start_reduce_scatter(in, out, std::move(options))->wait();
  }
  void all_reduce(const TensorView& buffer, ReduceOp op, CollectiveOptions options) {
    start_all_reduce(buffer, op, std::move(options))->wait();
  }
  void broadcast(const TensorView& buffer, int root, CollectiveOptions options) {
    start_broadcast(buffer, root, std::move(options))->wait();
  }
  void barrier(CollectiveOptions options) { start_barrier(std::move(options))->wait(); }

  /// Throws if a collective on device memory has failed since its wait(). What was computed from
  /// its result is then worthless: to be called after the host has waited for the device, and
  /// before a result is kept (a checkpoint) or shown. @throws CommError
  virtual void check() {}

  /// Fails what is under way or queued, and every later call. Safe from any thread; idempotent.
  virtual void abort(std::string_view reason) noexcept = 0;
};

}  // namespace tessera::comm
