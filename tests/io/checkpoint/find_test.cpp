#include "io/checkpoint/find.h"

#include <doctest/doctest.h>

#include "core/base/error.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

std::vector<std::int64_t> steps_in(const fs::path& dir) {
  std::vector<std::int64_t> steps;
  for (const CheckpointEntry& entry : find_checkpoints(dir)) steps.push_back(entry.step);
  return steps;
}

TEST_CASE("committed checkpoints are found in a run and in its directory of checkpoints") {
  TempDir run;
  const fs::path dir = run.path() / "checkpoints";
  const SampleModel model = make_sample_model();
  save(model, dir, {.step = 900});
  save(model, dir, {.step = 1000});
  save(model, dir, {.step = 123456789});
  fs::create_directories(dir / "step-00000005.run-a.tmp");
  write_text(dir / "step-00000005.run-a.tmp" / "index.json", "{}");
  fs::create_directories(dir / "step-00000006");  // no index: no checkpoint
  fs::create_directories(dir / "step-x0000006");
  const std::vector<std::int64_t> expected{900, 1000, 123456789};
  CHECK(steps_in(run.path()) == expected);
  CHECK(steps_in(dir) == expected);
  CHECK(open_checkpoint(run.path()).index().step == 123456789);
  CHECK(open_checkpoint(run.path(), 900).index().step == 900);
  CHECK(open_checkpoint(dir / "step-00001000").index().step == 1000);
  CHECK_THROWS_HOLDING(InvalidArgument, "no checkpoint of step 7; it has 900, 1000",
                       open_checkpoint(run.path(), 7));
  CHECK_THROWS_HOLDING(InvalidArgument, "is the checkpoint of step 1000, not of 7",
                       open_checkpoint(dir / "step-00001000", 7));
  TempDir empty;
  CHECK_THROWS_HOLDING(InvalidArgument, "is no checkpoint and holds none",
                       open_checkpoint(empty.path()));
  CHECK_THROWS_HOLDING(IoError, "cannot list", find_checkpoints(empty.path() / "absent"));
}

TEST_CASE("the newest valid checkpoint is taken, and why others are not is told") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  for (const std::int64_t step : {1, 2, 3, 4}) save(model, dir.path(), {.step = step});
  const char* const shard = "rank-00000-of-00001.safetensors";
  write_text(dir.path() / "step-00000004" / "index.json", "{");
  fs::resize_file(dir.path() / "step-00000003" / shard, 100);
  flip_bit(dir.path() / "step-00000002" / shard,
           static_cast<std::int64_t>(fs::file_size(dir.path() / "step-00000002" / shard)) - 1);

  const NewestCheckpoint quick = newest_valid(dir.path());
  REQUIRE(quick.reader);
  CHECK(quick.reader->index().step == 2);
  REQUIRE(quick.skipped.size() == 2);
  CHECK(quick.skipped[0].find("step-00000004 is skipped") != std::string::npos);
  CHECK(quick.skipped[1].find("has 100 bytes") != std::string::npos);

  const NewestCheckpoint thorough = newest_valid(dir.path(), true);
  REQUIRE(thorough.reader);
  CHECK(thorough.reader->index().step == 1);
  CHECK(thorough.skipped.size() == 3);
  CHECK(thorough.skipped[2].find("the checksum is wrong") != std::string::npos);

  CHECK_THROWS_HOLDING(CorruptCheckpoint,
                       "the checkpoint before it is " + dir.file("step-00000003"),
                       open_checkpoint(dir.path()));
  TempDir empty;
  CHECK_FALSE(newest_valid(empty.path()).reader);
}

TEST_CASE("pruning never removes what was just saved, nor what is newer") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  for (const std::int64_t step : {10, 20, 30, 40}) save(model, dir.path(), {.step = step});
  save(model, dir.path(), {.step = 15});  // the run went back to step 10
  CHECK(prune_checkpoints(dir.path(), 1, 15) ==
        std::vector<fs::path>{dir.path() / "step-00000010"});
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{15, 20, 30, 40});
  CHECK(prune_checkpoints(dir.path(), 2, 5).empty());
}

TEST_CASE("pruning keeps the newest and removes only committed checkpoints") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  for (const std::int64_t step : {1, 2, 3, 4}) save(model, dir.path(), {.step = step});
  fs::create_directories(dir.path() / "step-00000000.other.tmp");
  CHECK(prune_checkpoints(dir.path(), 0, 4).empty());
  CHECK(prune_checkpoints(dir.path(), 4, 4).empty());
  const auto removed = prune_checkpoints(dir.path(), 2, 4);
  CHECK(removed ==
        std::vector<fs::path>{dir.path() / "step-00000001", dir.path() / "step-00000002"});
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{3, 4});
  CHECK(fs::exists(dir.path() / "step-00000000.other.tmp"));
  // What an interrupted prune leaves is not loaded, and the next save removes it.
  fs::rename(dir.path() / "step-00000003", dir.path() / "step-00000003.pruned.tmp");
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{4});
  save(model, dir.path(), {.step = 5});
  CHECK_FALSE(fs::exists(dir.path() / "step-00000003.pruned.tmp"));
  CHECK_FALSE(fs::exists(dir.path() / "step-00000000.other.tmp"));  // nor of an attempt before it
}

}  // namespace
}  // namespace tessera::io
