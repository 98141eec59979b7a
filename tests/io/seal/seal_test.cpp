#include "io/seal/seal.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/base/json.h"
#include "io/consolidate/consolidate.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

constexpr std::int64_t kBlock = std::int64_t{4} << 20;

/// A Hugging Face directory with a tokenizer in a subdirectory.
struct Sealed {
  TempDir dir;
  fs::path model = dir.path() / "model";
  Sealed() {
    consolidate(test::source_path("tests/io/dcp/fixtures/fsdp-gpt2"), model);
    fs::create_directories(model / "tokenizer");
    write_text(model / "tokenizer/vocab.json", "{}");
  }
  std::vector<VerifyProblem> problems() const {
    return check_seal(*find_seal(model), {.threads = 2}).problems;
  }
};

TEST_CASE("no flipped bit of a sealed directory is silent") {
  const Sealed sealed;
  const Seal seal = write_seal(sealed.model, false, {.threads = 3});
  CHECK(seal.files.size() >= 3);
  CHECK(seal.files.contains("tokenizer/vocab.json"));
  CHECK(sealed.problems().empty());
  std::mt19937 random(7);
  std::vector<std::string> names;
  for (const auto& [name, entry] : seal.files) names.push_back(name);
  for (int i = 0; i < 60; ++i) {
    const std::string& name = names[random() % names.size()];
    CAPTURE(name);
    const auto byte =
        static_cast<std::int64_t>(random() % static_cast<std::uint32_t>(seal.files.at(name).size));
    flip_bit(sealed.model / name, byte);
    const auto problems = sealed.problems();
    REQUIRE(problems.size() == 1);
    CHECK(problems[0].file == name);
    CHECK(problems[0].byte_begin <= byte);
    CHECK(byte < problems[0].byte_end);
    if (i % 10 == 0)
      CHECK_THROWS_AS(consolidate(sealed.model, sealed.dir.path() / "out"), CorruptCheckpoint);
    CHECK_FALSE(fs::exists(sealed.dir.path() / "out"));
    flip_bit(sealed.model / name, byte);
  }
  flip_bit(sealed.model / "model.safetensors", -1);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "model.safetensors: bytes 0 to",
                       consolidate(sealed.model, sealed.dir.path() / "out"));
  flip_bit(sealed.model / "model.safetensors", -1);
  std::int64_t read = 0;
  ConsolidateOptions options;
  options.checked = [&](std::int64_t done, std::int64_t total) { read = done == total ? done : 0; };
  consolidate(sealed.model, sealed.dir.path() / "out", options);
  CHECK(read > 0);
}

TEST_CASE("damage of the seal itself never changes what it says") {
  const Sealed sealed;
  const Seal seal = write_seal(sealed.model, false);
  const auto size = static_cast<std::int64_t>(fs::file_size(seal.file));
  for (std::int64_t byte = 0; byte < size; byte += 5) {
    CAPTURE(byte);
    flip_bit(seal.file, byte);
    try {
      const auto found = find_seal(sealed.model);
      REQUIRE(found);
      CHECK(found->block == seal.block);
      REQUIRE(found->files.size() == seal.files.size());
      for (const auto& [name, entry] : found->files) {
        REQUIRE(seal.files.contains(name));
        CHECK(entry.blocks == seal.files.at(name).blocks);
        CHECK(entry.size == seal.files.at(name).size);
      }
    } catch (const CorruptCheckpoint&) {
    }
    flip_bit(seal.file, byte);
  }
}

TEST_CASE("missing, resized and additional files are named") {
  const Sealed sealed;
  write_seal(sealed.model, false);
  write_text(sealed.model / "README.md", "new");
  fs::remove(sealed.model / "tokenizer/vocab.json");
  fs::resize_file(sealed.model / "config.json", 5);
  const SealReport report = check_seal(*find_seal(sealed.model));
  CHECK(report.additional == std::vector<std::string>{"README.md"});
  REQUIRE(report.problems.size() == 2);
  CHECK(report.problems[0].str().starts_with("config.json: has 5 bytes, and had "));
  CHECK(report.problems[1].str() == "tokenizer/vocab.json: is missing, but the seal lists it");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "config.json: has 5 bytes",
                       require_seal_intact(sealed.model));
}

TEST_CASE("a seal is replaced only on request, and only if its files are intact") {
  const Sealed sealed;
  const Seal seal = write_seal(sealed.model, false);
  CHECK_THROWS_HOLDING(InvalidArgument, "--overwrite", write_seal(sealed.model, false));
  flip_bit(sealed.model / "config.json", 3);
  const std::string before = read_text(seal.file);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "config.json: bytes 0 to",
                       write_seal(sealed.model, true));
  CHECK(read_text(seal.file) == before);
  flip_bit(sealed.model / "config.json", 3);
  write_text(sealed.model / "README.md", "new");
  CHECK(write_seal(sealed.model, true).files.contains("README.md"));
  CHECK(check_seal(*find_seal(sealed.model)).additional.empty());
}

TEST_CASE("damage is located in one of several blocks") {
  const TempDir dir;
  const fs::path file = dir.path() / "weights.ckpt";
  write_text(file, "x");
  fs::resize_file(file, 3 * kBlock + 17);
  const Seal seal = write_seal(file, false, {.threads = 4});
  CHECK(seal.file == dir.path() / "weights.ckpt.seal.json");
  CHECK(seal.files.at("weights.ckpt").blocks.size() == 4);
  flip_bit(file, 5);
  flip_bit(file, 2 * kBlock);
  flip_bit(file, -1);
  const SealReport report = check_seal(*find_seal(file), {.threads = 2});
  REQUIRE(report.problems.size() == 2);  // neighbours are one range
  CHECK(report.problems[0].byte_begin == 0);
  CHECK(report.problems[0].byte_end == kBlock);
  CHECK(report.problems[1].byte_begin == 2 * kBlock);
  CHECK(report.problems[1].byte_end == 3 * kBlock + 17);
  CHECK(report.additional.empty());
}

TEST_CASE("a seal is found through a link to its file, and by the run that contains its folder") {
  const TempDir dir;
  write_text(dir.path() / "epoch=3.ckpt", "weights");
  write_seal(dir.path() / "epoch=3.ckpt", false);
  fs::create_symlink("epoch=3.ckpt", dir.path() / "last.ckpt");
  const fs::path run = dir.path() / "run";
  fs::copy(test::source_path("tests/io/megatron/fixtures/gpt2"), run, fs::copy_options::recursive);
  write_seal(run / "iter_0000004", false);
  for (const fs::path& path : {dir.path() / "last.ckpt", run}) {
    const auto seal = find_seal(path);
    REQUIRE(seal);
    const SealReport report = check_seal(*seal);
    CHECK(report.problems.empty());
    CHECK(report.additional.empty());
  }
  flip_bit(dir.path() / "epoch=3.ckpt", 0);
  flip_bit(run / "iter_0000004/__0_0.distcp", -1);
  CHECK_THROWS_AS(require_seal_intact(dir.path() / "last.ckpt"), CorruptCheckpoint);
  CHECK_THROWS_AS(consolidate(run, dir.path() / "out"), CorruptCheckpoint);
  ConsolidateOptions options;
  options.step = 4;
  CHECK_THROWS_AS(consolidate(run, dir.path() / "out", options), CorruptCheckpoint);
}

TEST_CASE("directories that links multiply are refused, not walked for ever") {
  const TempDir dir;
  fs::path at = dir.path() / "0";
  for (int i = 0; i < 24; ++i) {
    fs::create_directory(at);
    const fs::path next = dir.path() / std::to_string(i + 1);
    for (const char* link : {"a", "b"}) fs::create_directory_symlink(next, at / link);
    at = next;
  }
  fs::create_directory(at);
  CHECK_THROWS_HOLDING(Unsupported, "more than 65536 directories",
                       write_seal(dir.path() / "0", false));
}

TEST_CASE("links are followed, and the seal of a directory is that of what it contains") {
  const TempDir dir;
  for (const char* name : {"blobs", "snapshot", "snapshot/part", "snapshot/.cache"})
    fs::create_directory(dir.path() / name);
  write_text(dir.path() / "blobs/1", "weights");
  write_text(dir.path() / "snapshot/.cache/lock", "");
  write_text(dir.path() / "snapshot/part/a.ckpt", "a");
  fs::create_symlink("../blobs/1", dir.path() / "snapshot/model.bin");
  const Seal seal = write_seal(dir.path() / "snapshot" / "", false);
  CHECK(seal.files.size() == 2);
  CHECK(seal.files.contains("model.bin"));
  CHECK(find_seal(dir.path() / "snapshot/part")->files.size() == 1);
  CHECK(find_seal(dir.path() / "snapshot/part/a.ckpt") == std::nullopt);  // one level only
  CHECK(find_seal(dir.path() / "snapshot/model.bin")->files.size() == 1);
  flip_bit(dir.path() / "blobs/1", 0);
  CHECK_THROWS_AS(require_seal_intact(dir.path() / "snapshot/model.bin"), CorruptCheckpoint);
  require_seal_intact(dir.path() / "snapshot/part");

  fs::create_directory_symlink(dir.path() / "snapshot", dir.path() / "snapshot/part/loop");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "contains itself", write_seal(dir.path(), false));
  fs::remove(dir.path() / "snapshot/part/loop");
  fs::create_symlink("nowhere", dir.path() / "blobs/dangling");
  CHECK_THROWS_HOLDING(IoError, "blobs/dangling", write_seal(dir.path(), false));
  CHECK_FALSE(fs::exists(seal_path(dir.path())));
  CHECK_THROWS_HOLDING(InvalidArgument, "no files", [&] {
    fs::create_directory(dir.path() / "empty");
    write_seal(dir.path() / "empty", false);
  }());
}

TEST_CASE("malformed seals have errors of their own") {
  const Sealed sealed;
  const Seal seal = write_seal(sealed.model, false);
  const Json good = Json::parse(read_text(seal.file));
  const auto refuse = [&](const std::string& message, auto&& change, bool sums = true) {
    Json json = good;
    change(json);
    if (sums) {
      json.erase("checksum");
      const std::string text = json.dump();
      json["checksum"] = format_checksum(crc64(text.data(), text.size()));
    }
    write_text(seal.file, json.dump());
    CHECK_THROWS_HOLDING(CorruptCheckpoint, message, find_seal(sealed.model));
  };
  refuse("is not a seal", [](Json& json) { json["format"] = "x"; });
  refuse("format version 2", [](Json& json) { json["version"] = 2; });
  refuse("block", [](Json& json) { json["block"] = 0; });
  refuse(
      "its own checksum", [](Json& json) { json["files"].erase("config.json"); }, false);
  refuse("created", [](Json& json) { json.erase("created"); });
  const Json entry = good["files"]["config.json"];
  for (const char* name : {"../x", "/x", "a//b", "a/../b", ""})
    refuse("not a name", [&](Json& json) { json["files"][name] = entry; });
  const auto refuse_entry = [&](const std::string& message, const char* key, const Json& value) {
    refuse(message, [&](Json& json) { json["files"]["config.json"][key] = value; });
  };
  refuse_entry("has 1 entries, not 0", "size", 0);
  refuse_entry("size", "size", -1);
  refuse_entry("blocks", "size", std::int64_t{1} << 60);
  refuse_entry("hexadecimal", "blocks", {"12"});
  write_text(seal.file, "{");
  CHECK_THROWS_AS(find_seal(sealed.model), CorruptCheckpoint);
}

}  // namespace
}  // namespace tessera::io
