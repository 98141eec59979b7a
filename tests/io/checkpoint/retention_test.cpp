// Which checkpoints stay when a later one is saved.

#include "io/checkpoint/retention.h"

#include <doctest/doctest.h>

#include <map>

#include "core/base/error.h"
#include "io/checkpoint/find.h"
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

TEST_CASE("pruning never removes what was just saved, nor what is newer") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  for (const std::int64_t step : {10, 20, 30, 40}) save(model, dir.path(), {.step = step});
  save(model, dir.path(), {.step = 15});  // the run went back to step 10
  CHECK(prune_checkpoints(dir.path(), {.keep = 1}, 15) ==
        std::vector<fs::path>{dir.path() / "step-00000010"});
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{15, 20, 30, 40});
  CHECK(prune_checkpoints(dir.path(), {.keep = 2}, 5).empty());
}

TEST_CASE("pruning keeps the newest and removes only committed checkpoints") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  for (const std::int64_t step : {1, 2, 3, 4}) save(model, dir.path(), {.step = step});
  fs::create_directories(dir.path() / "step-00000000.other.tmp");
  CHECK(prune_checkpoints(dir.path(), {}, 4).empty());
  CHECK(prune_checkpoints(dir.path(), {.keep = 4}, 4).empty());
  const auto removed = prune_checkpoints(dir.path(), {.keep = 2}, 4);
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

TEST_CASE("a checkpoint whose loss cannot be told is not removed for that") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  for (const std::int64_t step : {10, 20, 30, 40}) save(model, dir.path(), {.step = step});
  Retention retention{.keep = 1, .keep_best = 1};
  retention.loss = [&](const fs::path& path) -> std::optional<double> {
    if (path.filename() == "step-00000010") throw IoError("trainer.json: Input/output error");
    return path.filename() == "step-00000020" ? 1.0 : 2.0;
  };
  prune_checkpoints(dir.path(), retention, 40);
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{10, 20, 40});
}

TEST_CASE("every n-th step and the best stay beside the newest") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  std::map<std::int64_t, double> losses{{10, 3.0}, {20, 1.0}, {30, 2.0}, {40, 1.0},
                                        {50, 4.0}, {60, 5.0}, {70, NAN}};
  Retention retention{.keep = 1};
  retention.loss = [&](const fs::path& path) -> std::optional<double> {
    const auto step = open_checkpoint(path).index().step;
    return losses.contains(step) ? std::optional(losses.at(step)) : std::nullopt;
  };
  std::vector<std::int64_t> expected;
  SUBCASE("every n-th") {
    retention.keep_every = 30;
    expected = {30, 60, 80};
  }
  SUBCASE("the best, of equal ones the later") {
    retention.keep_best = 1;
    expected = {40, 80};
  }
  SUBCASE("both, and some of the newest") {
    retention.keep = 2;
    retention.keep_every = 60;
    retention.keep_best = 2;
    expected = {20, 40, 60, 70, 80};
  }
  SUBCASE("more of the best than there are") {
    retention.keep_best = 100;
    expected = {10, 20, 30, 40, 50, 60, 80};  // the loss of 70 is no number
  }
  SUBCASE("all, whatever the others say") {
    retention = {.keep = 0, .keep_every = 30};
    expected = {10, 20, 30, 40, 50, 60, 70, 80};
  }
  // After every save, as a run does it.
  for (std::int64_t step = 10; step <= 80; step += 10) {
    save(model, dir.path(), {.step = step});
    prune_checkpoints(dir.path(), retention, step);
  }
  CHECK(steps_in(dir.path()) == expected);
}

TEST_CASE("nothing is removed if what was saved is not as it should be") {
  const SampleModel model = make_sample_model();
  TempDir dir;
  for (const std::int64_t step : {1, 2, 3})
    save(model, dir.path(), {.world_size = 2, .step = step});
  const fs::path saved = dir.path() / "step-00000003";
  std::string what;
  SUBCASE("a shard is cut") {
    const fs::path shard = saved / "rank-00001-of-00002.safetensors";
    fs::resize_file(shard, fs::file_size(shard) - 1);
    what = "rank-00001-of-00002.safetensors";
  }
  SUBCASE("a shard is missing") {
    fs::remove(saved / "rank-00000-of-00002.safetensors");
    what = "rank-00000-of-00002.safetensors";
  }
  SUBCASE("the index is damaged") {
    flip_bit(saved / "index.json", 200);
    what = "index.json";
  }
  SUBCASE("trainer.json is damaged") {
    flip_bit(saved / "trainer.json", 3);
    what = "trainer.json";
  }
  CHECK_THROWS_HOLDING(CorruptCheckpoint, what.c_str(),
                       prune_checkpoints(dir.path(), {.keep = 1}, 3));
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{1, 2, 3});
  fs::remove_all(saved);
  CHECK_THROWS_HOLDING(IoError, "is not there", prune_checkpoints(dir.path(), {.keep = 1}, 3));
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{1, 2});
}

}  // namespace
}  // namespace tessera::io
