// Small tokenizers in the configurations of published models against the reference libraries:
// fixtures/ is written by make_fixtures.py.
#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "core/base/error.h"
#include "io/base/base64.h"
#include "io/base/file.h"
#include "io/data/tokenizer.h"
#include "tests/support/paths.h"

using namespace tessera::io;
using nlohmann::json;
using Ids = std::vector<std::int32_t>;

namespace {

const fs::path kFixtures = fs::path(tessera::test::source_path("tests/io/tokenizer/fixtures"));

const json& expectations() {
  static const json all = json::parse(read_file(kFixtures / "expected.json", 1 << 20));
  return all;
}

TokenizerPtr open_fixture(const std::string& name) {
  const fs::path path = kFixtures / name;
  return load_tokenizer(is_there(path) ? path.string() : path.string() + ".json");
}

std::vector<std::string> broken_texts() {
  std::vector<std::string> texts;
  for (const auto& text : expectations()["broken"])
    CHECK(decode_base64(text.get<std::string>(), texts.emplace_back()));
  return texts;
}

}  // namespace

TEST_CASE("ids and texts are those of the reference") {
  for (const auto& [name, expected] : expectations()["expected"].items()) {
    INFO(name);
    const auto tokenizer = open_fixture(name);
    CHECK(tokenizer->prefix() == expected["prefix"].get<Ids>());
    const auto& texts = expectations()["texts"];
    for (std::size_t i = 0; i < texts.size(); ++i) {
      INFO(texts[i].dump());
      const Ids ids = expected["ids"][i].get<Ids>();
      CHECK(tokenizer->encode(texts[i].get<std::string>()) == ids);
      CHECK(tokenizer->decode(ids) == expected["text"][i].get<std::string>());
    }
  }
}

TEST_CASE("malformed UTF-8 is kept by byte-level tokenizers and else replaced by U+FFFD") {
  const auto broken = broken_texts();
  for (const auto& [name, expected] : expectations()["expected"].items()) {
    // These add or remove characters.
    if (name == "prefix_space" || name == "removed" || name.starts_with("sentencepiece")) continue;
    INFO(name);
    const auto tokenizer = open_fixture(name);
    for (std::size_t i = 0; i < broken.size(); ++i) {
      INFO(i);
      const Ids ids = tokenizer->encode(broken[i]);
      if (expected.contains("broken")) {
        CHECK(ids == expected["broken"][i].get<Ids>());
      } else {
        CHECK(tokenizer->decode(ids) == broken[i]);
      }
    }
  }
}

TEST_CASE(
    "a description carries the tokenizer, and decoding one id at a time gives the same text") {
  for (const auto& [name, expected] : expectations()["expected"].items()) {
    INFO(name);
    const auto tokenizer = open_fixture(name);
    const auto copy = tokenizer_from_json(tokenizer->to_json());
    CHECK(copy->vocab_size() == tokenizer->vocab_size());
    CHECK(copy->kind() == tokenizer->kind());
    CHECK(copy->prefix() == tokenizer->prefix());
    CHECK(copy->to_json() == tokenizer->to_json());
    for (const auto& text : expectations()["texts"]) {
      const Ids ids = tokenizer->encode(text.get<std::string>());
      CHECK(copy->encode(text.get<std::string>()) == ids);
      // Joins tokens with spaces: it has no decoder.
      if (name == "no_fuse" || name == "nfd" || name.starts_with("sentencepiece")) continue;
      std::string streamed = ids.empty() ? "" : tokenizer->decode(Ids{ids[0]});
      for (std::size_t i = 1; i < ids.size(); ++i) {
        const std::string before = tokenizer->decode(Ids{ids[i - 1]});
        const std::string both = tokenizer->decode(Ids{ids[i - 1], ids[i]});
        REQUIRE(both.starts_with(before));
        streamed += both.substr(before.size());
      }
      CHECK(streamed == tokenizer->decode(ids));
    }
  }
}

TEST_CASE("the pair of files is the same tokenizer as the one file") {
  const auto one = open_fixture("gpt2");
  for (const char* path : {"pair", "pair/vocab.json", "pair/merges.txt"}) {
    const auto pair = load_tokenizer((kFixtures / path).string());
    CHECK(pair->vocab_size() == one->vocab_size());
    CHECK(pair->eos_id() == 0);
    for (const auto& text : expectations()["texts"])
      CHECK(pair->encode(text.get<std::string>()) == one->encode(text.get<std::string>()));
  }
}

TEST_CASE("special tokens, document ids, and ids outside the vocabulary") {
  const auto tokenizer = open_fixture("llama3");
  CHECK(tokenizer->bos_id() == 0);
  CHECK(tokenizer->eos_id() == 1);
  CHECK(tokenizer->suffix() == Ids{1});
  REQUIRE(tokenizer->special_tokens().size() == 2);
  CHECK(tokenizer->special_tokens()[1].text == "<|endoftext|>");
  const Ids ids = tokenizer->encode("ab");
  Ids document{0};
  document.insert(document.end(), ids.begin(), ids.end());
  document.push_back(1);
  CHECK(tokenizer->encode_document("ab") == document);
  const auto size = static_cast<std::int32_t>(tokenizer->vocab_size());
  CHECK_THROWS_AS(tokenizer->decode(Ids{size}), tessera::InvalidArgument);
  CHECK_THROWS_AS(tokenizer->decode(Ids{-1}), tessera::InvalidArgument);
}

TEST_CASE("threads share a tokenizer") {
  const auto tokenizer = open_fixture("deepseek");
  const std::string text = expectations()["texts"].dump();
  const Ids expected = tokenizer->encode(text);
  std::vector<Ids> found(4);
  {
    std::vector<std::jthread> threads;
    for (Ids& ids : found) threads.emplace_back([&] { ids = tokenizer->encode(text); });
  }
  for (const Ids& ids : found) CHECK(ids == expected);
}

TEST_CASE("a long word and a long run of spaces") {
  const auto tokenizer = open_fixture("llama2");
  const auto gpt2 = open_fixture("gpt2");
  for (const std::string& text : {std::string(300000, ' '), std::string(300000, 'a')}) {
    CHECK(gpt2->decode(gpt2->encode(text)) == text);
    CHECK(tokenizer->decode(tokenizer->encode(text)) == text);
  }
}
