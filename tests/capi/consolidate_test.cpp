#include <doctest/doctest.h>
#include <tessera/c_api.h>

#include <cstring>
#include <string>
#include <vector>

#include "tests/io/support.h"
#include "tests/support/paths.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;

struct Calls {
  std::int64_t stop_at = -1, calls = 0;
  std::string report;
  std::vector<std::string> warnings;
};

int consolidate(const fs::path& source, const fs::path& out,
                const std::vector<tessera_option>& options, Calls& calls) {
  const auto progress = [](void* user, std::int64_t, std::int64_t) {
    auto& self = *static_cast<Calls*>(user);
    return ++self.calls == self.stop_at ? 1 : 0;
  };
  const auto warn = [](void* user, const char* text) {
    static_cast<Calls*>(user)->warnings.emplace_back(text);
  };
  const auto report = [](void* user, const char* text) {
    static_cast<Calls*>(user)->report = text;
  };
  return tessera_consolidate(source.c_str(), out.c_str(), options.data(), options.size(), progress,
                             warn, report, &calls);
}

TEST_CASE("options reach the consolidation") {
  const fs::path source = source_path("tests/io/dcp/fixtures/torchtitan");
  const TempDir dir;
  const fs::path out = dir.path() / "out";
  Calls calls;
  REQUIRE(consolidate(source, out,
                      {{"format", "safetensors"},
                       {"dtype", "bf16"},
                       {"rename", "s/^/a./"},
                       {"rename", "s/^a/b/"},
                       {"max_shard_size", "1GB"}},
                      calls) == TESSERA_OK);
  const auto tensors = tensors_of(out / "model.safetensors");
  CHECK(!tensors.empty());
  for (const auto& [name, bytes] : tensors) CHECK(name.starts_with("b."));
  CHECK(calls.report.find("\"kind\": \"PyTorch DCP\"") != std::string::npos);
  CHECK(calls.report.find("\"files\": [") != std::string::npos);

  CHECK(consolidate(source, out, {{"format", "safetensors"}}, calls) == TESSERA_INVALID_ARGUMENT);
  CHECK(consolidate(source, out, {{"format", "safetensors"}, {"overwrite", "true"}}, calls) ==
        TESSERA_OK);
  CHECK(consolidate(source, dir.path() / "hf", {}, calls) == TESSERA_INVALID_ARGUMENT);
  CHECK(std::strstr(tessera_error_message(), "--config") != nullptr);
  for (const tessera_option bad : {tessera_option{"format", "onnx"},
                                   {"jobs", "0"},
                                   {"dtype", "i4"},
                                   {"overwrite", "yes"},
                                   {"memory", "much"},
                                   {"part", "0/2"},
                                   {"part", "1"},
                                   {"shards", "0"},
                                   {"nothing", ""}}) {
    CAPTURE(bad.name);
    CHECK(consolidate(source, dir.path() / "bad", {bad}, calls) == TESSERA_INVALID_ARGUMENT);
  }
  CHECK(!fs::exists(dir.path() / "bad"));
  CHECK(consolidate(source, dir.path() / "bad", {{"jobs", "1"}, {"jobs", "2"}}, calls) ==
        TESSERA_INVALID_ARGUMENT);
  CHECK(std::strstr(tessera_error_message(), "--jobs is given twice") != nullptr);
}

TEST_CASE("parts of a consolidation") {
  const TempDir dir;
  const fs::path path = save(make_sample_model(), dir.path() / "run", {.world_size = 2});
  const auto part = [&](const char* text, Calls& calls) {
    return consolidate(path, dir.path() / "out",
                       {{"format", "safetensors"}, {"max-shard-size", "64"}, {"part", text}},
                       calls);
  };
  Calls first, last;
  REQUIRE(part("1/2", first) == TESSERA_OK);
  CHECK(first.report.find("\"committed\": false") != std::string::npos);
  REQUIRE(part("2/2", last) == TESSERA_OK);
  CHECK(last.report.find("\"committed\": true") != std::string::npos);
  CHECK(fs::exists(dir.path() / "out"));
}

TEST_CASE("a stopped consolidation continues") {
  const TempDir dir;
  const fs::path path = save(make_sample_model(), dir.path() / "run", {.world_size = 2});
  const fs::path out = dir.path() / "out";
  const std::vector<tessera_option> options{{"format", "safetensors"}, {"max-shard-size", "64"}};
  Calls stopped;
  stopped.stop_at = 3;
  CHECK(consolidate(path, out, options, stopped) == TESSERA_STOPPED);
  CHECK(!fs::exists(out));
  Calls calls;
  CHECK(consolidate(path, out, options, calls) == TESSERA_OK);
  CHECK(calls.report.find("\"reused_bytes\": 0") == std::string::npos);
}

}  // namespace
}  // namespace tessera::test
