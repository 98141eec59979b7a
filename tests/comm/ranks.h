#pragma once

#include <doctest/doctest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/control/memory_store.h"
#include "comm/gloo.h"
#include "comm/shared_memory.h"
#include "comm/single.h"
#include "comm/threads.h"

namespace tessera::test {

using namespace std::chrono_literals;

/// Milliseconds since it was made.
class Stopwatch {
 public:
  std::chrono::milliseconds elapsed() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() -
                                                                 start_);
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// What a rank's body threw, if anything.
struct RankResult {
  std::string error;
  CommFailure failure{};
  std::vector<int> culprits;
};

/// Runs body(rank) on a thread for each rank; returns what each threw.
inline std::vector<RankResult> run_ranks(int world_size, const std::function<void(int)>& body) {
  std::vector<RankResult> results(static_cast<std::size_t>(world_size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      RankResult& result = results[static_cast<std::size_t>(rank)];
      try {
        body(rank);
      } catch (const CommError& error) {
        result = {error.what(), error.failure(), error.culprits()};
      } catch (const std::exception& error) {
        result.error = std::string("not a CommError: ") + error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

/// The ranks of one process that a test talks through: by backend "threads", "gloo", "single",
/// "shm" (each rank maps the segment for itself, as processes do) or "shm, one mapping" (so that
/// the thread sanitizer sees all ranks at the same addresses).
class Group {
 public:
  Group(std::string backend, int world_size) : backend_(std::move(backend)), world_(world_size) {
    if (backend_ == "threads") threads_ = std::make_shared<comm::ThreadGroup>(world_size);
    store_ = std::make_shared<comm::MemoryStore>();
    if (backend_ == "shm, one mapping") {
      segment_ =
          comm::SharedSegment::create(comm::shared_memory_bytes(world_size, shared_memory({})));
    }
  }
  /// Called by each rank on its thread.
  std::unique_ptr<comm::Communicator> join(int rank,
                                           const comm::CommunicatorOptions& options = {}) const {
    if (backend_ == "threads") return comm::make_threads_communicator(threads_, rank, options);
    if (backend_ == "single" || world_ == 1) return comm::make_single_communicator();
    if (segment_) {
      auto segment = segment_->open_again();
      segment.hold(rank);
      return comm::make_shared_memory_communicator(store_, rank, world_, std::move(segment),
                                                   shared_memory(options));
    }
    if (backend_ == "shm") {
      auto segment = comm::connect_shared_segment(*store_, rank, world_, shared_memory(options));
      return comm::make_shared_memory_communicator(store_, rank, world_, std::move(segment),
                                                   shared_memory(options));
    }
    comm::GlooOptions gloo;
    gloo.communicator = options;
    gloo.connect_timeout = 10s;
    return comm::make_gloo_communicator(store_, rank, world_, gloo);
  }

 private:
  static comm::SharedMemoryOptions shared_memory(const comm::CommunicatorOptions& options) {
    comm::SharedMemoryOptions result;
    result.communicator = options;
    result.connect_timeout = 10s;
    return result;
  }

  std::string backend_;
  int world_;
  std::optional<comm::SharedSegment> segment_;
  std::shared_ptr<comm::ThreadGroup> threads_;
  std::shared_ptr<comm::MemoryStore> store_;
};

template <typename T>
TensorView view_of(std::vector<T>& values) {
  return dense_view(values.data(), dtype_of<T>(), {static_cast<std::int64_t>(values.size())});
}

}  // namespace tessera::test
