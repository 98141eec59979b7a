#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "io/base/json.h"
#include "io/checkpoint/index.h"
#include "tests/io/python.h"
#include "tests/io/support.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

Json saved_index(const SaveOptions& options) {
  TempDir dir;
  return Json::parse(read_text(save(make_sample_model(), dir.path(), options) / "index.json"));
}

Json with_box() {
  Json json = saved_index({.world_size = 2});
  Json& chunk = json["sections"]["model"]["tensors"]["wte.weight"]["chunks"][0];
  chunk["box"] = {{"offsets", {0, 0}}, {"shape", {13, 10}}};
  return json;
}

/// Invalid indexes with a description of the fault.
std::vector<std::pair<std::string, Json>> mutations() {
  const Json whole = with_box();
  std::vector<std::pair<std::string, Json>> result;
  const auto set = [&](const std::string& pointer, const Json& value) {
    Json json = whole;
    json[Json::json_pointer(pointer)] = value;
    result.emplace_back(fmt::format("{} = {}", pointer, value.dump()), json);
  };
  const auto erase = [&](const std::string& object, const std::string& key) {
    Json json = whole;
    REQUIRE(json[Json::json_pointer(object)].erase(key) == 1);
    result.emplace_back(fmt::format("{} lacks {}", object, key), json);
  };
  const std::string tensor = "/sections/model/tensors/wte.weight", chunk = tensor + "/chunks/0";
  const std::string shard = "/files/rank-00000-of-00002.safetensors";
  for (const char* key : {"format", "version", "step", "world_size", "run_id", "created", "tessera",
                          "model", "files", "sections"}) {
    erase("", key);
  }
  for (const char* key : {"dtype", "shape", "chunks"}) erase(tensor, key);
  for (const char* key : {"file", "bytes", "elements", "checksum"}) erase(chunk, key);
  for (const char* key : {"offsets", "shape"}) erase(chunk + "/box", key);
  for (const char* key : {"size", "checksum"}) erase(shard + "/header", key);
  for (const char* key : {"file", "size", "checksum"}) erase("/sections/trainer", key);
  for (const char* key : {"hyper", "tensors"}) erase("/sections/optimizer", key);
  erase("/sections/optimizer/hyper", "step");
  erase("/sections/model", "tensors");
  erase(shard, "size");
  for (const Json& wrong : {Json(-1), Json(1.5), Json(9223372036854775808ULL), Json("1"), Json()}) {
    for (const std::string& place :
         {std::string("/step"), shard + "/size", shard + "/header/size", chunk + "/bytes/1",
          chunk + "/elements/0", tensor + "/shape/0", chunk + "/box/shape/1",
          std::string("/sections/trainer/size"), std::string("/sections/optimizer/hyper/step")}) {
      set(place, wrong);
    }
  }
  for (const Json& wrong : {Json(0), Json(2147483648), Json("2")}) set("/world_size", wrong);
  for (const char* wrong : {"", "a/b", "a b"}) set("/run_id", wrong);
  for (const char* wrong : {"", "yesterday", "2026-01-01T00:00:00"}) set("/created", wrong);
  for (const char* wrong : {"crc64:", "crc64:00000000000000FF", "md5:0000000000000000"}) {
    set("/checksum", wrong);
    set(chunk + "/checksum", wrong);
  }
  for (const Json& wrong : {Json("../a"), Json("/a"), Json("a/b"), Json("."), Json(".."), Json(""),
                            Json(std::string("a\0b", 3)), Json(std::string(256, 'a'))}) {
    set(chunk + "/file", wrong);
    set("/sections/trainer/file", wrong);
    Json json = whole;
    json["files"][wrong.get<std::string>()] = {{"size", 1}};
    result.emplace_back(fmt::format("files has {}", wrong.dump()), json);
  }
  set("/format", "other");
  set("/version", 2);
  set("/model", "gpt2");
  set("/tessera", 1);
  set("/files", Json::array());
  set(tensor + "/dtype", "F33");
  set(tensor + "/shape", std::vector<int>(9, 1));
  set(chunk + "/bytes", {1});
  set(chunk + "/bytes", {1, 2, 3});
  set("/sections/model/tensors/", whole[Json::json_pointer(tensor)]);
  set("/unknown", 1);
  set("/sections/gradients", Json::object());
  return result;
}

TEST_CASE("the schema accepts written indexes, and rejects what the readers reject") {
  const Python python("import jsonschema");
  if (!python) {
    MESSAGE("skipped: " << python.missing());
    return;
  }
  TempDir dir;
  Json good = Json::array({saved_index({}), saved_index({.world_size = 4}),
                           saved_index({.optimizer = false, .trainer_json = ""}), with_box()});
  Json bad = Json::array();
  for (const auto& [what, json] : mutations()) {
    if (what.find("e+") != std::string::npos) continue;
    bad.push_back(json);
  }
  write_text(dir.path() / "good", good.dump());
  write_text(dir.path() / "bad", bad.dump());
  const auto result = python.run(fmt::format(R"(
import json, jsonschema
schema = json.load(open("{0}/io/index.schema.json"))
jsonschema.Draft202012Validator.check_schema(schema)
validator = jsonschema.Draft202012Validator(schema)
good, bad = json.load(open("{1}/good")), json.load(open("{1}/bad"))
assert len(good) == 4 and len(bad) > 100
for index in good:
    validator.validate(index)
for place, index in enumerate(bad):
    assert not validator.is_valid(index), place
print("agreed")
)",
                                             test::source_path(), dir.path().string()));
  CAPTURE(result);
  CHECK(holds(result, "agreed"));
}

}  // namespace
}  // namespace tessera::io
