// Runs the commands of docs/recipes on small models.

#include <doctest/doctest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "io/base/file.h"
#include "tests/e2e/small_run.h"
#include "tests/models/golden_models.h"
#include "tests/support/paths.h"

using namespace tessera;
using namespace tessera::test;

namespace fs = std::filesystem;

namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 24;

// The blocks ```LANGUAGE of a page, in order.
std::string blocks_of(const std::string& page, const std::string& language) {
  std::ifstream in(source_path("docs/recipes/" + page));
  std::string text;
  bool inside = false;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("```"))
      inside = line == "```" + language;
    else if (inside)
      text += line + "\n";
  }
  REQUIRE(!text.empty());
  return text;
}

// Replaces a part of a page by a smaller one.
void replace(std::string& text, const std::string& part, const std::string& by) {
  const auto at = text.find(part);
  CAPTURE(part);
  REQUIRE(at != text.npos);
  text.replace(at, part.size(), by);
}

// A model of 35k parameters and steps up to `last`, for pages that leave these to a file.
std::string small_model(int last) {
  return fmt::format(
      "export TESSERA_MODEL_N_LAYER=2 TESSERA_MODEL_N_HEAD=2 TESSERA_MODEL_N_EMBD=32 "
      "TESSERA_MODEL_SEQ_LEN=32 TESSERA_MODEL_VOCAB_SIZE=300 TESSERA_TRAIN_GLOBAL_BATCH=16 "
      "TESSERA_TRAIN_MICRO_BATCH=1 TESSERA_OPTIM_WARMUP_STEPS=1 TESSERA_TRAIN_EVAL_BATCHES=1 "
      "TESSERA_TRAIN_STEPS={}\n",
      last);
}

// Directory with small versions of the models, texts and shards that the pages name.
struct Kitchen : Fixture {
  Kitchen() {
    dir.write("notes.txt", "The meeting is at noon.\n" + make_text());
    make_model("gemma", "gemma-2b");
    make_model("mistral", "mistral-7b");
    make_model("llama", "smollm2");
    fs::create_directory(dir.path() / "gpt2");
    make_tokenizer("gpt2");
    fs::create_directory(dir.path() / "web");
    for (const char* file : {"web/a.jsonl", "web/b.jsonl", "val.jsonl"})
      dir.write(file, Json{{"text", make_text()}}.dump() + "\n");
    dir.write("smollm2/chat_template.jinja",
              "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
              "{% if add_generation_prompt %}<assistant>{% endif %}");
    std::string chats;
    for (int i = 0; i < 60; ++i)
      chats += fmt::format(R"({{"messages": [{{"role": "user", "content": "add {0} and {1}"}}, )"
                           R"({{"role": "assistant", "content": "that is {2}"}}]}})"
                           "\n",
                           i, i % 7, i + i % 7);
    dir.write("chats.jsonl", chats);
    const fs::path shards = source_path("tests/io/dcp/fixtures/fsdp-gpt2");
    fs::create_directory(dir.path() / "fsdp");
    for (const char* name : {".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"})
      fs::copy_file(shards / name, dir.path() / "fsdp" / name);
    fs::copy_file(shards / "config.json", dir.path() / "config.json");
    std::string tokens;
    for (int i = 0; i < 400; ++i) tokens += {static_cast<char>(i * i % 17), '\0'};
    dir.write("notes.bin", tokens);
  }

  // A random model of a family with a tokenizer of its own.
  void make_model(const std::string& family, const std::string& name) {
    Json json = Json::parse(
        io::read_file(source_path("tests/golden/families/" + family + ".json"), kMost))["cases"][0];
    json["config"]["vocab_size"] = 300;
    json["config"]["max_position_embeddings"] = 8192;
    const TempDir made;
    write_model(Case(json), made);
    fs::copy(made.path(), dir.path() / name);
    make_tokenizer(name);
  }
  void make_tokenizer(const std::string& name) const {
    run_to(0, {"data", "train-tokenizer", dir.file("notes.txt"), "--vocab-size", "300", "--out",
               dir.file(name + "/tokenizer.json")});
  }

  // Log of commands, all of which must succeed.
  std::string cook(const std::string& commands) const {
    const fs::path bin = fs::path(tessera_program()).parent_path();
    dir.write("recipe.sh",
              fmt::format("set -ex\nexport PATH={}:$PATH\ncd {}\n. {}\n{}", bin.string(),
                          dir.path().string(), source_path("tests/e2e/launchers.sh"), commands));
    const std::string command = "bash " + dir.file("recipe.sh") + " > " + dir.file("log") + " 2>&1";
    const int status = std::system(command.c_str());  // NOLINT(concurrency-mt-unsafe)
    std::string log = io::read_file(dir.file("log"), kMost);
    INFO(log);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    return log;
  }
};

// The value of a number in a job file: what follows `key`.
int number_after(const std::string& text, const std::string& key) {
  const auto at = text.find(key);
  CAPTURE(key);
  REQUIRE(at != text.npos);
  return std::stoi(text.substr(at + key.size()));
}

// The command of a Kubernetes Job with an index, in the environment of each of its pods, which share
// this host.
std::string pods(const std::string& yaml) {
  const int number = number_after(yaml, "completions: ");
  CHECK(number == number_after(yaml, "parallelism: "));
  std::string line = fmt::format("all_ranks {} JOB_COMPLETION_INDEX=@", number);
  static const std::regex kVariable(R"re(- \{name: (\w+), value: "?([^"}]*)"?\})re");
  for (std::sregex_iterator i(yaml.begin(), yaml.end(), kVariable), end; i != end; ++i) {
    std::string value = (*i)[2];
    if ((*i)[1] == "MASTER_ADDR") {
      CHECK(value == "gpt2-0.gpt2");  // the pod of index 0 of Job and Service gpt2
      value = "127.0.0.1";
    }
    if ((*i)[1] == "MASTER_PORT") value = "$((port + 9))";
    line += fmt::format(" {}={}", (*i)[1].str(), value);
  }
  static const std::regex kIndex(
      "- name: RANK\\s+valueFrom: .*batch\\.kubernetes\\.io/job-completion-index'\\]\"");
  if (std::regex_search(yaml, kIndex)) line += " RANK=@";
  const auto command = yaml.find("command: ") + 9;
  for (const auto& word : Json::parse(yaml.substr(command, yaml.find('\n', command) - command)))
    line += fmt::format(" '{}'", word.get<std::string>());
  return line + "\n";
}

}  // namespace

TEST_CASE_FIXTURE(Kitchen, "the recipes work as they are written") {
  std::set<std::string> pages;
  for (const auto& entry : fs::directory_iterator(source_path("docs/recipes"))) {
    const std::string page = entry.path().filename().string();
    if (page == "pretrain.md") continue;
    CAPTURE(page);
    pages.insert(page);
    std::string commands = blocks_of(page, "sh");
    if (page == "nanochat.md") {
      replace(commands, "train --model.depth 4", "train --model.depth 1");
      replace(commands, "--train.steps 200", "--train.steps 20");
      replace(commands, "--train.steps 60", "--train.steps 10");
      commands += "tessera train runs/base/config.json\n";
    }
    const std::string log = cook(commands);
    if (page == "nanochat.md") CHECK(log.find("--model.n_layer 4 --model.n_embd 256") != log.npos);
  }
  CHECK(pages.size() >= 5);
  for (const char* made :
       {"gemma-notes", "gemma-merged", "mistral-more", "tuned", "chat-merged", "nanochat"})
    CHECK(fs::exists(dir.path() / made / "model.safetensors"));
  CHECK(fs::exists(dir.path() / "gemma-adapters/adapter_model.safetensors"));
  const Json nanochat = Json::parse(io::read_file(dir.file("nanochat/config.json"), kMost));
  CHECK(nanochat["architectures"][0] == "NanoChatForCausalLM");
  CHECK(nanochat["hidden_size"] == 128);
  CHECK(fs::exists(dir.path() / "nanochat/chat_template.jinja"));
}

TEST_CASE_FIXTURE(Kitchen, "pretraining goes on under every launcher of the page") {
  const std::string page = "pretrain.md";
  std::string commands = blocks_of(page, "sh");
  replace(commands, "torchrun ", small_model(4) + "torchrun ");
  // Runs the commands after training at the end.
  const auto home = commands.find("tessera consolidate");
  REQUIRE(home != commands.npos);
  const std::string sbatch = blocks_of(page, "sbatch");
  dir.write("gpt2.sbatch", sbatch);
  const std::string log =
      cook(small_model(2) + commands.substr(0, home) + small_model(6) +
           fmt::format("SLURM_NNODES={} SLURM_JOB_NODELIST=127.0.0.1,x bash -e gpt2.sbatch\n",
                       number_after(sbatch, "--nodes=")) +
           small_model(8) + pods(blocks_of(page, "yaml")) +
           "tessera train runs/gpt2/config.json\n" + commands.substr(home));
  int on_two_ranks = 0;
  for (auto at = log.find("over 2 ranks ("); at != log.npos;
       at = log.find("over 2 ranks (", at + 1))
    ++on_two_ranks;
  CHECK(on_two_ranks == 4);
  for (const int step : {2, 4, 6})
    CHECK(log.find(fmt::format("step {} of {}, from", step, step + 2)) != log.npos);
  CHECK(fs::exists(dir.path() / "gpt2-124m/model.safetensors"));
}
