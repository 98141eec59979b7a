#include <doctest/doctest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "core/base/thread_pool.h"

namespace tessera {
namespace {

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TESSERA_IS_SANITIZED  // sanitizers reserve address space
#endif
#endif
#if !defined(TESSERA_IS_SANITIZED) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
// Runs in a child process. @return 0 if some threads started, one did not, and the error says so
int run_out_of_threads() {
  constexpr std::size_t kStack = std::size_t{64} << 20;
  pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  ::pthread_attr_setstacksize(&attributes, kStack);
  if (::pthread_setattr_default_np(&attributes) != 0) return 3;
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t most = pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) + 3 * kStack;
  const rlimit limit{most, most};
  if (::setrlimit(RLIMIT_AS, &limit) != 0) return 4;
  try {
    const ThreadPool pool(64);
    return 5;
  } catch (const IoError& error) {
    const std::string text = error.what();
    const bool some = text.find("cannot start thread 1 of") == text.npos &&
                      text.find("cannot start thread 2 of") == text.npos;
    return some && text.find(" of 64: ") != text.npos && text.find("ulimit") != text.npos ? 0 : 6;
  }
}

TEST_CASE("a failed thread start is an error that says how many started") {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(run_out_of_threads());
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}
#endif

TEST_CASE("a loop covers every index once, in chunks of at least the grain") {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    CHECK(pool.size() == threads);
    for (const std::int64_t n : {0, 1, 2, 7, 100, 1001}) {
      for (const std::int64_t grain : {0, 1, 10, 5000}) {
        CAPTURE(threads);
        CAPTURE(n);
        CAPTURE(grain);
        std::vector<int> visits(static_cast<std::size_t>(n), 0);
        std::atomic<int> parts{0}, short_parts{0};
        pool.parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
          ++parts;
          if (end - begin < std::min(grain, n)) ++short_parts;
          for (std::int64_t i = begin; i < end; ++i) ++visits[static_cast<std::size_t>(i)];
        });
        CHECK(visits == std::vector<int>(static_cast<std::size_t>(n), 1));
        CHECK(parts <= threads * ThreadPool::kChunksPerThread);
        CHECK(short_parts == 0);
        CHECK((parts == 0) == (n == 0));
      }
    }
  }
}

TEST_CASE("many short loops in a row give correct results") {
  ThreadPool pool(3);
  std::vector<std::int64_t> values(64);
  for (int round = 0; round < 2000; ++round) {
    pool.parallel_for(64, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) values[static_cast<std::size_t>(i)] += i;
    });
  }
  CHECK(std::accumulate(values.begin(), values.end(), std::int64_t{0}) == 2000 * (63 * 64 / 2));
}

TEST_CASE("other threads take over the chunks of a delayed one") {
  ThreadPool pool(2);
  const auto caller = std::this_thread::get_id();
  std::atomic<bool> held{false};
  std::atomic<int> others{0};
  const auto begin = std::chrono::steady_clock::now();
  pool.parallel_for(8, 1, [&](std::int64_t, std::int64_t) {
    const bool worker = std::this_thread::get_id() != caller;
    if (worker && !held.exchange(true)) {
      // Blocks until the caller has done all other chunks.
      while (others != 7 && std::chrono::steady_clock::now() - begin < std::chrono::seconds(20))
        std::this_thread::yield();
    } else {
      while (!held && std::chrono::steady_clock::now() - begin < std::chrono::seconds(20))
        std::this_thread::yield();
      ++others;
    }
  });
  CHECK(others == 7);
}

TEST_CASE("a nested loop runs serially") {
  ThreadPool pool(2);
  std::atomic<std::int64_t> sum{0};
  pool.parallel_for(8, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      pool.parallel_for(10, 1, [&](std::int64_t first, std::int64_t last) {
        CHECK(first == 0);
        CHECK(last == 10);
        sum += last - first;
      });
    }
  });
  CHECK(sum == 80);
}

TEST_CASE("an exception in any chunk reaches the caller, and the pool stays usable") {
  ThreadPool pool(3);
  for (const std::int64_t bad : {0, 1, 2}) {
    const auto run = [&] {
      pool.parallel_for(3, 1, [&](std::int64_t begin, std::int64_t) {
        if (begin == bad) throw InvalidArgument("part {}", begin);
      });
    };
    CHECK_THROWS_WITH_AS(run(), fmt::format("part {}", bad).c_str(), InvalidArgument);
  }
  std::atomic<int> parts{0};
  pool.parallel_for(3, 1, [&](std::int64_t, std::int64_t) { ++parts; });
  CHECK(parts == 3);
}

TEST_CASE("a pool sleeps between loops and wakes up again") {
  ThreadPool pool(2);
  for (int round = 0; round < 3; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // longer than it spins
    std::atomic<std::int64_t> sum{0};
    pool.parallel_for(100, 1, [&](std::int64_t begin, std::int64_t end) { sum += end - begin; });
    CHECK(sum == 100);
  }
}

TEST_CASE("an invalid number of threads is refused") {
  CHECK_THROWS_WITH_AS(ThreadPool(0), "number of threads must be in 1..4096, got 0",
                       InvalidArgument);
  CHECK_THROWS_AS(ThreadPool(-1), InvalidArgument);
  CHECK_THROWS_AS(ThreadPool(5000), InvalidArgument);
}

}  // namespace
}  // namespace tessera
