#include "io/data/dataset.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <string_view>
#include <vector>

#include "core/base/error.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

using namespace tessera;
using namespace tessera::io;
using tessera::test::TempDir;

namespace {

std::vector<std::int32_t> read_all(const TokenSource& source) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(source.size()));
  source.read(0, source.size(), out.data());
  return out;
}

std::string u16(const std::vector<std::uint16_t>& ids) {
  return {reinterpret_cast<const char*>(ids.data()), ids.size() * 2};
}

}  // namespace

TEST_CASE("bytes: the end of a text is the validation set, split as in nanoGPT") {
  const TempDir dir;
  std::string text;
  for (int i = 0; i < 109; ++i) text.push_back(static_cast<char>('a' + i % 20));
  const Dataset data = open_dataset({.train = {dir.write("t.txt", text)}});
  CHECK(data.vocab_size == 256);
  CHECK(data.train->size() == 98);  // int(109 * 0.9)
  REQUIRE(data.val);
  CHECK(data.val->size() == 11);
  CHECK(data.tokenizer->decode(read_all(*data.train)) == text.substr(0, 98));
  CHECK(data.tokenizer->decode(read_all(*data.val)) == text.substr(98));
  CHECK(!open_dataset({.train = {dir.file("t.txt")}, .val_fraction = 0}).val);
}

TEST_CASE(
    "chars: the vocabulary is the sorted set of characters of all text, split by characters") {
  const TempDir dir;
  const auto train = dir.write("t.txt", "b\u00e9a\u00e9b\u00e9a\u00e9ba");
  const Dataset data = open_dataset({.train = {train}, .tokenizer = "chars"});
  CHECK(data.vocab_size == 3);
  CHECK(read_all(*data.train) == std::vector<std::int32_t>{1, 2, 0, 2, 1, 2, 0, 2, 1});
  CHECK(read_all(*data.val) == std::vector<std::int32_t>{0});
  const Dataset both =
      open_dataset({.train = {train}, .val = {dir.write("v.txt", "z")}, .tokenizer = "chars"});
  CHECK(both.vocab_size == 4);
  CHECK(both.train->size() == 10);
  CHECK_THROWS_HOLDING(
      InvalidArgument, "not valid UTF-8",
      open_dataset({.train = {dir.write("b.txt", "a\xff")}, .tokenizer = "chars"}));
}

TEST_CASE("a tokenizer from a file or a model is used unchanged") {
  const TempDir dir;
  const auto text = dir.write("t.txt", "abcabcabca");
  const auto file = dir.write("tok.json", R"({"type":"chars","vocabulary":"abcd"})");
  CHECK(open_dataset({.train = {text}, .tokenizer = file}).vocab_size == 4);
  DatasetOptions fixed{.train = {text}};
  fixed.fixed_tokenizer = make_char_tokenizer(U"ab");
  CHECK_THROWS_HOLDING(InvalidArgument, "t.txt: character 'c' (U+0063) at position 2",
                       open_dataset(fixed));
}

TEST_CASE("lists and globs are concatenated, matches in order of name") {
  const TempDir dir;
  dir.write("b.txt", "BB");
  dir.write("a.txt", "AA");
  dir.write("c.txt", "CC");
  const DatasetOptions options{.train = {dir.file("c.txt"), dir.file("[ab].txt")},
                               .val_fraction = 0};
  const Dataset data = open_dataset(options);
  CHECK(data.tokenizer->decode(read_all(*data.train)) == "CCAABB");
  dir.write("[ab].txt", "[]");  // a literal file name takes precedence over the glob
  CHECK(data.tokenizer->decode(read_all(*open_dataset(options).train)) == "CC[]");
  CHECK_THROWS_HOLDING(IoError, "no file matches", open_dataset({.train = {dir.file("*.bin")}}));
  CHECK_THROWS_HOLDING(IoError, "No such file", open_dataset({.train = {dir.file("d.txt")}}));
  CHECK_THROWS_HOLDING(InvalidArgument, "no training data", open_dataset({}));
}

TEST_CASE("token files: never split; without a given vocabulary size, the ids determine it") {
  const TempDir dir;
  const auto train = dir.write("t.bin", u16({1, 2, 3}));
  const auto val = dir.write("v.bin", u16({9}));
  const Dataset data = open_dataset({.train = {train}, .val = {val}});
  CHECK(data.vocab_size == 10);
  CHECK(!data.tokenizer);
  CHECK(!open_dataset({.train = {train}}).val);
  const Dataset limited = open_dataset({.train = {train}, .vocab_size = 3});
  CHECK(limited.vocab_size == 3);
  CHECK_THROWS_HOLDING(IoError, "token 2 has id 3", read_all(*limited.train));
}

TEST_CASE("contradictory options are refused") {
  const TempDir dir;
  const auto text = dir.write("t.txt", "hello");
  const auto tokens = dir.write("t.bin", u16({1, 2}));
  CHECK_THROWS_HOLDING(InvalidArgument, "t.txt is text", open_dataset({.train = {text, tokens}}));
  CHECK_THROWS_HOLDING(InvalidArgument, "model.vocab_size is 100",
                       open_dataset({.train = {text}, .vocab_size = 100}));
  CHECK(open_dataset({.train = {text}, .vocab_size = 512}).vocab_size == 512);
  CHECK_THROWS_HOLDING(InvalidArgument, "val_fraction",
                       open_dataset({.train = {text}, .val_fraction = 1.0}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "is a directory",
                       open_dataset({.train = {dir.path().string()}}));
}

TEST_CASE("files of other formats are refused with advice, whatever their names") {
  using namespace std::string_view_literals;
  const TempDir dir;
  const std::string jsonl = "{\"text\": \"a\"}\n{\"text\": \"b\"}\n";
  const struct {
    const char* file;
    std::string_view content;
    const char* message;
  } cases[] = {{"a.gz", "\x1f\x8b\x08\0\0\0"sv, "is a gzip file"},
               {"a.bin", "\x1f\x8b\x08\0\0\0"sv, "is a gzip file, not a token file; unpack it"},
               {"a.bz2", "BZh91AY&SY..", "is a bzip2 file"},
               {"a.npy", "\x93NUMPY\x01", "write its ids as uint16 into a .bin file"},
               {"a.bin", "\x93NUMPY\x01.", "is a NumPy array"},
               {"a.out",
                "\x7f"
                "ELF\x02",
                "is a program"},
               {"a.zip", "PK\x03\x04", "is a zip archive"},
               {"a.txt", "version https://git-lfs.github.com/spec/v1\n", "git lfs pull"},
               {"a.json", jsonl, "is JSON with one object per line, not text; extract its text"},
               {"a.jsonl", "{", "a.jsonl:1: the line is not valid JSON"},
               {"a.csv", "a,b\n", "is a table"}};
  for (const auto& c : cases) {
    CAPTURE(c.file);
    CHECK_THROWS_HOLDING(IoError, c.message,
                         open_dataset({.train = {dir.write(c.file, c.content)}}));
  }
  const Dataset asked = open_dataset({.train = {dir.write("j.txt", jsonl)}});  // renamed to .txt
  CHECK(asked.warnings.empty());
}

TEST_CASE("binary noise gives a warning, text and its tokens do not") {
  const TempDir dir;
  std::uint32_t seed = 1;
  std::vector<std::uint16_t> noise(40'000), language(40'000);
  for (std::size_t i = 0; i < noise.size(); ++i) {
    seed = seed * 1664525 + 1013904223;
    noise[i] = static_cast<std::uint16_t>(seed >> 16);
    language[i] = noise[i] % 4 == 0 ? noise[i] : noise[i] % 100;
  }
  const auto warnings = [&](const char* file, const std::string& content) {
    return open_dataset({.train = {dir.write(file, content)}}).warnings;
  };
  REQUIRE(warnings("noise.txt", u16(noise)).size() == 1);
  CHECK(warnings("noise.txt", u16(noise))[0].find("control characters") != std::string::npos);
  REQUIRE(warnings("noise.bin", u16(noise)).size() == 1);
  CHECK(warnings("noise.bin", u16(noise))[0].find("spread evenly over ids 0 to 655") !=
        std::string::npos);
  CHECK(warnings("language.bin", u16(language)).empty());
  CHECK(warnings("short.bin", u16({1, 2, 3, 4})).empty());
  CHECK(warnings("text.txt", "Caf\xe9 of 1900,\r\n\tin Latin-1\n").empty());
}
