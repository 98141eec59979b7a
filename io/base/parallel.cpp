#include "io/base/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/base/thread_pool.h"

namespace tessera::io {

void parallel_for_each(std::size_t n, int threads, const std::function<void(std::size_t)>& body) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;  // guarded by mutex
  const auto work = [&] {
    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) {
      try {
        body(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        next.store(n, std::memory_order_relaxed);
      }
    }
  };
  std::vector<std::jthread> others;
  const auto wanted = std::min<std::size_t>(static_cast<std::size_t>(std::max(threads, 1)), n);
  try {
    while (others.size() + 1 < wanted) others.emplace_back(work);
  } catch (const std::system_error&) {
    // No more threads can be started; the existing ones do all the work.
  }
  work();
  others.clear();  // joins
  if (error) std::rethrow_exception(error);
}

}  // namespace tessera::io
