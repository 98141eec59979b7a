#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/error.h"
#include "core/base/tensor_view.h"

namespace tessera::comm {

class FlightRecorder;

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

  /// What is started from here to end_group() is ready at once, and handed on together: NCCL runs
  /// it in one launch that has one sequence number, and the sum of the deadlines; backends that run
  /// one collective after the other take no notice. Buffers on the host are read by end_group() at
  /// the latest; works may be waited for after it. Groups do not nest. See CollectiveGroup.
  virtual void begin_group() {}
  /// @throws CommError
  virtual void end_group() {}
  /// Instead of end_group(), after an error between the starts: what was held back never runs, and
  /// to wait for it is an InternalError. The same group may be started again.
  virtual void drop_group() noexcept {}

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

  /// The collective that runs, or is next, or was the last of a communicator that is dead, in
  /// words; empty if there is none. Any thread.
  virtual std::string under_way() const { return {}; }
  /// Nanoseconds that the caller has stood in waits of collectives, in all; 0 where the host does
  /// not wait. Any thread.
  virtual std::int64_t waited_ns() const { return 0; }

  /// Collectives that are queued from now on are recorded there; null: no more. A group of one has
  /// none, and takes no notice.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): those that have one keep it
  virtual void set_recorder(std::shared_ptr<FlightRecorder> /*recorder*/) {}

  /// Fails what is under way or queued, and every later call. Safe from any thread; idempotent.
  virtual void abort(std::string_view reason) noexcept = 0;
  /// The same because of something that was found elsewhere, which later calls then report.
  virtual void fail(const CommError& reason) noexcept { abort(reason.what()); }
};

/// Collectives that are started while it lives go together; see Communicator::begin_group().
class CollectiveGroup {
 public:
  explicit CollectiveGroup(Communicator& communicator) : communicator_(&communicator) {
    communicator.begin_group();
  }
  ~CollectiveGroup() {
    if (communicator_ != nullptr) communicator_->drop_group();
  }
  CollectiveGroup(const CollectiveGroup&) = delete;
  CollectiveGroup& operator=(const CollectiveGroup&) = delete;

  /// To be called once, after the last start. @throws CommError
  void end() { std::exchange(communicator_, nullptr)->end_group(); }

 private:
  Communicator* communicator_;
};

}  // namespace tessera::comm
