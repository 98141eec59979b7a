#include "core/base/thread_pool.h"

#include <algorithm>

#include "core/base/error.h"

namespace tessera {
namespace {

// How often a waiting thread looks before it sleeps: long enough to bridge the gap between two
// operations of a step (microseconds), short enough to leave the core to others in between.
constexpr int kSpins = 4000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  require(threads >= 1 && threads <= 4096, "number of threads must be in 1..4096, got {}", threads);
  workers_.reserve(static_cast<std::size_t>(threads - 1));
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    ++generation_;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::run_part(const Job& job, int index) {
  const std::int64_t begin = std::min(job.n, job.per_thread * index);
  const std::int64_t end = std::min(job.n, begin + job.per_thread);
  if (begin >= end) return;
  try {
    job.call(job.body, begin, end);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void ThreadPool::run(std::int64_t n, std::int64_t grain, void* body, Call call) {
  if (n <= 0) return;
  if (workers_.empty() || n <= grain || busy_) {
    call(body, 0, n);
    return;
  }
  busy_ = true;
  const std::int64_t even = (n + size() - 1) / size();
  job_ = {body, call, n, std::max(even, std::max<std::int64_t>(grain, 1))};
  pending_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    generation_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  run_part(job_, 0);
  for (int spin = 0; pending_.load(std::memory_order_acquire) != 0; ++spin) {
    if (spin < kSpins) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
  busy_ = false;
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::work(int index) {
  std::uint64_t seen = 0;
  for (;;) {
    int spin = 0;
    while (generation_.load(std::memory_order_acquire) == seen && spin < kSpins) {
      pause();
      ++spin;
    }
    if (generation_.load(std::memory_order_acquire) == seen) {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
    }
    seen = generation_.load(std::memory_order_acquire);
    if (stop_) return;
    run_part(job_, index);
    pending_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace tessera
