#include "comm/nccl/communicator.h"

#include <utility>

namespace tessera::comm {
namespace {

class NcclWork final : public Work {
 public:
  NcclWork(std::shared_ptr<NcclCore> core, std::shared_ptr<NcclItem> item)
      : core_(std::move(core)), item_(std::move(item)) {}
  bool is_done() const override { return core_->is_done(*item_); }
  void wait() override { core_->wait(*item_); }

 private:
  std::shared_ptr<NcclCore> core_;
  std::shared_ptr<NcclItem> item_;
};

class NcclCommunicator final : public Communicator {
 public:
  explicit NcclCommunicator(std::shared_ptr<NcclCore> core) : core_(std::move(core)) {}
  ~NcclCommunicator() override { core_->shut_down(); }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const override { return core_->rank(); }
  int world_size() const override { return core_->world_size(); }
  std::string_view backend() const override { return "nccl"; }

  WorkPtr start_all_gather(const TensorView& buffer, CollectiveOptions options) override {
    const Collective c = checked_all_gather(buffer, world_size(), device_of(buffer));
    return start(c, std::move(options), {{&buffer, true}});
  }

  WorkPtr start_reduce_scatter(const TensorView& in, const TensorView& out,
                               CollectiveOptions options) override {
    const Collective c = checked_reduce_scatter(in, out, world_size(), device_of(in));
    require<Unsupported>(in.dtype == DType::F32,
                         "reduce_scatter of {} over nccl would round at every hop; use "
                         "float32, or comm.backend=shm or tcp",
                         in.dtype);
    return start(c, std::move(options), {{&in, false}, {&out, true}});
  }

  WorkPtr start_all_reduce(const TensorView& buffer, ReduceOp op,
                           CollectiveOptions options) override {
    const Collective c = checked_all_reduce(buffer, op, device_of(buffer));
    require<Unsupported>(op == ReduceOp::Sum || buffer.dtype == DType::I64,
                         "all_reduce max of {} over nccl may drop NaN; use comm.backend=shm "
                         "or tcp",
                         buffer.dtype);
    return start(c, std::move(options), {{&buffer, true}});
  }

  WorkPtr start_broadcast(const TensorView& buffer, int root, CollectiveOptions options) override {
    const Collective c = checked_broadcast(buffer, root, world_size(), device_of(buffer));
    return start(c, std::move(options), {{&buffer, true}});
  }

  WorkPtr start_barrier(CollectiveOptions options) override {
    core_->check_alive();
    const auto item = std::make_shared<NcclItem>();
    item->host_waits = true;
    const TensorView token = dense_view(&item->token, DType::F32, {1});
    Collective call = checked_all_reduce(token, ReduceOp::Sum);
    call.out = stage(*item, token, false);
    return run(item, Collective{}, call, std::move(options));
  }

  void begin_group() override {
    require<InternalError>(!in_group_, "groups of collectives do not nest");
    in_group_ = true;
  }
  void end_group() override {
    in_group_ = false;
    const auto group = std::exchange(group_, {});
    if (group.empty()) return;
    core_->check_alive();
    core_->run(group);
  }

  void drop_group() noexcept override {
    in_group_ = false;
    group_.clear();
  }

  void check() override { core_->check_alive(); }

  void set_recorder(std::shared_ptr<FlightRecorder> recorder) override {
    core_->set_recorder(std::move(recorder));
  }

  void abort(std::string_view reason) noexcept override {
    core_->fail(CommError(CommFailure::Aborted, std::vector<int>{rank()},
                          "rank {} aborted communication: {}", rank(), reason));
  }
  void fail(const CommError& reason) noexcept override { core_->fail(reason); }

 private:
  struct Buffer {
    const TensorView* view;
    bool is_result;
  };

  // Device that all buffers of a collective must be on, given its first buffer.
  Device device_of(const TensorView& view) const {
    return view.device.type == DeviceType::CPU ? Device{} : core_->context().device();
  }

  WorkPtr start(const Collective& collective, CollectiveOptions options,
                std::initializer_list<Buffer> buffers) {
    core_->check_alive();
    const auto item = std::make_shared<NcclItem>();
    Collective call = collective;
    for (const Buffer& buffer : buffers) {
      if (buffer.view->device.type != DeviceType::CPU) continue;
      item->host_waits = true;
      void* device = stage(*item, *buffer.view, buffer.is_result);
      (buffer.is_result ? call.out : const_cast<void*&>(call.in)) = device;
    }
    return run(item, collective, call, std::move(options));
  }

  // Allocates staging for a host buffer. @return its device memory
  void* stage(NcclItem& item, const TensorView& view, bool is_result) {
    const auto& context = core_->options().communicator.context;
    constexpr std::string_view kOwner = "nccl staging";
    NcclItem::Staged staged;
    staged.bytes = view.bytes();
    staged.device = Storage::allocate(context, staged.bytes, MemoryCategory::Communication, kOwner);
    staged.pinned = std::make_unique<HostMemory>(context, staged.bytes, kOwner);
    staged.user = static_cast<std::byte*>(view.data);
    staged.is_result = is_result;
    item.staged.push_back(std::move(staged));
    return item.staged.back().device->data();
  }

  WorkPtr run(const std::shared_ptr<NcclItem>& item, Collective collective, const Collective& call,
              CollectiveOptions options) {
    collective.label = std::move(options.label);
    collective.deadline =
        options.deadline.count() > 0 ? options.deadline : core_->options().communicator.timeout;
    item->collective = std::move(collective);
    const NcclCore::Call one{item, call};
    if (in_group_)
      group_.push_back(one);
    else
      core_->run({&one, 1});
    return std::make_shared<NcclWork>(core_, item);
  }

  const std::shared_ptr<NcclCore> core_;
  bool in_group_ = false;
  std::vector<NcclCore::Call> group_;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<NcclDriver> driver,
                                                     std::shared_ptr<Store> store, int rank,
                                                     int world_size, const NcclOptions& options) {
  const auto& context = options.communicator.context;
  require(context && context->device().type == DeviceType::CUDA,
          "nccl needs a context on a CUDA device, got {}",
          context ? "one on " + context->device().str() : "none");
  const auto core =
      std::make_shared<NcclCore>(std::move(driver), std::move(store), rank, world_size, options);
  core->connect();
  core->start_threads();
  return std::make_unique<NcclCommunicator>(core);
}

}  // namespace tessera::comm
