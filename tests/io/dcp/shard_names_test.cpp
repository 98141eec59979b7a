// DCP safetensors directories with missing shards.

#include "io/dcp/shard_names.h"

#include <doctest/doctest.h>
#include <sys/resource.h>

#include <array>
#include <cstdint>
#include <fstream>
#include <vector>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/consolidate/consolidate.h"
#include "io/dcp/dcp_source.h"
#include "tests/io/dcp/bytes.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

constexpr std::int64_t kColumns = 3, kRowsPerShard = 2;

std::string shard_name(int shard, int model = 1, int models = 1) {
  return fmt::format("shard-{:05}-model-{:05}-of-{:05}.safetensors", shard, model, models);
}

/// Rows of a tensor as rank `shard` - 1 saves them; each element is its index in the tensor.
void write_shard(const fs::path& path, const std::string& tensor, int shard) {
  const std::int64_t first = (shard - 1) * kRowsPerShard;
  std::string data;
  for (std::int64_t i = first * kColumns; i < (first + kRowsPerShard) * kColumns; ++i) {
    const auto value = static_cast<float>(i);
    data.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  write_dcp_shard(path, {{tensor, "F32", {kRowsPerShard, kColumns}, data, {first, 0}}});
}

/// Row-sharded tensors: "a" in model file 1 and, with two files, "b" in model file 2.
struct Shards {
  TempDir dir;
  fs::path path = dir.path() / "source", out = dir.path() / "out";
  int models;
  Shards(int shards, int model_files) : models(model_files) {
    fs::create_directory(path);
    for (int shard = 1; shard <= shards; ++shard) {
      for (int model = 1; model <= models; ++model) {
        write_shard(path / shard_name(shard, model, models), model == 1 ? "a" : "b", shard);
      }
    }
  }
  void remove(int shard, int model = 1) const {
    REQUIRE(fs::remove(path / shard_name(shard, model, models)));
  }
  ConsolidatePlan plan(std::optional<std::int64_t> shards = {}) const {
    ConsolidateOptions options;
    options.format = ExportFormat::Safetensors;
    options.shards = shards;
    return plan_consolidation(path, options);
  }
};

TEST_CASE("all shards give a whole tensor, with a warning about unverifiable counts") {
  const Shards shards(3, 1);
  ConsolidateOptions options;
  options.format = ExportFormat::Safetensors;
  std::vector<std::string> warnings;
  options.warn = [&](const std::string& text) { warnings.push_back(text); };
  consolidate(shards.path, shards.out, options);
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].starts_with("3 shards; their number is not recorded"));
  CHECK(shards.plan().warnings == warnings);
  CHECK(shards.plan(3).warnings.empty());
  std::array<float, 18> values{};
  const SafetensorsReader made(shards.out / "model.safetensors");
  REQUIRE(made.find("a")->shape == Shape{6, 3});
  made.read("a", 0, 18, values.data(), DType::F32);
  for (std::size_t i = 0; i < values.size(); ++i) CHECK(values[i] == static_cast<float>(i));
}

TEST_CASE("a missing last shard is refused if the number of shards is given") {
  const Shards shards(3, 1);
  shards.remove(3);
  CHECK(shards.plan().warnings[0].starts_with("2 shards; their number is not recorded"));
  CHECK_THROWS_HOLDING(CorruptCheckpoint,
                       shard_name(3) + " is missing: found 2 shards, but --shards says 3",
                       shards.plan(3));
  CHECK_THROWS_HOLDING(InvalidArgument, "holds 2 shards, but --shards says 1", shards.plan(1));
}

TEST_CASE("a missing last shard is found by vectors that are shorter than rows") {
  // A norm of 128 elements and a matrix with rows of 128, in 4 shards, of which the last are missing.
  const auto write = [](const fs::path& path, int shards, std::int64_t rows) {
    fs::remove_all(path);
    fs::create_directory(path);
    for (int shard = 1; shard <= shards; ++shard) {
      const std::int64_t first = (shard - 1) * 32;
      write_dcp_shard(path / shard_name(shard),
                      {{"norm.weight", "U8", {32}, std::string(32, 'n'), {first}},
                       {"up.weight",
                        "U8",
                        {32, rows},
                        std::string(static_cast<std::size_t>(32 * rows), 'u'),
                        {first, 0}}});
    }
  };
  const TempDir dir;
  const fs::path path = dir.path() / "source";
  ConsolidateOptions options;
  options.format = ExportFormat::Safetensors;
  write(path, 4, 128);
  CHECK(plan_consolidation(path, options).tensors.size() == 2);
  for (const int left : {3, 2}) {
    write(path, left, 128);
    options.shards = std::nullopt;
    CHECK_THROWS_HOLDING(
        CorruptCheckpoint,
        fmt::format("{} shards, in which norm.weight has {} elements, but the rows of up.weight "
                    "have 128, as it would with 4 shards",
                    left, 32 * left),
        plan_consolidation(path, options));
    options.shards = left;
    CHECK(plan_consolidation(path, options).tensors.size() == 2);
  }
  options.shards = std::nullopt;
  for (const std::int64_t rows : {127, 96, 300}) {  // says nothing about the length of the norm
    write(path, 3, rows);
    CHECK(plan_consolidation(path, options).warnings.size() == 1);
  }
}

TEST_CASE("many shards, and offsets past 32 bits, with few open files") {
  // 300 files of a tensor of 300 * 2^28 bytes (80 GB), with holes.
  const TempDir dir, other;
  const std::int64_t rows = std::int64_t{1} << 28;
  for (int shard = 1; shard <= 300; ++shard) {
    const fs::path path = dir.path() / shard_name(shard);
    const std::int64_t first = (shard - 1) * rows;
    std::string header = fmt::format(
        R"({{"__metadata__":{{"DCP_SHARDING_INFO":"{{\"t\":{{\"saved_offsets\":[{}]}}}}"}},)"
        R"("t":{{"dtype":"U8","shape":[{}],"data_offsets":[0,{}]}}}})",
        first, rows, rows);
    header.resize((header.size() + 7) / 8 * 8, ' ');
    write_text(path, bytes_of<std::uint64_t>(header.size()) + header);
    fs::resize_file(path, 8 + header.size() + static_cast<std::uintmax_t>(rows));
    std::ofstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    for (const std::int64_t at : {std::int64_t{0}, rows - 1}) {
      file.seekp(static_cast<std::streamoff>(8 + header.size()) + at);
      file.put(static_cast<char>(shard % 100 + (at == 0 ? 0 : 100)));
    }
  }
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit low{100, before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &low) == 0);
  ConsolidateOptions options;
  options.format = ExportFormat::Safetensors;
  options.shards = 300;
  const ConsolidatePlan plan = plan_consolidation(dir.path(), other.path() / "out", options);
  const auto source = open_dcp_safetensors(dir.path(), 300);
  std::array<std::uint8_t, 4> bytes{};
  std::vector<std::uint8_t> found;
  for (std::int64_t shard = 1; shard < 300; ++shard) {
    source->read("t", shard * rows - 2, shard * rows + 2, bytes.data(), DType::U8);
    found.insert(found.end(), bytes.begin(), bytes.end());
  }
  ::setrlimit(RLIMIT_NOFILE, &before);
  CHECK(plan.tensors.at(0).bytes == 300 * rows);
  for (std::size_t shard = 1; shard < 300; ++shard) {
    const auto* const at = &found[4 * (shard - 1)];
    CHECK((at[0] == 0 && at[3] == 0));
    CHECK((at[1] == shard % 100 + 100 && at[2] == (shard + 1) % 100));
  }
}

TEST_CASE("a missing shard before another one is refused") {
  const Shards shards(4, 1);
  shards.remove(3);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, shard_name(3) + " is missing, but shard 4 exists",
                       shards.plan());
  CHECK_THROWS_HOLDING(CorruptCheckpoint, shard_name(3) + " is missing", shards.plan(4));
  // A rank may have nothing to save, but this one held rows.
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "tensor a: rows 4 to 6 of shape [8, 3] are in no chunk",
                       shards.plan(3));
  write_shard(shards.path / shard_name(4), "a", 3);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "with --shards 3", shards.plan());
  CHECK(shards.plan(3).tensors[0].shape == Shape{6, 3});
  shards.remove(1);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, shard_name(1) + " is missing", shards.plan());
}

TEST_CASE("a model file without any shard is refused") {
  for (const int gone : {1, 2}) {
    const Shards shards(2, 2);
    shards.remove(1, gone);
    shards.remove(2, gone);
    CHECK_THROWS_HOLDING(CorruptCheckpoint,
                         fmt::format("{} is missing, as are other shards of model file {} of 2",
                                     shard_name(1, gone, 2), gone),
                         shards.plan({}));
    // Possibly no rank had anything to save in it; only a given number of shards allows this.
    CHECK(shards.plan(2).warnings.size() == 1);
  }
}

TEST_CASE("a shard without one of its model files is reported") {
  const Shards shards(3, 2);
  CHECK(shards.plan(3).warnings.empty());
  shards.remove(3, 2);
  const ConsolidatePlan plan = shards.plan(3);
  CHECK(plan.tensors.size() == 2);
  REQUIRE(plan.warnings.size() == 1);
  CHECK(plan.warnings[0] == shard_name(3, 2, 2) +
                                " is missing: either its rank had nothing to save in it, or it "
                                "was lost");
  shards.remove(2, 2);
  CHECK(holds(shards.plan(3).warnings[0], shard_name(2, 2, 2) + " is missing, as is another"));
}

TEST_CASE("shards with different numbers of model files are refused") {
  const Shards shards(2, 1);
  write_shard(shards.path / shard_name(2, 1, 2), "b", 1);
  CHECK_THROWS_HOLDING(CorruptCheckpoint,
                       shard_name(2, 1, 2) + " is one of 2 model files, but " + shard_name(1) +
                           " is one of 1: they belong to two checkpoints",
                       shards.plan());
}

TEST_CASE("file names without numbers are refused") {
  for (const char* name :
       {"shard-1-model-00001-of-00001.safetensors", "shard-00000-model-00001-of-00001.safetensors",
        "shard-00002-model-00002-of-00001.safetensors",
        "shard-000002-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001 (1).safetensors", "shard-00002.safetensors"}) {
    CAPTURE(name);
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "does not have the name of a shard",
                         find_dcp_shards({shard_name(1), name}, "dir"));
  }
  const DcpShards many = find_dcp_shards({"config.json", shard_name(1)}, "dir");
  CHECK(many.names == std::vector<std::string>{shard_name(1)});
  CHECK_THROWS_HOLDING(CorruptCheckpoint, shard_name(2) + " is missing, but shard 100000 exists",
                       find_dcp_shards({shard_name(1), shard_name(100000)}, "dir"));
}

TEST_CASE("--shards is refused for formats that state the number themselves") {
  const fs::path fixtures = test::source_path("tests/io/dcp/fixtures");
  ConsolidateOptions options;
  options.format = ExportFormat::Safetensors;
  options.shards = 3;
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "is a PyTorch DCP, which records its number of shards; omit "
                       "--shards",
                       plan_consolidation(fixtures / "fsdp-gpt2", options));
}

}  // namespace
}  // namespace tessera::io
