#include "io/checkpoint/list.h"

#include <doctest/doctest.h>

#include <ctime>

#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

TEST_CASE("a run's checkpoints, unfinished saves and damaged ones are distinguished") {
  TempDir dir;
  const fs::path checkpoints = dir.path() / "checkpoints";
  const SampleModel model = make_sample_model();
  save(model, checkpoints, {.world_size = 2, .step = 10});
  save(model, checkpoints, {.step = 20, .optimizer = false, .trainer_json = ""});
  fs::remove(save(model, checkpoints, {.step = 30}) / "index.json");
  fs::resize_file(save(model, checkpoints, {.step = 40}) / "rank-00000-of-00001.safetensors", 99);
  fs::rename(save(model, checkpoints, {.step = 50}), checkpoints / "step-00000050.unusable");
  fs::create_directory(checkpoints / "step-00000060.run-a.tmp");
  write_text(checkpoints / "step-00000060.run-a.tmp" / "rank-00000-of-00001.safetensors", "12345");
  fs::create_directory(checkpoints / "step-00000005.pruned.tmp");
  fs::create_directory(checkpoints / "other");
  fs::create_directory(checkpoints / "step-7");
  fs::create_directory(checkpoints / "step-00000010.bak");
  write_text(checkpoints / "step-00000070", "a file");

  const auto entries = list_checkpoints(dir.path());
  std::vector<std::string> found;
  for (const auto& entry : entries) {
    found.push_back(fmt::format("{} {}", entry.step, state_name(entry.state)));
    CHECK(entry.time.has_value());
    CHECK(std::abs(*entry.time - std::time(nullptr)) < 600);
    CHECK(entry.problem.empty() == (entry.state == CheckpointState::Committed));
    CHECK(entry.index.has_value() == (entry.state == CheckpointState::Committed));
  }
  CHECK(found == std::vector<std::string>{"5 removing", "10 committed", "20 committed", "30 broken",
                                          "40 broken", "50 set aside", "60 attempt"});
  CHECK(entries[1].index->world_size == 2);
  CHECK(entries[1].sections == std::vector<std::string>{"model", "optimizer", "trainer"});
  CHECK(entries[2].sections == std::vector<std::string>{"model"});
  std::int64_t bytes = 0;
  for (const auto& item : fs::directory_iterator(entries[1].path)) {
    bytes += static_cast<std::int64_t>(item.file_size());
  }
  CHECK(entries[1].bytes == bytes);
  CHECK(entries[3].problem == "it has no index.json");
  CHECK(holds(entries[4].problem, "has 99 bytes, but the index says"));
  CHECK(holds(entries[6].problem, "run run-a is saving it, or failed to"));
  CHECK(entries[6].bytes == 5);
  CHECK(list_checkpoints(checkpoints).size() == entries.size());
}

TEST_CASE("a checkpoint of a newer format is not listed as broken") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  for (const std::int64_t step : {1, 2, 3}) save(model, dir.path(), {.step = step});
  set_format_version(dir.path() / "step-00000001", 2);
  const auto entries = list_checkpoints(dir.path(), [](const CheckpointReader& reader) {
    if (reader.index().step == 2) throw NewerFormat("trainer.json", 3, 1);
    if (reader.index().step == 3) throw CorruptCheckpoint("trainer.json: no state");
  });
  REQUIRE(entries.size() == 3);
  CHECK(state_name(entries[0].state) == "newer format");
  CHECK(holds(entries[0].problem, "has format version 2; this build reads up to 1"));
  CHECK(entries[1].state == CheckpointState::Newer);
  CHECK(holds(entries[1].problem, "trainer.json has format version 3"));
  CHECK(entries[2].state == CheckpointState::Broken);
  CHECK(entries[2].problem == "trainer.json: no state");
}

TEST_CASE("times are read as UTC") {
  CHECK(parse_time("1970-01-01T00:00:00Z") == 0);
  CHECK(parse_time("2026-01-31T12:00:00Z") == 1769860800);
  CHECK_FALSE(parse_time("2026-01-31"));
  CHECK_FALSE(parse_time("2026-01-31T12:00:00Z "));
}

TEST_CASE("a missing directory") {
  CHECK_THROWS_HOLDING(IoError, "No such file", list_checkpoints("/nonexistent/run"));
}

}  // namespace
}  // namespace tessera::io
