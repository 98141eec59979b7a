#include "train/metrics.h"

#include <doctest/doctest.h>
#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/base/error.h"
#include "tests/support/check_throws.h"
#include "tests/support/file_limit.h"
#include "tests/support/temp_dir.h"

using namespace tessera;
using namespace tessera::train;
using nlohmann::json;
using tessera::test::TempDir;

namespace {

train::StepMetrics at(std::int64_t step) {
  return {.step = step,
          .loss = 4.0 - static_cast<double>(step) / 10,
          .grad_norm = 1.5,
          .lr = 1e-3,
          .epoch = 0.5,
          .tokens = 768,
          .step_ms = 12.5,
          .tokens_per_s = 61440,
          .memory_bytes = 1 << 20};
}

// Without times, which differ between runs.
std::vector<json> lines(const TempDir& dir) {
  std::istringstream text(dir.read("metrics.jsonl"));
  std::vector<json> out;
  for (std::string line; std::getline(text, line);) {
    out.push_back(json::parse(line));
    if (!out.back().is_object()) continue;
    CHECK(out.back().value("time", 0.0) > 1.7e9);
    CHECK(out.back().value("elapsed_s", -1.0) >= 0);
    out.back().erase("time");
    out.back().erase("elapsed_s");
  }
  return out;
}

}  // namespace

TEST_CASE("each step is one line with the documented keys, visible at once") {
  const TempDir dir;
  train::MetricsWriter writer(dir.file("metrics.jsonl"), 0);
  writer.write_step(at(0));
  const auto first = lines(dir);
  REQUIRE(first.size() == 1);
  CHECK(first[0] == json{{"step", 0},
                         {"loss", 4.0},
                         {"grad_norm", 1.5},
                         {"lr", 1e-3},
                         {"epoch", 0.5},
                         {"tokens", 768},
                         {"step_ms", 12.5},
                         {"tokens_per_s", 61440.0},
                         {"memory_bytes", 1 << 20}});
  train::StepMetrics skipped = at(0);
  skipped.step = 1;
  skipped.loss = NAN;
  skipped.skipped = true;
  writer.write_step(skipped);
  CHECK(lines(dir).back()["skipped"] == true);
  CHECK(lines(dir).back()["loss"].is_null());
  CHECK_FALSE(lines(dir).back().contains("mfu"));
  train::StepMetrics on_gpu = at(2);
  on_gpu.mfu = 0.45;
  writer.write_step(on_gpu);
  CHECK(lines(dir).back()["mfu"] == 0.45);
  writer.write_evaluation(1, 3.5);
  CHECK(lines(dir).back() == json{{"step", 1}, {"val_loss", 3.5}});
  CHECK(writer.train_losses().size() == 3);
  CHECK(writer.val_losses().size() == 1);
  CHECK_THROWS_AS(writer.write_step(at(0)), InternalError);
}

TEST_CASE("a resumed run continues the file: one line per step, no duplicates") {
  const TempDir dir;
  const auto path = dir.file("metrics.jsonl");
  {
    train::MetricsWriter writer(path, 0);
    for (int step = 0; step < 8; ++step) {
      writer.write_step(at(step));
      if (step % 2 == 1) writer.write_evaluation(step + 1, 3.0);
    }
  }
  // The crash cut a line, two steps after the checkpoint of step 6.
  dir.write("metrics.jsonl", dir.read("metrics.jsonl") + R"({"step": 8, "lo)");

  train::MetricsWriter writer(path, 6);
  CHECK(writer.train_losses().size() == 6);
  CHECK(writer.val_losses().size() == 3);  // after 2, 4 and 6 steps
  writer.write_evaluation(6, 9.0);         // before the checkpoint: not repeated
  for (int step = 6; step < 10; ++step) writer.write_step(at(step));
  writer.write_evaluation(8, 2.0);

  std::vector<std::int64_t> steps, evaluations;
  for (const json& line : lines(dir)) {
    (line.contains("val_loss") ? evaluations : steps).push_back(line["step"]);
  }
  CHECK(steps == std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  CHECK(evaluations == std::vector<std::int64_t>{2, 4, 6, 8});
  CHECK(lines(dir).back()["val_loss"] == 2.0);
}

TEST_CASE("foreign lines are dropped, an unfinished last line is ended, null reads as NaN") {
  const TempDir dir;
  dir.write("metrics.jsonl",
            "hello\n[]\n{\"step\":\"x\"}\n{\"step\":0,\"loss\":null,\"time\":2e9,\"elapsed_s\":0}");
  train::MetricsWriter writer(dir.file("metrics.jsonl"), 1);
  REQUIRE(writer.train_losses().size() == 1);
  CHECK(std::isnan(writer.train_losses()[0].loss));
  train::StepMetrics metrics = at(1);
  metrics.grad_norm = HUGE_VAL;
  writer.write_step(metrics);
  REQUIRE(lines(dir).size() == 2);
  CHECK(lines(dir)[1]["grad_norm"].is_null());
  const train::MetricsWriter anew(dir.file("metrics.jsonl"), 0);
  CHECK(dir.read("metrics.jsonl").empty());
}

TEST_CASE("a file that cannot be opened is an I/O error with its name") {
  const TempDir dir;
  CHECK_THROWS_HOLDING(IoError, "absent/metrics.jsonl",
                       train::MetricsWriter(dir.file("absent/metrics.jsonl"), 0));
}

TEST_CASE("lines are buffered while the disk is full, and written once it is not") {
  const TempDir dir;
  train::MetricsWriter writer(dir.file("metrics.jsonl"), 0);
  writer.write_step(at(0));
  CHECK(writer.take_warning().empty());
  std::string warning, error;
  {
    const test::FileLimit full(dir.read("metrics.jsonl").size() + 20);
    writer.write_step(at(1));
    warning = writer.take_warning();
    writer.write_evaluation(2, 3.5);
    writer.write_step(at(2));
    try {
      writer.flush();
    } catch (const IoError& e) {
      error = e.what();
    }
  }
  CHECK(warning.find("metrics.jsonl: File too large") != std::string::npos);
  CHECK(error == warning);
  CHECK(writer.take_warning().empty());
  writer.write_step(at(3));
  const auto written = lines(dir);
  REQUIRE(written.size() == 5);
  CHECK(written[1]["step"] == 1);
  CHECK(written[2] == json{{"step", 2}, {"val_loss", 3.5}});
  CHECK(written[4]["step"] == 3);
  writer.flush();
}

TEST_CASE("lines beyond the buffer are lost, counted, and end nothing") {
  const TempDir dir;
  train::MetricsWriter writer(dir.file("metrics.jsonl"), 0);
  std::int64_t step = 0;
  {
    const test::FileLimit full(0);
    while (step < 20'000) writer.write_step(at(step++));
  }
  writer.write_step(at(step));
  CHECK_THROWS_HOLDING(IoError, "metrics.jsonl was full; ", writer.flush());
  const auto written = lines(dir);
  CHECK(written.size() > 1000);
  CHECK(written.size() < 20'000);
  CHECK(written[written.size() - 2]["step"] == std::ssize(written) - 2);  // the oldest stay
  CHECK(written.back()["step"] == step);
}
