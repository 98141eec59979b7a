#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
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
  for (const char* command :
       {"train", "generate", "eval", "consolidate", "checkpoint", "doctor", "run-report"}) {
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
      {"train --data.train x --run.out runs/\xff", "--run.out: run.out must be UTF-8 text"},
      {"train --data.train x\xff", "--data.train: data.train must be UTF-8 text"},
      {"train --data.train x --train.steps 0", "train.steps must be at least 1"},
      {"eval m --data x --seq-len -5", "--seq-len"},
      {"eval m --data x --max-rows -3", "--max-rows"},
      {"eval m --data x --threads -2", "--threads"},
      {"generate m --prompt x --threads -2", "--threads"},
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

TEST_CASE("generate shows the whole prompt in front of its text, or ids without a tokenizer") {
  const tessera::test::TempDir dir;
  const auto text = dir.write("text.txt", std::string(400, 'x'));
  const Result trained =
      run("train --data.train " + text + " --run.out " + dir.file("run") +
          " --train.steps 1 --model.n_layer 1 --model.n_head 1 --model.n_embd 8 --model.seq_len 8" +
          " --train.global_batch 1 --optim.warmup_steps 0");
  INFO(trained.err);
  REQUIRE(trained.code == 0);
  const std::string generate = "generate " + dir.file("run") + " --max-new-tokens 0";
  CHECK(run(generate + " --prompt 'H\xc3\xa9'").out == "H\xc3\xa9\n");
  CHECK(run(generate + " --prompt-tokens 72 195 169 13 10").out == "H\xc3\xa9\r\n\n");
  const Result outside = run(generate + " --prompt-tokens 72 256");
  CHECK(outside.code == 2);
  CHECK(holds(outside.err, "token id 256 is outside the vocabulary"));

  const Result ids = run(std::string("generate ") + TESSERA_SOURCE_DIR +
                         "/tests/golden/gpt2-tiny --prompt-tokens 5 6 7 --max-new-tokens 2");
  CHECK(ids.code == 0);
  CHECK(ids.out.starts_with("5 6 7 "));
  CHECK(std::count(ids.out.begin(), ids.out.end(), ' ') == 4);
}

TEST_CASE("who stops reading the messages ends no run") {
  const tessera::test::TempDir dir;
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  ::close(ends[0]);
  const auto run_unread = [&](const std::string& arguments) {
    const std::string to = " >&" + std::to_string(ends[1]) + " 2>&" + std::to_string(ends[1]);
    const int status = std::system((std::string(TESSERA_BINARY) + " " + arguments + to).c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  const auto text = dir.write("text.txt", std::string(400, 'x'));
  CHECK(run_unread("train --data.train " + text + " --run.out " + dir.file("run") +
                   " --train.steps 3 --model.n_layer 1 --model.n_head 1 --model.n_embd 8" +
                   " --model.seq_len 8 --train.global_batch 1 --optim.warmup_steps 0") == 0);
  CHECK(std::filesystem::exists(dir.path() / "run" / "checkpoints" / "step-00000003"));
  CHECK(run_unread("doctor --frobnicate") == 2);
  CHECK(run_unread("") == 2);
  CHECK(run_unread("eval " + dir.file("absent") + " --data " + text) == 3);
  ::close(ends[1]);
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
  CHECK(found["backends"]["cuda"] == !found["gpus"].empty());
  const std::string problem = found["gpu_problem"];
  CHECK(found["gpus"].empty() == !problem.empty());
  CHECK(found["backends"]["tcp"] == true);
  CHECK(found["backends"]["shm"].is_boolean());

  // A path's bytes need not be UTF-8, but JSON is.
  const Result odd = run("doctor --json --run.out " + dir.file("\xff"));
  CHECK(odd.code == 0);
  CHECK(nlohmann::json::parse(odd.out, nullptr, false).is_object());

  const Result bad = run("doctor --run.out /proc/absent");
  CHECK(bad.code == 1);
  CHECK(holds(bad.out, "FAILED"));

  REQUIRE(found.contains("libraries"));
  REQUIRE(found["libraries"].size() == 3);
  for (const auto& library : found["libraries"]) {
    const std::string name = library["name"], why = library["problem"];
    const std::string cost = library["cost_of_missing"];
    CAPTURE(name);
    const bool in_build = library["in_build"], on_machine = library["on_machine"];
    CHECK(on_machine == why.empty());
    CHECK(holds(bad.out, name + ": " + (in_build ? "found" : "missing") + " in this build, " +
                             (on_machine ? "found" : "missing") + " on this machine"));
    CHECK_FALSE(cost.empty());
    CHECK(holds(bad.out, "without it " + cost) == !(in_build && on_machine));
  }
  CHECK_FALSE(holds(bad.out, "there is no GPU to use it"));
}

TEST_CASE("with its standard streams closed, nothing that is said goes into files") {
  // The first file that is opened would take the place of a stream: here the text, or a run's
  // files.
  const tessera::test::TempDir dir;
  std::string text;
  for (int i = 0; i < 400; ++i) text += "to be or not to be\n";
  const std::string data = dir.write("text.txt", text), run = dir.file("run");
  const std::string command =
      std::string(TESSERA_BINARY) + " train --run.out=" + run + " --data.train=" + data +
      " --model.n_layer=1 --model.n_head=1 --model.n_embd=16 --model.seq_len=16"
      " --train.global_batch=2 --train.steps=3 --json <&- >&- 2>&-";
  const int status = std::system(command.c_str());
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(dir.read("text.txt") == text);
  std::size_t files = 0;
  for (const auto& file : std::filesystem::recursive_directory_iterator(run)) {
    const std::string name = file.path().filename().string();
    if (!file.is_regular_file() || name.ends_with(".bin")) continue;
    ++files;
    INFO(name);
    const std::string content =
        dir.read(std::filesystem::relative(file.path(), dir.path()).string());
    CHECK_FALSE(holds(content, "step 1/3"));  // what the console shows
    CHECK_FALSE(holds(content, "tessera: "));
    if (name == "metrics.jsonl" || name == "saves.jsonl") {
      std::istringstream lines(content);
      for (std::string line; std::getline(lines, line);) {
        CHECK(nlohmann::json::accept(line));
      }
    }
  }
  CHECK(files >= 4);
}
