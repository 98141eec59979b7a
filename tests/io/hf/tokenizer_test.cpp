#include "io/hf/tokenizer.h"

#include <doctest/doctest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "io/base/json.h"

namespace tessera::io {
namespace {

TEST_CASE("bytes are byte-level BPE without merges, in GPT-2's byte alphabet") {
  const auto json = tokenizer_to_hf({{"type", "bytes"}});
  REQUIRE(json);
  const Json& model = json->at("model");
  CHECK(model["type"] == "BPE");
  CHECK(model["merges"] == Json::array());
  const Json& vocabulary = model["vocab"];
  CHECK(vocabulary.size() == 256);
  CHECK(std::set<int>(vocabulary.begin(), vocabulary.end()).size() == 256);
  for (const auto& entry : std::map<std::string, int>{{"\u0100", 0x00},
                                                      {"\u010A", '\n'},
                                                      {"\u0120", ' '},
                                                      {"!", '!'},
                                                      {"\"", '"'},
                                                      {"~", '~'},
                                                      {"\u0121", 0x7F},
                                                      {"\u0142", 0xA0},
                                                      {"\u00A1", 0xA1},
                                                      {"\u0143", 0xAD},
                                                      {"\u00FF", 0xFF}}) {
    INFO(entry.first);
    CHECK(vocabulary.value(entry.first, -1) == entry.second);
  }
  for (const char* part : {"pre_tokenizer", "decoder"}) {
    CHECK(json->at(part)["type"] == "ByteLevel");
    CHECK(json->at(part)["add_prefix_space"] == false);
  }
  CHECK(json->at("normalizer").is_null());
}

TEST_CASE("characters keep their ids, and unknown ones are an error") {
  const Json description{{"type", "chars"}, {"vocabulary", "\n \"a\u00e4\u20ac\U0001F600"}};
  const auto json = tokenizer_to_hf(description);
  REQUIRE(json);
  const Json& model = json->at("model");
  CHECK(model["type"] == "WordLevel");
  CHECK(model["vocab"] == Json{{"\n", 0},
                               {" ", 1},
                               {"\"", 2},
                               {"a", 3},
                               {"\u00e4", 4},
                               {"\u20ac", 5},
                               {"\U0001F600", 6}});
  CHECK_FALSE(model["vocab"].contains(model["unk_token"].get<std::string>()));
  CHECK(json->at("pre_tokenizer")["behavior"] == "Isolated");
  CHECK(json->at("pre_tokenizer")["pattern"] == Json{{"Regex", "[\\s\\S]"}});
  CHECK(json->at("decoder")["type"] == "Fuse");
}

TEST_CASE("other tokenizers have no Hugging Face counterpart") {
  for (const Json& description :
       {Json(nullptr), Json{{"kind", "bytes"}}, Json{{"type", 3}}, Json{{"type", "bpe"}},
        Json{{"type", "chars"}}, Json{{"type", "chars"}, {"vocabulary", 3}}}) {
    INFO(description.dump());
    CHECK_FALSE(tokenizer_to_hf(description));
  }
}

TEST_CASE("text round-trips, and the model's maximum length is stated") {
  const Json config = tokenizer_config_to_hf(32);
  CHECK(config["clean_up_tokenization_spaces"] == false);
  CHECK(config["model_max_length"] == 32);
}

}  // namespace
}  // namespace tessera::io
