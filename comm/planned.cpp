#include "comm/planned.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "comm/collective.h"
#include "comm/host_staged.h"
#include "comm/shared_memory.h"
#include "comm/single.h"
#include "comm/tcp.h"
#include "core/base/storage.h"
#include "core/base/trace.h"

namespace tessera::comm {
namespace {

// Holds staging memory as the backend's work would; in a trace, it ends at `end` seconds.
class PlannedWork final : public Work {
 public:
  PlannedWork(Context& context, std::shared_ptr<Storage> staging, double end)
      : context_(context), staging_(std::move(staging)), end_(end) {}
  bool is_done() const override { return true; }
  void wait() override {
    staging_.reset();
    if (Trace* trace = context_.trace(); trace != nullptr) trace->wait_until(end_);
  }

 private:
  Context& context_;
  std::shared_ptr<Storage> staging_;
  double end_;
};

class PlannedCommunicator final : public Communicator {
 public:
  PlannedCommunicator(std::shared_ptr<Context> context, std::string_view backend, int rank,
                      std::vector<int> members, const Links& links)
      : context_(std::move(context)),
        backend_(backend),
        rank_(rank),
        world_(static_cast<int>(members.size())),
        members_(std::move(members)),
        links_(links) {
    if (world_ == 1 || !backend_.ends_with("shm")) return;
    const std::size_t bytes = shared_memory_share(shared_memory_bytes(world_, {}), rank_, world_);
    memory_ = on_host(bytes, "shared memory");
  }
  int rank() const override { return rank_; }
  int world_size() const override { return world_; }
  std::string_view backend() const override { return backend_; }
  DType scattered_dtype(DType in) const override { return backend_ == "nccl" ? in : DType::F32; }

  WorkPtr start(Collective c) override {
    std::shared_ptr<Storage> staging;
    if (backend_.starts_with("host-staged"))
      staging = on_host(host_staging_bytes(c, world_), "host staging");
    const bool reduces =
        c.kind == CollectiveKind::ReduceScatter || c.kind == CollectiveKind::AllReduce;
    if (backend_.ends_with("tcp") && world_ > 1 && reduces) {
      const std::size_t bytes = tcp_staging_bytes(c, rank_, world_);
      if (!memory_ || memory_->bytes() < bytes) {
        memory_.reset();
        memory_ = on_host(bytes, "tcp staging");
      }
    }
    return std::make_shared<PlannedWork>(*context_, std::move(staging), run(c));
  }
  std::unique_ptr<Communicator> split(const std::vector<int>& members,
                                      const std::string& /*kind*/) override {
    const auto self = std::find(members.begin(), members.end(), rank_);
    require(self != members.end(), "rank {} is not among the members of its group", rank_);
    return std::make_unique<PlannedCommunicator>(
        context_, backend_, static_cast<int>(self - members.begin()), world_ranks(members), links_);
  }
  void abort(std::string_view /*reason*/) noexcept override {}

 private:
  // Seconds at which the collective ends in the context's trace.
  double run(const Collective& c) {
    Trace* trace = context_->trace();
    if (trace == nullptr || links_.in_host <= 0 || world_ == 1) return 0;
    const double begin = std::max(busy_until_, trace->planned_now());
    busy_until_ = begin + seconds(c);
    trace->add_collective(c.describe(), begin, busy_until_);
    return busy_until_;
  }
  double seconds(const Collective& c) const {
    const auto host_of = [&](int member) {
      return members_[static_cast<std::size_t>(member)] / links_.per_host;
    };
    int hosts = 1;  // members ascend
    for (int i = 1; i < world_; ++i) hosts += host_of(i) != host_of(i - 1) ? 1 : 0;
    const int passes = c.kind == CollectiveKind::AllReduce ? 2 : 1;
    const double sent = passes * static_cast<double>(c.bytes()) * (world_ - 1) / world_;
    double rate = links_.in_host;
    if (hosts > 1) rate = std::min(rate, links_.between_hosts * world_ / hosts);
    return links_.start + sent / rate +
           passes * ((world_ - hosts) * links_.step_in_host +
                     (hosts > 1 ? hosts - 1 : 0) * links_.step_between_hosts);
  }
  std::vector<int> world_ranks(const std::vector<int>& members) const {
    std::vector<int> ranks;
    for (const int member : members) ranks.push_back(members_[static_cast<std::size_t>(member)]);
    return ranks;
  }
  Device device() const override { return context_->device(); }
  std::shared_ptr<Storage> on_host(std::size_t bytes, std::string_view owner) const {
    return Storage::allocate_on_host(context_, bytes, MemoryCategory::Communication, owner);
  }

  const std::shared_ptr<Context> context_;
  const std::string backend_;
  const int rank_, world_;
  const std::vector<int> members_;  // ranks of the world
  const Links links_;
  double busy_until_ = 0;  // seconds, in the trace
  std::shared_ptr<Storage> memory_;
};

}  // namespace

std::unique_ptr<Communicator> make_planned_communicator(std::shared_ptr<Context> context,
                                                        std::string_view backend, int rank,
                                                        int world_size, const Links& links) {
  std::vector<int> members(static_cast<std::size_t>(world_size));
  std::iota(members.begin(), members.end(), 0);
  return std::make_unique<PlannedCommunicator>(std::move(context), backend, rank,
                                               std::move(members), links);
}

}  // namespace tessera::comm
