#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "io/base/json.h"
#include "tests/io/python.h"
#include "tests/io/support.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"
#include "tests/support/text.h"

namespace tessera::test {
namespace {

TEST_CASE("saving and loading are benchmarked against plain writers and readers") {
  const Python python("import json");
  if (!python) {
    MESSAGE("skipped: " << python.missing());
    return;
  }
  const TempDir dir;
  const std::string json = dir.path() / "out.json";
  std::vector<std::string> arguments = {build_path(), "--dir", dir.path(), "--json", json};
  for (const char* word : {"--size=5MB", "--width=8", "--ranks=2", "--rounds=1", "--train=tiny",
                           "--runs=1", "--every=2", "--saves=2", "--load-ranks", "2", "3"}) {
    arguments.emplace_back(word);
  }
  const std::string said = python.run_file(source_path("tools/bench/checkpoint_io.py"), arguments);
  CAPTURE(said);
  REQUIRE(said.ends_with("exit code 0\n"));
  const io::Json result = io::Json::parse(read_text(json));
  const io::Json& rows = result.at("rows");
  const io::Json bytes = rows.at("save, 2 ranks")[0].at("bytes");
  CHECK(bytes > 4'000'000);
  for (const char* name : {"dd, 2 writers", "save, 2 ranks", "load, 2 ranks", "load, 3 ranks"}) {
    CAPTURE(name);
    CHECK(holds(said, std::string("| ") + name));
    CHECK(rows.at(name)[0].at("bytes") == bytes);
    CHECK(rows.at(name)[0].at("seconds") > 0);
  }
  CHECK(rows.at("load, 2 ranks")[0].at("read_bytes") == bytes);
  CHECK(rows.at("load, 3 ranks")[0].at("read_bytes") > bytes);
  CHECK(result.at("train_saves").size() == 2);
  CHECK(holds(said, "of the save (medians)"));
}

}  // namespace
}  // namespace tessera::test
