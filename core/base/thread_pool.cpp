#include "core/base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/error.h"

namespace tessera {
namespace {

// Spins before a waiting thread sleeps. They bridge the microseconds between two operations.
constexpr int kSpins = 4000;

constexpr std::uint64_t kChunksMask = 0xffffffffU;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

class ThreadPool::Workers {
 public:
  explicit Workers(int threads);
  ~Workers() { end(); }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int size() const { return static_cast<int>(threads_.size()) + 1; }
  void run(std::int64_t n, std::int64_t grain, void* body, Call call);

 private:
  struct Job {
    void* body = nullptr;
    Call call = nullptr;
    std::int64_t n = 0;
    std::int64_t chunks = 0;
  };
  /// Chunks of the current loop that one thread starts with; idle threads steal the rest.
  struct alignas(64) Share {
    /// Upper half: number of the loop. Lower half: chunks left.
    std::atomic<std::uint64_t> ticket{0};
    std::int64_t first = 0;  ///< first chunk
  };
  void work(int index);
  void end();
  void run_chunks(int index);
  void run_chunk(std::int64_t chunk);

  Job job_;
  std::vector<Share> shares_;
  bool busy_ = false;  // used by the calling thread only
  std::uint64_t loops_ = 0;
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<std::int64_t> unfinished_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;
};

ThreadPool::Workers::Workers(int threads)
    : shares_(threads >= 1 ? static_cast<std::size_t>(threads) : 0) {
  require(threads >= 1 && threads <= 4096, "number of threads must be in 1..4096, got {}", threads);
  threads_.reserve(static_cast<std::size_t>(threads - 1));
  try {
    for (int i = 1; i < threads; ++i) threads_.emplace_back([this, i] { work(i); });
  } catch (const std::system_error& error) {
    const std::size_t started = threads_.size();
    end();
    throw IoError(
        "cannot start thread {} of {}: {}; ask for fewer (train.threads), or raise the limit of "
        "processes or memory (ulimit -u, ulimit -v)",
        started + 2, threads, error.what());
  } catch (...) {
    end();
    throw;
  }
}

void ThreadPool::Workers::end() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    ++generation_;
  }
  wake_.notify_all();
  for (auto& worker : threads_) worker.join();
}

void ThreadPool::Workers::run_chunk(std::int64_t chunk) {
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

// Chunks are claimed only while their loop is unfinished, so job_ stays valid until they are done.
void ThreadPool::Workers::run_chunks(int index) {
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

void ThreadPool::Workers::run(std::int64_t n, std::int64_t grain, void* body, Call call) {
  if (n <= 0) return;
  const std::int64_t most = n / std::max<std::int64_t>(grain, 1);
  if (threads_.empty() || most <= 1 || busy_) {
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

void ThreadPool::Workers::work(int index) {
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

ThreadPool::ThreadPool(int threads) : workers_(std::make_unique<Workers>(threads)) {}
ThreadPool::~ThreadPool() = default;
int ThreadPool::size() const { return workers_->size(); }
void ThreadPool::run(std::int64_t n, std::int64_t grain, void* body, Call call) {
  workers_->run(n, grain, body, call);
}

}  // namespace tessera
