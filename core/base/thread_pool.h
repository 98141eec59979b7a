#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace tessera {

/// A fixed set of threads that share loops. A loop is cut into a few chunks for each thread; a
/// thread that has done its own takes those of others, so that one that the system holds up delays
/// the loop by the chunk that it is at. The cuts depend on the loop's length, its grain and the
/// number of threads alone, so results repeat exactly. One caller at a time; loops don't nest: a
/// parallel_for inside a body runs serially.
class ThreadPool {
 public:
  static constexpr int kChunksPerThread = 4;

  /// @param threads  at least 1; the calling thread is one of them
  /// @throws IoError if the system does not give so many
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  /// Calls body(begin, end) on disjoint ranges that cover [0, n), each of at least `grain`
  /// elements. Returns when all are done. The first exception is rethrown.
  template <typename Body>
  void parallel_for(std::int64_t n, std::int64_t grain, Body&& body) {
    // One compiled copy of the body for every number of threads: copies that are optimized apart
    // may order a reduction apart.
    using Plain = std::remove_reference_t<Body>;
    run(n, grain, const_cast<void*>(static_cast<const void*>(&body)),
        [](void* f, std::int64_t begin, std::int64_t end) {
          (*static_cast<Plain*>(f))(begin, end);
        });
  }

 private:
  using Call = void (*)(void*, std::int64_t, std::int64_t);
  struct Job {
    void* body = nullptr;
    Call call = nullptr;
    std::int64_t n = 0;
    std::int64_t chunks = 0;
  };
  /// Chunks of the loop under way that one thread begins with. Others take what it leaves.
  struct alignas(64) Share {
    /// The loop's number in the upper half, chunks left in the lower.
    std::atomic<std::uint64_t> ticket{0};
    std::int64_t first = 0;  ///< of its chunks
  };
  void run(std::int64_t n, std::int64_t grain, void* body, Call call);
  void work(int index);
  void end_workers();
  void run_chunks(int index);
  void run_chunk(std::int64_t chunk);

  Job job_;
  std::vector<Share> shares_;
  bool busy_ = false;  // only touched by the calling thread
  std::uint64_t loops_ = 0;
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<std::int64_t> unfinished_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::exception_ptr error_;
  std::vector<std::thread> workers_;
};

}  // namespace tessera
