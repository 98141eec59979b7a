// tessera plot on files of runs.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <string>

#include "tests/e2e/small_run.h"

using namespace tessera::test;

namespace {

void write_run(const TempDir& dir, const std::string& name, int steps) {
  std::string lines;
  for (int i = 0; i < steps; ++i)
    lines += fmt::format(
        "{{\"step\":{},\"loss\":{},\"grad_norm\":1.5,\"lr\":0.001,\"tokens\":64,\"step_ms\":2.5,"
        "\"tokens_per_s\":25600,\"memory_bytes\":1048576,\"elapsed_s\":{}}}\n",
        i, i == 5 ? "null" : fmt::format("{}", 4 - i * 1e-3), 0.0025 * (i + 1));
  lines += fmt::format("{{\"step\":{},\"val_loss\":3.5,\"elapsed_s\":3}}\n", steps);
  std::filesystem::create_directories(dir.path() / name);
  dir.write(name + "/metrics.jsonl", lines);
}

std::uint32_t big_endian(const std::string& bytes, std::size_t at) {
  std::uint32_t value = 0;
  for (std::size_t i = at; i < at + 4; ++i)
    value = value << 8 | static_cast<unsigned char>(bytes.at(i));
  return value;
}

}  // namespace

TEST_CASE("runs are plotted on the console, as SVG, and as CSV") {
  const TempDir dir;
  write_run(dir, "x/run", 300);
  write_run(dir, "y/run", 1);
  const Arguments runs = {"plot", dir.file("x/run"), dir.file("y/run"), dir.file("x/../x/run"),
                          dir.file("x/run/metrics.jsonl")};

  const CliResult console = run_to(0, runs);
  CHECK(holds(console.out, "loss (nats per token)"));
  CHECK(holds(console.out, "  x/run "));
  CHECK(holds(console.out, "speed (tokens/s)"));
  CHECK(holds(console.out, "1.00 MiB"));
  CHECK(console.err.empty());

  run_to(0, joined(runs, {"--output", dir.file("a.svg"), "--x", "tokens"}));
  const std::string svg = dir.read("a.svg");
  CHECK(svg.starts_with("<svg "));
  CHECK(svg.ends_with("</svg>\n"));
  // Loss: each step and mean of x, one point of y, and validation of both; raw and mean of x's gradient norm and speed,
  // one of y's; learning rate and memory of both.
  CHECK(count(svg, "class=\"curve") == 5 + 2 * 3 + 2 * 2);
  CHECK(count(svg, "<path") ==
        count(svg, "/>") - count(svg, "<rect") - count(svg, "<circle") + count(svg, "</path>"));
  CHECK(count(svg, "<text") == count(svg, "</text>"));

  run_to(0, joined(runs, {"-o", dir.file("a.csv"), "--key=val_loss", "--key=loss"}));
  const std::string csv = dir.read("a.csv");
  CHECK(csv.starts_with("run,step,val_loss,loss\nx/run,0,,4\n"));
  CHECK(holds(csv, "\nx/run,5,,\n"));
  CHECK(holds(csv, "\nx/run,300,3.5,\ny/run,0,,4\n"));
}

TEST_CASE("a PNG has twice the size of the SVG") {
  const TempDir dir;
  write_run(dir, "run", 40);
  const CliResult result =
      run_cli({"plot", dir.file("run"), "-o", dir.file("a.png"), "--key", "loss"});
  if (result.code == 2 && holds(result.err, "install librsvg")) {
    MESSAGE("skipped: no librsvg");
    return;
  }
  CHECK(result.code == 0);
  const std::string png = dir.read("a.png");
  REQUIRE(png.size() > 5000);
  CHECK(png.starts_with("\x89PNG\r\n\x1a\n"));
  run_to(0, {"plot", dir.file("run"), "-o", dir.file("a.svg"), "--key", "loss"});
  CHECK(holds(dir.read("a.svg"), fmt::format("viewBox=\"0 0 {} {}\"", big_endian(png, 16) / 2,
                                             big_endian(png, 20) / 2)));
}

TEST_CASE("what can't be plotted is named") {
  const TempDir dir;
  write_run(dir, "run", 3);
  const std::string run = dir.file("run");
  dir.write("run/metrics.jsonl", dir.read("run/metrics.jsonl") + "{\"step\":3,\"lo");
  const CliResult some = run_to(0, {"plot", run, dir.file("absent")});
  CHECK(holds(some.err, "the last line is incomplete"));
  CHECK(holds(
      some.err,
      "absent does not exist; name a directory given as --run.out, or a metrics.jsonl; left out"));
  CHECK(holds(run_to(3, {"plot", dir.file("absent")}).err, "does not exist"));
  CHECK(holds(run_to(2, {"plot", run, "-o", "a.pdf"}).err, "must end in .svg, .png or .csv"));
  CHECK(holds(run_to(2, {"plot", run, "--key", "los"}).err, "no run has the metric 'los'"));
  run_to(2, {"plot", run, "--x", "day"});
}

TEST_CASE_FIXTURE(Fixture, "a run draws its losses at its end, and has no MFU on a CPU") {
  const std::string run = dir.file("run");
  run_to(0, joined(small_run(text, run, 1, 3), {"--train.device=cpu", "--checkpoint.every=0"}));
  const std::string svg = dir.read("run/loss.svg");
  CHECK(count(svg, "class=\"curve") == 2);
  CHECK(holds(svg, ">loss (nats per token)</text>"));
  CHECK_FALSE(holds(dir.read("run/metrics.jsonl"), "mfu"));
  run_to(0, {"plot", run, "-o", dir.file("again.svg"), "--key=loss", "--key=val_loss"});
  CHECK(count(dir.read("again.svg"), "class=\"curve") == 2);
}
