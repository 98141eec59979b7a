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
  const auto prompt = [&](const std::string& file) {
    const auto found =
        json_of({"generate", dir.file("out"), "--messages", file, "--max-new-tokens=1",
                 "--chat-template", dir.write("d", "{{ system }}{{ tools[0] }}")});
    return tokenizer->decode(found["prompt_tokens"].get<std::vector<std::int32_t>>());
  };
  CHECK(prompt(dir.write("k.json", R"({"messages":[{"role":"user","content":"a"}],"tools":["t"],)"
                                   R"("chat_template_kwargs":{"system":"s"}})")) == "st");
  CHECK(run_to(2, {"generate", dir.file("out"), "--chat", "\x80"}).err.find("--chat") !=
        std::string::npos);
  CHECK(json_of({"eval", dir.file("out"), "--data", file, "--seq-len", "32"})["targets"] > 0);
  run_to(2, {"eval", dir.file("out"), "--data", file, "--seq-len=32", "--chat-date=today"});
  const CliResult shown =
      run_to(0, {"data", "render", file, "--tokenizer", dir.file("out"), "--row", "2"});
  CHECK(shown.out ==
        "<|begin_of_text|>user\n1 and 1<|endoftext|>assistant\n[[2xxxxxxxxx<|endoftext|>]]\n");
}

TEST_CASE_FIXTURE(Chats, "a line that is no conversation is named before training starts") {
  const std::string bad = dir.write("bad.jsonl", "{\"text\":\"a\"}\n{\"question\":\"a\"}\n");
  const CliResult result = run_to(3, train("bad", 1, 2, bad.c_str()));
  CHECK(result.err.find("bad.jsonl:2: expected an object with \"messages\"") != std::string::npos);
  // Another row is still shown.
  CHECK(run_to(0, {"data", "render", bad, "--tokenizer=bytes", "--row=1"}).out == "[[a]]\n");
  run_to(3, {"data", "render", bad, "--tokenizer=bytes", "--row=2"});
}

TEST_CASE_FIXTURE(Chats, "a run goes on without validation if its split has no token with loss") {
  std::string lines = io::read_file(file, 1 << 20);
  for (int i = 0; i < 5; ++i)
    lines += R"({"messages":[{"role":"user","content":"a"}]})"
             "\n";
  const std::string data = dir.write("val.jsonl", lines);
  const CliResult result =
      run_to(0, joined(train("val", 1, 2, data.c_str()), {"--data.val_fraction=0.05"}));
  CHECK(result.err.find("note: no validation: 0.05 of the conversations are 4, without a token") !=
        std::string::npos);
}

TEST_CASE_FIXTURE(Chats, "a resumed run keeps the date of its template") {
  dir.write("chat.jinja", std::string("{{ strftime_now('%Y') }}") + kTemplate);
  const auto dated = [&](const std::string& run, int steps, const std::vector<std::string>& more) {
    return joined(train(run, 1, steps), more);
  };
  const std::string date = "--data.chat_date=1999-01-01";
  run_to(0, dated("whole", 8, {date}));
  run_to(0, dated("parts", 4, {date}));
  run_to(0, dated("parts", 8, {}));
  CHECK(read_metrics(dir.file("whole")).steps.back().loss ==
        read_metrics(dir.file("parts")).steps.back().loss);
}
