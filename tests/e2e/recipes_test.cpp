// Runs the commands of docs/recipes on small models.

#include <doctest/doctest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
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

// The commands of a page: its blocks of ```sh, in order.
std::string script_of(const fs::path& page) {
  std::ifstream in(page);
  std::string script;
  bool inside = false;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("```"))
      inside = line == "```sh";
    else if (inside)
      script += line + "\n";
  }
  return script;
}

// Directory with small versions of the models, texts and shards that the pages name.
struct Kitchen : Fixture {
  Kitchen() {
    dir.write("notes.txt", "The meeting is at noon.\n" + make_text());
    make_model("gemma", "gemma-2b");
    make_model("mistral", "mistral-7b");
    make_model("llama", "smollm2");
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
    run_to(0, {"data", "train-tokenizer", dir.file("notes.txt"), "--vocab-size", "300", "--out",
               dir.file(name + "/tokenizer.json")});
  }

  // Output of a page's commands, all of which must succeed.
  std::string cook(const std::string& page) const {
    const fs::path bin = fs::path(tessera_program()).parent_path();
    const std::string script = script_of(source_path("docs/recipes/" + page));
    REQUIRE(!script.empty());
    dir.write("recipe.sh", "set -ex\nexport PATH=" + bin.string() + ":$PATH\ncd " +
                               dir.path().string() + "\n" + script);
    const std::string command = "bash " + dir.file("recipe.sh") + " > " + dir.file("log") + " 2>&1";
    const int status = std::system(command.c_str());  // NOLINT(concurrency-mt-unsafe)
    std::string log = io::read_file(dir.file("log"), kMost);
    INFO(log);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    return log;
  }
};

}  // namespace

TEST_CASE_FIXTURE(Kitchen, "the recipes work as they are written") {
  std::set<std::string> pages;
  for (const auto& entry : fs::directory_iterator(source_path("docs/recipes"))) {
    const std::string page = entry.path().filename().string();
    CAPTURE(page);
    pages.insert(page);
    cook(page);
  }
  CHECK(pages.size() >= 4);
  for (const char* made : {"gemma-notes", "gemma-merged", "mistral-more", "tuned", "chat-merged"})
    CHECK(fs::exists(dir.path() / made / "model.safetensors"));
  CHECK(fs::exists(dir.path() / "gemma-adapters/adapter_model.safetensors"));
}
