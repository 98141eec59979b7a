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

/// A fixed set of threads that share loops. The split of a loop depends on its length and the
/// number of threads alone, so results repeat exactly. One caller at a time; loops don't nest:
/// a parallel_for inside a body runs serially.
class ThreadPool {
 public:
  /// @param threads  at least 1; the calling thread is one of them
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  /// Calls body(begin, end) on disjoint ranges that cover [0, n), each of at least `grain`
  /// elements (but the last). Returns when all are done. The first exception is rethrown.
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
    std::int64_t per_thread = 0;
  };
  void run(std::int64_t n, std::int64_t grain, void* body, Call call);
  void work(int index);
  void run_part(const Job& job, int index);

  Job job_;
  bool busy_ = false;  // only touched by the calling thread
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<int> pending_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::exception_ptr error_;
  std::vector<std::thread> workers_;
};

}  // namespace tessera
