// tools/read_checkpoint.py, an independent implementation of io/FORMAT.md, reads saved checkpoints.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "io/base/json.h"
#include "io/checkpoint/reader.h"
#include "tests/io/python.h"
#include "tests/io/support.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

const std::string kReader = test::source_path("tools/read_checkpoint.py");

std::string python_bytes(const Python& python, const fs::path& checkpoint,
                         const std::string& section, const fs::path& out) {
  return python.run(fmt::format(R"(
import sys
sys.path.insert(0, "{}/tools")
from read_checkpoint import load
tensors, digest, index = load("{}", "{}")
with open("{}", "wb") as file:
    for name in sorted(tensors):
        file.write(tensors[name].tobytes())
)",
                                test::source_path(), checkpoint.string(), section, out.string()));
}

TEST_CASE("a reader written from FORMAT.md reads checkpoints") {
  const Python python("import numpy");
  if (!python) {
    MESSAGE("skipped: " << python.missing());
    return;
  }
  TempDir dir;
  const SampleModel model = make_sample_model();
  const fs::path path = save(model, dir.path(), {.world_size = 3, .chunk_bytes = 64});
  const auto reader = CheckpointReader::open(path);

  SUBCASE("names, shapes and digest") {
    const std::string said = python.run_file(kReader, {path.string()});
    CAPTURE(said);
    CHECK(holds(said, "digest " + reader.digest() + "\n"));
    CHECK(holds(said, fmt::format("step 7, {} tensors", model.tensors.size())));
    CHECK(holds(said, "exit code 0"));
    for (const auto& [name, record] : reader.tensors(kModelSection)) {
      CHECK(holds(said, fmt::format("{:<40} float32  {}", name, record.shape)));
    }
  }
  SUBCASE("values of all sections") {
    for (const Section& section : reader.index().tensor_sections()) {
      const std::string name = section.is_model() ? "model" : section.state;
      const std::string said = python_bytes(python, path, name, dir.path() / "bytes");
      CAPTURE(said);
      std::string expected;
      for (const auto& [tensor, record] : reader.tensors(section)) {
        const std::int64_t n = numel(record.shape);
        std::string data(static_cast<std::size_t>(n) * 4, '\0');
        reader.read(section, tensor, 0, n, data.data(), DType::F32);
        expected += data;
      }
      CHECK(read_text(dir.path() / "bytes") == expected);
    }
  }
  SUBCASE("damage is detected and named") {
    const Chunk chunk = reader.tensors(kModelSection).at("wte.weight").chunks[0];
    const auto said_after = [&](const fs::path& file, std::int64_t byte) {
      flip_bit(file, byte);
      const std::string said = python.run_file(kReader, {path.string()});
      flip_bit(file, byte);
      return said;
    };
    const auto expect = [](const std::string& said, const std::string& text) {
      CAPTURE(said);
      CHECK(holds(said, text));
      CHECK(said.ends_with("exit code 1\n"));
    };
    expect(said_after(path / chunk.file, chunk.byte_begin),
           chunk.file + ": tensor wte.weight, elements 0 to ");
    expect(said_after(path / chunk.file, 20), chunk.file + ": header: ");
    const std::string index = read_text(path / "index.json");
    expect(said_after(path / "index.json", static_cast<std::int64_t>(index.find("1e-05"))),
           "index.json: its checksum is wrong");
    expect(said_after(path / "index.json", 4), "index.json: unknown fields without a checksum");
    fs::resize_file(path / chunk.file, fs::file_size(path / chunk.file) - 1);
    expect(python.run_file(kReader, {path.string()}), chunk.file + ": wrong size");
  }
  SUBCASE("a newer version is refused") {
    CheckpointIndex changed = reader.index();
    std::string text = format_index(changed);
    Json json = Json::parse(text);
    json.erase("checksum");
    json["version"] = 2;
    write_text(path / "index.json", json.dump());
    CHECK(python.run_file(kReader, {path.string()})
              .find("version 2, but this reader supports only version 1") != std::string::npos);
  }
}

TEST_CASE("a reader written from FORMAT.md reads boxes and bf16") {
  const Python python("import numpy");
  if (!python) {
    MESSAGE("skipped: " << python.missing());
    return;
  }
  TempDir dir;
  const fs::path path = dir.path() / "boxed";
  std::vector<BFloat16> stored;
  for (const float value : {1.F, 2.F, 3.F, 4.F, 5.F, 6.F}) stored.emplace_back(value);
  const auto reader = write_tensor(path, DType::BF16, {2, 3},
                                   {reinterpret_cast<const char*>(stored.data()), 12}, true);

  const std::string said = python_bytes(python, path, "model", dir.path() / "bytes");
  CAPTURE(said);
  const std::string bytes = read_text(dir.path() / "bytes");
  std::vector<float> values(6);
  REQUIRE(bytes.size() == 24);
  std::memcpy(values.data(), bytes.data(), 24);
  CHECK(values == std::vector<float>{1, 2, 3, 4, 5, 6});
  CHECK(holds(python.run_file(kReader, {path.string()}), reader.digest()));
}

}  // namespace
}  // namespace tessera::io
