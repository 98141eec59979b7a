#include "tools/tessera/report/saves.h"

#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

#include "core/base/error.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

using namespace tessera;
using namespace tessera::tools;
using nlohmann::json;
using tessera::test::TempDir;

namespace {

std::vector<json> lines(const TempDir& dir) {
  std::istringstream text(dir.read("saves.jsonl"));
  std::vector<json> out;
  for (std::string line; std::getline(text, line);) out.push_back(json::parse(line));
  return out;
}

std::vector<int> steps(const TempDir& dir) {
  std::vector<int> out;
  for (const json& line : lines(dir)) out.push_back(line.at("step"));
  return out;
}

}  // namespace

TEST_CASE("each save is one line with the documented keys, visible at once") {
  const TempDir dir;
  SavesWriter writer(dir.file("saves.jsonl"), 0);
  writer.write({.step = 3, .bytes = 3'000'000'000, .seconds = 2, .stall_ms = 7.5});
  REQUIRE(lines(dir).size() == 1);
  CHECK(lines(dir)[0] == json{{"step", 3},
                              {"bytes", 3'000'000'000},
                              {"seconds", 2.0},
                              {"gb_per_s", 1.5},
                              {"stall_ms", 7.5}});
}

TEST_CASE("a resumed run keeps the saves up to where it goes on, and makes the others again") {
  const TempDir dir;
  {
    SavesWriter writer(dir.file("saves.jsonl"), 0);
    for (const int step : {3, 6, 9}) writer.write({.step = step, .bytes = 1, .seconds = 1});
  }
  SavesWriter writer(dir.file("saves.jsonl"), 6);
  CHECK(steps(dir) == std::vector{3, 6});
  writer.write({.step = 9, .bytes = 1, .seconds = 1});
  CHECK(steps(dir) == std::vector{3, 6, 9});
  const SavesWriter anew(dir.file("saves.jsonl"), 0);
  CHECK(steps(dir).empty());
}

TEST_CASE("a file of saves that cannot be opened is an I/O error with its name") {
  const TempDir dir;
  CHECK_THROWS_HOLDING(IoError, "absent/saves.jsonl",
                       SavesWriter(dir.file("absent/saves.jsonl"), 0));
}
