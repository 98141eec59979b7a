// Documents to token files: the same bytes at any number of threads, after stops, and in parts.
#include "io/data/tokenize.h"

#include <doctest/doctest.h>
#include <zstd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/data/dataset.h"
#include "io/data/input_stream.h"
#include "io/data/token_file.h"
#include "io/data/verify_tokens.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

using namespace tessera;
using namespace tessera::io;
using tessera::test::TempDir;

namespace {

std::string words(std::size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::string text;
  while (text.size() < bytes) {
    static const std::vector<std::string> kWords = {
        "the", "cat", " sat", "\n",   "on", "\xE6\xBC\xA2\xE5\xAD\x97", " ", "don't", "  ",
        "42",  ",",   ".",    "\n\n", "mat"};
    text += kWords[random() % kWords.size()];
    text += random() % 3 == 0 ? "" : " ";
  }
  return text;
}

std::string zstd(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 1));
  return out;
}

std::string line(const std::string& text, const std::string& field = "text") {
  return nlohmann::json{{"id", 1}, {field, text}, {"meta", {{"text", 5}}}}.dump() + "\n";
}

TokenizerPtr gpt2() {
  return load_tokenizer(test::source_path("tests/io/tokenizer/fixtures/gpt2.json"));
}

TokenizeOptions options_for(const std::vector<std::string>& files,
                            TokenizerPtr tokenizer = make_byte_tokenizer()) {
  TokenizeOptions options;
  options.tokenizer = std::move(tokenizer);
  options.sources = list_corpus(files);
  return options;
}

std::vector<std::int32_t> tokens_of(const std::vector<std::string>& files) {
  const auto source = open_dataset({.train = files}).train;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(source->size()));
  source->read(0, source->size(), ids.data());
  return ids;
}

/// Contents of the files of a directory, by name; without the times of sources.
std::map<std::string, std::string> contents(const TempDir& dir, const std::string& name) {
  std::map<std::string, std::string> all;
  for (const auto& entry : std::filesystem::directory_iterator(dir.path() / name)) {
    const std::string file = entry.path().filename().string();
    all[file] = dir.read(name + "/" + file);
  }
  return all;
}

}  // namespace

TEST_CASE("text, lines and compressed files give the same tokens as encoding each document") {
  const TempDir dir;
  const std::string a = words(5000, 1), b = words(300, 2), c = "\xC3\xA9 \"quoted\"\n";
  const auto text = dir.write("a.txt", a);
  const auto lines = dir.write("b.jsonl.zst", zstd(line(b) + "\n  \n" + line("") + line(c)));
  auto options = options_for({text, lines}, gpt2());
  std::vector<std::int32_t> expected;
  for (const std::string& document : {a, b, c}) {
    const auto ids = options.tokenizer->encode_document(document);
    expected.insert(expected.end(), ids.begin(), ids.end());
  }
  const auto report = tokenize_to_file(options, dir.file("x.bin"));
  CHECK(report.documents == 3);
  CHECK(report.tokens == std::ssize(expected));
  CHECK(tokens_of({dir.file("x.bin")}) == expected);
}

TEST_CASE("a long document is cut, and its tokens are those of the whole") {
  const TempDir dir;
  const std::string text = words(5 << 19, 3);
  for (const std::string name : {"gpt2.json", "qwen.json", "llama3.json", "olmo2.json",
                                 "cl100k_base.tiktoken", "llama2.json", "tekken.json"}) {
    CAPTURE(name);
    const auto tokenizer = load_tokenizer(test::source_path("tests/io/tokenizer/fixtures/" + name));
    CHECK(tokenizer->can_cut() == (name != "llama2.json" && name != "qwen.json"));
    auto options = options_for({dir.write("a.txt", text)}, tokenizer);
    options.threads = 3;
    options.overwrite = true;
    const auto report = tokenize_to_file(options, dir.file("x.bin"));
    CHECK(report.documents == 1);
    CHECK(tokens_of({dir.file("x.bin")}) == tokenizer->encode_document(text));
  }
  // Nowhere to cut.
  const std::string spaces(3 << 20, ' ');
  const auto tokenizer = gpt2();
  tokenize_to_file(options_for({dir.write("b.txt", spaces)}, tokenizer), dir.file("b.bin"));
  CHECK(tokens_of({dir.file("b.bin")}) == tokenizer->encode_document(spaces));
}

TEST_CASE("shards: the same bytes at any number of threads, and after a stop in any batch") {
  const TempDir dir;
  std::string lines;
  for (unsigned i = 0; i < 60; ++i) lines += line(words(20'000, i));
  std::vector<std::string> files = {dir.write("1.jsonl", lines),
                                    dir.write("2.txt", words(2 << 20, 9)),
                                    dir.write("3.jsonl.zst", zstd(lines))};
  auto options = options_for(files, gpt2());
  options.shard_tokens = 300'003;
  const auto report = tokenize_to_directory(options, dir.path() / "whole");
  CHECK(report.shards.size() > 3);
  CHECK(report.documents == 121);
  const auto expected = contents(dir, "whole");
  CHECK(expected.size() == report.shards.size() + 2);
  tokenize_to_file(options, dir.file("one.bin"));
  const auto all = tokens_of({dir.file("one.bin")});
  CHECK(tokens_of({dir.file("whole")}) == all);
  CHECK(open_dataset({.train = {dir.file("whole")}}).vocab_size == options.tokenizer->vocab_size());
  CHECK(tokenize_to_directory(options, dir.path() / "whole").was_done);

  options.threads = 3;
  for (int stops = 0;; ++stops) {
    int left = 2;
    options.progress = [&](const TokenizeProgress&) { return --left > 0; };
    try {
      tokenize_to_directory(options, dir.path() / "stopped");
      CHECK(stops > 1);
      break;
    } catch (const TokenizeStopped&) {
      CHECK_THROWS_HOLDING(IoError, "is unfinished: run the same",
                           read_token_directory(dir.path() / "stopped"));
      // A batch is several times larger than what is left of a shard, so that each process gets on.
      options.threads = 1 + stops % 3;
    }
    REQUIRE(stops < 40);
  }
  options.progress = {};
  CHECK(contents(dir, "stopped") == expected);

  options.parts = 2;
  for (const int part : {2, 1}) {
    if (part == 1)
      CHECK_THROWS_HOLDING(IoError, "not done: part 1 of 2",
                           commit_token_parts(dir.path() / "parts"));
    options.part = part;
    tokenize_to_directory(options, dir.path() / "parts");
  }
  CHECK(commit_token_parts(dir.path() / "parts").documents() == 121);
  CHECK(tokens_of({dir.file("parts")}) == all);
}

TEST_CASE("where a document can't be cut for long, a stop at any shard changes nothing") {
  const TempDir dir;
  std::mt19937 random(2);
  const auto digits = [&](std::size_t bytes) {
    std::string text;
    while (text.size() < bytes) text += std::to_string(10'000'000 + random() % 90'000'000) + "\n";
    return text;
  };
  // The one place to cut is found only after the buffer has grown, and not by a process that begins near it.
  const std::string text = digits(1530 << 10) + "rank\n" + digits(1770 << 10) + words(2 << 20, 5);
  auto options = options_for({dir.write("a.txt", text)}, gpt2());
  options.shard_tokens = 200'000;
  options.threads = 1;
  const auto report = tokenize_to_directory(options, dir.path() / "whole");
  REQUIRE(report.shards.size() > 20);
  const auto expected = contents(dir, "whole");
  for (const std::size_t stop : {17, 19}) {
    CAPTURE(stop);
    const std::string name = "stopped-" + std::to_string(stop);
    const auto blocked = dir.path() / name / (token_shard_name(1, 1, stop) + ".tmp");
    std::filesystem::create_directories(blocked / "x");
    CHECK_THROWS_AS(tokenize_to_directory(options, dir.path() / name), IoError);
    std::filesystem::remove_all(blocked);
    tokenize_to_directory(options, dir.path() / name);
    const bool same = contents(dir, name) == expected;
    CHECK(same);
  }
}

TEST_CASE("another command is refused with what differs") {
  const TempDir dir;
  const auto text = dir.write("a.txt", words(10'000, 1));
  auto options = options_for({text});
  options.shard_tokens = 1000;
  options.progress = [](const TokenizeProgress&) { return false; };
  CHECK_THROWS_AS(tokenize_to_directory(options, dir.path() / "out"), TokenizeStopped);
  options.progress = {};
  const auto refused = [&](const TokenizeOptions& other, const char* why) {
    CHECK_THROWS_HOLDING(InvalidArgument, why, tokenize_to_directory(other, dir.path() / "out"));
  };
  auto other = options;
  other.shard_tokens = 2000;
  refused(other, "shard_tokens was 1000, and is 2000 now");
  other = options;
  other.tokenizer = gpt2();
  refused(other, "tokenizer was");
  other = options;
  other.parts = 2;
  refused(other, "parts was 1, and is 2 now");
  dir.write("a.txt", words(10'000, 2));
  other = options_for({text});
  other.shard_tokens = 1000;
  refused(other, "source 1 was");
  tokenize_to_directory(options, dir.path() / "out");
  refused(other, "source 1 was");
  other.overwrite = true;
  tokenize_to_directory(other, dir.path() / "out");
}

TEST_CASE("bad lines and damaged streams are named, or skipped and counted") {
  const TempDir dir;
  const std::string good = line("good text"), broken = "{\"text\": \"x\n";
  const auto refused = [&](const std::string& name, const std::string& content,
                           const std::string& why) {
    CAPTURE(name);
    auto options = options_for({dir.write(name, content)});
    try {
      tokenize_to_file(options, dir.file("x.bin"));
      FAIL("accepted");
    } catch (const Error& error) {
      CHECK_MESSAGE(std::string(error.what()).find(why) != std::string::npos, error.what());
    }
    CHECK(!std::filesystem::exists(dir.file("x.bin")));
    CHECK(!std::filesystem::exists(dir.file("x.bin.tmp")));
    options.sources.push_back(list_corpus({dir.write("good.jsonl", good)}).front());
    options.skip_bad = true;
    const auto report = tokenize_to_file(options, dir.file("x.bin"));
    CHECK(report.skipped == 1);
    std::filesystem::remove(dir.file("x.bin"));
    return report.documents;
  };
  CHECK(refused("a.jsonl", good + good + broken + good, "a.jsonl:3: no valid JSON at byte") == 4);
  CHECK(refused("b.jsonl", good + line("x", "content"), "b.jsonl:2: no key \"text\"; --field") ==
        2);
  CHECK(refused("c.jsonl", "{\"text\": 5}\n", "c.jsonl:1: \"text\" is a number, expected") == 1);
  CHECK(refused("d.jsonl", "[\"text\"]\n", "d.jsonl:1: expected an object") == 1);
  CHECK(refused("e.jsonl", "{\"text\": \"\xFF\"}\n", "e.jsonl:1: no valid JSON") == 1);
  std::string lines;
  for (int i = 0; i < 2000; ++i) lines += line(words(500, static_cast<unsigned>(i)));
  const std::string packed = zstd(lines);
  CHECK(refused("f.jsonl.zst", packed.substr(0, packed.size() / 2), "f.jsonl.zst") < 2001);
  CHECK(refused("g.jsonl.zst", good, "begins no frame of zstd") == 1);
  CHECK(refused("h.jsonl.gz", good, "no gzip header") == 1);
}

TEST_CASE("verification names each damaged shard") {
  const TempDir dir;
  auto options = options_for({dir.write("a.txt", words(5000, 1))});
  options.shard_tokens = 1000;
  tokenize_to_directory(options, dir.path() / "out");
  const auto verify = [&] { return verify_tokens(dir.path() / "out", {.threads = 2}).problems; };
  CHECK(verify().empty());
  std::string shard = dir.read("out/shard-000001.bin");
  shard[1500] ^= 1;
  dir.write("out/shard-000001.bin", shard);
  shard[1501] = 1;  // beyond the 256 ids
  dir.write("out/shard-000003.bin", shard);
  dir.write("out/shard-000004.bin", shard.substr(0, 1200));
  const auto problems = verify();
  REQUIRE(problems.size() == 3);
  CHECK(problems[0].file == "shard-000001.bin");
  CHECK(problems[0].what.find("has checksum crc64:") == 0);
  CHECK(problems[1].what.find("the vocabulary has 256 entries") != std::string::npos);
  CHECK(problems[2].file == "shard-000004.bin");
  std::string index = dir.read("out/index.json");
  index[index.find("\"documents\": 1") + 13] = '2';
  dir.write("out/index.json", index);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "it was damaged or edited", verify());
}

TEST_CASE("parts are consecutive files of about equal bytes") {
  std::vector<CorpusFile> files;
  for (const std::int64_t bytes : {10, 10, 70, 10, 10, 40, 50}) files.push_back({"x", bytes, 0});
  for (const int parts : {1, 2, 3, 7, 20}) {
    std::size_t next = 0;
    for (int part = 1; part <= parts; ++part) {
      const FileRange range = corpus_part(files, part, parts);
      if (range.begin == range.end) continue;
      CHECK(range.begin == next);
      next = range.end;
    }
    CHECK(next == files.size());
  }
  CHECK(corpus_part(files, 1, 2).end == 4);
}

TEST_CASE("directories by one tokenizer give it to the data set, unless the model has another") {
  const TempDir dir;
  const std::vector<std::string> files = {dir.write("a.txt", words(500, 1))};
  for (const char* name : {"a", "b"})
    tokenize_to_directory(options_for(files, gpt2()), dir.path() / name);
  tokenize_to_directory(options_for(files), dir.path() / "bytes");
  const auto tokenizer = [&](const std::vector<std::string>& names, TokenizerPtr of_model = {}) {
    DatasetOptions options{.fixed_tokenizer = std::move(of_model)};
    for (const std::string& name : names) options.train.push_back(dir.file(name));
    return open_dataset(options).tokenizer;
  };
  REQUIRE(tokenizer({"a", "b"}) != nullptr);
  CHECK(tokenizer({"a", "b"})->to_json() == gpt2()->to_json());
  CHECK(tokenizer({"a", "bytes"}) == nullptr);
  CHECK(tokenizer({"a", "a/shard-000000.bin"}) == nullptr);
  CHECK(tokenizer({"a/shard-000000.bin"}) == nullptr);
  const TokenizerPtr other = make_byte_tokenizer();
  CHECK(tokenizer({"a"}, other) == other);
  CHECK(open_dataset({.train = {dir.file("a")}}).tokenizer_file ==
        dir.file("a/tokenizer_tessera.json"));
}
