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
  ReplayedWork(Context& context, std::shared_ptr<Running> running)
      : context_(context), running_(std::move(running)) {}

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
  const auto running = std::make_shared<Running>(communicator_);
  auto action = [running, start = std::move(start)] {
    require<InternalError>(!running->work, "a captured collective starts before its last ended");
    running->work = start();
  };
  if (group_)
    group_->push_back(std::move(action));
  else
    Replay::between(context_, std::move(action));
  return std::make_shared<ReplayedWork>(context_, running);
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
  group_.emplace();
}

void ReplayedCommunicator::end_group() {
  if (context_.capture() == nullptr) return communicator_.end_group();
  auto starts = std::exchange(group_, std::nullopt);
  if (!starts || starts->empty()) return;
  Replay::between(context_, [&inner = communicator_, starts = std::move(*starts)] {
    CollectiveGroup group(inner);
    for (const auto& start : starts) start();
    group.end();
  });
}

void ReplayedCommunicator::drop_group() noexcept {
  if (!group_) communicator_.drop_group();
  group_.reset();  // else nothing has begun
}

}  // namespace tessera::comm
