#include "comm/host_staged.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "comm/collective.h"
#include "core/base/device_backend.h"
#include "core/base/storage.h"

namespace tessera::comm {
namespace {

std::size_t aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

// Copy from staging to the device after the collective.
struct CopyBack {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::size_t bytes = 0;
};

class StagedWork final : public Work {
 public:
  StagedWork(std::shared_ptr<Context> context, std::shared_ptr<Storage> staging, WorkPtr inner,
             std::vector<CopyBack> copies)
      : context_(std::move(context)),
        staging_(std::move(staging)),
        inner_(std::move(inner)),
        copies_(std::move(copies)) {}

  bool is_done() const override { return inner_->is_done(); }
  void wait() override {
    inner_->wait();
    for (const CopyBack& copy : std::exchange(copies_, {})) {
      context_->backend().copy_from_host(copy.to, copy.from, copy.bytes);
    }
    staging_.reset();
  }

 private:
  std::shared_ptr<Context> context_;
  std::shared_ptr<Storage> staging_;
  WorkPtr inner_;
  std::vector<CopyBack> copies_;
};

class HostStagedCommunicator final : public Communicator {
 public:
  HostStagedCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<Context> context)
      : context_(std::move(context)),
        name_("host-staged " + std::string(inner->backend())),
        inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string_view backend() const override { return name_; }

  WorkPtr start(Collective c) override {
    if (c.device.type == DeviceType::CPU) return inner_->start(std::move(c));
    c.device = {};
    if (c.kind == CollectiveKind::ReduceScatter) return reduce_scatter(std::move(c));
    if (world_size() == 1) {  // the buffer already holds the result
      c.count = 0;
      c.out = nullptr;
      return inner_->start(std::move(c));
    }
    const std::size_t bytes = c.bytes();
    // Part of the buffer that the collective reads on this rank.
    std::size_t begin = 0, end = bytes;
    if (c.kind == CollectiveKind::AllGather) {
      const std::size_t part = bytes / static_cast<std::size_t>(world_size());
      begin = part * static_cast<std::size_t>(rank());
      end = begin + part;
    } else if (c.kind == CollectiveKind::Broadcast && c.root != rank()) {
      end = 0;
    }
    auto staging = take(bytes);
    auto* host = static_cast<std::byte*>(staging->data());
    auto* memory = static_cast<std::byte*>(c.out);
    context_->backend().copy_to_host(host + begin, memory + begin, end - begin);
    std::vector<CopyBack> copies = {{memory, host, begin}, {memory + end, host + end, bytes - end}};
    if (c.kind == CollectiveKind::AllReduce) copies = {{memory, host, bytes}};
    c.out = host;
    return staged(std::move(staging), inner_->start(std::move(c)), std::move(copies));
  }

  std::unique_ptr<Communicator> split(const std::vector<int>& members,
                                      const std::string& kind) override {
    return std::make_unique<HostStagedCommunicator>(inner_->split(members, kind), context_);
  }

  void check() override { inner_->check(); }

  std::string under_way() const override { return inner_->under_way(); }
  std::int64_t waited_ns() const override { return inner_->waited_ns(); }

  void set_recorder(std::shared_ptr<FlightRecorder> recorder) override {
    inner_->set_recorder(std::move(recorder));
  }
  void abort(std::string_view reason) noexcept override { inner_->abort(reason); }
  void fail(const CommError& reason) noexcept override { inner_->fail(reason); }

 protected:
  Device device() const override { return context_->device(); }

 private:
  WorkPtr reduce_scatter(Collective c) {
    const std::size_t in_bytes = aligned(c.bytes());
    const std::size_t out_bytes = host_staging_bytes(c, world_size()) - in_bytes;
    auto staging = take(in_bytes + out_bytes);
    auto* host = static_cast<std::byte*>(staging->data());
    auto* memory = static_cast<std::byte*>(c.out);
    context_->backend().copy_to_host(host, c.in, c.bytes());
    c.in = host;
    c.out = host + in_bytes;
    WorkPtr inner = inner_->start(std::move(c));
    return staged(std::move(staging), std::move(inner), {{memory, host + in_bytes, out_bytes}});
  }
  std::shared_ptr<Storage> take(std::size_t bytes) {
    std::erase_if(running_, [](const WorkPtr& work) { return work->is_done(); });
    return Storage::allocate_on_host(context_, bytes, MemoryCategory::Communication,
                                     "host staging");
  }
  WorkPtr staged(std::shared_ptr<Storage> staging, WorkPtr inner, std::vector<CopyBack> copies) {
    running_.push_back(std::make_shared<StagedWork>(context_, std::move(staging), std::move(inner),
                                                    std::move(copies)));
    return running_.back();
  }

  const std::shared_ptr<Context> context_;
  const std::string name_;
  std::vector<WorkPtr> running_;  // keep staging buffers alive if callers drop works
  // Destroyed first, because its collectives use the members above.
  std::unique_ptr<Communicator> inner_;
};

}  // namespace

std::size_t host_staging_bytes(const Collective& c, int world_size) {
  if (c.kind == CollectiveKind::ReduceScatter)
    return aligned(c.bytes()) + static_cast<std::size_t>(c.count / world_size) * sizeof(float);
  return world_size == 1 ? 0 : c.bytes();
}

std::unique_ptr<Communicator> make_host_staged_communicator(std::unique_ptr<Communicator> inner,
                                                            std::shared_ptr<Context> context) {
  require(context->device().type == DeviceType::CUDA,
          "host staging needs a context on a CUDA device, got one on {}", context->device().str());
  return std::make_unique<HostStagedCommunicator>(std::move(inner), std::move(context));
}

}  // namespace tessera::comm
