// Fine-tuning on conversations, from a file to an answer.

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "io/base/file.h"
#include "io/data/tokenizer.h"
#include "tests/e2e/small_run.h"
#include "tests/support/paths.h"

using namespace tessera;
using namespace tessera::test;

namespace {

constexpr const char* kTemplate =
    "{{ bos_token }}{% for m in messages %}{{ m.role }}\n{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}";

struct Chats {
  Chats() {
    std::string lines;
    for (int i = 0; i < 60; ++i) {
      const std::string long_answer(static_cast<std::size_t>(i % 7 * 9), 'x');
      lines += fmt::format(
          R"({{"messages":[{{"role":"user","content":"{0} and {1}"}},{{"role":"assistant","content":"{2}{3}"}}]}})"
          "\n",
          i % 10, i % 3, i % 10 + i % 3, long_answer);
    }
    file = dir.write("chats.jsonl", lines);
    std::filesystem::create_directory(dir.file("tokenizer"));
    const auto source = source_path("tests/io/tokenizer/fixtures/llama3.json");
    dir.write("tokenizer/tokenizer.json", io::read_file(source, 1 << 20));
    dir.write("chat.jinja", kTemplate);
  }
  Arguments train(const std::string& run, int world, int steps, const char* data = "") const {
    return joined(small_run(data[0] == 0 ? file : data, dir.file(run), world, steps),
                  {"--data.tokenizer=" + dir.file("tokenizer"),
                   "--data.chat_template=" + dir.file("chat.jinja"), "--train.eval_every=4"});
  }

  TempDir dir;
  std::string file;
};

}  // namespace

TEST_CASE_FIXTURE(
    Chats,
    "a run on conversations reports them, resumes on other ranks, and is planned to the byte") {
  const auto one = json_of(train("one", 1, 8));
  const auto two = json_of(train("two", 2, 8));
  CHECK(one["conversations"] == two["conversations"]);
  CHECK(one["conversations"]["conversations"] == 54);
  CHECK(one["val_conversations"]["conversations"] == 6);
  CHECK(one["conversations"]["truncated"] > 0);
  for (const auto& summary : {one, two})
    CHECK(summary["memory_peak_bytes"] == summary["memory_planned_bytes"]);
  run_to(0, train("three", 2, 4));
  const CliResult resumed = run_to(0, train("three", 1, 8));
  CHECK(resumed.err.find("conversations are truncated and lose") != std::string::npos);
  const Metrics a = read_metrics(dir.file("one")), b = read_metrics(dir.file("two")),
                c = read_metrics(dir.file("three"));
  REQUIRE(a.steps.size() == 8);
  REQUIRE(c.steps.size() == 8);
  for (std::size_t i = 0; i < 8; ++i) {
    CHECK(relative(a.steps[i].loss, b.steps[i].loss) < 1e-5);
    CHECK(relative(a.steps[i].loss, c.steps[i].loss) < 1e-5);
    CHECK(relative(a.steps[i].grad_norm, b.steps[i].grad_norm) < 1e-4);
  }
  CHECK(relative(a.val_loss.at(8), b.val_loss.at(8)) < 1e-5);
}

TEST_CASE_FIXTURE(Chats, "the template goes into the export, which answers") {
  run_to(0, train("run", 1, 2));
  run_to(0, {"consolidate", dir.file("run"), dir.file("out")});
  CHECK(io::read_file(dir.file("out") + "/chat_template.jinja", 1 << 20) == kTemplate);
  const auto tokenizer = io::load_tokenizer(dir.file("out"));
  for (const std::string& model : {dir.file("run"), dir.file("out")}) {
    const auto answer = json_of({"generate", model, "--chat", "1 and 2", "--max-new-tokens", "3"});
    CHECK(tokenizer->decode(answer["prompt_tokens"].get<std::vector<std::int32_t>>()) ==
          "<|begin_of_text|>user\n1 and 2<|endoftext|>assistant\n");
  }
  const std::string messages =
      dir.write("m.json", R"([{"role":"user","content":"a"},{"role":"assistant","content":"b"}])");
  const auto more =
      json_of({"generate", dir.file("out"), "--messages", messages, "--max-new-tokens", "1"});
  CHECK(tokenizer->decode(more["prompt_tokens"].get<std::vector<std::int32_t>>()) ==
        "<|begin_of_text|>user\na<|endoftext|>assistant\nb<|endoftext|>assistant\n");
  CHECK(json_of({"eval", dir.file("out"), "--data", file, "--seq-len", "32"})["targets"] > 0);
  const CliResult shown =
      run_to(0, {"data", "render", file, "--tokenizer", dir.file("out"), "--row", "2"});
  CHECK(shown.out ==
        "<|begin_of_text|>user\n1 and 1<|endoftext|>assistant\n[[2xxxxxxxxx<|endoftext|>]]\n");
}

TEST_CASE_FIXTURE(Chats, "a line that is no conversation is named before training starts") {
  const std::string bad = dir.write("bad.jsonl", "{\"text\":\"a\"}\n{\"question\":\"a\"}\n");
  const CliResult result = run_to(3, train("bad", 1, 2, bad.c_str()));
  CHECK(result.err.find("bad.jsonl:2: expected an object with \"messages\"") != std::string::npos);
}
