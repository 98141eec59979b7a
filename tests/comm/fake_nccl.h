#pragma once

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/nccl/driver.h"
#include "comm/threads.h"
#include "core/base/error.h"

namespace tessera::test {

/// Peers of the communicators that FakeNccl drivers make by unique id. Thread-safe.
class FakeNetwork {
 public:
  std::string make_id() {
    const std::lock_guard lock(mutex_);
    std::string id = fmt::format(" x{}", ++ids_);
    id.resize(128);
    return id;
  }
  std::unique_ptr<comm::Communicator> join(std::string_view id, int rank, int world_size) {
    const std::lock_guard lock(mutex_);
    auto& group = groups_[std::string(id)];
    if (!group) group = std::make_shared<comm::ThreadGroup>(world_size);
    return comm::make_threads_communicator(group, rank);
  }

 private:
  std::mutex mutex_;
  int ids_ = 0;
  std::map<std::string, std::shared_ptr<comm::ThreadGroup>> groups_;
};

/// Faults and counters of a FakeNccl. Shared with the test; thread-safe.
struct FakeNcclState {
  using Ms = std::chrono::milliseconds;

  std::atomic<bool> never_connects = false;
  std::atomic<bool> fails_to_connect = false;
  std::atomic<bool> fails_on_peer = false;
  std::atomic<bool> collectives_end = true;    ///< false: queued, but never done
  std::atomic<bool> collectives_start = true;  ///< false: the device never starts them
  std::atomic<bool> run_blocks = false;        ///< the caller blocks inside NCCL
  std::atomic<bool> abort_blocks = false;
  std::atomic<int> polls_in_progress = 0;  ///< number of in-progress results before success
  std::atomic<bool> is_over = false;       ///< releases everything that blocks
  /// Shared by all ranks; needed by subgroups.
  std::shared_ptr<FakeNetwork> network = std::make_shared<FakeNetwork>();

  std::atomic<int> inits = 0, launches = 0, runs = 0, aborts = 0, destroys = 0, holds = 0;
  std::atomic<int> calls_while_in_progress = 0;
  std::atomic<int> calls_at_once = 0;

  void block_until_over() const {
    for (int i = 0; i < 20'000 && !is_over; ++i) std::this_thread::sleep_for(Ms(1));
  }
};

/// NCCL simulated by a host-memory communicator, on a fiber device, whose memory is the host's.
/// Each collective is done when run() returns, unless the state says otherwise.
class FakeNccl final : public comm::NcclDriver {
 public:
  /// @param peers  null: found by unique id in the state's network
  FakeNccl(std::shared_ptr<FakeNcclState> state, std::unique_ptr<comm::Communicator> peers)
      : state_(std::move(state)), peers_(std::move(peers)) {}

  std::string version() const override { return "0.fake"; }
  std::unique_ptr<comm::NcclDriver> open_again() const override {
    return std::make_unique<FakeNccl>(state_, nullptr);
  }
  std::string make_unique_id() override { return state_->network->make_id(); }
  comm::NcclStatus init(std::string_view id, int rank, int world_size) override {
    const Call call(*this);
    ++state_->inits;
    if (id.size() != 128 || id[1] != 'x') return failed("bad id");
    if (!peers_) peers_ = state_->network->join(id, rank, world_size);
    if (state_->fails_to_connect) return failed("no such device");
    if (state_->never_connects) return {.state = comm::NcclStatus::State::InProgress};
    return begin();
  }
  comm::NcclStatus status() override {
    const Call call(*this, true);
    if (state_->fails_on_peer) {
      return {.state = comm::NcclStatus::State::Failed, .remote = true, .text = "NCCL: peer gone"};
    }
    if (state_->never_connects) return {.state = comm::NcclStatus::State::InProgress};
    if (left_ > 0) --left_;
    return left_ > 0 ? comm::NcclStatus{.state = comm::NcclStatus::State::InProgress}
                     : comm::NcclStatus{};
  }
  comm::NcclStatus run(std::span<const comm::Collective> group) override {
    const Call call(*this);
    ++state_->launches;
    state_->runs += static_cast<int>(group.size());
    if (state_->run_blocks) state_->block_until_over();
    const bool ends = state_->collectives_end && state_->collectives_start;
    done_now_ = ends;
    try {
      for (const comm::Collective& c : group) {
        if (ends) play(c);
      }
    } catch (const CommError&) {  // a peer is gone: NCCL waits for it
      done_now_ = false;
    }
    return begin();
  }
  comm::NcclStatus finalize() override {
    const Call call(*this);
    return begin();
  }
  void destroy() noexcept override { ++state_->destroys; }
  void abort() noexcept override {
    ++state_->aborts;
    if (state_->abort_blocks) state_->block_until_over();
    aborted_ = true;
  }

  void wait_for_compute() override {}
  void hold_back_compute(const comm::NcclEvent&) override { ++state_->holds; }
  std::unique_ptr<comm::NcclEvent> record() override {
    // A collective records two events; the first marks its start.
    is_start_ = !is_start_;
    const bool done = is_start_ ? state_->collectives_start.load() : done_now_.load();
    return std::make_unique<Event>(*this, done);
  }
  void copy_to_device(void* to, const void* from, std::size_t n) override {
    std::memcpy(to, from, n);
  }
  void copy_to_host(void* to, const void* from, std::size_t n) override {
    std::memcpy(to, from, n);
  }

 private:
  class Event final : public comm::NcclEvent {
   public:
    Event(const FakeNccl& driver, bool done) : driver_(driver), done_(done) {}
    bool is_done() const override { return done_ || driver_.aborted_; }

   private:
    const FakeNccl& driver_;
    const bool done_;
  };

  // Detects calls that violate NCCL's rules.
  class Call {
   public:
    explicit Call(FakeNccl& driver, bool is_status = false) : driver_(driver) {
      if (driver_.inside_.exchange(true)) ++driver_.state_->calls_at_once;
      if (!is_status && driver_.left_ > 0) ++driver_.state_->calls_while_in_progress;
    }
    ~Call() { driver_.inside_ = false; }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    FakeNccl& driver_;
  };

  static comm::NcclStatus failed(const char* why) {
    return {.state = comm::NcclStatus::State::Failed, .text = why};
  }
  comm::NcclStatus begin() {
    left_ = state_->polls_in_progress.load();
    return left_ > 0 ? comm::NcclStatus{.state = comm::NcclStatus::State::InProgress}
                     : comm::NcclStatus{};
  }
  void play(const comm::Collective& c) {
    using comm::CollectiveKind;
    const auto view = [&](const void* data, DType dtype, std::int64_t count) {
      return dense_view(const_cast<void*>(data), dtype, {count});
    };
    const TensorView out = view(c.out, c.dtype, c.count);
    switch (c.kind) {
      case CollectiveKind::AllGather:
        return peers_->all_gather(out, {});
      case CollectiveKind::ReduceScatter:
        if (c.dtype == DType::BF16) return reduce_scatter_bf16(c);
        return peers_->reduce_scatter(view(c.in, c.dtype, c.count),
                                      view(c.out, DType::F32, c.count / peers_->world_size()), {});
      case CollectiveKind::AllReduce:
        return peers_->all_reduce(out, c.op, {});
      case CollectiveKind::Broadcast:
        return peers_->broadcast(out, c.root, {});
      case CollectiveKind::Barrier:
        throw InternalError("a barrier reached NCCL");
    }
  }

  // Rounds every sum, as NCCL does.
  void reduce_scatter_bf16(const comm::Collective& c) {
    const auto world = static_cast<std::size_t>(peers_->world_size());
    const auto rank = static_cast<std::size_t>(peers_->rank());
    const auto count = static_cast<std::size_t>(c.count), part = count / world;
    std::vector<BFloat16> all(count * world);
    std::memcpy(all.data() + rank * count, c.in, c.bytes());
    peers_->all_gather(dense_view(all.data(), DType::BF16, {c.count * peers_->world_size()}), {});
    auto* const out = static_cast<BFloat16*>(c.out);
    for (std::size_t i = 0; i < part; ++i) {
      out[i] = all[rank * part + i];
      for (std::size_t r = 1; r < world; ++r)
        out[i] = BFloat16(static_cast<float>(out[i]) +
                          static_cast<float>(all[r * count + rank * part + i]));
    }
  }

  const std::shared_ptr<FakeNcclState> state_;
  std::unique_ptr<comm::Communicator> peers_;
  std::atomic<bool> inside_ = false, aborted_ = false, done_now_ = true;
  bool is_start_ = false;
  std::atomic<int> left_ = 0;
};

}  // namespace tessera::test
