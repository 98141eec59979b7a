#include "io/dcp/dcp_source.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/dcp/metadata.h"
#include "io/hf/family.h"
#include "io/hf/model_source.h"
#include "io/seal/verify_path.h"
#include "io/source/open_sharded.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

const fs::path kFixtures = test::source_path("tests/io/dcp/fixtures");

std::unique_ptr<ShardedSource> open_fixture(const fs::path& dir) {
  return is_dcp(dir) ? open_dcp(dir) : open_dcp_safetensors(dir);
}

std::string read_raw(const TensorSource& source, const TensorInfo& tensor, std::int64_t begin,
                     std::int64_t end) {
  std::string bytes(static_cast<std::size_t>(end - begin) * dtype_size(tensor.dtype), '?');
  source.read(tensor.name, begin, end, bytes.data(), tensor.dtype);
  return bytes;
}

struct Whole {
  DType dtype;
  Shape shape;
  std::string bytes;
};

/// A fixture's tensors as PyTorch had them in memory.
std::map<std::string, Whole> expected_tensors(const fs::path& dir) {
  std::map<std::string, Whole> expected;
  const SafetensorsReader file(dir / "expected.safetensors.golden");
  for (const SafetensorsEntry& entry : file.header().tensors) {
    if (!entry.dtype) continue;
    Whole whole{*entry.dtype, entry.shape, std::string(entry.end - entry.begin, '?')};
    file.file().read(entry.begin, whole.bytes.data(), whole.bytes.size());
    expected.emplace(entry.name, std::move(whole));
  }
  return expected;
}

TEST_CASE("PyTorch's shards are read as the tensors were in memory") {
  for (const char* name : {"fsdp-gpt2", "fsdp-wrapped", "torchtitan", "mixed", "dcp-safetensors",
                           "lightning", "accelerate", "strided", "zstd"}) {
    CAPTURE(name);
    const auto expected = expected_tensors(kFixtures / name);
    const auto source = open_fixture(kFixtures / name);
    CHECK(source->tensors().size() == expected.size());
    for (const TensorInfo& tensor : source->tensors()) {
      CAPTURE(tensor.name);
      REQUIRE(expected.contains(tensor.name));
      const Whole& whole = expected.at(tensor.name);
      CHECK(tensor.dtype == whole.dtype);
      CHECK(tensor.shape == whole.shape);
      CHECK(read_raw(*source, tensor, 0, numel(tensor.shape)) == whole.bytes);
    }
  }
}

TEST_CASE("an unfinished save of accelerate is detected, and several models are not mixed") {
  const TempDir dir;
  fs::copy(kFixtures / "accelerate", dir.path() / "a", fs::copy_options::recursive);
  fs::copy(dir.path() / "a/pytorch_model_fsdp_0", dir.path() / "a/pytorch_model_fsdp_1");
  CHECK_THROWS_HOLDING(InvalidArgument, "a holds several models; give one, such as",
                       open_sharded(dir.path() / "a", {}));
  fs::create_directory(dir.path() / "full");
  for (const char* name : {"full/pytorch_model_fsdp.bin", "full/pytorch_model_fsdp_1.bin"})
    dir.write(name, "");
  CHECK_THROWS_HOLDING(InvalidArgument, "full holds several models; give one, such as",
                       open_sharded(dir.path() / "full", {}));
  fs::remove_all(dir.path() / "a/pytorch_model_fsdp_1");
  fs::remove(dir.path() / "a/optimizer_0/.metadata");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "optimizer_0 has shards, but no .metadata",
                       open_sharded(dir.path() / "a", {}));
}

TEST_CASE("PyTorch 2.1's ShardedTensor and DTensor are read") {
  const auto source = open_dcp(kFixtures / "torch-2.1");
  CHECK(source->objects() == std::vector<std::string>{"epoch"});
  REQUIRE(source->tensors().size() == 3);
  for (const TensorInfo& tensor : source->tensors()) {
    CAPTURE(tensor.name);
    CHECK(tensor.shape == Shape{5, 3});
    std::array<float, 15> values{};
    source->read(tensor.name, 0, 15, values.data(), DType::F32);
    for (std::size_t i = 0; i < values.size(); ++i) CHECK(values[i] == static_cast<float>(i));
  }
}

TEST_CASE("ranges of sharded tensors match the whole") {
  for (const char* name : {"mixed", "dcp-safetensors", "torchtitan", "strided", "zstd"}) {
    CAPTURE(name);
    const auto expected = expected_tensors(kFixtures / name);
    const auto source = open_fixture(kFixtures / name);
    for (const TensorInfo& tensor : source->tensors()) {
      CAPTURE(tensor.name);
      const std::string& whole = expected.at(tensor.name).bytes;
      const auto width = static_cast<std::int64_t>(dtype_size(tensor.dtype));
      const std::int64_t size = numel(tensor.shape);
      bool same = true;
      for (std::int64_t begin = 0; begin <= size; ++begin) {
        for (std::int64_t end = begin; end <= size; end += 3) {
          same = same && read_raw(*source, tensor, begin, end) ==
                             whole.substr(static_cast<std::size_t>(begin * width),
                                          static_cast<std::size_t>((end - begin) * width));
        }
      }
      CHECK(same);
    }
  }
}

struct Copy {
  TempDir dir;
  fs::path path;
  explicit Copy(const char* name) : path(dir.path() / name) {
    fs::copy(kFixtures / name, path, fs::copy_options::recursive);
  }
  std::string text(const char* file) const { return read_text(path / file); }
  void write(const char* file, std::string_view content) const { write_text(path / file, content); }
};

void read_everything(const fs::path& dir) {
  const auto source = open_fixture(dir);
  for (const TensorInfo& tensor : source->tensors()) {
    read_raw(*source, tensor, 0, numel(tensor.shape));
  }
}

TEST_CASE("each mismatch between shards and metadata has its own error") {
  {
    const Copy copy("lightning");
    fs::remove(copy.path / ".metadata");
    CHECK(is_dcp(copy.path));
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "this save was not finished", open_dcp(copy.path));
  }
  {
    const Copy copy("lightning");
    fs::remove(copy.path / "__1_0.distcp");
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "__1_0.distcp is missing", open_dcp(copy.path));
    fs::create_directory(copy.path / "__1_0.distcp");
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "is a directory", open_dcp(copy.path));
  }
  {
    const Copy copy("lightning");
    const std::string whole = copy.text("__1_0.distcp");
    copy.write("__1_0.distcp", whole.substr(0, whole.size() - 1));
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "it was truncated or replaced", open_dcp(copy.path));
    // The same size, shifted by a byte.
    copy.write("__1_0.distcp", "x" + whole.substr(0, whole.size() - 1));
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "does not end like a zip archive",
                         read_everything(copy.path));
    // The other rank's shard: intact archives of other chunks.
    const std::string other = copy.text("__0_0.distcp");
    copy.write("__1_0.distcp", other + std::string(whole.size(), 'x'));
    CHECK_THROWS_AS(read_everything(copy.path), CorruptCheckpoint);
  }
  {
    // Two chunks of different shapes swap places.
    const Copy copy("lightning");
    const DcpMetadata metadata = parse_dcp_metadata(copy.text(".metadata"), ".metadata");
    const StoredBlock& bias = metadata.tensors.at("model.model.layers.0.bias").chunks[0];
    const StoredBlock& weight = metadata.tensors.at("model.model.layers.0.weight").chunks[0];
    REQUIRE(bias.length == weight.length);
    const char* const file = metadata.files[bias.file].c_str();
    const auto n = static_cast<std::size_t>(bias.length);
    std::string bytes = copy.text(file);
    std::swap_ranges(bytes.begin() + bias.offset, bytes.begin() + bias.offset + bias.length,
                     bytes.begin() + weight.offset);
    REQUIRE(bytes.size() > n);
    copy.write(file, bytes);
    CHECK_THROWS_HOLDING(CorruptCheckpoint,
                         "has a chunk of float32 [3] at [0], but its archive holds",
                         read_everything(copy.path));
  }
}

/// Flips a bit of each byte of a tensor's first archive.
/// @return number of reads that noticed it
int noticed_flips(const char* fixture, const char* name) {
  const Copy copy(fixture);
  const Whole whole = expected_tensors(kFixtures / fixture).at(name);
  const auto width = dtype_size(whole.dtype);
  const DcpMetadata metadata = parse_dcp_metadata(copy.text(".metadata"), ".metadata");
  const StoredBlock& chunk = metadata.tensors.at(name).chunks[0];
  std::fstream file(copy.path / metadata.files[chunk.file],
                    std::ios::in | std::ios::out | std::ios::binary);
  const auto flip = [&](std::size_t at) {  // in place: rewriting the file is slow
    const auto position = static_cast<std::streamoff>(at);
    char byte = 0;
    file.seekg(position).get(byte);
    file.seekp(position).put(static_cast<char>(byte ^ (1 << (at % 8)))).flush();
    REQUIRE(file.good());
  };
  int noticed = 0;
  for (auto i = static_cast<std::size_t>(chunk.offset);
       i < static_cast<std::size_t>(chunk.offset + chunk.length); ++i) {
    flip(i);
    const auto source = open_dcp(copy.path);
    for (const std::int64_t end : {4, 3}) {  // the whole chunk, and part of it
      try {
        const std::string bytes = read_raw(*source, {name, whole.shape, whole.dtype}, 0, end);
        REQUIRE(bytes == whole.bytes.substr(0, static_cast<std::size_t>(end) * width));
      } catch (const Error&) {  // a flip may make a window too large
        ++noticed;
      }
    }
    flip(i);  // undo
  }
  return noticed;
}

TEST_CASE("a flipped bit in a shard is detected, or outside of all tensors") {
  CHECK(noticed_flips("strided", "plain") > 500);
  CHECK(noticed_flips("zstd", "more.f16") > 300);
}

TEST_CASE("compressed hyperparameters are read whole, and damage is an error") {
  const Copy copy("zstd-optimizer");
  const Hyperparameters found = open_dcp(copy.path)->hyperparameters();
  CHECK(found.left_out.empty());
  REQUIRE(found.groups.size() == 1);
  CHECK(found.groups[0].weights.size() == 33);
  const DcpMetadata metadata = parse_dcp_metadata(copy.text(".metadata"), ".metadata");
  const std::string name = metadata.hyperparameters.front().first;
  std::string bytes = copy.text("__0_0.distcp");
  bytes[static_cast<std::size_t>(metadata.hyperparameters.front().second.offset)] ^= 1;
  copy.write("__0_0.distcp", bytes);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, name, open_dcp(copy.path)->hyperparameters());
}

TEST_CASE("verification names every compressed item that is damaged") {
  const Copy copy("zstd");
  const DcpMetadata metadata = parse_dcp_metadata(copy.text(".metadata"), ".metadata");
  for (const char* name : {"more.f16", "more.i8"}) {
    const StoredBlock& block = metadata.tensors.at(name).chunks[0];
    const char* const file = metadata.files[block.file].c_str();
    std::string bytes = copy.text(file);
    bytes[static_cast<std::size_t>(block.offset)] ^= 1;
    copy.write(file, bytes);
  }
  const VerifyReport report = verify_path(copy.path, {}, {}).verify;
  CHECK(report.tensors == 34);
  REQUIRE(report.problems.size() == 2);
  CHECK(report.problems[0].what.find("tensor more.f16: ") != std::string::npos);
  CHECK(report.problems[1].what.find("tensor more.i8: ") != std::string::npos);
  CHECK(report.problems[1].what.find("begins no frame of zstd") != std::string::npos);
}

TEST_CASE("wrong data of a reordered tensor are detected before any element is returned") {
  const Copy copy("strided");
  std::string file = copy.text("__0_0.distcp");
  const DcpMetadata metadata = parse_dcp_metadata(copy.text(".metadata"), ".metadata");
  const auto in_file = static_cast<std::size_t>(metadata.tensors.at("permuted").chunks[0].offset);
  const std::string last("\0\0\xb8\x40", 4);  // 5.75
  const std::size_t at = file.find(last, in_file);
  REQUIRE(at != std::string::npos);
  file[at] = 1;
  copy.write("__0_0.distcp", file);
  const auto source = open_dcp(copy.path);
  float first = 0;
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "__0_0.distcp: tensor permuted, elements",
                       source->read("permuted", 0, 1, &first, DType::F32));
}

TEST_CASE("damage is reported with tensor and chunk") {
  const Copy copy("strided");
  std::string file = copy.text("__0_0.distcp");
  const std::string values = expected_tensors(kFixtures / "strided").at("plain").bytes;
  const DcpMetadata metadata = parse_dcp_metadata(copy.text(".metadata"), ".metadata");
  const std::size_t at =
      file.find(values, static_cast<std::size_t>(metadata.tensors.at("plain").chunks[0].offset));
  REQUIRE(at != std::string::npos);
  file[at + 5] = static_cast<char>(file[at + 5] ^ 4);
  copy.write("__0_0.distcp", file);
  float first = 0;
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "__0_0.distcp: tensor plain, elements 0 to 4 (bytes",
                       open_dcp(copy.path)->read("plain", 0, 1, &first, DType::F32));
}

TEST_CASE("unsupported content is refused by name, and only on request") {
  float values[24];
  const auto others = open_dcp(kFixtures / "other-dtypes");
  CHECK(others->tensors().size() == 1);
  CHECK(others->unreadable().size() == 3);
  CHECK_THROWS_HOLDING(Unsupported, "tensor f8 is stored as u8, which does not convert",
                       others->read("f8", 0, 1, values, DType::F32));
  CHECK_THROWS_HOLDING(InvalidArgument, "holds no tensor x",
                       others->read("x", 0, 1, values, DType::F32));
  CHECK_THROWS_HOLDING(InvalidArgument, "elements 0 to 4 are outside tensor weight of shape [3]",
                       others->read("weight", 0, 4, values, DType::F32));
  const auto mixed = open_dcp(kFixtures / "mixed");
  CHECK_THROWS_HOLDING(Unsupported, "tensor model.i64 is stored as i64",
                       mixed->read("model.i64", 0, 1, values, DType::F32));
}

TEST_CASE("the kind of a directory is detected by its files") {
  CHECK(open_dcp(kFixtures / "torchtitan")->kind() == "PyTorch DCP");
  CHECK(open_dcp(kFixtures / "lightning")->kind() == "Lightning FSDP (PyTorch DCP)");
  CHECK(open_dcp_safetensors(kFixtures / "dcp-safetensors")->kind() ==
        "PyTorch DCP as safetensors");
  CHECK_FALSE(is_dcp(kFixtures / "dcp-safetensors"));
  CHECK_FALSE(is_dcp_safetensors(kFixtures / "lightning"));
  CHECK_FALSE(is_dcp(kFixtures));
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "contains 11 checkpoints of PyTorch, but is not one itself; give one",
                       open_sharded(kFixtures));
}

TEST_CASE("inconsistent safetensors shards are refused") {
  const auto refuse = [](const char* reason, auto edit) {
    const Copy copy("dcp-safetensors");
    edit(copy);
    CAPTURE(reason);
    CHECK_THROWS_HOLDING(CorruptCheckpoint, reason, open_dcp_safetensors(copy.path));
  };
  const char* const first = "shard-00001-model-00001-of-00001.safetensors";
  const char* const second = "shard-00002-model-00001-of-00001.safetensors";
  const auto replace = [](const Copy& copy, const char* file, const std::string& from,
                          const std::string& to) {
    std::string text = copy.text(file);
    const std::size_t at = text.find(from);
    REQUIRE(at != std::string::npos);
    REQUIRE(from.size() == to.size());
    copy.write(file, text.replace(at, from.size(), to));
  };
  refuse("shard-00002-model-00001-of-00001.safetensors is missing, but shard 4 exists",
         [&](const Copy& copy) { fs::remove(copy.path / second); });
  refuse("overlap", [&](const Copy& copy) {
    replace(copy, second, R"(\"uneven\": {\"saved_offsets\": [2, 0]})",
            R"(\"uneven\": {\"saved_offsets\": [1, 0]})");
  });
  refuse("no DCP_SHARDING_INFO (offsets",
         [&](const Copy& copy) { replace(copy, first, "DCP_SHARDING_INFO", "DCP_SHARDING_NONE"); });
  refuse("1 offsets for shape", [&](const Copy& copy) {
    replace(copy, second, R"(\"uneven\": {\"saved_offsets\": [2, 0]})",
            R"(\"uneven\": {\"saved_offsets\": [2000]})");
  });
  refuse("expected a whole number from 0", [&](const Copy& copy) {
    replace(copy, second, R"(\"uneven\": {\"saved_offsets\": [2, 0]})",
            R"(\"uneven\": {\"saved_offsets\": [2,-1]})");
  });
  refuse("the field \"saved_offsets\" is missing", [&](const Copy& copy) {
    replace(copy, second, R"(\"uneven\": {\"saved_offsets\")", R"(\"uneven\": {\"saved_offsetz\")");
  });
  refuse("is not valid JSON",
         [&](const Copy& copy) { replace(copy, second, R"(\"uneven\": {)", R"(\"uneven\": [)"); });
}

TEST_CASE("GPT-2 shards with a configuration are opened with tessera's names") {
  const auto expected = expected_tensors(kFixtures / "fsdp-gpt2");
  const auto model = open_model(kFixtures / "fsdp-gpt2");
  CHECK(model->checkpoint() == nullptr);
  CHECK(model->config().at("n_embd") == 4);
  CHECK(model->tensors().size() == model_tensors(model->config()).size());
  for (const TensorInfo& tensor : model->tensors()) {
    CHECK(read_raw(*model, tensor, 0, numel(tensor.shape)) ==
          expected.at("model.transformer." + tensor.name).bytes);
  }
  CHECK_THROWS_HOLDING(InvalidArgument, "is a PyTorch DCP and has no step 3",
                       open_model(kFixtures / "fsdp-gpt2", 3));
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "is a Lightning FSDP (PyTorch DCP) without config.json, so its model",
                       open_model(kFixtures / "lightning"));

  const Copy copy("fsdp-gpt2");
  Json config = Json::parse(copy.text("config.json"));
  config["vocab_size"] = 18;
  copy.write("config.json", config.dump());
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "shape: transformer.wte.weight is [17, 4], expected [18, 4]",
                       open_model(copy.path));
  config["model_type"] = "t5";
  copy.write("config.json", config.dump());
  CHECK_THROWS_HOLDING(Unsupported, "model_type \"t5\" cannot be imported", open_model(copy.path));
}

}  // namespace
}  // namespace tessera::io
