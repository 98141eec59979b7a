#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace tessera {

/// A fixed set of threads that share loops. A loop is cut into a few chunks per thread; idle
/// threads steal chunks, so that a delayed thread delays the loop by one chunk. Chunks depend only
/// on the loop's length, grain and number of threads, so results repeat exactly. One caller at a
/// time; a nested parallel_for runs serially.
class ThreadPool {
 public:
  static constexpr int kChunksPerThread = 4;

  /// @param threads  at least 1, the calling thread included
  /// @throws IoError if the system cannot start them
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  /// Calls body(begin, end) on disjoint ranges that cover [0, n), each of at least `grain`
  /// elements. Returns when all are done. The first exception is rethrown.
  template <typename Body>
  void parallel_for(std::int64_t n, std::int64_t grain, Body&& body) {
    // One compiled copy of the body for any number of threads, because differently optimized copies
    // may reduce in different orders.
    using Plain = std::remove_reference_t<Body>;
    run(n, grain, const_cast<void*>(static_cast<const void*>(&body)),
        [](void* f, std::int64_t begin, std::int64_t end) {
          (*static_cast<Plain*>(f))(begin, end);
        });
  }

 private:
  using Call = void (*)(void*, std::int64_t, std::int64_t);
  void run(std::int64_t n, std::int64_t grain, void* body, Call call);

  class Workers;
  std::unique_ptr<Workers> workers_;
};

}  // namespace tessera
