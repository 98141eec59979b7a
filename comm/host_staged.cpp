#include "comm/host_staged.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "comm/host_memory.h"
#include "comm/queued_communicator.h"

namespace tessera::comm {
namespace {

// Copy from staging to the device after the collective.
struct CopyBack {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::size_t bytes = 0;
};

class StagedWork final : public Work {
 public:
  StagedWork(std::shared_ptr<Context> context, std::unique_ptr<HostMemory> staging, WorkPtr inner,
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
  std::unique_ptr<HostMemory> staging_;
  WorkPtr inner_;
  std::vector<CopyBack> copies_;
};

bool on_host(const TensorView& view) { return view.device.type == DeviceType::CPU; }

class HostStagedCommunicator final : public Communicator {
 public:
  HostStagedCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<Context> context)
      : context_(std::move(context)),
        name_("host-staged " + std::string(inner->backend())),
        inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string_view backend() const override { return name_; }

  WorkPtr start_all_gather(const TensorView& buffer, CollectiveOptions options) override {
    if (on_host(buffer)) return inner_->start_all_gather(buffer, std::move(options));
    checked_all_gather(buffer, world_size(), context_->device());
    if (world_size() == 1) return inner_->start_all_gather(nothing(buffer), std::move(options));
    auto staging = take(buffer.bytes());
    std::byte* host = staging->data();
    auto* device = static_cast<std::byte*>(buffer.data);
    const std::size_t part = buffer.bytes() / static_cast<std::size_t>(world_size());
    const std::size_t begin = part * static_cast<std::size_t>(rank());
    const std::size_t end = begin + part;
    context_->backend().copy_to_host(host + begin, device + begin, part);
    WorkPtr inner = inner_->start_all_gather(at(host, buffer), std::move(options));
    return staged(std::move(staging), std::move(inner),
                  {{device, host, begin}, {device + end, host + end, buffer.bytes() - end}});
  }

  WorkPtr start_reduce_scatter(const TensorView& in, const TensorView& out,
                               CollectiveOptions options) override {
    if (on_host(in)) return inner_->start_reduce_scatter(in, out, std::move(options));
    checked_reduce_scatter(in, out, world_size(), context_->device());
    constexpr std::size_t kAlign = 64;
    const std::size_t in_bytes = (in.bytes() + kAlign - 1) / kAlign * kAlign;
    auto staging = take(in_bytes + out.bytes());
    std::byte* host_in = staging->data();
    std::byte* host_out = host_in == nullptr ? nullptr : host_in + in_bytes;
    context_->backend().copy_to_host(host_in, in.data, in.bytes());
    WorkPtr inner =
        inner_->start_reduce_scatter(at(host_in, in), at(host_out, out), std::move(options));
    return staged(std::move(staging), std::move(inner),
                  {{static_cast<std::byte*>(out.data), host_out, out.bytes()}});
  }

  WorkPtr start_all_reduce(const TensorView& buffer, ReduceOp op,
                           CollectiveOptions options) override {
    if (on_host(buffer)) return inner_->start_all_reduce(buffer, op, std::move(options));
    checked_all_reduce(buffer, op, context_->device());
    if (world_size() == 1) return inner_->start_all_reduce(nothing(buffer), op, std::move(options));
    auto staging = take(buffer.bytes());
    std::byte* host = staging->data();
    context_->backend().copy_to_host(host, buffer.data, buffer.bytes());
    WorkPtr inner = inner_->start_all_reduce(at(host, buffer), op, std::move(options));
    return staged(std::move(staging), std::move(inner),
                  {{static_cast<std::byte*>(buffer.data), host, buffer.bytes()}});
  }

  WorkPtr start_broadcast(const TensorView& buffer, int root, CollectiveOptions options) override {
    if (on_host(buffer)) return inner_->start_broadcast(buffer, root, std::move(options));
    checked_broadcast(buffer, root, world_size(), context_->device());
    if (world_size() == 1) {
      return inner_->start_broadcast(nothing(buffer), root, std::move(options));
    }
    auto staging = take(buffer.bytes());
    std::byte* host = staging->data();
    std::vector<CopyBack> copies;
    if (rank() == root) {
      context_->backend().copy_to_host(host, buffer.data, buffer.bytes());
    } else {
      copies.push_back({static_cast<std::byte*>(buffer.data), host, buffer.bytes()});
    }
    WorkPtr inner = inner_->start_broadcast(at(host, buffer), root, std::move(options));
    return staged(std::move(staging), std::move(inner), std::move(copies));
  }

  WorkPtr start_barrier(CollectiveOptions options) override {
    return inner_->start_barrier(std::move(options));
  }

  void check() override { inner_->check(); }

  std::string under_way() const override { return inner_->under_way(); }
  std::int64_t waited_ns() const override { return inner_->waited_ns(); }

  void set_recorder(std::shared_ptr<FlightRecorder> recorder) override {
    inner_->set_recorder(std::move(recorder));
  }
  void abort(std::string_view reason) noexcept override { inner_->abort(reason); }
  void fail(const CommError& reason) noexcept override { inner_->fail(reason); }

 private:
  std::unique_ptr<HostMemory> take(std::size_t bytes) {
    std::erase_if(running_, [](const WorkPtr& work) { return work->is_done(); });
    return std::make_unique<HostMemory>(context_, bytes, "host staging");
  }
  static TensorView at(std::byte* host, const TensorView& like) {
    return dense_view(host, like.dtype, {like.numel()});
  }
  static TensorView nothing(const TensorView& like) { return dense_view(nullptr, like.dtype, {0}); }
  WorkPtr staged(std::unique_ptr<HostMemory> staging, WorkPtr inner, std::vector<CopyBack> copies) {
    running_.push_back(std::make_shared<StagedWork>(context_, std::move(staging), std::move(inner),
                                                    std::move(copies)));
    return running_.back();
  }

  const std::shared_ptr<Context> context_;
  const std::string name_;
  std::vector<WorkPtr> running_;  // keeps staging that collectives use, even if callers drop works
  // Destroyed first: its collectives use the members above.
  std::unique_ptr<Communicator> inner_;
};

}  // namespace

std::unique_ptr<Communicator> make_host_staged_communicator(std::unique_ptr<Communicator> inner,
                                                            std::shared_ptr<Context> context) {
  require(context->device().type == DeviceType::CUDA,
          "host staging needs a context on a CUDA device, got one on {}", context->device().str());
  return std::make_unique<HostStagedCommunicator>(std::move(inner), std::move(context));
}

}  // namespace tessera::comm
