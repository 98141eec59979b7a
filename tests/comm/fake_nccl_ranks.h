#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "comm/nccl.h"
#include "comm/threads.h"
#include "tests/comm/fake_nccl.h"
#include "tests/comm/ranks.h"
#include "tests/support/multiprocess.h"

namespace tessera::test {

class HookedStore final : public comm::Store {
 public:
  explicit HookedStore(std::function<void()> hook) : hook_(std::move(hook)) {}
  void set(const std::string& key, std::string_view value) override {
    hook_();
    store_.set(key, value);
  }
  std::string get(const std::string& key, std::chrono::milliseconds deadline) override {
    hook_();
    return store_.get(key, deadline);
  }
  bool has(const std::string& key) override {
    hook_();
    return store_.has(key);
  }
  void leave(const std::string& name, int readers) override {
    hook_();
    store_.leave(name, readers);
  }
  std::size_t size() const { return store_.size(); }

 private:
  const std::function<void()> hook_;
  comm::MemoryStore store_;
};

/// Ranks over fake NCCL, with one fault state each.
class FakeRanks {
 public:
  explicit FakeRanks(int world) : group(std::make_shared<comm::ThreadGroup>(world)) {
    const auto network = std::make_shared<FakeNetwork>();
    for (int r = 0; r < world; ++r) {
      states.push_back(std::make_shared<FakeNcclState>());
      states.back()->network = network;
    }
  }
  ~FakeRanks() {
    for (const auto& state : states) state->is_over = true;
  }
  FakeRanks(const FakeRanks&) = delete;
  FakeRanks& operator=(const FakeRanks&) = delete;

  std::unique_ptr<comm::Communicator> join(int rank) {
    device_context() = fiber_context();
    comm::NcclOptions options;
    options.communicator = {timeout, device_context()};
    options.connect_timeout = connect_timeout;
    options.poll = 5ms;
    options.store_poll = store_poll;
    options.answer_time = kSlack > 1 ? 4s : 2s;
    options.abort_time = 1s;
    options.grace = 1s;
    options.on_stuck = [this](const CommError& error) {
      const std::lock_guard lock(mutex);
      stuck.emplace_back(error.what());
    };
    return comm::make_nccl_communicator(
        std::make_unique<FakeNccl>(state(rank), comm::make_threads_communicator(group, rank)),
        store, rank, group->world_size(), options);
  }
  const std::shared_ptr<FakeNcclState>& state(int rank) const {
    return states[static_cast<std::size_t>(rank)];
  }

  std::chrono::milliseconds timeout{300}, connect_timeout{10'000}, store_poll{10};
  std::shared_ptr<comm::ThreadGroup> group;
  std::shared_ptr<comm::Store> store = std::make_shared<comm::MemoryStore>();
  std::vector<std::shared_ptr<FakeNcclState>> states;
  std::mutex mutex;
  std::vector<std::string> stuck;  // arguments of on_stuck()
};

/// Calls check() until it throws, like a busy rank.
inline void stay_until_failure(comm::Communicator& c) {
  for (int i = 0; i < 2000; ++i) {
    c.check();
    std::this_thread::sleep_for(2ms);
  }
}

/// Returns once all ranks have joined.
inline void meet(comm::Communicator& c) { c.barrier({.label = "meet", .deadline = 10s}); }

}  // namespace tessera::test
