#include "io/tokenizer/train_bpe.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/data/tokenizer.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

using namespace tessera;
using namespace tessera::io;
using Ids = std::vector<std::int32_t>;

namespace {

nlohmann::json train(TrainBpeOptions options, const std::vector<std::string>& texts) {
  BpeTrainer trainer(std::move(options));
  for (const std::string& text : texts) trainer.add(text);
  return nlohmann::json::parse(trainer.finish());
}

}  // namespace

TEST_CASE("the most frequent pair comes first, of several the one with the smallest ids") {
  const auto json = train({.vocab_size = 261, .special_tokens = {"<s>"}, .min_count = 1},
                          {"abab abab xy xy zz zz"});
  const std::vector<std::string> merges = json["model"]["merges"];
  // ab: 4. Then abab: 2, and of the pairs with a count of 2 the smallest is (x, y).
  CHECK(merges == std::vector<std::string>{"a b", "x y", "z z", "\u0120 xy"});
  CHECK(json["model"]["vocab"]["<s>"] == 0);
  CHECK(json["model"]["vocab"]["!"] == 1);
  CHECK(json["model"]["vocab"]["ab"] == 257);
}

TEST_CASE("the file is a tokenizer that gives any text back") {
  const test::TempDir dir;
  const std::string text =
      "The cat sat on the mat.\n\u6211\u559c\u6b22\u5b66\u4e60 \xff <|endoftext|>";
  BpeTrainer trainer({.vocab_size = 300});
  for (int i = 0; i < 3; ++i) trainer.add(text);
  const std::string json = trainer.finish();
  const auto tokenizer = load_tokenizer(dir.write("tokenizer.json", json));
  CHECK(tokenizer->kind() == "bpe");
  CHECK(tokenizer->vocab_size() <= 300);
  CHECK(tokenizer->vocab_size() > 270);
  CHECK(tokenizer->decode(tokenizer->encode(text)) == text);
  CHECK(tokenizer->encode("a<|endoftext|>").back() == 0);

  // The order of texts does not matter, nor how they are cut between words.
  BpeTrainer again({.vocab_size = 300});
  for (int i = 0; i < 3; ++i) again.add(text);
  CHECK(again.finish() == json);
}

TEST_CASE("rare pairs are not merged") {
  CHECK(train({.vocab_size = 400, .special_tokens = {}}, {"abcd"})["model"]["merges"].empty());
  CHECK(
      train({.vocab_size = 400, .special_tokens = {}, .min_count = 1}, {"abcd"})["model"]["merges"]
          .size() == 3);
}

TEST_CASE("overlapping pairs are counted as they are merged") {
  const auto json = train({.vocab_size = 260, .special_tokens = {}}, {"aaaaaaa aaaaaaa aaaa"});
  const std::vector<std::string> merges = json["model"]["merges"];
  REQUIRE(!merges.empty());
  CHECK(merges[0] == "a a");
  CHECK(merges[1] == "aa aa");
}

TEST_CASE("options that do not fit are refused") {
  CHECK_THROWS_HOLDING(InvalidArgument, "from 257 ids", BpeTrainer({.vocab_size = 256}));
  CHECK_THROWS_HOLDING(InvalidArgument, "given twice",
                       BpeTrainer({.special_tokens = {"<a>", "<a>"}}));
  CHECK_THROWS_HOLDING(InvalidArgument, "is the character of a byte",
                       BpeTrainer({.special_tokens = {"a"}}));
  CHECK_THROWS_HOLDING(InvalidArgument, "not empty", BpeTrainer({.special_tokens = {""}}));
  CHECK_THROWS_HOLDING(Unsupported, "--pattern", BpeTrainer({.pattern = "["}));
  BpeTrainer nothing({});
  CHECK_THROWS_HOLDING(InvalidArgument, "no text", nothing.finish());
}
