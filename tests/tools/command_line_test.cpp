#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"
#include "tests/support/text.h"

namespace test = tessera::test;
using test::holds;

namespace {

struct Result {
  int code = -1;
  std::string out;
  std::string err;
};

/// Runs the binary through the shell, with its streams in files.
Result run(const std::string& arguments) {
  const tessera::test::TempDir dir;
  const std::string command = tessera::test::tessera_program() + " " + arguments + " >" +
                              dir.file("out") + " 2>" + dir.file("err") + " </dev/null";
  const int status = std::system(command.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, dir.read("out"), dir.read("err")};
}

}  // namespace

TEST_CASE("help and version go to standard output and succeed") {
  const Result version = run("--version");
  CHECK(version.code == 0);
  CHECK(version.out.starts_with("tessera "));
  const Result help = run("--help");
  CHECK(help.code == 0);
  CHECK(help.err.empty());
  for (const char* command : {"train", "generate", "eval", "consolidate", "checkpoint", "data",
                              "doctor", "plot", "run", "run-report"}) {
    INFO(command);
    CHECK(holds(help.out, command));
    const Result own = run(std::string(command) + " --help");
    CHECK(own.code == 0);
    CHECK(holds(own.out, "Usage:"));
  }
}

TEST_CASE("usage errors exit with 2, and say on standard error what to do") {
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
      {"train --data.train x --model.arch t5", "model.arch must be one of gpt2, llama, "},
      {"train --data.train x --run.out runs/\xff", "--run.out: run.out must be UTF-8 text"},
      {"eval m --data x --seq-len -5", "--seq-len"},
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

TEST_CASE("generate prints the whole prompt before its text, or ids without a tokenizer") {
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
  CHECK(holds(outside.err, "--prompt-tokens: 256 is not one of the model's ids, 0 to 255"));

  const Result ids = run("generate " + tessera::test::source_path("tests/golden/gpt2-tiny") +
                         " --prompt-tokens 5 6 7 --max-new-tokens 2");
  CHECK(ids.code == 0);
  CHECK(ids.out.starts_with("5 6 7 "));
  CHECK(std::count(ids.out.begin(), ids.out.end(), ' ') == 4);
}

TEST_CASE("a closed standard error ends no run") {
  const tessera::test::TempDir dir;
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  ::close(ends[0]);
  const auto run_unread = [&](const std::string& arguments) {
    const std::string to = " >&" + std::to_string(ends[1]) + " 2>&" + std::to_string(ends[1]);
    const int status =
        std::system((tessera::test::tessera_program() + " " + arguments + to).c_str());
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

TEST_CASE("run starts a program as ranks, and exits like the rank that failed first") {
  const auto all = run("run --nproc 3 sh -c 'echo rank $RANK of $WORLD_SIZE --json'");
  CHECK(all.code == 0);
  CHECK(holds(all.out, "rank 0 of 3 --json\n"));
  CHECK(holds(all.err, "[rank 2] rank 2 of 3 --json\n"));
  const auto failed = run("run --nproc 2 sh -c 'exit $((7 * RANK))'");
  CHECK(failed.code == 7);
  CHECK(holds(failed.err, "exited with code 7"));
  CHECK(run("run --nproc 2").code == 2);
  const auto absent = run("run --nproc 2 no-such-program");
  CHECK(absent.code == 2);
  CHECK(holds(absent.err, "no program no-such-program in PATH"));
}

TEST_CASE("doctor measures, and fails on an unwritable directory") {
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

  // Paths may be any bytes, JSON must be UTF-8.
  const Result odd = run("doctor --json --run.out " + dir.file("\xff"));
  CHECK(odd.code == 0);
  CHECK(nlohmann::json::parse(odd.out, nullptr, false).is_object());

  const Result bad = run("doctor --run.out /proc/absent");
  CHECK(bad.code == 1);
  CHECK(holds(bad.out, "FAILED"));

  REQUIRE(found["libraries"].size() == 4);
  for (const auto& library : found["libraries"])
    CHECK(holds(bad.out, library["name"].get<std::string>() + ": "));
  CHECK_FALSE(holds(bad.out, "there is no GPU for it"));
}

TEST_CASE("with closed standard streams, messages do not end up in files") {
  // The first file opened would take a stream's descriptor: here the text, or a run's files.
  const tessera::test::TempDir dir;
  std::string text;
  for (int i = 0; i < 400; ++i) text += "to be or not to be\n";
  const std::string data = dir.write("text.txt", text), run = dir.file("run");
  const std::string command =
      tessera::test::tessera_program() + " train --run.out=" + run + " --data.train=" + data +
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
    CHECK_FALSE(holds(content, "step 1/3"));  // console output
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
