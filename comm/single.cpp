#include "comm/single.h"

#include <mutex>
#include <optional>

#include "comm/queued_communicator.h"
#include "comm/reduce.h"

namespace tessera::comm {
namespace {

class FinishedWork final : public Work {
 public:
  bool is_done() const override { return true; }
  void wait() override {}
};

class SingleCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  std::string_view backend() const override { return "single"; }

  WorkPtr start_all_gather(const TensorView& buffer, CollectiveOptions /*options*/) override {
    checked_all_gather(buffer, 1);
    return finished();
  }
  WorkPtr start_reduce_scatter(const TensorView& in, const TensorView& out,
                               CollectiveOptions /*options*/) override {
    const Collective c = checked_reduce_scatter(in, out, 1);
    WorkPtr done = finished();
    sum_parts_f32({&c.in, 1}, c.dtype, static_cast<float*>(c.out), c.count);
    return done;
  }
  WorkPtr start_all_reduce(const TensorView& buffer, ReduceOp op,
                           CollectiveOptions /*options*/) override {
    checked_all_reduce(buffer, op);
    return finished();
  }
  WorkPtr start_broadcast(const TensorView& buffer, int root,
                          CollectiveOptions /*options*/) override {
    checked_broadcast(buffer, root, 1);
    return finished();
  }
  WorkPtr start_barrier(CollectiveOptions /*options*/) override { return finished(); }

  void abort(std::string_view reason) noexcept override {
    const std::lock_guard lock(mutex_);
    if (!reason_) reason_ = reason;
  }

 private:
  WorkPtr finished() {
    const std::lock_guard lock(mutex_);
    if (reason_) {
      throw CommError(CommFailure::Aborted, {0},
                      "this communicator is dead; it was aborted before: {}", *reason_);
    }
    return finished_;
  }

  std::mutex mutex_;
  std::optional<std::string> reason_;
  const WorkPtr finished_ = std::make_shared<FinishedWork>();
};

}  // namespace

std::unique_ptr<Communicator> make_single_communicator() {
  return std::make_unique<SingleCommunicator>();
}

}  // namespace tessera::comm
