#include <doctest/doctest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/temp_dir.h"

namespace {

struct Result {
  int code = -1;
  std::string out;
  std::string err;
};

/// Runs the binary through the shell with its streams in files.
Result run(const std::string& arguments) {
  const tessera::test::TempDir dir;
  const std::string command = std::string(TESSERA_BINARY) + " " + arguments + " >" +
                              dir.file("out") + " 2>" + dir.file("err") + " </dev/null";
  const int status = std::system(command.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, dir.read("out"), dir.read("err")};
}

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("help and version go to standard output and succeed") {
  const Result version = run("--version");
  CHECK(version.code == 0);
  CHECK(version.out.starts_with("tessera "));
  const Result help = run("--help");
  CHECK(help.code == 0);
  CHECK(help.err.empty());
  for (const char* command : {"train", "generate", "eval", "consolidate", "checkpoint", "doctor"}) {
    INFO(command);
    CHECK(holds(help.out, command));
    const Result own = run(std::string(command) + " --help");
    CHECK(own.code == 0);
    CHECK(holds(own.out, "Usage:"));
  }
}

TEST_CASE("usage errors exit with 2, on standard error, and say what to do") {
  struct Case {
    const char* arguments;
    const char* message;
  };
  const Case cases[] = {
      {"", "Usage:"},
      {"trian", "unknown command \"trian\"; did you mean \"train\"?"},
      {"--frobnicate", "tessera: error: "},
      {"doctor --frobnicate", "See tessera doctor --help"},
      {"consolidate", "tessera: error: "},
      {"train", "--data.train FILE"},
      {"train --model.layers 3 --data.train x", "did you mean --model.n_layer?"},
      {"train --data.train x --model.n_head 3", "model.n_head 3 does not divide"},
      {"train --data.train x --optim.lr nan", "optim.lr must be"},
      {"train --data.train x --model.arch llama", "model.arch llama"},
  };
  for (const Case& c : cases) {
    INFO(c.arguments);
    const Result result = run(c.arguments);
    CHECK(result.code == 2);
    CHECK(result.out.empty());
    INFO(result.err);
    CHECK(holds(result.err, c.message));
  }
}

TEST_CASE("an unknown key of a configuration file is named with file, line and nearest key") {
  const tessera::test::TempDir dir;
  const auto config = dir.write("run.json", "{\n  \"model\": {\n    \"n_layers\": 2\n  }\n}\n");
  const Result result = run("train " + config + " --data.train x");
  CHECK(result.code == 2);
  CHECK(holds(result.err,
              "run.json:3: unknown key \"model.n_layers\"; did you mean "
              "\"model.n_layer\"?"));
}

TEST_CASE("missing data exits with 3") {
  const tessera::test::TempDir dir;
  const Result result =
      run("train --data.train " + dir.file("absent.txt") + " --run.out " + dir.file("run"));
  CHECK(result.code == 3);
  CHECK(holds(result.err, "absent.txt"));
  CHECK(run("eval " + dir.file("absent") + " --data " + dir.file("absent.txt")).code == 3);
}

TEST_CASE("doctor measures, and fails on a directory that it cannot write to") {
  const tessera::test::TempDir dir;
  const Result good = run("doctor --json --run.out " + dir.file("runs"));
  CHECK(good.code == 0);
  const auto found = nlohmann::json::parse(good.out, nullptr, false);
  REQUIRE(found.is_object());
  CHECK(found["healthy"] == true);
  CHECK(found["matmul"]["correct"] == true);
  CHECK(found["matmul"]["gflops"] > 0.1);
  CHECK(found["cpu"]["threads"] >= 1);
  CHECK(found["backends"]["cpu"] == true);
  CHECK(found["backends"]["cuda"] == false);

  const Result bad = run("doctor --run.out /proc/absent");
  CHECK(bad.code == 1);
  CHECK(holds(bad.out, "FAILED"));
}
