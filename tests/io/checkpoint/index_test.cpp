// One error per malformation of a checkpoint's index and directory.

#include "io/checkpoint/index.h"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/checkpoint/find.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

// A valid index with one tensor "w" of shape [4, 3], f32, in two chunks.
Json sample() {
  return Json::parse(R"({
    "format": "tessera-checkpoint", "version": 1, "step": 7, "world_size": 2, "run_id": "r",
    "created": "2026-01-01T00:00:00Z", "tessera": "0.1.0", "model": {},
    "files": {"a": {"size": 128}, "b": {"size": 128}},
    "sections": {"model": {"tensors": {"w": {"dtype": "F32", "shape": [4, 3], "chunks": [
      {"file": "a", "bytes": [100, 120], "elements": [0, 5], "checksum": "crc64:0000000000000000"},
      {"file": "b", "bytes": [100, 128], "elements": [5, 12], "checksum": "crc64:0000000000000000"}
    ]}}}, "trainer": {"file": "t", "size": 5, "checksum": "crc64:0000000000000000"}}})");
}

void refuse_text(const std::string& text, const char* reason) {
  CAPTURE(text.substr(0, 300));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, reason, parse_index(text, "index.json"));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "index.json", parse_index(text, "index.json"));
}

void refuse(const char* pointer, const Json& value, const char* reason) {
  Json json = sample();
  json[Json::json_pointer(pointer)] = value;
  refuse_text(json.dump(), reason);
}

// Output of format_index() without its checksum.
Json without_checksum(const CheckpointIndex& index) {
  Json json = Json::parse(format_index(index));
  REQUIRE(json.erase("checksum") == 1);
  return json;
}

constexpr const char* kChunk = "/sections/model/tensors/w/chunks/0";
std::string in_chunk(const char* field) { return std::string(kChunk) + field; }

TEST_CASE("a valid index survives parse and format") {
  const CheckpointIndex index = parse_index(sample().dump(), "index.json");
  CHECK(index.model->at("w").chunks[1].end == 12);
  CHECK_FALSE(index.optimizer);
  CHECK(index.trainer->size == 5);
  CHECK(without_checksum(index) == sample());
  CHECK(format_index(parse_index(format_index(index), "index.json")) == format_index(index));
}

TEST_CASE("an index has a checksum of itself") {
  Json json = sample();
  json["files"]["a"]["header"] = {{"size", 100}, {"checksum", "crc64:00000000000000ff"}};
  const std::string text = format_index(parse_index(json.dump(), "index.json"));
  const CheckpointIndex index = parse_index(text, "index.json");
  CHECK(index.headers.at("a").size == 100);
  CHECK(index.headers.at("a").crc64 == 255);
  CHECK_FALSE(index.headers.contains("b"));
  SUBCASE("every flipped bit is detected") {
    for (std::size_t bit = 0; bit < text.size() * 8; ++bit) {
      std::string damaged = text;
      damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
      CAPTURE(bit);
      CHECK_THROWS_HOLDING(CorruptCheckpoint, "index.json", parse_index(damaged, "index.json"));
    }
  }
  SUBCASE("every truncation and every edit is detected") {
    for (std::size_t size = 0; size < text.size(); ++size) {
      CHECK_THROWS_AS(parse_index(text.substr(0, size), "index.json"), CorruptCheckpoint);
    }
    std::string edited = text;
    edited.replace(text.find("\"step\": 7"), 9, "\"step\": 8");
    refuse_text(edited, "its own checksum is wrong");
    refuse_text(text + " ", "its own checksum is wrong");
    refuse_text(Json::parse(text).dump(), "rewritten by another program");
  }
  SUBCASE("a misspelled checksum field is refused") {
    Json renamed = sample();
    renamed["chdcksum"] = "crc64:0000000000000000";
    refuse_text(renamed.dump(), "unknown field \"chdcksum\"");
  }
  SUBCASE("a newer version is reported, damaged or not") {
    const std::string what = "has format version 2; this build reads up to 1: use a newer tessera";
    Json newer = sample();
    newer["version"] = 2;
    newer["not yet known"] = 1;
    CHECK_THROWS_HOLDING(NewerFormat, what.c_str(), parse_index(newer.dump(), "index.json"));
    newer["checksum"] = "of another kind";
    CHECK_THROWS_HOLDING(NewerFormat, what.c_str(), parse_index(newer.dump(), "index.json"));
    // The version number itself may be damaged here.
    const std::string damaged =
        "{\n \"checksum\": \"crc64:0000000000000000\",\n \"format\": \"tessera-checkpoint\",\n "
        "\"version\": 2}";
    refuse_text(damaged, ("or a newer tessera wrote it: index.json " + what).c_str());
    try {
      parse_index(damaged, "index.json");
    } catch (const NewerFormat&) {
      FAIL("possible damage was reported as a newer format");
    } catch (const CorruptCheckpoint&) {
    }
  }
}

TEST_CASE("invalid index texts") {
  refuse_text("", "is empty");
  refuse_text("\xEF\xBB\xBF{}", "byte-order mark");
  refuse_text(std::string("\xFF\xFE{\0}\0", 6), "UTF-16");
  refuse_text(std::string("{\0}\0", 4), "UTF-16");
  refuse_text("{\"format\": \"\xff\"}", "not valid JSON");
  refuse_text(std::string(100'000, '['), "nested deeper");
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += R"({"a":)";
  refuse_text(objects, "nested deeper");
  refuse_text("[]", "expected an object");
  refuse_text(sample().dump() + "x", "not valid JSON");
  refuse_text(R"({"format": "a", "format": "a"})", "duplicate key");
  refuse_text(R"({"step": 1e400})", "not valid JSON");
  const std::string whole = sample().dump();
  for (std::size_t cut = 1; cut < whole.size(); ++cut) {
    CHECK_THROWS_AS(parse_index(whole.substr(0, cut), "index.json"), CorruptCheckpoint);
  }
}

Json full_sample() {
  Json json = sample();
  Json& tensors = json["sections"]["model"]["tensors"];
  tensors["w"]["chunks"][0]["box"] = {{"offsets", {0, 0}}, {"shape", {4, 3}}};
  tensors["w"]["chunks"][1]["box"] = {{"offsets", {0, 0}}, {"shape", {4, 3}}};
  json["files"]["a"]["header"] = {{"size", 64}, {"checksum", "crc64:0000000000000000"}};
  json["sections"]["optimizer"] = {{"hyper", {{"step", 7}}},
                                   {"tensors", {{"exp_avg", tensors}, {"exp_avg_sq", tensors}}}};
  return json;
}

TEST_CASE("each field is required") {
  const Json whole = full_sample();
  CHECK(without_checksum(parse_index(whole.dump(), "index.json")) == whole);
  const std::vector<std::pair<std::string, std::vector<const char*>>> fields = {
      {"",
       {"format", "version", "step", "world_size", "run_id", "created", "tessera", "model", "files",
        "sections"}},
      {"/sections/model/tensors/w", {"dtype", "shape", "chunks"}},
      {kChunk, {"file", "bytes", "elements", "checksum"}},
      {"/files/a", {"size"}},
      {"/files/a/header", {"size", "checksum"}},
      {"/sections/model", {"tensors"}},
      {in_chunk("/box"), {"offsets", "shape"}},
      {"/sections/optimizer", {"hyper", "tensors"}},
      {"/sections/optimizer/hyper", {"step"}},
      {"/sections/trainer", {"file", "size", "checksum"}}};
  for (const auto& field : fields) {
    const std::string& place = field.first;
    for (const char* name : field.second) {
      CAPTURE(place);
      Json json = whole;
      REQUIRE(json[Json::json_pointer(place)].erase(name) == 1);
      refuse_text(json.dump(), (std::string("\"") + name + "\" is missing").c_str());
    }
  }
}

TEST_CASE("every number is an integer from 0 to 2^63 - 1") {
  const std::vector<std::string> places = {"/version",
                                           "/step",
                                           "/world_size",
                                           "/files/a/size",
                                           "/files/a/header/size",
                                           "/sections/model/tensors/w/shape/0",
                                           in_chunk("/bytes/0"),
                                           in_chunk("/bytes/1"),
                                           in_chunk("/elements/0"),
                                           in_chunk("/elements/1"),
                                           in_chunk("/box/offsets/0"),
                                           in_chunk("/box/shape/1"),
                                           "/sections/optimizer/hyper/step",
                                           "/sections/trainer/size"};
  for (const std::string& place : places) {
    CAPTURE(place);
    for (const char* number : {"-1", "1.5", "1e2", "9223372036854775808", "18446744073709551616",
                               "-9223372036854775809", "\"1\"", "null", "true", "[1]"}) {
      CAPTURE(number);
      Json json = full_sample();
      json[Json::json_pointer(place)] = "NUMBER";
      std::string text = json.dump();
      text.replace(text.find("\"NUMBER\""), 8, number);
      refuse_text(text, "expected a whole number");
    }
    Json json = full_sample();
    json[Json::json_pointer(place)] = "NUMBER";
    std::string text = json.dump();
    text.replace(text.find("\"NUMBER\""), 8, "1e400");
    refuse_text(text, "not valid JSON");
  }
}

TEST_CASE("fields of the wrong type or size") {
  refuse("/format", "other", "expected format");
  refuse("/version", 2, "use a newer tessera");
  refuse("/version", 0, "whole number from 1");
  refuse("/world_size", 0, "whole number from 1");
  refuse("/world_size", 2147483648, "whole number from 1");
  refuse("/run_id", 7, "expected a string");
  for (const auto& id :
       {std::string(), std::string("a/b"), std::string("a b"), std::string(101, 'a')}) {
    refuse("/run_id", id, "expected 1 to 100 letters");
  }
  for (const char* time : {"", "yesterday", "2026-01-01 00:00:00Z", "2026-01-01T00:00:00Z\n"}) {
    refuse("/created", time, "expected a time like");
  }
  refuse("/model", "gpt2", "expected an object");
  refuse("/files", Json::array(), "expected an object");
  refuse("/files/a/header", Json::array(), "expected an object");
  refuse("/files/a/header", {{"size", 129}, {"checksum", "crc64:0000000000000000"}},
         "whole number from 0 to 128");
  refuse("/files/a/header", {{"size", 64}, {"checksum", "crc64:"}}, "expected a checksum");
  refuse("/files/a/header", {{"size", 104}, {"checksum", "crc64:0000000000000000"}},
         "begins at byte 100, but the data of a begins at 104");
  refuse("/sections/trainer/checksum", "crc64:000000000000000G", "expected a checksum");
  refuse("/sections", Json::array(), "expected an object");
  refuse("/sections/model/tensors", Json::array(), "expected an object");
  refuse("/sections/model/tensors/w", 1, "expected an object");
}

TEST_CASE("file names that leave the directory") {
  for (const char* name : {"../a", "/etc/passwd", "x/y", "..", ".", ""}) {
    CAPTURE(name);
    Json json = sample();
    json["files"][name] = {{"size", 1}};
    refuse_text(json.dump(), "not a plain file name");
    refuse(in_chunk("/file").c_str(), name, "not a plain file name");
    refuse("/sections/trainer/file", name, "not a plain file name");
  }
  refuse(in_chunk("/file").c_str(), std::string("a\0b", 3), "not a plain file name");
  refuse(in_chunk("/file").c_str(), std::string(256, 'a'), "not a plain file name");
  refuse(in_chunk("/file").c_str(), "c", "not listed under \"files\"");
  std::string twice = sample().dump();
  const std::string one = R"("a":{"size":128})";
  twice.replace(twice.find(one), one.size(), one + "," + one);
  refuse_text(twice, "duplicate key \"a\"");
}

TEST_CASE("tensors and chunks that do not match") {
  refuse("/sections/model/tensors/w/dtype", "F33", "unknown dtype");
  refuse("/sections/model/tensors/w/shape", {5, 3}, "are in no chunk");
  refuse("/sections/model/tensors/w/shape", {3, 3}, "but there are 9");
  refuse("/sections/model/tensors/w/shape", {4294967296, 4294967296}, "more than 2^63");
  refuse("/sections/model/tensors/w/shape", {1, 1, 1, 1, 1, 1, 1, 1, 12}, "9 dims");
  refuse("/sections/model/tensors/w/chunks", Json::array(), "elements 0 to 12 are in no chunk");
  refuse(in_chunk("/bytes").c_str(), {100, 132}, "has 128 bytes");
  refuse(in_chunk("/bytes").c_str(), {100, 119}, "do not fill 19 bytes");
  refuse(in_chunk("/bytes").c_str(), {120, 100}, "begin 120 is past end 100");
  refuse(in_chunk("/bytes").c_str(), {100}, "found 1 values");
  refuse(in_chunk("/checksum").c_str(), "crc64:xyz", "expected a checksum");
  refuse(in_chunk("/checksum").c_str(), 7, "expected a string");
  Json json = sample();
  json[Json::json_pointer(kChunk)]["elements"] = {0, 4};
  json[Json::json_pointer(kChunk)]["bytes"] = {100, 116};
  refuse_text(json.dump(), "elements 4 to 5 are in no chunk");
  json[Json::json_pointer(kChunk)]["elements"] = {0, 6};
  json[Json::json_pointer(kChunk)]["bytes"] = {100, 124};
  refuse_text(json.dump(), "elements 5 to 6 are in two chunks");
  try {
    parse_index(json.dump(), "index.json");
    FAIL("accepted");
  } catch (const CorruptTensor& error) {
    CHECK(error.tensor() == "model/w");
    CHECK(error.begin() == 5);
    CHECK(error.end() == 6);
  }
  json = sample();
  json["sections"]["model"]["tensors"][std::string("w\0", 2)] =
      json["sections"]["model"]["tensors"]["w"];
  refuse_text(json.dump(), "contains a NUL");
  for (const std::string& name : {std::string(), std::string(4097, 'n')}) {
    json = sample();
    json["sections"]["model"]["tensors"][name] = json["sections"]["model"]["tensors"]["w"];
    refuse_text(json.dump(), "a tensor name is empty, contains a NUL, or is longer");
  }
}

TEST_CASE("boxes cover a tensor exactly once") {
  // Columns 0-1 and column 2 of [4, 3].
  Json json = sample();
  Json& chunks = json["sections"]["model"]["tensors"]["w"]["chunks"];
  chunks[0] = {{"file", "a"},
               {"bytes", {0, 32}},
               {"elements", {0, 8}},
               {"box", {{"offsets", {0, 0}}, {"shape", {4, 2}}}},
               {"checksum", "crc64:0000000000000000"}};
  chunks[1] = {{"file", "b"},
               {"bytes", {0, 16}},
               {"elements", {0, 4}},
               {"box", {{"offsets", {0, 2}}, {"shape", {4, 1}}}},
               {"checksum", "crc64:0000000000000000"}};
  const CheckpointIndex index = parse_index(json.dump(), "index.json");
  CHECK_FALSE(tensor_checksum(index.model->at("w")));
  CHECK(without_checksum(index) == json);

  chunks[1]["box"]["offsets"] = {0, 1};
  refuse_text(json.dump(), "overlap");
  chunks[1]["box"]["offsets"] = {0, 3};
  refuse_text(json.dump(),
              "sections.model.tensors.w: b holds the box at [0, 3] of shape [4, 1], which is "
              "outside the shape [4, 3] of the tensor");
  chunks[1]["box"] = {{"offsets", {0, 2}}, {"shape", {4, 2}}};
  refuse_text(json.dump(), "b holds the box at [0, 2] of shape [4, 2]");
  chunks[1]["box"]["offsets"] = {0};
  refuse_text(json.dump(), "is outside the shape");
  chunks.erase(1);
  refuse_text(json.dump(), "chunks hold 8 of the 12 elements");
}

TEST_CASE("moments match parameters") {
  Json json = sample();
  const Json tensors = json["sections"]["model"]["tensors"];
  json["sections"]["optimizer"] = {{"hyper", {{"step", 7}}},
                                   {"tensors", {{"exp_avg", tensors}, {"exp_avg_sq", tensors}}}};
  CHECK(parse_index(json.dump(), "index.json").optimizer->step == 7);
  Json other = json;
  Json& moments = other["sections"]["optimizer"]["tensors"];
  moments["exp_avg"]["v"] = tensors["w"];
  moments["exp_avg_sq"]["v"] = tensors["w"];
  refuse_text(other.dump(), "exp_avg of v has no counterpart in the model");
  other["sections"]["model"]["tensors"]["v"] = tensors["w"];
  CHECK(parse_index(other.dump(), "index.json").optimizer->state.at("exp_avg").size() == 2);
  moments["exp_avg_sq"].erase("v");
  refuse_text(other.dump(), "exp_avg of v has no counterpart in optimizer/exp_avg_sq");
  moments["ema"] = moments["exp_avg"];  // of all trained weights
  moments["momentum"]["v"] = moments["exp_avg"]["v"];
  moments["exp_avg"].erase("v");  // v is frozen, or another optimizer's
  CHECK(parse_index(other.dump(), "index.json").optimizer->state.size() == 4);
  moments["ema"].erase("v");
  refuse_text(other.dump(), "momentum of v has no counterpart in optimizer/ema");
  moments.erase("ema");
  moments.erase("momentum");
  CHECK(parse_index(other.dump(), "index.json").optimizer->state.at("exp_avg").size() == 1);
  moments = {{"momentum", tensors}};  // another optimizer
  CHECK(parse_index(other.dump(), "index.json").tensor_sections() ==
        std::vector<Section>{kModelSection, {"momentum"}});
  moments = {{"a/b", tensors}};
  refuse_text(other.dump(), "state \"a/b\": expected 1 to 100 letters, digits or '_'");
  other = json;
  for (const char* moment : {"exp_avg", "exp_avg_sq"}) {
    other["sections"]["optimizer"]["tensors"][moment]["w"]["shape"] = {3, 4};
    refuse_text(other.dump(), "has shape [3, 4], but [4, 3] in");
  }
  other = json;
  other["sections"]["optimizer"].erase("hyper");
  refuse_text(other.dump(), "\"hyper\" is missing");
}

TEST_CASE("the directory must match its index") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  const fs::path path = save(model, dir.path(), {.world_size = 2});
  const fs::path shard = path / "rank-00001-of-00002.safetensors";
  const std::string content = read_text(shard);
  const auto refuse_open = [&](const char* reason) {
    CHECK_THROWS_HOLDING(CorruptCheckpoint, reason, CheckpointReader::open(path));
  };
  SUBCASE("no index") {
    fs::remove(path / "index.json");
    refuse_open("no index.json");
    CHECK(find_checkpoints(dir.path()).empty());
  }
  SUBCASE("the directory belongs to an unfinished save") {
    const fs::path attempt = dir.path() / "step-00000007.run-a.tmp";
    fs::rename(path, attempt);
    for (const fs::path& name : {attempt, attempt / "", attempt / "."}) {
      CHECK_THROWS_HOLDING(CorruptCheckpoint, "directories that end in .tmp",
                           CheckpointReader::open(name));
      CHECK_THROWS_HOLDING(CorruptCheckpoint, "directories that end in .tmp",
                           open_checkpoint(name));
    }
  }
  SUBCASE("an index over the size limit") {
    fs::resize_file(path / "index.json", static_cast<std::uintmax_t>(kMaxIndexBytes) + 1);
    refuse_open("at most");
  }
  SUBCASE("a shard is missing") {
    fs::remove(shard);
    refuse_open("rank-00001-of-00002.safetensors is missing");
    const auto blamed = [&](const fs::path& where) {
      try {
        open_checkpoint(where);
      } catch (const CorruptFile& error) {
        return error.file();
      }
      return std::string("nothing");
    };
    CHECK(blamed(path) == shard.filename());
    save(model, dir.path(), {.step = 6});  // the error then also lists this one
    CHECK(blamed(dir.path()) == shard.filename());
  }
  SUBCASE("a shard is truncated") {
    fs::resize_file(shard, content.size() - 1);
    refuse_open("rank-00001-of-00002.safetensors has");
  }
  SUBCASE("a shard is not a regular file") {
    fs::rename(shard, path / "elsewhere");
    const auto refuse_shard = [&] {
      refuse_open("not a regular file");
      fs::remove(shard);
    };
    fs::create_symlink("elsewhere", shard);
    refuse_shard();
    fs::create_directory(shard);
    refuse_shard();
    for (const mode_t kind : {S_IFIFO, S_IFSOCK, S_IFCHR}) {  // creating devices needs root
      if (::mknod(shard.c_str(), kind | 0600, makedev(1, 3)) == 0) refuse_shard();
    }
  }
  SUBCASE("an index that is a link, a FIFO or a directory") {
    fs::rename(path / "index.json", path / "other.json");
    fs::create_symlink("other.json", path / "index.json");
    refuse_open("symbolic link");
    fs::remove(path / "index.json");
    REQUIRE(::mkfifo((path / "index.json").c_str(), 0600) == 0);
    refuse_open("is a FIFO; expected a regular file");
    fs::remove(path / "index.json");
    fs::create_directory(path / "index.json");
    refuse_open("is a directory; expected a regular file");
  }
  SUBCASE("an empty index") {
    write_text(path / "index.json", "");
    refuse_open("index.json is empty");
  }
  SUBCASE("the directory's name has another step") {
    fs::rename(path, dir.path() / "step-00000008");
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "index of step 7, but the directory is step-00000008",
                         CheckpointReader::open(dir.path() / "step-00000008"));
  }
  SUBCASE("the trainer section was edited") {
    write_text(path / "trainer.json", R"({"step": 8})");
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "trainer.json: the checksum is wrong",
                         CheckpointReader::open(path).trainer_json());
  }
}

}  // namespace
}  // namespace tessera::io
