#include "io/checkpoint/find.h"

#include <doctest/doctest.h>

#include "core/base/error.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

TEST_CASE("committed checkpoints are found in a run and in its checkpoints directory") {
  TempDir run;
  const fs::path dir = run.path() / "checkpoints";
  const SampleModel model = make_sample_model();
  save(model, dir, {.step = 900});
  save(model, dir, {.step = 1000});
  save(model, dir, {.step = 123456789});
  fs::create_directories(dir / "step-00000005.run-a.tmp");
  write_text(dir / "step-00000005.run-a.tmp" / "index.json", "{}");
  fs::create_directories(dir / "step-00000006");
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
  CHECK_THROWS_HOLDING(InvalidArgument, "is not a checkpoint and contains none",
                       open_checkpoint(empty.path()));
  CHECK_THROWS_HOLDING(IoError, "cannot list", find_checkpoints(empty.path() / "absent"));
}

TEST_CASE("the newest valid checkpoint is chosen, with reasons for the skipped ones") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  for (const std::int64_t step : {1, 2, 3, 4}) save(model, dir.path(), {.step = step});
  const char* const shard = "rank-00000-of-00001.safetensors";
  write_text(dir.path() / "step-00000004" / "index.json", "{");
  fs::resize_file(dir.path() / "step-00000003" / shard, 100);
  flip_bit(dir.path() / "step-00000002" / shard, -1);

  const NewestCheckpoint quick = newest_valid(dir.path());
  REQUIRE(quick.reader);
  CHECK(quick.reader->index().step == 2);
  REQUIRE(quick.skipped.size() == 2);
  CHECK(holds(quick.skipped[0], "step-00000004 is skipped"));
  CHECK(holds(quick.skipped[1], "has 100 bytes"));

  const NewestCheckpoint thorough = newest_valid(dir.path(), {.verify_data = true});
  REQUIRE(thorough.reader);
  CHECK(thorough.reader->index().step == 1);
  CHECK(thorough.skipped.size() == 3);
  CHECK(holds(thorough.skipped[2], "the checksum is wrong"));

  CHECK_THROWS_HOLDING(CorruptCheckpoint, "the previous checkpoint is " + dir.file("step-00000003"),
                       open_checkpoint(dir.path()));
  TempDir empty;
  CHECK_FALSE(newest_valid(empty.path()).reader);
}

TEST_CASE("a checkpoint of a newer format is not skipped") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  for (const std::int64_t step : {1, 2, 3}) save(model, dir.path(), {.step = step});
  set_format_version(dir.path() / "step-00000002", 2);
  CHECK(newest_valid(dir.path()).reader->index().step == 3);
  write_text(dir.path() / "step-00000003" / "index.json", "{");
  CHECK_THROWS_HOLDING(NewerFormat,
                       "step-00000002/index.json has format version 2; this build reads up to 1",
                       newest_valid(dir.path()));
  CHECK_THROWS_HOLDING(NewerFormat, "of the state has format version 9",
                       newest_valid(dir.path(), {.passed_over = {dir.path() / "step-00000002"},
                                                 .check = [](const CheckpointReader&) {
                                                   throw NewerFormat("of the state", 9, 1);
                                                 }}));
}

}  // namespace
}  // namespace tessera::io
