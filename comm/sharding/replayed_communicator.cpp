#include "comm/sharding/replayed_communicator.h"

#include <utility>

#include "core/base/replay.h"

namespace tessera::comm {
namespace {

/// Of one run. Like a unit's collectives, one that is under way when its buffers go is aborted.
struct Running {
  explicit Running(Communicator& of) : communicator(of) {}
  ~Running() {
    if (!work || work->is_done()) return;
    communicator.abort("captured work was destroyed during a collective");
    try {
      work->wait();
    } catch (const Error&) {  // that it failed is what was asked for
    }
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  Communicator& communicator;
  WorkPtr work;  // null: not started, or waited for
};

/// A collective whose start is captured: of each run another.
class ReplayedWork final : public Work {
 public:
  ReplayedWork(Context& context, Communicator& communicator, std::function<WorkPtr()> start)
      : context_(context), running_(std::make_shared<Running>(communicator)) {
    Replay::between(context_, [running = running_, start = std::move(start)] {
      require<InternalError>(!running->work, "a captured collective starts before its last ended");
      running->work = start();
    });
  }

  bool is_done() const override { return !running_->work || running_->work->is_done(); }
  void wait() override {
    Replay::between(context_, [running = running_] {
      require<InternalError>(running->work != nullptr, "a captured collective was not started");
      const WorkPtr work = std::exchange(running->work, nullptr);
      work->wait();
    });
  }

 private:
  Context& context_;
  std::shared_ptr<Running> running_;
};

}  // namespace

WorkPtr ReplayedCommunicator::start(std::function<WorkPtr()> start) {
  if (context_.capture() == nullptr) return start();
  if (in_group_ && !std::exchange(group_began_, true))
    Replay::between(context_, [&inner = communicator_] { inner.begin_group(); });
  return std::make_shared<ReplayedWork>(context_, communicator_, std::move(start));
}

WorkPtr ReplayedCommunicator::start_all_gather(const TensorView& buffer,
                                               CollectiveOptions options) {
  return start([=, &inner = communicator_] { return inner.start_all_gather(buffer, options); });
}

WorkPtr ReplayedCommunicator::start_reduce_scatter(const TensorView& in, const TensorView& out,
                                                   CollectiveOptions options) {
  return start(
      [=, &inner = communicator_] { return inner.start_reduce_scatter(in, out, options); });
}

WorkPtr ReplayedCommunicator::start_all_reduce(const TensorView& buffer, ReduceOp op,
                                               CollectiveOptions options) {
  return start([=, &inner = communicator_] { return inner.start_all_reduce(buffer, op, options); });
}

WorkPtr ReplayedCommunicator::start_broadcast(const TensorView& buffer, int root,
                                              CollectiveOptions options) {
  return start(
      [=, &inner = communicator_] { return inner.start_broadcast(buffer, root, options); });
}

WorkPtr ReplayedCommunicator::start_barrier(CollectiveOptions options) {
  return start([=, &inner = communicator_] { return inner.start_barrier(options); });
}

void ReplayedCommunicator::begin_group() {
  if (context_.capture() == nullptr) return communicator_.begin_group();
  in_group_ = true;
  group_began_ = false;
}

void ReplayedCommunicator::end_group() {
  if (context_.capture() == nullptr) return communicator_.end_group();
  in_group_ = false;
  if (group_began_) Replay::between(context_, [&inner = communicator_] { inner.end_group(); });
}

void ReplayedCommunicator::drop_group() noexcept {
  if (!std::exchange(in_group_, false)) communicator_.drop_group();  // else nothing has begun
}

}  // namespace tessera::comm
