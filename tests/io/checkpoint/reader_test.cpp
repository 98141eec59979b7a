#include "io/checkpoint/reader.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/base/json.h"
#include "io/checkpoint/find.h"
#include "io/checkpoint/verify.h"
#include "io/pump/read_parts.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

std::string split_tensor(const CheckpointReader& reader) {
  for (const auto& [name, record] : reader.tensors(kModelSection)) {
    if (record.chunks.size() >= 2) return name;
  }
  throw std::runtime_error("no tensor is split");
}

TEST_CASE("whole and partial reads detect a flipped bit, and name its place") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  const fs::path path = save(model, dir.path(), {.world_size = 4});
  const auto intact = CheckpointReader::open(path);
  const std::string name = split_tensor(intact);
  const Chunk damaged = intact.tensors(kModelSection).at(name).chunks[1];
  const std::int64_t size = numel(intact.tensors(kModelSection).at(name).shape);
  flip_bit(path / damaged.file, damaged.byte_end - 1);

  const auto reader = CheckpointReader::open(path);
  std::vector<float> out(static_cast<std::size_t>(size));
  const std::string place = fmt::format("{}: tensor model/{}, elements {} to {}", damaged.file,
                                        name, damaged.begin, damaged.end);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, place,
                       reader.read(kModelSection, name, 0, size, out.data(), DType::F32));
  // The requested range is intact, but shares the damaged chunk.
  CHECK_THROWS_HOLDING(
      CorruptCheckpoint, place,
      reader.read(kModelSection, name, damaged.begin, damaged.begin + 1, out.data(), DType::F32));
  reader.read(kModelSection, name, 0, damaged.begin, out.data(),
              DType::F32);  // other chunks are readable
  CHECK(out[0] == model.at(name).weight[0]);

  const VerifyReport report = verify_checkpoint(reader);
  REQUIRE(report.problems.size() == 1);
  CHECK(report.problems[0].str() ==
        fmt::format("{}: tensor model/{}, elements {} to {} (bytes {} to {}): the checksum is "
                    "wrong",
                    damaged.file, name, damaged.begin, damaged.end, damaged.byte_begin,
                    damaged.byte_end));
}

TEST_CASE("verify reports non-finite values and continues") {
  TempDir dir;
  SampleModel model = make_sample_model();
  for (auto& tensor : model.tensors) {
    if (tensor.name == "wpe.weight") tensor.weight[37] = std::numeric_limits<float>::quiet_NaN();
    if (tensor.name == "ln_f.bias") tensor.exp_avg_sq[2] = std::numeric_limits<float>::infinity();
  }
  const auto reader = CheckpointReader::open(save(model, dir.path()));
  const VerifyReport report = verify_checkpoint(reader);
  REQUIRE(report.problems.size() == 2);
  CHECK(holds(report.problems[0].str(), "model/wpe.weight, elements 37 to 38 (bytes "));
  CHECK(report.problems[0].what == "the value is not finite");
  CHECK(report.problems[0].byte_end - report.problems[0].byte_begin == 4);
  CHECK(report.problems[1].tensor == "optimizer/exp_avg_sq/ln_f.bias");
  CHECK(report.problems[1].begin == 2);
}

TEST_CASE("verify compares each shard's header with the index") {
  TempDir dir;
  const fs::path path = save(make_sample_model(), dir.path(), {.world_size = 2});
  const fs::path shard = path / "rank-00001-of-00002.safetensors";
  std::string content = read_text(shard);
  const auto replace = [&](const std::string& from, const std::string& to) {
    REQUIRE(from.size() == to.size());
    const auto at = content.find(from);
    REQUIRE(at != std::string::npos);
    content.replace(at, from.size(), to);
    write_text(shard, content);
  };
  const auto expect = [&](const std::vector<std::string>& expected) {
    const VerifyReport report = verify_checkpoint(CheckpointReader::open(path));
    std::vector<std::string> found;
    for (const VerifyProblem& problem : report.problems) found.push_back(problem.str());
    CHECK(found == expected);
  };
  expect({});
  const std::string name = shard.filename().string();
  SUBCASE("another name") {
    replace("\"model/ln_f.bias\"", "\"model/ln_f.bia_\"");
    const SafetensorsReader reader(shard);
    const auto* bytes = reader.find("model/ln_f.bia_");
    expect({name + ": tensor model/ln_f.bias: the file's own header does not list it",
            fmt::format("{}: tensor model/ln_f.bia_: the file has {} bytes of it, the index "
                        "lists 0",
                        name, bytes->end - bytes->begin)});
  }
  SUBCASE("another dtype") {
    const auto at = content.find("F32", content.find("\"model/ln_f.bias\""));
    content.replace(at, 3, "I32");
    write_text(shard, content);
    expect({name + ": tensor model/ln_f.bias: the file's own header says I32, the index f32"});
  }
  SUBCASE("another rank") {
    replace("\"rank\":\"1\"", "\"rank\":\"0\"");
    expect({name + ": is the shard of rank 0: shards were swapped"});
  }
  SUBCASE("swapped positions") {
    const SafetensorsHeader header = SafetensorsReader(shard).header();
    const SafetensorsEntry& one = header.tensors.front();
    const auto other =
        std::find_if(header.tensors.begin() + 1, header.tensors.end(),
                     [&](const auto& e) { return e.name.size() == one.name.size(); });
    REQUIRE(other != header.tensors.end());
    const auto quoted = [](const std::string& text) { return "\"" + text + "\""; };
    const std::string spare(one.name.size(), 'x');
    replace(quoted(one.name), quoted(spare));
    replace(quoted(other->name), quoted(one.name));
    replace(quoted(spare), quoted(other->name));
    const VerifyReport report = verify_checkpoint(CheckpointReader::open(path));
    REQUIRE(report.problems.size() >= 2);
    CHECK(report.problems[0].what.find("the file's own header puts it at bytes") == 0);
  }
}

TEST_CASE("a checkpoint of an older version, without checksums in index and headers, is readable") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  const fs::path path = save(model, dir.path(), {.world_size = 2});
  const std::string digest = CheckpointReader::open(path).digest();
  Json json = Json::parse(read_text(path / "index.json"));
  json.erase("checksum");
  for (Json& file : json["files"]) REQUIRE(file.erase("header") == 1);
  write_text(path / "index.json", json.dump());
  const auto reader = CheckpointReader::open(path);
  CHECK(reader.digest() == digest);
  CHECK(verify_checkpoint(reader).problems.empty());
  std::vector<float> out(130);
  reader.read(kModelSection, "wte.weight", 0, 130, out.data(), DType::F32);
  CHECK(out == model.at("wte.weight").weight);
}

TEST_CASE("a shard of another step is detected") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  const fs::path old_path = save(model, dir.path(), {.world_size = 2, .step = 6});
  const fs::path path = save(model, dir.path(), {.world_size = 2, .step = 7});
  const char* const shard = "rank-00001-of-00002.safetensors";
  fs::copy_file(old_path / shard, path / shard, fs::copy_options::overwrite_existing);
  const auto reader = CheckpointReader::open(path);  // file sizes are equal
  const std::string name = split_tensor(reader);
  const std::int64_t size = numel(reader.tensors(kModelSection).at(name).shape);
  std::vector<float> out(static_cast<std::size_t>(size));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "has step 6, but the index has 7",
                       reader.read(kModelSection, name, 0, size, out.data(), DType::F32));
  CHECK_FALSE(verify_checkpoint(reader).problems.empty());
}

TEST_CASE("boxes are assembled") {
  TempDir dir;
  std::vector<float> values;
  for (int i = 0; i < 24; ++i) values.push_back(static_cast<float>(i) + 0.5F);
  const auto reader = write_tensor(dir.path() / "boxed", DType::F32, {4, 6},
                                   {reinterpret_cast<const char*>(values.data()), 96}, true);
  for (std::int64_t begin = 0; begin <= 24; ++begin) {
    for (std::int64_t end = begin; end <= 24; ++end) {
      std::vector<float> out(static_cast<std::size_t>(end - begin), -1);
      reader.read(kModelSection, "w", begin, end, out.data(), DType::F32);
      const std::vector<float> expected(values.begin() + begin, values.begin() + end);
      CHECK(out == expected);
      std::fill(out.begin(), out.end(), -1.0F);
      read_parts(std::vector<ReadPart>{{&reader.source(kModelSection), "w", begin, end, DType::F32,
                                        out.data()}},
                 {.threads = 2});
      CHECK(out == expected);
    }
  }
  CHECK(reader.digest() == [&] {
    const std::string text =
        fmt::format("w\nf32\n[4, 6]\n{}\n", format_checksum(crc64(values.data(), 96)));
    return format_checksum(crc64(text.data(), text.size()));
  }());
  CHECK(verify_checkpoint(reader).problems.empty());
}

TEST_CASE("unreadable files are not reported as missing") {
  TempDir dir;
  const fs::path loop = dir.path() / "loop";
  fs::create_symlink(loop, loop);
  CHECK_THROWS_HOLDING(IoError, "cannot stat ", CheckpointReader::open(loop / "step-00000001"));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "has no index.json",
                       CheckpointReader::open(dir.path() / "step-00000001"));
}

}  // namespace
}  // namespace tessera::io
