#include "io/gguf/vocabulary.h"

#include <doctest/doctest.h>

#include <cmath>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/gguf/header.h"
#include "io/gguf/source.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

std::string fixture(const std::string& name) {
  return read_text(source_path("tests/io/tokenizer/fixtures/" + name + ".json"));
}

/// Keys of a GGUF file with the values of its arrays.
Json json_keys(const File& file, const GgufHeader& header) {
  Json keys = header.keys;
  for (const auto& [key, array] : header.arrays) {
    Json& values = keys[key];
    if (array.type == GgufType::String)
      visit_gguf_strings(file, header, key,
                         [&values](std::string_view text) { values.push_back(text); });
    else
      values = read_gguf_numbers(file, header, key, array.count);
  }
  return keys;
}

struct Result {
  std::unique_ptr<TempDir> dir = std::make_unique<TempDir>();
  GgufHeader header;
  std::vector<std::string> warnings;
  Json keys;
  File file() const { return File::open(dir->path() / "x.gguf"); }
  std::map<std::string, std::string> tokenizer(std::vector<std::string>& reasons) const {
    return gguf_tokenizer(file(), header, reasons);
  }
};

Result put(std::map<std::string, std::string> files, Json config = Json::object()) {
  Result result;
  GgufKeys keys;
  config.emplace("vocab_size", 600);
  add_gguf_vocabulary(keys, files, config, result.warnings);
  std::ofstream(result.dir->path() / "x.gguf", std::ios::binary) << plan_gguf(keys, {}).preamble;
  result.header = read_gguf_header(result.file());
  result.keys = json_keys(result.file(), result.header);
  return result;
}

std::string reason_of(const std::string& tokenizer) {
  const Result result = put({{"tokenizer.json", tokenizer}});
  CHECK(result.keys.size() == 1);
  CHECK(result.keys["tokenizer.ggml.model"] == "none");
  REQUIRE(result.warnings.size() == 1);
  return result.warnings[0];
}

TEST_CASE("byte-level tokenizers have the name of their pre-tokenizer in llama.cpp") {
  const std::pair<const char*, const char*> kNames[] = {{"gpt2", "gpt-2"},
                                                        {"smollm", "smollm"},
                                                        {"llama3", "llama-bpe"},
                                                        {"qwen", "qwen2"},
                                                        {"olmo2", "dbrx"}};
  for (const auto& [file, pre] : kNames) {
    const char* const tokenizer = file;
    CAPTURE(tokenizer);
    const Json root = Json::parse(fixture(file));
    const Result result = put({{"tokenizer.json", fixture(file)}});
    CHECK(result.warnings.empty());
    CHECK(result.keys["tokenizer.ggml.model"] == "gpt2");
    CHECK(result.keys["tokenizer.ggml.pre"] == pre);
    CHECK(result.keys["tokenizer.ggml.tokens"].size() == 600);
    CHECK(result.keys["tokenizer.ggml.tokens"][599] == "[PAD599]");
    CHECK(result.keys["tokenizer.ggml.token_type"][599] == 5);
    CHECK(result.keys["tokenizer.ggml.token_type"][0] == 3);
    CHECK(result.keys["tokenizer.ggml.merges"].size() == root["model"]["merges"].size());

    std::vector<std::string> warnings;
    auto files = result.tokenizer(warnings);
    CHECK(warnings.empty());
    const Json back = Json::parse(files.at("tokenizer.json"));
    CHECK(back["model"]["vocab"].size() >= root["model"]["vocab"].size());
    CHECK(back["model"]["ignore_merges"] == root["model"]["ignore_merges"]);
    CHECK(put(files).keys == result.keys);
  }
}

TEST_CASE("tokenizers in SentencePiece's manner have scores in the order of their merges") {
  const auto without_nul = [](std::string text) {
    for (std::size_t at = 0; (at = text.find("\\u0000", at)) != std::string::npos;)
      text.replace(at, 6, "\\u2400");
    return text;
  };
  for (const auto& [file, prefix] : {std::pair("llama2", true), std::pair("phi3", true),
                                     std::pair("mistral", true), std::pair("gemma", false)}) {
    const char* const tokenizer = file;
    CAPTURE(tokenizer);
    const std::string text = without_nul(fixture(file));
    const Json root = Json::parse(text);
    const Result result = put({{"tokenizer.json", text}});
    CHECK(result.warnings.empty());
    CHECK(result.keys["tokenizer.ggml.model"] == "llama");
    CHECK(result.keys["tokenizer.ggml.add_space_prefix"] == prefix);
    const Json& types = result.keys["tokenizer.ggml.token_type"];
    CHECK(types[0] == 2);
    CHECK(types[1] == 3);
    CHECK(types[3] == 6);
    const Json& scores = result.keys["tokenizer.ggml.scores"];
    double last = 0;
    for (const Json& merge : root["model"]["merges"]) {
      const std::string piece = merge[0].get<std::string>() + merge[1].get<std::string>();
      const double score = scores[root["model"]["vocab"][piece].get<std::size_t>()];
      CHECK(score <= last);
      last = score;
    }
    std::vector<std::string> warnings;
    auto files = result.tokenizer(warnings);
    REQUIRE(warnings.empty());
    const Json back = Json::parse(files["tokenizer.json"]);
    // Scores allow any two tokens that make a piece, so that there may be more merges. Special tokens
    // are not merged.
    std::vector<Json> merges;
    for (const Json& merge : root["model"]["merges"]) {
      const std::string piece = merge[0].get<std::string>() + merge[1].get<std::string>();
      if (types[root["model"]["vocab"][piece].get<std::size_t>()] != 3) merges.push_back(merge);
    }
    CHECK(merges.size() + 10 > root["model"]["merges"].size());
    std::size_t found = 0;
    for (const Json& merge : back["model"]["merges"])
      if (found < merges.size() && merge == merges[found]) ++found;
    CHECK(found == merges.size());
    REQUIRE(back["added_tokens"].size() == root["added_tokens"].size());
    for (std::size_t i = 0; i < root["added_tokens"].size(); ++i)
      CHECK(back["added_tokens"][i]["content"] == root["added_tokens"][i]["content"]);
  }
  CHECK(reason_of(fixture("llama2")).find("contains a NUL") != std::string::npos);
}

TEST_CASE("lists of tokens that a tokenizer can't have") {
  struct Case {
    std::vector<std::string> tokens;
    std::vector<float> scores;
    std::vector<GgufSpec> tensors;
  };
  const auto read = [](const Case& c) {
    GgufKeys keys;
    keys.add("tokenizer.ggml.model", "llama");
    keys.add("tokenizer.ggml.tokens", c.tokens);
    keys.add("tokenizer.ggml.scores",
             c.scores.empty() ? std::vector<float>(c.tokens.size()) : c.scores);
    const GgufPlan plan = plan_gguf(keys, c.tensors);
    const TempDir dir;
    std::ofstream(dir.path() / "x.gguf", std::ios::binary) << plan.preamble;
    fs::resize_file(dir.path() / "x.gguf", static_cast<std::uintmax_t>(plan.file_size));
    const File file = File::open(dir.path() / "x.gguf");
    std::vector<std::string> warnings;
    const auto files = gguf_tokenizer(file, read_gguf_header(file), warnings);
    CHECK(files.empty() != warnings.empty());
    return warnings.empty() ? "" : warnings[0];
  };
  const GgufSpec embedding{
      "token_embd.weight", {2, 4}, &gguf_elements_of(DType::F32, Encoding::Plain)};
  CHECK(read({{"a", "b"}, {}, {embedding}}).empty());
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "tokens has 3 tokens, but token_embd.weight has 2 rows",
                       read({{"a", "b", "c"}, {}, {embedding}}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "tokens 0 and 2 are the same",
                       read({{"a", "b", "a"}, {}, {}}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "score of token 1 is no number",
                       read({{"a", "b"}, {0, std::nanf("")}, {}}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "scores has 1 values, not 2",
                       read({{"a", "b"}, {0}, {}}));
  std::vector<std::string> repeated;
  for (std::size_t size = 1; size <= 1024; ++size) repeated.emplace_back(size, 'a');
  CHECK(read({repeated, {}, {}}).find("allow over 64 MiB of merges") != std::string::npos);
  CHECK(read({std::vector<std::string>((1 << 20) + 1), {}, {}}).find("over 1048576 tokens") !=
        std::string::npos);
}

TEST_CASE("other tokenizers are left out, with the reason") {
  CHECK(reason_of(fixture("deepseek")).find("pre-tokenizer is none") != std::string::npos);
  CHECK(reason_of(fixture("prefix_space")).find("add_prefix_space") != std::string::npos);
  CHECK(reason_of(R"({"model": {"type": "WordLevel"}})").find("WordLevel, not BPE") !=
        std::string::npos);
  Json root = Json::parse(fixture("gpt2"));
  root["normalizer"] = {{"type", "Lowercase"}};
  CHECK(reason_of(root.dump()).find("normalizer Lowercase") != std::string::npos);
  root["normalizer"] = nullptr;
  root["model"]["ignore_merges"] = true;
  CHECK(reason_of(root.dump()).find("pre-tokenizer is none") != std::string::npos);
  root = Json::parse(fixture("gpt2"));
  root["added_tokens"].push_back({{"id", 600}, {"content", "<x>"}, {"special", true}});
  CHECK(reason_of(root.dump()).find("<x> has id 600, but the model has 600 tokens") !=
        std::string::npos);
  root = Json{{"model",
               {{"type", "BPE"},
                {"byte_fallback", true},
                {"unk_token", "u"},
                {"vocab", {{"u", 0}, {"a", 1}, {"b", 2}, {"ab", 3}, {"ba", 4}}},
                {"merges", {"a b"}}}},
              {"normalizer",
               {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "\xe2\x96\x81"}}}};
  CHECK(reason_of(root.dump()).find("no merge makes its token ba") != std::string::npos);
  root["model"]["merges"] = {"a b", "b a", "a b"};
  CHECK(reason_of(root.dump()).find("not next to each other") != std::string::npos);
  root["model"]["merges"] = {"a b", "b b"};
  CHECK(reason_of(root.dump()).find("which is no token") != std::string::npos);
  root["normalizer"] = nullptr;
  CHECK(reason_of(root.dump()).find("its normalizer is none") != std::string::npos);
  CHECK_THROWS_AS(put({{"tokenizer.json", "{"}}), CorruptCheckpoint);
  CHECK_THROWS_AS(put({{"tokenizer.json", R"({"model": {"type": "BPE"}})"}}), CorruptCheckpoint);
}

TEST_CASE("special tokens and chat templates come from the tokenizer's files") {
  const std::string llama3 = fixture("llama3");
  const Result result = put(
      {{"tokenizer.json", llama3},
       {"tokenizer_config.json",
        R"({"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": "<|endoftext|>", "chat_template": [
                {"name": "default", "template": "A"}, {"name": "tools", "template": "B"}]})"}},
      {{"pad_token_id", 5}, {"eos_token_id", {7, 8}}});
  const Json& keys = result.keys;
  CHECK(keys["tokenizer.ggml.bos_token_id"] == 0);
  CHECK(keys["tokenizer.ggml.eos_token_id"] == 1);
  CHECK(keys["tokenizer.ggml.padding_token_id"] == 5);
  CHECK(keys["tokenizer.ggml.add_bos_token"] == true);
  CHECK(keys["tokenizer.ggml.add_eos_token"] == true);
  CHECK(keys["tokenizer.chat_template"] == "A");
  CHECK(keys["tokenizer.chat_template.tools"] == "B");
  const Json other = put({{"tokenizer.json", llama3},
                          {"tokenizer_config.json", R"({"add_bos_token": false})"},
                          {"chat_template.jinja", "C"}},
                         {{"bos_token_id", 0}, {"eos_token_id", {7, 8}}})
                         .keys;
  CHECK(other["tokenizer.ggml.eos_token_id"] == 7);
  CHECK(other["tokenizer.ggml.add_bos_token"] == false);
  CHECK(other["tokenizer.chat_template"] == "C");
}

}  // namespace
}  // namespace tessera::io
