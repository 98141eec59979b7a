#pragma once

#include <doctest/doctest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/control/memory_store.h"
#include "comm/host_staged.h"
#include "comm/shared_memory.h"
#include "comm/single.h"
#include "comm/tcp.h"
#include "comm/threads.h"
#include "core/base/context.h"
#include "core/base/device_backend.h"
#include "core/base/storage.h"
#include "tests/support/machine_time.h"
#include "tests/support/on_threads.h"
#include "tests/support/paths.h"
#include "tests/support/text.h"

namespace tessera::test {

using namespace std::chrono_literals;

struct RankResult {
  std::string error;
  CommFailure failure{};
  std::vector<int> culprits;
};

/// Device of this thread's Mirrors; null: host memory.
inline std::shared_ptr<Context>& device_context() {
  thread_local std::shared_ptr<Context> context;
  return context;
}

/// Runs body(rank) on one thread per rank; returns the exceptions.
inline std::vector<RankResult> run_ranks(int world_size, const std::function<void(int)>& body) {
  std::vector<RankResult> results(static_cast<std::size_t>(world_size));
  on_threads(world_size, [&](int rank) {
    RankResult& result = results[static_cast<std::size_t>(rank)];
    try {
      body(rank);
    } catch (const CommError& error) {
      result = {error.what(), error.failure(), error.culprits()};
    } catch (const std::exception& error) {
      result.error = std::string("not a CommError: ") + error.what();
    }
    device_context().reset();
  });
  return results;
}

inline std::shared_ptr<Context> fiber_context() {
  return Context::create({.device = {DeviceType::CUDA, 0}, .plugin = fiber_plugin()});
}

template <typename T>
TensorView view_of(std::vector<T>& values) {
  return dense_view(values.data(), dtype_of<T>(), {static_cast<std::int64_t>(values.size())});
}

/// A vector as a collective's argument: copied to device_context()'s memory, or used in place if
/// there is none.
template <typename T>
class Mirror {
 public:
  explicit Mirror(std::vector<T>& values)
      : values_(values), view_(view_of(values)), context_(device_context()) {
    if (!context_) return;
    storage_ = Storage::allocate(context_, view_.bytes(), MemoryCategory::Data, "test");
    view_.data = storage_->data();
    view_.device = context_->device();
    context_->backend().copy_from_host(view_.data, values_.data(), view_.bytes());
  }
  const TensorView& view() const { return view_; }
  void fetch() {
    if (context_) context_->backend().copy_to_host(values_.data(), view_.data, view_.bytes());
  }

 private:
  std::vector<T>& values_;
  TensorView view_;
  std::shared_ptr<Context> context_;
  std::shared_ptr<Storage> storage_;
};

/// Joins over shared memory ("shm") or TCP, as processes do. @param processes  see ConnectOptions
inline std::unique_ptr<comm::Communicator> join_over(const std::string& backend,
                                                     const std::shared_ptr<comm::Store>& store,
                                                     int rank, int world,
                                                     const comm::CommunicatorOptions& options,
                                                     std::vector<std::string> processes = {}) {
  const auto fill = [&](comm::ConnectOptions& to) {
    to.communicator = options;
    to.connect_timeout = 10s;
    to.processes = std::move(processes);
  };
  if (backend == "shm") {
    comm::SharedMemoryOptions shared;
    fill(shared);
    auto segment = comm::connect_shared_segment(*store, rank, world, shared);
    return comm::make_shared_memory_communicator(store, rank, world, std::move(segment), shared);
  }
  comm::TcpOptions tcp;
  fill(tcp);
  return comm::make_tcp_communicator(store, rank, world, tcp);
}

/// Ranks within the test process. Backends: "threads", "tcp", "single", "shm" (each rank maps the
/// segment itself, as processes do) and "shm, one mapping" (the thread sanitizer sees all ranks at
/// the same addresses). With ", staged" appended, each rank's thread uses a fiber device from then
/// on.
class Group {
 public:
  Group(const std::string& backend, int world_size)
      : staged_(backend.ends_with(kStaged)),
        backend_(backend.substr(0, backend.size() - (staged_ ? kStaged.size() : 0))),
        world_(world_size) {
    if (backend_ == "threads") threads_ = std::make_shared<comm::ThreadGroup>(world_size);
    store_ = std::make_shared<comm::MemoryStore>();
    if (backend_ == "shm, one mapping") {
      segment_ = comm::SharedSegment::create(comm::shared_memory_bytes(world_size, {}));
      for (int rank = 0; rank < world_size; ++rank) {
        held_.push_back(segment_->open_again());
        held_.back()->hold(rank);  // otherwise the first rank finds the others gone
      }
    }
  }
  /// Called by each rank on its thread.
  std::unique_ptr<comm::Communicator> join(int rank,
                                           const comm::CommunicatorOptions& options = {}) const {
    if (!staged_) return join_on_host(rank, options);
    device_context() = fiber_context();
    return comm::make_host_staged_communicator(join_on_host(rank, options), device_context());
  }

 private:
  static constexpr std::string_view kStaged = ", staged";

  std::unique_ptr<comm::Communicator> join_on_host(int rank,
                                                   const comm::CommunicatorOptions& options) const {
    if (backend_ == "threads") return comm::make_threads_communicator(threads_, rank, options);
    if (backend_ == "single" || world_ == 1) return comm::make_single_communicator();
    if (segment_) {
      auto segment = std::exchange(held_.at(static_cast<std::size_t>(rank)), std::nullopt);
      comm::SharedMemoryOptions shared;
      shared.communicator = options;
      return comm::make_shared_memory_communicator(store_, rank, world_, std::move(segment.value()),
                                                   shared);
    }
    return join_over(backend_, store_, rank, world_, options);
  }

  bool staged_;
  std::string backend_;
  int world_;
  std::optional<comm::SharedSegment> segment_;
  mutable std::vector<std::optional<comm::SharedSegment>> held_;  // by ranks yet to join
  std::shared_ptr<comm::ThreadGroup> threads_;
  std::shared_ptr<comm::MemoryStore> store_;
};

/// An expected error with MOST replaced by "<world - 1> of <world>".
inline std::string all_but_one(std::string text, int world) {
  const std::string from = "MOST", to = fmt::format("{} of {}", world - 1, world);
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

}  // namespace tessera::test
