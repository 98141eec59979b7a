// One case per malformation: the message names the file, and the field or line.
#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/base64.h"
#include "io/data/tokenizer.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

using namespace tessera;
using namespace tessera::io;
using nlohmann::json;

namespace {

json valid() {
  return {{"version", "1.0"},
          {"added_tokens", json::array()},
          {"pre_tokenizer", {{"type", "Metaspace"}}},
          {"model",
           {{"type", "BPE"},
            {"vocab", {{"a", 0}, {"b", 1}, {"ab", 2}}},
            {"merges", json::array({"a b"})}}}};
}

struct Files {
  test::TempDir dir;

  template <typename E>
  void refused(const std::string& name, const std::string& text, const std::string& part) const {
    const auto path = dir.write(name, text);
    INFO(part);
    CHECK_THROWS_HOLDING(E, path, load_tokenizer(path));
    CHECK_THROWS_HOLDING(E, part, load_tokenizer(path));
  }
  /// tokenizer.json with a value at a JSON pointer.
  void malformed(const char* at, const json& value, const std::string& part) const {
    json file = valid();
    file[json::json_pointer(at)] = value;
    refused<InvalidArgument>("tokenizer.json", file.dump(), part);
  }
  void unsupported(const char* at, const json& value, const std::string& part) const {
    json file = valid();
    file[json::json_pointer(at)] = value;
    refused<Unsupported>("tokenizer.json", file.dump(), part);
  }
};

/// A rank file of all bytes.
std::string ranks() {
  std::string text;
  for (int byte = 0; byte < 256; ++byte)
    text += fmt::format("{} {}\n", encode_base64(std::string(1, static_cast<char>(byte))), byte);
  return text;
}

}  // namespace

TEST_CASE("tokenizer.json: malformed fields") {
  const Files files;
  CHECK(load_tokenizer(files.dir.write("t.json", valid().dump()))->vocab_size() == 3);
  files.malformed("/model", 3, "model");
  files.malformed("/model/type", 3, "model.type");
  files.malformed("/model/vocab", json::array(), "model.vocab");
  files.malformed("/model/vocab", json::object(), "model.vocab: it is empty");
  files.malformed("/model/vocab/a", -1, "the id of \"a\" is -1");
  files.malformed("/model/vocab/a", 1.5, "the id of \"a\" is 1.5");
  files.malformed("/model/vocab/a", 1 << 30, "the id of \"a\"");
  files.malformed("/model/vocab/a", 1, "\"a\" and \"b\" have the same id 1");
  files.malformed("/model/merges", "a b", "model.merges");
  files.malformed("/model/merges/0", "ab",
                  "expected two tokens with a space between, found \"ab\"");
  files.malformed("/model/merges/0", "a b c", "expected two tokens");
  files.malformed("/model/merges/0", json::array({"a"}), "expected two tokens, found 1");
  files.malformed("/model/merges/0", json::array({"a", 3}), "model.merges[0][1]");
  files.malformed("/model/merges/0", "a x", "\"x\" is not in the vocabulary");
  files.malformed("/model/merges/0", "b a", "\"ba\" is not in the vocabulary");
  files.malformed("/model/fuse_unk", 1, "model.fuse_unk: expected true or false");
  files.malformed("/added_tokens", json::object(), "added_tokens");
  files.malformed("/added_tokens/0", {{"id", 3}}, "added_tokens[0]");
  files.malformed("/pre_tokenizer", {{"kind", "x"}}, "pre_tokenizer");
  files.malformed("/pre_tokenizer", {{"type", "Split"}, {"pattern", {{"Regex", "a"}}}},
                  "pre_tokenizer");
  files.malformed("/normalizer", {{"type", "Sequence"}, {"normalizers", 3}},
                  "normalizer.normalizers");
  files.malformed("/decoder", {{"type", "Strip"}, {"content", " "}, {"start", -1}, {"stop", 0}},
                  "decoder.start");
  files.malformed("/post_processor",
                  {{"type", "TemplateProcessing"},
                   {"single", json::array({{{"SpecialToken", {{"id", "<s>"}}}}})},
                   {"special_tokens", json::object()}},
                  "post_processor.special_tokens");
  files.malformed("/post_processor",
                  {{"type", "TemplateProcessing"},
                   {"single", json::array({{{"SpecialToken", {{"id", "<s>"}}}}})},
                   {"special_tokens", {{"<s>", {{"ids", json::array({7})}}}}}},
                  "post_processor: id 7 is outside the vocabulary of 3");
  files.refused<InvalidArgument>("tokenizer.json", R"({"version":"1.0","model":)",
                                 "not valid JSON");
  files.refused<InvalidArgument>("tokenizer.json", "{\"version\":\"\xff\"}", "not valid UTF-8");
}

TEST_CASE("tokenizer.json: what this build lacks is refused by name") {
  const Files files;
  files.unsupported("/model/type", "Unigram", "model.type: the model Unigram");
  files.unsupported("/model/dropout", 0.1, "model.dropout");
  files.unsupported("/model/end_of_word_suffix", "</w>", "model.end_of_word_suffix");
  files.unsupported("/model/continuing_subword_prefix", "##", "model.continuing_subword_prefix");
  files.unsupported("/model/novelty", true, "model.novelty: this field");
  files.unsupported("/novelty", true, "novelty");
  files.unsupported("/normalizer", {{"type", "Precompiled"}},
                    "normalizer: the normalizer Precompiled");
  files.unsupported("/pre_tokenizer", {{"type", "UnicodeScripts"}},
                    "the pre-tokenizer UnicodeScripts");
  files.unsupported("/pre_tokenizer/novelty", 1, "pre_tokenizer.novelty");
  files.unsupported("/pre_tokenizer/prepend_scheme", "sometimes", "prepend_scheme");
  files.unsupported(
      "/pre_tokenizer",
      {{"type", "Sequence"}, {"pretokenizers", {{{"type", "ByteLevel"}}, {{"type", "Digits"}}}}},
      "pretokenizers[1]: a pre-tokenizer after ByteLevel");
  files.unsupported("/pre_tokenizer",
                    {{"type", "Split"}, {"pattern", {{"Regex", "a&&["}}}, {"behavior", "Isolated"}},
                    "pre_tokenizer.pattern.Regex");
  files.unsupported("/pre_tokenizer",
                    {{"type", "Split"}, {"pattern", {{"String", "a"}}}, {"behavior", "Odd"}},
                    "Odd");
  files.unsupported("/decoder", {{"type", "WordPiece"}}, "the decoder WordPiece");
  files.unsupported("/post_processor", {{"type", "BertProcessing"}}, "BertProcessing");
}

TEST_CASE("vocab.json and merges.txt: errors name the file and the line") {
  const Files files;
  files.dir.write("vocab.json", R"({"a":0,"b":1,"ab":2})");
  files.refused<InvalidArgument>("merges.txt", "#version: 0.2\na b\nab\n",
                                 "line 3: expected two tokens");
  files.refused<InvalidArgument>("merges.txt", "#version: 0.2\na c\n", "line 2: \"c\" is not");
  files.dir.write("merges.txt", "#version: 0.2\na b\n");
  files.refused<InvalidArgument>("vocab.json", R"({"a":0,"b":"x"})", "the id of \"b\"");
  const test::TempDir alone;
  CHECK_THROWS_HOLDING(InvalidArgument, "needs merges.txt",
                       load_tokenizer(alone.write("vocab.json", R"({"a":0})")));
  const test::TempDir other;
  CHECK_THROWS_HOLDING(InvalidArgument, "needs vocab.json",
                       load_tokenizer(other.write("merges.txt", "#version: 0.2\n")));
}

TEST_CASE("tiktoken: errors name the file and the line") {
  const Files files;
  const std::string name = "cl100k_base.tiktoken";
  CHECK(load_tokenizer(files.dir.write(name, ranks()))->encode("az") ==
        std::vector<std::int32_t>{97, 122});
  files.refused<InvalidArgument>(name, ranks() + "YWI=\n", "line 257: expected a token in base64");
  files.refused<InvalidArgument>(name, ranks() + "YWI= x\n",
                                 "line 257: expected a token in base64");
  files.refused<InvalidArgument>(name, ranks() + "YWI 256\n",
                                 "line 257: expected a token in base64");
  files.refused<InvalidArgument>(name, ranks() + "YWI= 255\n", "line 257: rank 255 occurs twice");
  files.refused<InvalidArgument>(name, ranks() + "YWI= 999999999\n", "line 257: rank 999999999");
  files.refused<InvalidArgument>(name, ranks() + " 256\n", "line 257: an empty token");
  files.refused<InvalidArgument>(name, ranks() + "YQ== 256\n",
                                 "ranks 97 and 256 are the same token");
  files.refused<InvalidArgument>(name, "YWI= 0\n", "no token for the byte 0x00");
  files.refused<Unsupported>("other.tiktoken", ranks(), "256 ranks");
  const auto given = tokenizer_from_json(json{
      {"type", "files"},
      {"files", {{"tiktoken.model", ranks()}}},
      {"pattern", "\\p{L}+"}}.dump());
  CHECK(given->encode("ab").size() == 2);
}

TEST_CASE("tekken.json and SentencePiece models: errors name the file") {
  const Files files;
  json tekken{{"config",
               {{"pattern", "a"}, {"default_vocab_size", 266}, {"default_num_special_tokens", 10}}},
              {"vocab", json::array()}};
  for (int byte = 0; byte < 256; ++byte)
    tekken["vocab"].push_back(
        {{"rank", byte}, {"token_bytes", encode_base64(std::string(1, static_cast<char>(byte)))}});
  CHECK(load_tokenizer(files.dir.write("tekken.json", tekken.dump()))->vocab_size() == 266);
  const auto with = [&](const char* at, const json& value) {
    json file = tekken;
    file[json::json_pointer(at)] = value;
    return file.dump();
  };
  files.refused<InvalidArgument>("tekken.json", with("/config/default_vocab_size", 3),
                                 "config.default_vocab_size");
  files.refused<InvalidArgument>("tekken.json", with("/vocab/3/token_bytes", "%"),
                                 "vocab[3].token_bytes: expected base64");
  files.refused<InvalidArgument>("tekken.json", with("/vocab/3/rank", 4),
                                 "vocab[4]: rank 4 occurs twice");
  files.refused<InvalidArgument>("tekken.json", with("/config/pattern", 4), "config.pattern");
  files.refused<Unsupported>("tekken.json", with("/config/pattern", "["), "config.pattern");
  files.refused<InvalidArgument>("tokenizer.model", "\nnonsense", "not a SentencePiece model");
  files.refused<InvalidArgument>("tokenizer.model", "hello", "expected a tokenizer");
}

TEST_CASE("descriptions and directories without a tokenizer") {
  const test::TempDir dir;
  CHECK_THROWS_HOLDING(InvalidArgument, "holds no tokenizer", load_tokenizer(dir.path().string()));
  CHECK_THROWS_HOLDING(InvalidArgument, "names none of its files",
                       tokenizer_from_json(R"({"type":"files","files":{}})"));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "binary.x: expected base64",
                       tokenizer_from_json(R"({"type":"files","files":{},"binary":{"x":"?"}})"));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "files.x",
                       tokenizer_from_json(R"({"type":"files","files":{"x":3}})"));
}
