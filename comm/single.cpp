#include "comm/single.h"

#include <mutex>
#include <optional>
#include <utility>

#include "comm/collective.h"
#include "comm/reduce.h"
#include "comm/split.h"

namespace tessera::comm {
namespace {

class FinishedWork final : public Work {
 public:
  bool is_done() const override { return true; }
  void wait() override {}
};

class SingleCommunicator final : public Communicator, private FailureDomain::Member {
 public:
  explicit SingleCommunicator(Membership membership) : membership_(std::move(membership)) {
    membership_.domain->add(*this);
  }
  ~SingleCommunicator() override { membership_.domain->remove(*this); }
  SingleCommunicator(const SingleCommunicator&) = delete;
  SingleCommunicator& operator=(const SingleCommunicator&) = delete;

  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  std::string_view backend() const override { return "single"; }

  WorkPtr start(Collective c) override {
    {
      const std::lock_guard lock(mutex_);
      if (failure_ && !std::exchange(knows_failure_, true)) throw CommError(*failure_);
      if (failure_) {
        throw CommError(CommFailure::Aborted, failure_->culprits(),
                        "this communicator is dead; it failed before: {}", failure_->what());
      }
    }
    if (c.kind == CollectiveKind::ReduceScatter) {
      sum_parts_f32({&c.in, 1}, c.dtype, static_cast<float*>(c.out), c.count);
    }
    return finished_work();
  }

  std::unique_ptr<Communicator> split(const std::vector<int>& members,
                                      const std::string& kind) override {
    const SplitOptions options{.group = membership_.group,
                               .key = membership_.group ? membership_.group->key : "single",
                               .number = splits_++,
                               .connect_time = {}};
    return split_communicator(*this, options, members, kind, [&](SubgroupPtr group, int) {
      return make_single_communicator({std::move(group), membership_.domain});
    });
  }

  void abort(std::string_view reason) noexcept override {
    const int self = world_rank(membership_.group.get(), 0);
    {
      const std::lock_guard lock(mutex_);
      knows_failure_ = true;
    }
    fail(CommError(CommFailure::Aborted, std::vector<int>{self},
                   "rank {} aborted communication: {}", self, reason));
  }
  void fail(const CommError& reason) noexcept override { membership_.domain->fail(reason); }

 private:
  void fail_alone(const CommError& reason) noexcept override {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = reason;
  }

  const Membership membership_;
  std::mutex mutex_;
  bool knows_failure_ = false;  // it was thrown to the caller, or the caller aborted
  std::optional<CommError> failure_;
  std::uint64_t splits_ = 0;
};

}  // namespace

WorkPtr finished_work() { return std::make_shared<FinishedWork>(); }

std::unique_ptr<Communicator> make_single_communicator(Membership membership) {
  return std::make_unique<SingleCommunicator>(std::move(membership));
}

}  // namespace tessera::comm
