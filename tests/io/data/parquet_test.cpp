// Parquet files, of fixtures/make_parquet.py: the tokens of the same documents in lines of JSON.
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "io/data/recognize.h"
#include "io/data/tokenize.h"
#include "io/parquet/text_column.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

using namespace tessera;
using namespace tessera::io;
using tessera::test::TempDir;

namespace {

TokenizeOptions byte_options(const std::vector<std::string>& files, const std::string& field) {
  TokenizeOptions options;
  options.tokenizer = make_byte_tokenizer();
  options.end_token = 0;
  options.sources = list_corpus(files);
  options.field = field;
  return options;
}

}  // namespace

TEST_CASE("without the plugin, a Parquet file is refused with what to install") {
  ::unsetenv("TESSERA_PARQUET_PLUGIN");
  const TempDir dir;
  const auto options = byte_options({dir.write("a.parquet", "PAR1")}, "text");
  CHECK_THROWS_HOLDING(Unsupported, "a.parquet: this build of tessera can't read Parquet",
                       tokenize_to_file(options, dir.file("x.bin")));
  CHECK_THROWS_HOLDING(Unsupported, "tools/setup.sh --parquet",
                       tokenize_to_file(options, dir.file("x.bin")));
  CHECK_THROWS_HOLDING(IoError, "make token files of it",
                       inspect_data_file(dir.file("a.parquet"), false));
}

#ifdef TESSERA_PARQUET_PLUGIN
namespace {

constexpr int kFixtureRows = 130;

std::string fixture() {
  ::setenv("TESSERA_PARQUET_PLUGIN", TESSERA_PARQUET_PLUGIN, 1);
  return test::source_path("tests/io/data/fixtures/texts.parquet");
}

std::string row_text(int row) {
  if (row % 50 == 0) return "";
  std::string text = std::to_string(row) + " \"quoted\" \xE6\xBC\xA2\xE5\xAD\x97\n";
  for (int i = 0; i < row % 7; ++i) text += "word ";
  return text;
}

std::vector<std::optional<std::string>> read_column(const std::string& path,
                                                    const std::string& column,
                                                    std::int64_t first = 0) {
  std::vector<std::optional<std::string>> texts;
  const auto rows = open_text_column(path, column, first);
  for (std::optional<std::string_view> text; rows->next(text);)
    texts.push_back(text ? std::optional<std::string>(*text) : std::nullopt);
  return texts;
}

std::map<std::string, std::string> shards_in(const TempDir& dir, const std::string& name) {
  std::map<std::string, std::string> all;
  for (const auto& entry : std::filesystem::directory_iterator(dir.path() / name))
    if (const auto file = entry.path().filename().string(); file.ends_with(".bin"))
      all[file] = dir.read(name + "/" + file);
  return all;
}

}  // namespace

TEST_CASE("columns of every type, encoding and compression have their texts, from any row on") {
  std::vector<std::optional<std::string>> expected;
  for (int row = 0; row < kFixtureRows; ++row) expected.emplace_back(row_text(row));
  for (const std::string column :
       {"text", "large", "dictionary", "delta", "binary", "required", "nested.text"}) {
    CAPTURE(column);
    CHECK(read_column(fixture(), column) == expected);
    for (int first = 1; first <= kFixtureRows; ++first)
      CHECK(read_column(fixture(), column, first) ==
            std::vector(expected.begin() + first, expected.end()));
  }
  for (int row = 0; row < kFixtureRows; row += 3) expected[static_cast<std::size_t>(row)].reset();
  CHECK(read_column(fixture(), "nulls") == expected);
}

TEST_CASE("Parquet files give the tokens of lines of JSON; nulls are counted") {
  const TempDir dir;
  std::filesystem::create_directories(dir.path() / "deep/er");
  std::filesystem::copy_file(fixture(), dir.path() / "deep/er/a.parquet");
  std::string lines, without_nulls;
  for (int row = 0; row < kFixtureRows; ++row) {
    const std::string line = nlohmann::json{{"text", row_text(row)}}.dump() + "\n";
    lines += line;
    if (row % 3 != 0) without_nulls += line;
  }
  const auto bytes_of = [&](const std::string& file, const std::string& field, int skipped) {
    auto options = byte_options({dir.file(file)}, field);
    std::vector<std::string> warnings;
    options.warn = [&](const std::string& text) { warnings.push_back(text); };
    options.overwrite = true;
    CHECK(tokenize_to_file(options, dir.file("x.bin")).skipped == skipped);
    CHECK(warnings.size() == (skipped > 0 ? 10 : 0));
    if (skipped > 0)
      CHECK(warnings[1].find("a.parquet: row 4: \"nulls\" is null") != std::string::npos);
    return dir.read("x.bin");
  };
  dir.write("lines.jsonl", lines);
  CHECK(bytes_of("deep", "text", 0) == bytes_of("lines.jsonl", "text", 0));
  dir.write("lines.jsonl", without_nulls);
  CHECK(bytes_of("deep", "nulls", 44) == bytes_of("lines.jsonl", "text", 0));
}

TEST_CASE("Parquet files: the same shards after a stop in any batch") {
  const TempDir dir;
  auto options = byte_options({fixture()}, "long");
  options.shard_tokens = 100'003;
  tokenize_to_directory(options, dir.path() / "whole");
  const auto expected = shards_in(dir, "whole");
  REQUIRE(expected.size() > 50);
  int stops = 0;
  for (bool done = false; !done; ++stops) {
    int left = 2;
    options.threads = 1 + stops % 3;
    options.progress = [&](const TokenizeProgress&) { return --left > 0; };
    try {
      tokenize_to_directory(options, dir.path() / "stopped");
      done = true;
    } catch (const TokenizeStopped&) {
      REQUIRE(stops < 40);
    }
  }
  CHECK(stops > 5);
  CHECK(shards_in(dir, "stopped") == expected);
}

TEST_CASE("columns that hold no text are refused with those that do") {
  const TempDir dir;
  const auto refused = [&](const std::string& field, const std::string& why) {
    CHECK_THROWS_HOLDING(IoError, why,
                         tokenize_to_file(byte_options({fixture()}, field), dir.file("x.bin")));
  };
  refused("content",
          "has no column \"content\"; --field names another, of its text columns: text, large,");
  refused("id", "column \"id\" holds INT64, not one text per row");
  refused("lists", "column \"lists\" holds lists, not one text per row");
  refused("lists.list.element", "holds lists, not one text per row");
}

TEST_CASE("damaged Parquet files end with an error, and are skipped alike from any row on") {
  const TempDir dir;
  std::string whole;
  {
    std::ifstream in(fixture(), std::ios::binary);
    whole.assign(std::istreambuf_iterator<char>(in), {});
  }
  int refused = 0;
  const auto examine = [&](const std::string& content, const std::string& column) {
    const auto path = dir.write("a.parquet", content);
    const auto rows_before_damage = [&](std::int64_t first) {
      std::int64_t rows = first;
      try {
        const auto texts = open_text_column(path, column, first);
        for (std::optional<std::string_view> text; texts->next(text);) ++rows;
      } catch (const CorruptCheckpoint& error) {
        CHECK(std::string(error.what()).find("a.parquet") != std::string::npos);
        ++refused;
      } catch (const IoError&) {  // no such column
        ++refused;
      }
      return rows;
    };
    const std::int64_t rows = rows_before_damage(0);
    if (rows > 1) CHECK(rows_before_damage(rows - 1) == rows);
  };
  for (std::size_t size = 0; size < whole.size(); size += 97)
    examine(whole.substr(0, size), "text");
  CHECK(refused > 100);
  for (std::size_t at = 0; at < whole.size(); at += 13) {
    std::string flipped = whole;
    flipped[at] ^= static_cast<char>(1 + at % 255);
    examine(flipped, at % 3 == 0 ? "text" : at % 3 == 1 ? "delta" : "dictionary");
  }

  // The header of a dictionary page: all threads stop at the error of the one that reads.
  std::string headless = whole;
  headless[2399] ^= 1;
  auto threads = byte_options({dir.write("c.parquet", headless)}, "dictionary");
  threads.threads = 4;
  for (int i = 0; i < 5; ++i)
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "c.parquet: column \"dictionary\"",
                         tokenize_to_file(threads, dir.file("x.bin")));

  // Numbers of rows of 50, made negative.
  refused = 0;
  for (std::size_t at = whole.size() - 4000; at < whole.size(); ++at) {
    if (whole[at] != 2 * 50) continue;
    std::string negative = whole;
    negative[at] = 2 * 15 - 1;
    examine(negative, "text");
  }
  CHECK(refused >= 2);

  auto options =
      byte_options({dir.write("b.parquet", whole.substr(0, whole.size() / 2)), fixture()}, "text");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "b.parquet can't be read as a Parquet file",
                       tokenize_to_file(options, dir.file("x.bin")));
  options.skip_bad = true;
  CHECK(tokenize_to_file(options, dir.file("x.bin")).skipped == 1);
}
#endif
