#include "comm/queued_communicator.h"

#include <utility>

#include "comm/flight_recorder.h"
#include "core/base/fault_point.h"

namespace tessera::comm {
namespace {

void check_buffer(const TensorView& view, std::string_view what, Device device) {
  require(view.device == device, "{}: expected a buffer on {}, got one on {}", what, device.str(),
          view.device.str());
  require(view.is_contiguous(), "{}: expected a contiguous buffer, got shape {} with strides {}",
          what, view.shape, view.strides);
  require(view.data != nullptr || view.numel() == 0, "{}: the buffer of shape {} has no memory",
          what, view.shape);
}

void check_parts(const TensorView& view, int world_size, std::string_view what) {
  require(view.numel() % world_size == 0,
          "{}: {} elements do not split into {} equal parts, one for each rank; pad the buffer",
          what, view.numel(), world_size);
}

}  // namespace

Collective checked_all_gather(const TensorView& buffer, int world_size, Device device) {
  check_buffer(buffer, "all_gather", device);
  check_parts(buffer, world_size, "all_gather");
  return {.kind = CollectiveKind::AllGather,
          .dtype = buffer.dtype,
          .count = buffer.numel(),
          .out = buffer.data};
}

Collective checked_reduce_scatter(const TensorView& in, const TensorView& out, int world_size,
                                  Device device) {
  check_buffer(in, "reduce_scatter", device);
  check_buffer(out, "reduce_scatter", device);
  check_parts(in, world_size, "reduce_scatter");
  require(in.dtype == DType::F32 || in.dtype == DType::BF16,
          "reduce_scatter: expected input of dtype f32 or bf16, got {}", in.dtype);
  require(out.dtype == DType::F32, "reduce_scatter: expected output of dtype f32, got {}",
          out.dtype);
  require(out.numel() == in.numel() / world_size,
          "reduce_scatter: the input has {} elements for {} ranks, so the output needs {}, got {}",
          in.numel(), world_size, in.numel() / world_size, out.numel());
  const auto* in_begin = static_cast<const std::byte*>(in.data);
  const auto* out_begin = static_cast<const std::byte*>(out.data);
  require(
      in.numel() == 0 || in_begin + in.bytes() <= out_begin || out_begin + out.bytes() <= in_begin,
      "reduce_scatter: input and output overlap; use separate memory");
  return {.kind = CollectiveKind::ReduceScatter,
          .dtype = in.dtype,
          .count = in.numel(),
          .in = in.data,
          .out = out.data};
}

Collective checked_all_reduce(const TensorView& buffer, ReduceOp op, Device device) {
  check_buffer(buffer, "all_reduce", device);
  require(buffer.dtype == DType::F64 || buffer.dtype == DType::F32 || buffer.dtype == DType::I64,
          "all_reduce: expected dtype f64, f32 or i64, got {}", buffer.dtype);
  return {.kind = CollectiveKind::AllReduce,
          .dtype = buffer.dtype,
          .op = op,
          .count = buffer.numel(),
          .out = buffer.data};
}

Collective checked_broadcast(const TensorView& buffer, int root, int world_size, Device device) {
  check_buffer(buffer, "broadcast", device);
  require(root >= 0 && root < world_size, "broadcast: root {} is not a rank of a group of {}", root,
          world_size);
  return {.kind = CollectiveKind::Broadcast,
          .dtype = buffer.dtype,
          .root = root,
          .count = buffer.numel(),
          .out = buffer.data};
}

class QueuedCommunicator::QueuedWork final : public Work {
 public:
  QueuedWork(Collective c, std::shared_ptr<std::atomic<std::int64_t>> waited_ns)
      : collective(std::move(c)), waited_ns_(std::move(waited_ns)) {}
  bool is_done() const override { return done_.load(std::memory_order_acquire); }
  void wait() override {
    std::unique_lock lock(mutex_);
    if (!is_done()) {
      const auto start = std::chrono::steady_clock::now();
      finished_.wait(lock, [&] { return is_done(); });
      *waited_ns_ += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
    }
    if (error_) throw CommError(*error_);
  }
  void finish(const CommError* error) {
    const std::lock_guard lock(mutex_);
    if (error != nullptr) error_ = *error;
    done_.store(true, std::memory_order_release);
    finished_.notify_all();  // inside the lock: the waiter may destroy this object at once
  }

  const Collective collective;

 private:
  const std::shared_ptr<std::atomic<std::int64_t>> waited_ns_;
  std::mutex mutex_;
  std::condition_variable finished_;
  std::atomic<bool> done_{false};
  std::optional<CommError> error_;
};

QueuedCommunicator::QueuedCommunicator(std::unique_ptr<CollectiveBackend> backend,
                                       std::chrono::milliseconds timeout)
    : backend_(std::move(backend)), timeout_(timeout), thread_([this] { work(); }) {
  // thread_ is the last member: work() sees the others constructed.
}

QueuedCommunicator::~QueuedCommunicator() {
  bool busy = false;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    busy = !queue_.empty();
  }
  if (busy) abort("the communicator was destroyed while collectives were under way");
  wake_.notify_all();
  thread_.join();
}

WorkPtr QueuedCommunicator::start_all_gather(const TensorView& buffer, CollectiveOptions options) {
  return enqueue(checked_all_gather(buffer, world_size()), std::move(options));
}

WorkPtr QueuedCommunicator::start_reduce_scatter(const TensorView& in, const TensorView& out,
                                                 CollectiveOptions options) {
  return enqueue(checked_reduce_scatter(in, out, world_size()), std::move(options));
}

WorkPtr QueuedCommunicator::start_all_reduce(const TensorView& buffer, ReduceOp op,
                                             CollectiveOptions options) {
  return enqueue(checked_all_reduce(buffer, op), std::move(options));
}

WorkPtr QueuedCommunicator::start_broadcast(const TensorView& buffer, int root,
                                            CollectiveOptions options) {
  return enqueue(checked_broadcast(buffer, root, world_size()), std::move(options));
}

WorkPtr QueuedCommunicator::start_barrier(CollectiveOptions options) {
  return enqueue(Collective{}, std::move(options));
}

WorkPtr QueuedCommunicator::enqueue(Collective collective, CollectiveOptions options) {
  collective.label = std::move(options.label);
  collective.deadline = options.deadline.count() > 0 ? options.deadline : timeout_;
  const std::lock_guard lock(mutex_);
  if (failure_ && !std::exchange(reported_, true)) throw CommError(*failure_);
  if (failure_) throw aborted_error();
  collective.sequence = sequence_++;
  if (recorder_) recorder_->queued(collective);
  auto item = std::make_shared<QueuedWork>(std::move(collective), waited_ns_);
  queue_.push_back(item);
  wake_.notify_one();
  return item;
}

std::string QueuedCommunicator::under_way() const {
  const std::lock_guard lock(mutex_);
  return queue_.empty() ? died_in_ : queue_.front()->collective.describe();
}

CommError QueuedCommunicator::aborted_error() const {
  CommError error(CommFailure::Aborted, failure_->culprits(),
                  "this communicator is dead; it failed before: {}", failure_->what());
  return error.set_fate(failure_->fate());
}

void QueuedCommunicator::set_recorder(std::shared_ptr<FlightRecorder> recorder) {
  const std::lock_guard lock(mutex_);
  recorder_ = std::move(recorder);
}

void QueuedCommunicator::abort(std::string_view reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    reported_ = true;  // the caller knows the reason
  }
  fail(CommError(CommFailure::Aborted, std::vector<int>{rank()},
                 "rank {} aborted communication: {}", rank(), reason));
}

void QueuedCommunicator::fail(const CommError& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = reason;
  }
  backend_->interrupt(reason);
  wake_.notify_all();
}

void QueuedCommunicator::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stop_ || failure_ || !queue_.empty(); });
    if (failure_ || queue_.empty()) break;
    const auto item = queue_.front();
    const auto recorder = recorder_;
    lock.unlock();
    std::optional<CommError> error;
    if (recorder) recorder->started(item->collective.sequence);
    try {
      fault_point(collective_name(item->collective.kind).data());
      backend_->run(item->collective);
    } catch (const CommError& failure) {
      error = failure;
    } catch (const std::exception& failure) {  // such as out of memory for staging
      error = CommError(CommFailure::Aborted, std::vector<int>{rank()}, "rank {}: {} failed: {}",
                        rank(), item->collective.describe(), failure.what());
    }
    if (recorder) recorder->ended(item->collective.sequence, !error);
    lock.lock();
    if (error && !failure_) failure_ = error;
    if (error) {
      died_in_ = item->collective.describe();
      reported_ = true;
    }
    // Dequeued first: a waiter may destroy the communicator once the work is done.
    queue_.pop_front();
    lock.unlock();
    item->finish(error ? &*error : nullptr);
    lock.lock();
  }
  const std::optional<CommError> reason = failure_;
  auto left = std::exchange(queue_, {});
  const auto recorder = recorder_;
  bool reported = reported_ || left.empty();
  reported_ = reported_ || !left.empty();
  lock.unlock();
  backend_->close(reason ? &*reason : nullptr);
  for (const auto& item : left) {
    const CommError error =
        std::exchange(reported, true)
            ? CommError(CommFailure::Aborted, reason->culprits(), "{} did not run: {}",
                        item->collective.describe(), reason->what())
            : *reason;
    if (recorder) recorder->ended(item->collective.sequence, false);
    item->finish(&error);
  }
}

}  // namespace tessera::comm
