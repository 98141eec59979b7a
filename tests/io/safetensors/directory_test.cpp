#include "io/safetensors/directory.h"

#include <doctest/doctest.h>
#include <sys/resource.h>

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/safetensors/writer.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

/// One file per tensor, "0", "1", ..., of one byte each.
void write_files(const fs::path& dir, int n) {
  Json map;
  for (int i = 0; i < n; ++i) {
    const std::string name = std::to_string(i);
    const SafetensorsPlan plan = plan_safetensors({{name, DType::U8, {1}}});
    write_text(dir / (name + ".safetensors"), plan.preamble + static_cast<char>(i));
    map[name] = name + ".safetensors";
  }
  write_text(dir / "model.safetensors.index.json", Json{{"weight_map", map}}.dump());
}

TEST_CASE("more files than may be open at once") {
  TempDir dir;
  write_files(dir.path(), 150);
  CHECK(in_child([&] {
          const rlimit limit{100, 100};
          ::setrlimit(RLIMIT_NOFILE, &limit);
          const auto source = open_safetensors_directory(dir.path());
          int wrong = source->tensors().size() == 150 ? 0 : 1;
          for (int i = 0; i < 150; ++i) {
            std::uint8_t value = 0;
            source->read(std::to_string(i), 0, 1, &value, DType::U8);
            wrong += value == i ? 0 : 1;
          }
          return wrong;
        }) == 0);
}

TEST_CASE("a replaced file is not read with the old file's header") {
  TempDir dir;
  write_files(dir.path(), 1);
  const auto source = open_safetensors_directory(dir.path());
  CHECK(source->open_file("0.safetensors").size() > 0);
  fs::copy(dir.path() / "0.safetensors", dir.path() / "copy");
  fs::rename(dir.path() / "copy", dir.path() / "0.safetensors");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "0.safetensors was replaced while it was read",
                       source->open_file("0.safetensors"));
}

TEST_CASE("a dtype that cannot be read is reported with its file") {
  TempDir dir;
  const std::string header = R"({"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}})";
  const std::uint64_t length = header.size();
  const std::string start(reinterpret_cast<const char*>(&length), sizeof(length));
  const fs::path file = dir.path() / "model.safetensors";
  write_text(file, start + header + "x");
  CHECK_THROWS_HOLDING(Unsupported, file.string() + ": tensor w has dtype F4",
                       open_safetensors_directory(dir.path())->record("w"));
}

TEST_CASE("tensors of a directory") {
  TempDir dir;
  write_files(dir.path(), 2);
  const auto source = open_safetensors_directory(dir.path());
  std::uint8_t value = 0;
  CHECK_THROWS_HOLDING(InvalidArgument, "holds no tensor 2",
                       source->read("2", 0, 1, &value, DType::U8));
  CHECK_THROWS_HOLDING(InvalidArgument, "outside tensor 1",
                       source->read("1", 0, 2, &value, DType::U8));
  CHECK(source->record("1")->chunks.at(0).file == "1.safetensors");
}

}  // namespace
}  // namespace tessera::io
