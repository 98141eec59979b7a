#include "io/checkpoint/retention.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cmath>
#include <exception>
#include <map>
#include <thread>

#include "core/base/error.h"
#include "io/checkpoint/find.h"
#include "io/checkpoint/verify.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/on_threads.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

// Prunes on all ranks of a save of `step`. @return paths that rank 0 removed; throws rank 0's
// exception, which all ranks must throw
std::vector<fs::path> prune(const fs::path& dir, const Retention& retention, std::int64_t step,
                            int world_size = 1) {
  ThreadCoordinator::Board board(world_size);
  std::vector<std::vector<fs::path>> removed(static_cast<std::size_t>(world_size));
  std::vector<std::string> errors(static_cast<std::size_t>(world_size));
  std::exception_ptr error;
  on_threads(world_size, [&](int rank) {
    ThreadCoordinator coordinator(board, rank);
    SaveRequest request;
    request.checkpoints_dir = dir;
    request.step = step;
    request.rank = rank;
    request.world_size = world_size;
    const auto at = static_cast<std::size_t>(rank);
    try {
      removed[at] = prune_checkpoints(request, retention, coordinator);
    } catch (const Error& failure) {
      errors[at] = failure.what();
      if (rank == 0) error = std::current_exception();
    }
  });
  for (std::size_t rank = 1; rank < errors.size(); ++rank) {
    CHECK(errors[rank] == errors[0]);
    CHECK(removed[rank].empty());
  }
  if (error) std::rethrow_exception(error);
  return removed[0];
}

TEST_CASE("pruning never removes the saved checkpoint or newer ones") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  for (const std::int64_t step : {10, 20, 30, 40}) save(model, dir.path(), {.step = step});
  save(model, dir.path(), {.step = 15});  // the run resumed from step 10
  CHECK(prune(dir.path(), {.keep = 1}, 15) == std::vector<fs::path>{dir.path() / "step-00000010"});
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{15, 20, 30, 40});
  CHECK(prune(dir.path(), {.keep = 2}, 5).empty());
}

TEST_CASE("pruning keeps the newest and removes only committed checkpoints") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  for (const std::int64_t step : {1, 2, 3, 4}) save(model, dir.path(), {.step = step});
  fs::create_directories(dir.path() / "step-00000000.other.tmp");
  CHECK(prune(dir.path(), {}, 4).empty());
  CHECK(prune(dir.path(), {.keep = 4}, 4).empty());
  const auto removed = prune(dir.path(), {.keep = 2}, 4);
  CHECK(removed ==
        std::vector<fs::path>{dir.path() / "step-00000001", dir.path() / "step-00000002"});
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{3, 4});
  CHECK(fs::exists(dir.path() / "step-00000000.other.tmp"));
  // Remains of an interrupted prune are not loaded, and the next save removes them.
  fs::rename(dir.path() / "step-00000003", dir.path() / "step-00000003.pruned.tmp");
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{4});
  save(model, dir.path(), {.step = 5});
  CHECK_FALSE(fs::exists(dir.path() / "step-00000003.pruned.tmp"));
  CHECK_FALSE(fs::exists(dir.path() / "step-00000000.other.tmp"));
}

TEST_CASE("a checkpoint without a known loss is not removed for that") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  for (const std::int64_t step : {10, 20, 30, 40}) save(model, dir.path(), {.step = step});
  Retention retention{.keep = 1, .keep_best = 1};
  retention.loss = [&](const fs::path& path) -> std::optional<double> {
    if (path.filename() == "step-00000010") throw IoError("trainer.json: Input/output error");
    return path.filename() == "step-00000020" ? 1.0 : 2.0;
  };
  prune(dir.path(), retention, 40);
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{10, 20, 40});
}

TEST_CASE("every n-th and the best checkpoints are kept besides the newest") {
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
  SUBCASE("the best, and of equal ones the later") {
    retention.keep_best = 1;
    expected = {40, 80};
  }
  SUBCASE("both, and some of the newest") {
    retention.keep = 2;
    retention.keep_every = 60;
    retention.keep_best = 2;
    expected = {20, 40, 60, 70, 80};
  }
  SUBCASE("more best ones than exist") {
    retention.keep_best = 100;
    expected = {10, 20, 30, 40, 50, 60, 80};  // the loss of 70 is NaN
  }
  SUBCASE("keep=0 keeps all") {
    retention = {.keep = 0, .keep_every = 30};
    expected = {10, 20, 30, 40, 50, 60, 70, 80};
  }
  for (std::int64_t step = 10; step <= 80; step += 10) {
    save(model, dir.path(), {.step = step});
    prune(dir.path(), retention, step);
  }
  CHECK(steps_in(dir.path()) == expected);
}

TEST_CASE("checkpoints of a newer format are kept, without counting for retention") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  for (const std::int64_t step : {10, 20, 30, 40, 50, 60}) save(model, dir.path(), {.step = step});
  Retention retention{.keep = 2};
  retention.loss = [](const fs::path& path) -> std::optional<double> {
    if (path.filename() == "step-00000020") throw NewerFormat("trainer.json", 2, 1);
    return std::nullopt;
  };
  for (const std::int64_t step : {10, 50})
    set_format_version(dir.path() / checkpoint_name(step), 2);
  prune(dir.path(), retention, 60);
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{10, 20, 40, 50, 60});
}

TEST_CASE("unreadable checkpoints are kept: they may be of a newer format") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  for (const std::int64_t step : {10, 20, 30, 40}) save(model, dir.path(), {.step = step});
  const fs::path index = dir.path() / checkpoint_name(10) / "index.json";
  fs::remove(index);
  REQUIRE(::mknod(index.c_str(), S_IFSOCK | 0600, 0) == 0);
  prune(dir.path(), {.keep = 2}, 40);
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{10, 30, 40});
}

TEST_CASE("nothing is removed if the saved checkpoint is damaged") {
  const SampleModel model = make_sample_model();
  for (const int ranks : {1, 2, 3}) {  // ranks that prune; two had saved
    CAPTURE(ranks);
    TempDir dir;
    for (const std::int64_t step : {1, 2, 3})
      save(model, dir.path(), {.world_size = 2, .step = step});
    const fs::path saved = dir.path() / "step-00000003";
    const fs::path shard = saved / "rank-00001-of-00002.safetensors";
    std::vector<std::string> parts{"is not verified: rank ", "; no other checkpoint was removed"};
    SUBCASE("a shard is truncated") {
      fs::resize_file(shard, fs::file_size(shard) - 1);
      parts.emplace_back("rank-00001-of-00002.safetensors");
    }
    SUBCASE("a shard is missing") {
      fs::remove(saved / "rank-00000-of-00002.safetensors");
      parts.emplace_back("rank-00000-of-00002.safetensors");
    }
    SUBCASE("the index is damaged") {
      flip_bit(saved / "index.json", 200);
      parts.emplace_back("index.json");
    }
    SUBCASE("trainer.json is damaged") {
      flip_bit(saved / "trainer.json", 3);
      parts.emplace_back("trainer.json");
    }
    SUBCASE("a shard's header is damaged") {
      flip_bit(shard, 40);
      parts.emplace_back("rank-00001-of-00002.safetensors");
    }
    SUBCASE("values are damaged") {
      const TensorRecord last =
          CheckpointReader::open(saved).tensors(Section{"exp_avg_sq"}).at("h.1.mlp.c_proj.weight");
      const Chunk& chunk = last.chunks.back();
      flip_bit(saved / chunk.file, chunk.byte_end - 1);
      parts.push_back(fmt::format(
          "{} differs from what was saved: {}: tensor optimizer/exp_avg_sq/h.1.mlp.c_proj.weight, "
          "elements {} to {} (bytes {} to {}): the checksum is wrong",
          saved.string(), chunk.file, chunk.begin, chunk.end, chunk.byte_begin, chunk.byte_end));
    }
    for (const std::string& part : parts) {
      CHECK_THROWS_HOLDING(IoError, part.c_str(), prune(dir.path(), {.keep = 1}, 3, ranks));
    }
    CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{1, 2, 3});
    // Nothing is read if nothing is to be removed.
    CHECK(prune(dir.path(), {.keep = 3}, 3, ranks).empty());
    fs::remove_all(saved);
    CHECK_THROWS_HOLDING(IoError, "has no index.json", prune(dir.path(), {.keep = 1}, 3, ranks));
    CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{1, 2});
  }
}

TEST_CASE("a checkpoint known to be damaged does not displace an intact one") {
  const SampleModel model = make_sample_model();
  TempDir dir;
  const Retention retention{.keep = 2, .damaged = std::make_shared<std::set<std::int64_t>>()};
  for (const std::int64_t step : {1, 2, 3, 4}) {
    save(model, dir.path(), {.step = step});
    if (step < 3) continue;
    if (step == 3) {
      const fs::path saved = dir.path() / "step-00000003";
      const Chunk chunk =
          CheckpointReader::open(saved).tensors(kModelSection).at("wte.weight").chunks.back();
      flip_bit(saved / chunk.file, chunk.byte_end - 1);
      CHECK_THROWS_HOLDING(IoError, "the checksum is wrong", prune(dir.path(), retention, step));
      CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{1, 2, 3});
    } else {
      prune(dir.path(), retention, step);
    }
  }
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{2, 4});
}

TEST_CASE("a damaged checkpoint does not count as best or permanent either") {
  const SampleModel model = make_sample_model();
  TempDir dir;
  for (const std::int64_t step : {10, 20, 30}) save(model, dir.path(), {.step = step});
  Retention retention{.keep = 1, .keep_every = 20, .keep_best = 1};
  retention.loss = [](const fs::path& path) {
    return std::optional(path.filename() == "step-00000020" ? 1.0 : 2.0);
  };
  retention.damaged = std::make_shared<std::set<std::int64_t>>(std::set<std::int64_t>{20});
  prune(dir.path(), retention, 30);
  // The best of two equal losses is the later one, which is kept anyway.
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{30});
  save(model, dir.path(), {.step = 40});
  retention.loss = [](const fs::path& path) {
    return std::optional(path.filename() == "step-00000030" ? 2.0 : 3.0);
  };
  retention.keep_every = 0;
  save(model, dir.path(), {.step = 50});
  prune(dir.path(), retention, 50);
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{30, 50});
}

class AnswersOfRanks final : public SaveCoordinator {
 public:
  explicit AnswersOfRanks(std::vector<std::string> answers) : answers_(std::move(answers)) {}
  std::vector<std::string> exchange(const std::string& phase, std::string_view mine) override {
    if (phase.ends_with("verified")) return answers_;
    return std::vector<std::string>(answers_.size(), std::string(mine));
  }

 private:
  std::vector<std::string> answers_;
};

TEST_CASE("damage found by one rank counts, even if other ranks could not read their parts") {
  const SampleModel model = make_sample_model();
  TempDir dir;
  for (const std::int64_t step : {1, 2}) save(model, dir.path(), {.step = step});
  const auto prune_with = [&](std::vector<std::string> answers, bool& is_damaged) {
    const Retention retention{.keep = 1, .damaged = std::make_shared<std::set<std::int64_t>>()};
    SaveRequest request;
    request.checkpoints_dir = dir.path();
    request.step = 2;
    request.world_size = static_cast<int>(answers.size());
    AnswersOfRanks coordinator(std::move(answers));
    std::string why;
    try {
      prune_checkpoints(request, retention, coordinator);
    } catch (const IoError& error) {
      why = error.what();
    }
    is_damaged = retention.damaged->contains(2);
    return why;
  };
  const std::string intact = "ok\n", unread = "error\nthe disk is away",
                    damaged = "damaged\na bit is wrong";
  bool is_damaged = false;
  CHECK(holds(prune_with({unread, intact, damaged}, is_damaged), "rank 2: a bit is wrong"));
  CHECK(is_damaged);
  CHECK(holds(prune_with({intact, unread, intact}, is_damaged), "rank 1: the disk is away"));
  CHECK_FALSE(is_damaged);
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{1, 2});
  CHECK(prune_with({intact, intact, intact}, is_damaged) == "");
  CHECK(steps_in(dir.path()) == std::vector<std::int64_t>{2});
}

TEST_CASE("unreadable does not mean damaged") {
  const SampleModel model = make_sample_model();
  TempDir dir;
  const fs::path path = save(model, dir.path(), {.step = 1});
  const auto reader = CheckpointReader::open(path);
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit none{0, before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  const auto problems = verify_checkpoint(reader).problems;
  ::setrlimit(RLIMIT_NOFILE, &before);
  CHECK(problems.size() > model.tensors.size());
  for (const VerifyProblem& problem : problems) {
    CAPTURE(problem.str());
    CHECK(problem.unread);
    CHECK(holds(problem.what, "Too many open files"));
  }

  fs::resize_file(path / "trainer.json", 1);
  fs::remove(path / "rank-00000-of-00001.safetensors");
  for (const VerifyProblem& problem : verify_checkpoint(reader).problems) {
    CAPTURE(problem.str());
    CHECK_FALSE(problem.unread);
  }
}

TEST_CASE("under time pressure quick removals still happen") {
  const SampleModel model = make_sample_model();
  TempDir dir;
  for (const std::int64_t step : {1, 2}) save(model, dir.path(), {.step = step});
  SoloCoordinator coordinator;
  auto request = make_request(model, dir.path(), 0, {.step = 2});
  request.hurry = std::make_shared<std::atomic<bool>>(true);
  // Verification takes less than a second.
  CHECK(prune_checkpoints(request, {.keep = 1}, coordinator).size() == 1);
}

TEST_CASE("verification reports progress") {
  const SampleModel model = make_sample_model();
  TempDir dir;
  for (const std::int64_t step : {1, 2}) save(model, dir.path(), {.step = step});
  SoloCoordinator coordinator;
  auto request = make_request(model, dir.path(), 0, {.step = 2});
  request.pulse = std::make_shared<std::atomic<std::uint64_t>>(0);
  CHECK(prune_checkpoints(request, {.keep = 1}, coordinator).size() == 1);
  // Once per phase, and once per chunk.
  CHECK(request.pulse->load() > 2 + 3 * model.tensors.size() - 1);
}

}  // namespace
}  // namespace tessera::io
