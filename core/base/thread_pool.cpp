#include "core/base/thread_pool.h"

#include <algorithm>
#include <system_error>

#include "core/base/error.h"

namespace tessera {
namespace {

// How often a waiting thread looks before it sleeps: long enough to bridge the gap between two
// operations of a step (microseconds), short enough to leave the core to others in between.
constexpr int kSpins = 4000;

constexpr std::uint64_t kChunksMask = 0xffffffffU;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads)
    : shares_(threads >= 1 ? static_cast<std::size_t>(threads) : 0) {
  require(threads >= 1 && threads <= 4096, "number of threads must be in 1..4096, got {}", threads);
  workers_.reserve(static_cast<std::size_t>(threads - 1));
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (const std::system_error& error) {
    const std::size_t started = workers_.size();
    end_workers();
    throw IoError(
        "cannot start thread {} of {}: {}; ask for fewer (train.threads), or raise the limit of "
        "processes or memory (ulimit -u, ulimit -v)",
        started + 2, threads, error.what());
  } catch (...) {
    end_workers();
    throw;
  }
}

ThreadPool::~ThreadPool() { end_workers(); }

void ThreadPool::end_workers() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    ++generation_;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::run_chunk(std::int64_t chunk) {
  const std::int64_t begin =
      job_.n / job_.chunks * chunk + job_.n % job_.chunks * chunk / job_.chunks;
  const std::int64_t next = chunk + 1;
  const std::int64_t end = job_.n / job_.chunks * next + job_.n % job_.chunks * next / job_.chunks;
  try {
    job_.call(job_.body, begin, end);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
  unfinished_.fetch_sub(1, std::memory_order_release);
}

// A ticket is taken only while its loop is unfinished, so job_ stands until the chunk is done.
void ThreadPool::run_chunks(int index) {
  for (int i = 0; i < size(); ++i) {
    Share& share = shares_[static_cast<std::size_t>((index + i) % size())];
    std::uint64_t ticket = share.ticket.load(std::memory_order_acquire);
    while ((ticket & kChunksMask) != 0) {
      if (!share.ticket.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel,
                                              std::memory_order_acquire))
        continue;
      run_chunk(share.first + static_cast<std::int64_t>(ticket & kChunksMask) - 1);
      ticket = share.ticket.load(std::memory_order_acquire);
    }
  }
}

void ThreadPool::run(std::int64_t n, std::int64_t grain, void* body, Call call) {
  if (n <= 0) return;
  const std::int64_t most = n / std::max<std::int64_t>(grain, 1);
  if (workers_.empty() || most <= 1 || busy_) {
    call(body, 0, n);
    return;
  }
  busy_ = true;
  const std::int64_t chunks = std::min<std::int64_t>(most, std::int64_t{size()} * kChunksPerThread);
  job_ = {body, call, n, chunks};
  unfinished_.store(chunks, std::memory_order_relaxed);
  ++loops_;
  std::int64_t first = 0;
  for (int i = 0; i < size(); ++i) {
    Share& share = shares_[static_cast<std::size_t>(i)];
    const std::int64_t next = chunks * (i + 1) / size();
    share.first = first;
    share.ticket.store(loops_ << 32 | static_cast<std::uint64_t>(next - first),
                       std::memory_order_release);
    first = next;
  }
  {
    const std::lock_guard lock(mutex_);
    generation_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  run_chunks(0);
  for (int spin = 0; unfinished_.load(std::memory_order_acquire) != 0; ++spin) {
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
    for (int spin = 0; generation_.load(std::memory_order_acquire) == seen && spin < kSpins; ++spin)
      pause();
    if (generation_.load(std::memory_order_acquire) == seen) {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
    }
    seen = generation_.load(std::memory_order_acquire);
    if (stop_) return;
    run_chunks(index);
  }
}

}  // namespace tessera
