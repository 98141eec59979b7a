#include "io/data/tokenizer.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

using namespace tessera;
using namespace tessera::io;
using nlohmann::json;

using Ids = std::vector<std::int32_t>;

TEST_CASE("bytes: every byte round-trips") {
  const auto tokenizer = make_byte_tokenizer();
  std::string text;
  for (int i = 0; i < 256; ++i) text.push_back(static_cast<char>(i));
  const Ids ids = tokenizer->encode(text);
  CHECK(ids.front() == 0);
  CHECK(ids.back() == 255);
  CHECK(tokenizer->decode(ids) == text);
  CHECK(tokenizer->vocab_size() == 256);
  CHECK_THROWS_HOLDING(InvalidArgument, "id 256", tokenizer->decode(Ids{256}));
  CHECK_THROWS_HOLDING(InvalidArgument, "id -1", tokenizer->decode(Ids{-1}));
}

TEST_CASE("chars: ids follow the sorted vocabulary") {
  const auto tokenizer = make_char_tokenizer(U"\nab\u20AC");
  CHECK(tokenizer->vocab_size() == 4);
  CHECK(tokenizer->encode("b\u20AC\na") == Ids{2, 3, 0, 1});
  CHECK(tokenizer->decode(Ids{3, 3, 1}) == "\u20AC\u20ACa");
  CHECK_THROWS_HOLDING(InvalidArgument, "p: character 'c' (U+0063) at position 1",
                       tokenizer->encode("acb", "p"));
  CHECK_THROWS_HOLDING(InvalidArgument, "not valid UTF-8", tokenizer->encode("a\xff"));
  CHECK_THROWS_AS(tokenizer->decode(Ids{4}), InvalidArgument);
}

TEST_CASE("a char vocabulary must be sorted, unique, and not too large") {
  CHECK_THROWS_AS(make_char_tokenizer(U""), InvalidArgument);
  CHECK_THROWS_HOLDING(InvalidArgument, "entry 2 is 'a'", make_char_tokenizer(U"aba"));
  CHECK_THROWS_HOLDING(InvalidArgument, "entry 1 is 'a'", make_char_tokenizer(U"aa"));
  std::u32string many;
  for (char32_t c = 0x20000; many.size() < 65537; ++c) many.push_back(c);
  CHECK_THROWS_HOLDING(InvalidArgument, "65537", make_char_tokenizer(many));
}

TEST_CASE("descriptions round-trip through JSON and files") {
  const test::TempDir dir;
  for (const auto& tokenizer : {make_byte_tokenizer(), make_char_tokenizer(U"\n \"\\\u00e9")}) {
    const auto path = dir.write("t.json", tokenizer->to_json());
    const auto loaded = load_tokenizer(path);
    CHECK(loaded->kind() == tokenizer->kind());
    CHECK(loaded->vocab_size() == tokenizer->vocab_size());
    CHECK(loaded->to_json() == tokenizer->to_json());
  }
}

TEST_CASE("a malformed tokenizer file is refused with its name") {
  const test::TempDir dir;
  const auto refused = [&](const std::string& text, const char* part) {
    const auto path = dir.write("t.json", text);
    CHECK_THROWS_HOLDING(InvalidArgument, path, load_tokenizer(path));
    CHECK_THROWS_HOLDING(InvalidArgument, part, load_tokenizer(path));
  };
  refused("", "is empty");
  refused("{\"type\":\"chars\",\"vocabulary\":\"ab", "not valid JSON");
  refused("\xEF\xBB\xBF{\"type\":\"bytes\"}", "byte-order mark");
  refused("{\"type\":\"bytes\",\"type\":\"chars\"}", "duplicate key \"type\"");
  refused(std::string(1000, '['), "nested deeper");
  refused("[]", "found array");
  refused("{}", "found none");
  refused("{\"type\":3}", "found number");
  refused("{\"type\":\"chars\"}", "vocabulary\", found none");
  refused("{\"type\":\"chars\",\"vocabulary\":\"ba\"}", "sorted");
  CHECK_THROWS_HOLDING(Unsupported, "\"spm\"",
                       load_tokenizer(dir.write("t.json", "{\"type\":\"spm\"}")));
  refused("{\"model\":{},\"added_tokens\":[]}", "model: the field \"vocab\" is missing");
  CHECK_THROWS_HOLDING(IoError, "No such file", load_tokenizer(dir.file("absent.json")));
}
