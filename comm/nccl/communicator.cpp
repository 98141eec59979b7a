#include "comm/nccl/communicator.h"

#include <utility>

#include "comm/split.h"

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
  explicit NcclCommunicator(std::shared_ptr<NcclCore> core) : core_(std::move(core)) {
    core_->domain().add(*core_);
  }
  ~NcclCommunicator() override {
    core_->shut_down();
    core_->domain().remove(*core_);
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const override { return core_->rank(); }
  int world_size() const override { return core_->world_size(); }
  std::string_view backend() const override { return "nccl"; }
  DType scattered_dtype(DType in) const override { return in; }

  WorkPtr start(Collective collective) override {
    if (collective.kind == CollectiveKind::AllReduce) {
      require<Unsupported>(collective.op == ReduceOp::Sum || collective.dtype == DType::I64,
                           "all_reduce max of {} over nccl may drop NaN; use comm.backend=shm "
                           "or tcp",
                           collective.dtype);
    }
    core_->check_alive();
    collective.group = core_->membership().group;
    if (collective.deadline.count() <= 0) {
      collective.deadline = core_->options().communicator.timeout;
    }
    const auto item = std::make_shared<NcclItem>();
    Collective call = collective;
    const bool is_barrier = collective.kind == CollectiveKind::Barrier;
    if (is_barrier) {
      call = Collective{
          .kind = CollectiveKind::AllReduce, .dtype = DType::F32, .count = 1, .out = &item->token};
    }
    if (call.device.type == DeviceType::CPU) {
      item->host_waits = true;
      std::size_t out_bytes = call.bytes();
      if (call.kind == CollectiveKind::ReduceScatter) {
        out_bytes /= static_cast<std::size_t>(world_size());
        call.in = stage(*item, const_cast<void*>(call.in), call.bytes(), false);
      }
      call.out = stage(*item, call.out, out_bytes, !is_barrier);
      call.device = device();
    }
    item->collective = std::move(collective);
    const NcclCore::Call one{item, std::move(call)};
    if (in_group_)
      group_.push_back(one);
    else
      core_->run({&one, 1});
    return std::make_shared<NcclWork>(core_, item);
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

  std::unique_ptr<Communicator> split(const std::vector<int>& members,
                                      const std::string& kind) override {
    require<InternalError>(!in_group_, "split within a group of collectives");
    const NcclOptions& options = core_->options();
    const SplitOptions split{
        .group = core_->membership().group,
        .key = options.name,
        .number = splits_++,
        .connect_time = options.communicator.timeout + options.connect_timeout};
    return split_communicator(*this, split, members, kind, [&](SubgroupPtr group, int rank) {
      const Membership subgroup{std::move(group), core_->membership().domain};
      auto core = core_->connect_subgroup(subgroup, rank);
      core->start_threads();
      std::unique_ptr<Communicator> made = std::make_unique<NcclCommunicator>(std::move(core));
      return made;
    });
  }

  void check() override {
    if (core_->membership().group) {
      core_->check_alive();
    } else {
      core_->domain().check();
    }
  }

  void set_recorder(std::shared_ptr<FlightRecorder> recorder) override {
    core_->domain().set_recorder(std::move(recorder));
  }

  void abort(std::string_view reason) noexcept override {
    const int self = core_->own_world_rank();
    fail(CommError(CommFailure::Aborted, std::vector<int>{self},
                   "rank {} aborted communication: {}", self, reason));
  }
  void fail(const CommError& reason) noexcept override { core_->domain().fail(reason); }

 protected:
  Device device() const override { return core_->context().device(); }

 private:
  // Allocates staging for a host buffer. @return its device memory
  void* stage(NcclItem& item, void* buffer, std::size_t bytes, bool is_result) {
    const auto& context = core_->options().communicator.context;
    constexpr std::string_view kOwner = "nccl staging";
    NcclItem::Staged staged;
    staged.bytes = bytes;
    staged.device = Storage::allocate(context, bytes, MemoryCategory::Communication, kOwner);
    staged.pinned =
        Storage::allocate_on_host(context, bytes, MemoryCategory::Communication, kOwner);
    staged.user = static_cast<std::byte*>(buffer);
    staged.is_result = is_result;
    item.staged.push_back(std::move(staged));
    return item.staged.back().device->data();
  }

  const std::shared_ptr<NcclCore> core_;
  std::uint64_t splits_ = 0;
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
