#include "tools/tessera/report/byte_progress.h"

#include <doctest/doctest.h>

#include <sstream>
#include <string>

using namespace tessera::tools;

namespace {

constexpr ConsoleStyle kTerminal{.live = true, .color = false, .width = 80};
constexpr std::int64_t kMiB = 1 << 20;

/// Output for updates at given times in seconds.
struct Shown {
  ByteProgress::Clock::time_point start = ByteProgress::Clock::now();
  std::ostringstream out;
  ByteProgress progress;
  explicit Shown(const ConsoleStyle& style) : progress("copied", out, style, start) {}

  void at(double seconds, std::int64_t done_mib, std::int64_t total_mib,
          std::int64_t found_mib = 0) {
    progress.update(done_mib * kMiB, total_mib * kMiB, found_mib * kMiB,
                    start + std::chrono::microseconds(static_cast<std::int64_t>(seconds * 1e6)));
  }
  std::string take() {
    std::string text = out.str();
    out.str("");
    return text;
  }
};

}  // namespace

TEST_CASE("bytes on a terminal: one line with rate and time left, ended at completion") {
  Shown shown(kTerminal);
  shown.at(0.4, 4, 100);  // may be finished soon
  CHECK(shown.take().empty());
  shown.at(2, 10, 100);
  CHECK(shown.take() == "\r 10%  10.0 MiB of 100.0 MiB copied, 5.00 MiB/s, 18.0 s left\x1b[K");
  shown.at(2.05, 11, 100);
  CHECK(shown.take().empty());
  shown.at(4, 40, 100);
  CHECK(shown.take() == "\r 40%  40.0 MiB of 100.0 MiB copied, 10.0 MiB/s, 6.0 s left\x1b[K");
  shown.at(4.01, 100, 100);  // the last one is always shown
  CHECK(shown.take() == "\r100%  100.0 MiB of 100.0 MiB copied, 24.9 MiB/s\x1b[K\n");
  shown.progress.stop();
  CHECK(shown.take().empty());
}

TEST_CASE("bytes elsewhere: a line every quarter, and every half minute") {
  Shown shown({});
  shown.at(0.1, 30, 100);
  CHECK(shown.take().empty());
  shown.at(2, 30, 100);
  CHECK(shown.take() == " 30%  30.0 MiB of 100.0 MiB copied, 15.0 MiB/s, 4.7 s left\n");
  shown.at(3, 49, 100);
  CHECK(shown.take().empty());
  shown.at(31.9, 49, 100);
  CHECK(shown.take().empty());
  shown.at(32.1, 49, 100);
  CHECK(shown.take().starts_with(" 49%"));
  shown.at(40, 100, 100);
  CHECK(shown.take() == "100%  100.0 MiB of 100.0 MiB copied, 2.50 MiB/s\n");
  shown.progress.stop();
  CHECK(shown.take().empty());
}

TEST_CASE("reused bytes do not count for the rate") {
  Shown shown(kTerminal);
  shown.at(1, 50, 100, 50);  // nothing was copied yet: no estimate
  CHECK(shown.take() == "\r 50%  50.0 MiB of 100.0 MiB copied, 0 B/s, 50.0 MiB already done\x1b[K");
  shown.at(2, 60, 100, 50);
  CHECK(
      shown.take() ==
      "\r 60%  60.0 MiB of 100.0 MiB copied, 5.00 MiB/s, 50.0 MiB already done, 8.0 s left\x1b[K");
}

TEST_CASE("very short work shows nothing, and interrupted work keeps its line") {
  Shown fast(kTerminal);
  fast.at(0.3, 100, 100);
  fast.progress.stop();
  CHECK(fast.take().empty());
  Shown empty({});
  empty.at(1, 0, 0);
  CHECK(empty.take() == "100%  0 B of 0 B copied, 0 B/s\n");
  Shown stopped(kTerminal);
  stopped.at(1, 10, 100);
  stopped.take();
  stopped.progress.stop();
  CHECK(stopped.take() == "\n");
  stopped.progress.stop();
  CHECK(stopped.take().empty());
}
