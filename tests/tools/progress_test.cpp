#include "tools/tessera/report/progress.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <sstream>
#include <streambuf>
#include <string>
#include <vector>

using namespace tessera::tools;

namespace {

tessera::train::StepMetrics at(std::int64_t step) {
  return {.step = step,
          .loss = 3.25,
          .grad_norm = 1.5,
          .lr = 1e-3,
          .epoch = 0.25,
          .tokens = 768,
          .step_ms = 20,
          .tokens_per_s = 38400,
          .memory_bytes = 64 << 20};
}

constexpr ConsoleStyle kTerminal{.live = true, .color = false, .width = 60};

}  // namespace

TEST_CASE("without a terminal: a plain line every log_every steps, and the last") {
  std::ostringstream out;
  {
    ProgressLine progress(out, {}, 0, 25, 10);
    for (int step = 0; step < 25; ++step) progress.update(at(step));
    progress.note("saved");
  }
  const std::string text = out.str();
  CHECK(std::count(text.begin(), text.end(), '\n') == 5);  // steps 1, 10, 20, 25, and the note
  CHECK(
      text.starts_with("step  1/25  loss 3.2500  480 ms left  38.4k tok/s  epoch 0.25  "
                       "lr 1.00e-03  grad 1.5  64.0 MiB\n"));
  CHECK(text.find("step 10/25") != std::string::npos);
  CHECK(text.find("step 25/25") != std::string::npos);
  CHECK(text.find('\r') == std::string::npos);
  CHECK(text.find('\x1b') == std::string::npos);
  CHECK(text.ends_with("saved\n"));
}

TEST_CASE("tokens per second are averaged since the previous line") {
  std::ostringstream out;
  ProgressLine progress(out, {}, 0, 100, 4);
  for (int step = 0; step < 4; ++step) {
    tessera::train::StepMetrics metrics = at(step);
    metrics.step_ms = step == 3 ? 10 : 125;
    progress.update(metrics);
  }
  CHECK(out.str().find("6.14k tok/s") != std::string::npos);  // step 0: 768 in 125 ms
  CHECK(out.str().find("8.86k tok/s") != std::string::npos);  // steps 1 to 3: 2304 in 260 ms
}

TEST_CASE("MFU is of the same steps as the rate, where it is known") {
  std::ostringstream out;
  ProgressLine progress(out, {}, 0, 100, 4);
  for (int step = 0; step < 4; ++step) {
    tessera::train::StepMetrics metrics = at(step);
    metrics.step_ms = step == 3 ? 10 : 20;
    metrics.tokens_per_s = 768e3 / metrics.step_ms;
    metrics.mfu = metrics.tokens_per_s * 1e-5;
    progress.update(metrics);
  }
  CHECK(out.str().find("38.4k tok/s  mfu 38.4%  epoch") != std::string::npos);
  CHECK(out.str().find("46.1k tok/s  mfu 46.1%  epoch") != std::string::npos);  // 2304 in 50 ms
}

TEST_CASE("a line is written at once, so that no other output splits it") {
  struct Pieces final : std::streambuf {
    std::vector<std::string> all;
    std::streamsize xsputn(const char* text, std::streamsize n) override {
      all.emplace_back(text, static_cast<std::size_t>(n));
      return n;
    }
    int_type overflow(int_type c) override {
      all.emplace_back(1, static_cast<char>(c));
      return c;
    }
  } pieces;
  std::ostream out(&pieces);
  ProgressLine progress(out, {}, 0, 25, 10);
  progress.update(at(0));
  progress.note("saved");
  REQUIRE(pieces.all.size() == 2);
  CHECK(pieces.all[0].ends_with("MiB\n"));
  CHECK(pieces.all[1] == "saved\n");
}

TEST_CASE("on a terminal: one line, redrawn and never wider than the screen") {
  std::ostringstream out;
  ProgressLine progress(out, kTerminal, 0, 100, 10);
  progress.update(at(0));
  // The parts that fit into 59 columns, including the time left.
  CHECK(out.str() == "\r\x1b[Kstep   1/100  loss 3.2500  2.0 s left  38.4k tok/s");
  progress.note("saved");
  CHECK(out.str().ends_with("\r\x1b[Ksaved\n"));
  progress.update(at(1));
  progress.finish();
  CHECK(out.str().ends_with("tok/s\n"));
  const auto size = out.str().size();
  progress.finish();
  CHECK(out.str().size() == size);
}

TEST_CASE("fast steps are drawn a few times per second, the last one always") {
  std::ostringstream out;
  ProgressLine progress(out, kTerminal, 0, 1000, 1);
  for (int step = 0; step < 1000; ++step) progress.update(at(step));
  const std::string text = out.str();
  CHECK(std::count(text.begin(), text.end(), '\r') < 200);
  CHECK(text.find("step 1000/1000") != std::string::npos);
}

TEST_CASE("a resumed run measures time from its first own step") {
  std::ostringstream out;
  ProgressLine progress(out, {}, 50, 100, 1);
  progress.update(at(50));
  CHECK(out.str().find("980 ms left") != std::string::npos);
}
