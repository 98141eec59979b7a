// Tokenization killed at random moments: the same bytes as without.
#include <doctest/doctest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>

#include "tests/support/cli.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"
#include "tests/support/text.h"

namespace test = tessera::test;
using test::run_to;

namespace {

// Documents of many lengths in lines, compressed and not, and in files.
std::vector<std::string> write_corpus(const test::TempDir& dir) {
  std::mt19937 random(11);
  const auto text = [&](std::size_t bytes) {
    std::string out;
    while (out.size() < bytes)
      out += "word" + std::to_string(random() % 5000) + (random() % 9 == 0 ? "\n" : " ");
    return out;
  };
  std::vector<std::string> files;
  for (int file = 0; file < 3; ++file) {
    std::string lines;
    for (int i = 0; i < 120; ++i)
      lines += nlohmann::json{{"text", text(random() % 20'000)}}.dump() + "\n";
    files.push_back(dir.write("lines" + std::to_string(file) + ".jsonl", lines));
  }
  files.push_back(dir.write("long.txt", text(3'000'000)));
  return files;
}

test::Arguments command(const std::vector<std::string>& files, const std::string& out,
                        const test::Arguments& more) {
  const auto tokenizer = test::source_path("tests/io/tokenizer/fixtures/gpt2.json");
  return test::joined(test::joined({"data", "tokenize"}, files),
                      test::joined({"--tokenizer", tokenizer, "--out", out, "--shard-tokens",
                                    "250000", "--end-token", "<|endoftext|>"},
                                   more));
}

// Runs a command to its end, but kills it after random times.
// @return kills
int run_with_kills(const test::Arguments& arguments, std::mt19937& random) {
  for (int kills = 0;; ++kills) {
    test::CliProcess process(arguments);
    // Longer each time, so that it ends.
    const auto wait =
        std::chrono::milliseconds(20 + random() % 120 + 40U * static_cast<unsigned>(kills));
    const auto deadline = std::chrono::steady_clock::now() + wait;
    while (process.running() && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const bool ended = !process.running();
    if (!ended) process.signal(SIGKILL);
    const auto result = process.wait(std::chrono::seconds(60));
    if (result.signal != SIGKILL) {
      CHECK_MESSAGE(result.code == 0, result.describe());
      return kills;
    }
  }
}

std::map<std::string, std::string> shards(const test::TempDir& dir, const std::string& name) {
  std::map<std::string, std::string> all;
  for (const auto& entry : std::filesystem::directory_iterator(dir.path() / name)) {
    const std::string file = entry.path().filename().string();
    CHECK(!test::holds(file, ".tmp"));
    all[file] = dir.read(name + "/" + file);
  }
  return all;
}

}  // namespace

TEST_CASE("killed and started again, it gives the bytes of an uninterrupted run") {
  const test::TempDir dir(test::TempDir::in_memory());
  const auto files = write_corpus(dir);
  run_to(0, command(files, dir.file("whole"), {"--threads", "1"}));
  const auto expected = shards(dir, "whole");
  REQUIRE(expected.size() > 10);
  std::mt19937 random(std::random_device{}());
  int kills = 0;
  for (const std::string threads : {"1", "3"}) {
    const std::string out = "killed" + threads;
    kills += run_with_kills(command(files, dir.file(out), {"--threads", threads}), random);
    CHECK(shards(dir, out) == expected);
  }
  CHECK(kills > 0);

  run_to(0, command(files, dir.file("parts"), {"--part", "1/2"}));
  CHECK(test::holds(run_to(3, {"data", "commit", dir.file("parts")}).err, "not done: part 2 of 2"));
  const auto whole_parts = [&](const std::string& out) {
    run_to(0, {"data", "commit", dir.file(out)});
    return shards(dir, out);
  };
  run_to(0, command(files, dir.file("parts"), {"--part", "2/2"}));
  for (const std::string part : {"2/2", "1/2"})
    run_with_kills(command(files, dir.file("killed-parts"), {"--part", part}), random);
  CHECK(whole_parts("killed-parts") == whole_parts("parts"));
  CHECK(test::json_of({"data", "verify", dir.file("parts")})["valid"] == true);
  CHECK(test::json_of({"data", "inspect", dir.file("parts")})["tokens"] ==
        test::json_of({"data", "inspect", dir.file("whole")})["tokens"]);
}

TEST_CASE("memory is bounded, also for a document of any length") {
  const test::TempDir dir(test::TempDir::in_memory());
  // Written block by block, because a child's memory counts from the fork.
  const auto write = [&](const std::string& name, const std::string& block) {
    std::ofstream out(dir.file(name));
    for (int i = 0; i < 100; ++i) out << block;
    return dir.file(name);
  };
  std::string text, lines;
  while (text.size() < 1'000'000)
    text += "A line of text number " + std::to_string(text.size() % 9973) + " that is not long.\n";
  const std::string line = nlohmann::json{{"text", text.substr(0, 10'000)}}.dump() + "\n";
  while (lines.size() < text.size()) lines += line;
  const auto tokenizer = test::source_path("tests/io/tokenizer/fixtures/gpt2.json");
  for (const auto& file : {write("a.txt", text), write("b.jsonl", lines)})
    run_to(0, {"data", "tokenize", file, "--tokenizer", tokenizer, "--out", dir.file("out.bin"),
               "--threads", "2", "--overwrite"});
  rusage usage{};
  REQUIRE(::getrusage(RUSAGE_CHILDREN, &usage) == 0);
  CHECK(usage.ru_maxrss < 64 << 10);  // KiB, of the largest process
}

TEST_CASE("Ctrl-C stops soon, with the exit code of a stop, and the command continues") {
  const test::TempDir dir(test::TempDir::in_memory());
  std::vector<std::string> files = write_corpus(dir);
  for (int i = 0; i < 3; ++i) files.push_back(files.back());
  const auto arguments = command(files, dir.file("out"), {"--threads", "1"});
  test::CliProcess process(arguments);
  REQUIRE(test::wait_until(
      [&] { return std::filesystem::exists(dir.path() / "out/shard-000001.bin"); }));
  process.signal(SIGINT);
  const auto result = process.wait(std::chrono::seconds(20));
  CHECK_MESSAGE(result.code == 130, result.describe());
  CHECK(test::holds(result.err, "the same command continues"));
  CHECK(test::holds(run_to(2, test::joined(arguments, {"--field", "content"})).err,
                    "field was \"text\", and is \"content\" now"));
  CHECK(test::holds(run_to(3, {"train", "--data.train", dir.file("out"), "--run.out",
                               dir.file("run"), "--train.steps", "1"})
                        .err,
                    "is unfinished"));
  run_to(0, arguments);
  run_to(0, arguments);  // is done
  run_to(0, {"train", "--data.train", dir.file("out"), "--run.out", dir.file("run"),
             "--train.steps", "1", "--model.n_layer", "1", "--model.n_head", "1", "--model.n_embd",
             "8", "--model.seq_len", "8", "--train.global_batch", "2"});
  std::string shard = dir.read("out/shard-000002.bin");
  shard.back() ^= 1;
  dir.write("out/shard-000002.bin", shard);
  const auto report = test::json_of({"data", "verify", dir.file("out")}, 1);
  REQUIRE(report["problems"].size() == 1);
  CHECK(report["problems"][0]["file"] == "shard-000002.bin");
}
