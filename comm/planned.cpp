#include "comm/planned.h"

#include <algorithm>
#include <string>

#include "comm/collective.h"
#include "comm/host_staged.h"
#include "comm/shared_memory.h"
#include "comm/single.h"
#include "comm/tcp.h"
#include "core/base/storage.h"

namespace tessera::comm {
namespace {

// Holds staging memory as the backend's work would.
class StagedWork final : public Work {
 public:
  explicit StagedWork(std::shared_ptr<Storage> staging) : staging_(std::move(staging)) {}
  bool is_done() const override { return true; }
  void wait() override { staging_.reset(); }

 private:
  std::shared_ptr<Storage> staging_;
};

class PlannedCommunicator final : public Communicator {
 public:
  PlannedCommunicator(std::shared_ptr<Context> context, std::string_view backend, int rank,
                      int world_size)
      : context_(std::move(context)), backend_(backend), rank_(rank), world_(world_size) {
    if (world_ == 1 || !backend_.ends_with("shm")) return;
    const std::size_t bytes = shared_memory_share(shared_memory_bytes(world_, {}), rank_, world_);
    memory_ = on_host(bytes, "shared memory");
  }
  int rank() const override { return rank_; }
  int world_size() const override { return world_; }
  std::string_view backend() const override { return backend_; }
  DType scattered_dtype(DType in) const override { return backend_ == "nccl" ? in : DType::F32; }

  WorkPtr start(Collective c) override {
    WorkPtr work = finished_work();
    if (backend_.starts_with("host-staged"))
      work = std::make_shared<StagedWork>(on_host(host_staging_bytes(c, world_), "host staging"));
    const bool reduces =
        c.kind == CollectiveKind::ReduceScatter || c.kind == CollectiveKind::AllReduce;
    if (backend_.ends_with("tcp") && world_ > 1 && reduces) {
      const std::size_t bytes = tcp_staging_bytes(c, rank_, world_);
      if (!memory_ || memory_->bytes() < bytes) {
        memory_.reset();
        memory_ = on_host(bytes, "tcp staging");
      }
    }
    return work;
  }
  std::unique_ptr<Communicator> split(const std::vector<int>& members,
                                      const std::string& /*kind*/) override {
    const auto self = std::find(members.begin(), members.end(), rank_);
    require(self != members.end(), "rank {} is not among the members of its group", rank_);
    return std::make_unique<PlannedCommunicator>(context_, backend_,
                                                 static_cast<int>(self - members.begin()),
                                                 static_cast<int>(members.size()));
  }
  void abort(std::string_view /*reason*/) noexcept override {}

 private:
  Device device() const override { return context_->device(); }
  std::shared_ptr<Storage> on_host(std::size_t bytes, std::string_view owner) const {
    return Storage::allocate_on_host(context_, bytes, MemoryCategory::Communication, owner);
  }

  const std::shared_ptr<Context> context_;
  const std::string backend_;
  const int rank_, world_;
  std::shared_ptr<Storage> memory_;
};

}  // namespace

std::unique_ptr<Communicator> make_planned_communicator(std::shared_ptr<Context> context,
                                                        std::string_view backend, int rank,
                                                        int world_size) {
  return std::make_unique<PlannedCommunicator>(std::move(context), backend, rank, world_size);
}

}  // namespace tessera::comm
