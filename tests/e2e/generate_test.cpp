// tessera generate: options, standard input, conversations.

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "tests/e2e/inference_support.h"
#include "tests/io/python.h"
#include "tests/support/paths.h"

using namespace tessera;
using namespace tessera::test;

namespace {

nlohmann::json generated(const Arguments& more) {
  return json_of(joined({"generate", SmallModel::get().run, "--prompt", "the "}, more));
}

}  // namespace

TEST_CASE("samples have random numbers of their own, from one seed") {
  const auto all = generated({"--samples", "18", "--max-new-tokens", "8"})["samples"];
  REQUIRE(all.size() == 18);
  CHECK(all == generated({"--samples", "18", "--max-new-tokens", "8"})["samples"]);
  CHECK(all != generated({"--samples", "18", "--max-new-tokens", "8", "--seed", "2"})["samples"]);
  CHECK(all[0]["text"] != all[1]["text"]);
  CHECK(all[0]["tokens"] == generated({"--max-new-tokens", "8"})["tokens"]);
  const CliResult shown = run_to(0, {"generate", SmallModel::get().run, "--prompt", "the ",
                                     "--samples", "2", "--max-new-tokens", "8"});
  CHECK(shown.out == "--- sample 1\nthe " + all[0]["text"].get<std::string>() +
                         "\n--- sample 2\nthe " + all[1]["text"].get<std::string>() + "\n");
}

TEST_CASE("a text is cut before stop strings, and min-p and a penalty change it") {
  const std::string whole = generated({"--temperature", "0"})["text"];
  const std::string stop = whole.substr(20, 3);
  const Arguments greedy = {"--temperature", "0", "--stop", "zzz", stop};
  const auto cut = generated(greedy);
  CHECK(cut["text"] == whole.substr(0, whole.find(stop)));
  CHECK(run_to(0, joined({"generate", SmallModel::get().run, "--prompt", "the "}, greedy)).out ==
        "the " + whole.substr(0, whole.find(stop)) + "\n");
  CHECK(generated({"--min-p", "1"})["text"] == whole);
  CHECK(generated({"--temperature", "0", "--repetition-penalty", "1.5"})["text"] != whole);
  CHECK(run_to(2, {"generate", SmallModel::get().run, "--prompt", "a", "--min-p", "2"})
            .err.find("min-p must be in [0, 1], got 2") != std::string::npos);
  run_to(2, {"generate", SmallModel::get().run, "--prompt", "a", "--chat", "b"});
  run_to(2, {"generate", SmallModel::get().run, "--interactive", "--json"});
}

TEST_CASE("prompts and conversations are read from standard input") {
  const Python python("import signal");
  const SmallModel& model = SmallModel::get();
  CHECK(python.run_file(source_path("tests/e2e/generate_stdin.py"),
                        {tessera_program(), model.run, model.chat_template}) == "exit code 0\n");
}
