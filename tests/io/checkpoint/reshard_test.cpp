#include "io/checkpoint/reshard.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "io/base/json.h"
#include "io/checkpoint/diff.h"
#include "io/checkpoint/find.h"
#include "io/checkpoint/verify.h"
#include "io/hf/family.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

TEST_CASE("a resharded checkpoint equals one saved at that world size") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  for (const int from : {1, 3, 4}) {
    const auto source = CheckpointReader::open(
        save(model, dir.path() / ("from" + std::to_string(from)),
             {.world_size = from, .chunk_bytes = from == 1 ? 0 : std::int64_t{32} << from}));
    for (const int to : {1, 2, 4, 9}) {
      CAPTURE(from);
      CAPTURE(to);
      const auto saved =
          CheckpointReader::open(save(model, dir.path() / ("saved" + std::to_string(to)),
                                      {.world_size = to, .chunk_bytes = 128}));
      CHECK(saved.tensors(kModelSection).at("wte.weight").chunks.size() >= 5);
      const fs::path out = dir.path() / fmt::format("{}to{}", from, to);
      const ReshardReport report =
          reshard_checkpoint(source, out,
                             {.world_size = to,
                              .jobs = from,
                              .chunk_bytes = 128,
                              .order = model_tensors(Json::parse(model.config))});
      CHECK(report.path == out / "step-00000007");
      CHECK(report.digest == source.digest());
      CHECK(names_in(out) == std::vector<std::string>{"latest", "step-00000007"});
      const auto result = CheckpointReader::open(report.path);
      CHECK(verify_checkpoint(result).problems.empty());
      // Files are identical; the index differs only in its time.
      CHECK(names_in(report.path) == names_in(saved.path()));
      for (const auto& [file, size] : saved.index().files) {
        CHECK(read_text(report.path / file) == read_text(saved.path() / file));
      }
      CHECK(read_text(report.path / "trainer.json") == read_text(saved.path() / "trainer.json"));
      CheckpointIndex index = result.index();
      index.created = saved.index().created;
      CHECK(format_index(index) == format_index(saved.index()));
    }
  }
}

TEST_CASE("a weights-only checkpoint stays weights-only") {
  TempDir dir;
  const auto source = CheckpointReader::open(save(
      make_sample_model(), dir.path(), {.world_size = 3, .optimizer = false, .trainer_json = ""}));
  const auto report = reshard_checkpoint(source, dir.path() / "out", {.world_size = 2});
  const auto result = CheckpointReader::open(report.path);
  CHECK_FALSE(result.index().optimizer);
  CHECK_FALSE(result.index().trainer);
  CHECK(diff_checkpoints(source, result, {}).equal());
}

TEST_CASE("chunks are as large as memory allows") {
  TempDir dir;
  SampleModel model = make_sample_model();
  model.config = "{}";  // an unknown model
  model.tensors.clear();
  SampleModel::Tensor tensor{"layers.0.w", {3, 100'000}, {}, {}, {}};
  for (int i = 0; i < 300'000; ++i) tensor.weight.push_back(static_cast<float>(i));
  tensor.exp_avg = tensor.exp_avg_sq = tensor.weight;
  model.tensors.push_back(tensor);
  const auto source = CheckpointReader::open(save(model, dir.path(), {.world_size = 3}));
  std::int64_t calls = 0, last = 0;
  const auto progress = [&](std::int64_t done, std::int64_t total) {
    ++calls;
    last = done;
    CHECK(done <= total);
  };
  const auto report =
      reshard_checkpoint(source, dir.path() / "out",
                         {.world_size = 2, .memory = 4 << 16, .jobs = 2, .progress = progress});
  CHECK(last == report.bytes);
  CHECK(calls >= 3 * 1'200'000 / (1 << 16));
  CHECK(diff_checkpoints(source, CheckpointReader::open(report.path), {.optimizer = true}).equal());
  CHECK(verify_checkpoint(CheckpointReader::open(report.path)).problems.empty());
}

TEST_CASE("a boxed tensor is converted to ranges") {
  TempDir dir;
  const std::int64_t rows = 200'000;
  std::string bytes(static_cast<std::size_t>(rows) * 3 * 4, '\0');
  for (std::size_t i = 0; i < bytes.size(); i += 4) bytes[i] = static_cast<char>(i / 4);
  const auto source = write_tensor(dir.path() / "a", DType::F32, {rows, 3}, bytes, true);
  const auto report = reshard_checkpoint(source, dir.path() / "out",
                                         {.world_size = 2, .memory = 1 << 20, .jobs = 3});
  const auto result = CheckpointReader::open(report.path);
  CHECK(diff_checkpoints(source, result, {}).equal());
  CHECK(verify_checkpoint(result).problems.empty());
}

TEST_CASE("a checkpoint that appears meanwhile is kept") {
  TempDir dir;
  const auto source =
      CheckpointReader::open(save(make_sample_model(), dir.path() / "a", {.world_size = 3}));
  const fs::path target = dir.path() / "b" / "step-00000007";
  const auto progress = [&](std::int64_t, std::int64_t) { fs::create_directories(target); };
  CHECK_THROWS_HOLDING(
      InvalidArgument, "was created meanwhile; it is unchanged",
      reshard_checkpoint(source, dir.path() / "b", {.world_size = 2, .progress = progress}));
  CHECK(fs::is_empty(target));
}

TEST_CASE("a damaged source leaves no output") {
  TempDir dir;
  const fs::path out = dir.path() / "out";
  const auto source =
      CheckpointReader::open(save(make_sample_model(), dir.path(), {.world_size = 3}));
  const Chunk chunk = source.tensors(Section{"exp_avg"}).at("wte.weight").chunks.back();
  flip_bit(source.path() / chunk.file, chunk.byte_end - 1);
  CHECK_THROWS_HOLDING(CorruptCheckpoint,
                       fmt::format("{}: tensor optimizer/exp_avg/wte.weight, elements {} to {}",
                                   chunk.file, chunk.begin, chunk.end),
                       reshard_checkpoint(source, out, {.world_size = 2}));
  CHECK(names_in(out).empty());
  flip_bit(source.path() / chunk.file, chunk.byte_end - 1);
  write_text(source.path() / "trainer.json", R"({"step": 8})");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "trainer.json: the checksum is wrong",
                       reshard_checkpoint(source, out, {.world_size = 2}));
  CHECK(names_in(out).empty());
}

TEST_CASE("nothing is replaced without overwrite") {
  TempDir dir;
  const auto source =
      CheckpointReader::open(save(make_sample_model(), dir.path() / "a", {.world_size = 3}));
  const fs::path other = save(make_sample_model(5), dir.path() / "b", {.world_size = 1});
  save(make_sample_model(6), dir.path() / "b", {.world_size = 1, .step = 9});
  const std::string before = CheckpointReader::open(other).digest();
  CHECK_THROWS_HOLDING(InvalidArgument, "step-00000007 exists",
                       reshard_checkpoint(source, dir.path() / "b", {.world_size = 2}));
  CHECK(CheckpointReader::open(other).digest() == before);
  reshard_checkpoint(source, dir.path() / "b", {.world_size = 2, .overwrite = true});
  CHECK(CheckpointReader::open(other).digest() == source.digest());
  CHECK(CheckpointReader::open(other).index().world_size == 2);
  CHECK(read_text(dir.path() / "b" / "latest") == "step-00000009\n");
  reshard_checkpoint(source, dir.path() / "a", {.world_size = 5, .overwrite = true});
  CHECK(open_checkpoint(dir.path() / "a").index().world_size == 5);
  CHECK(names_in(dir.path() / "a") == std::vector<std::string>{"latest", "step-00000007"});

  for (const char* below : {"step-00000007", "step-00000007/deeper"})
    CHECK_THROWS_HOLDING(InvalidArgument, "is inside the source",
                         reshard_checkpoint(open_checkpoint(dir.path() / "a"),
                                            dir.path() / "a" / below, {.world_size = 2}));

  CHECK_THROWS_HOLDING(InvalidArgument, "world size 0",
                       reshard_checkpoint(source, dir.path() / "c", {.world_size = 0}));
  CHECK_THROWS_HOLDING(InvalidArgument, "at least 131072 are needed",
                       reshard_checkpoint(source, dir.path() / "c", {.memory = 65536}));
}

TEST_CASE("remains of a killed process are removed, and only those") {
  TempDir dir;
  const auto source = CheckpointReader::open(save(make_sample_model(), dir.path() / "a"));
  const fs::path out = dir.path() / "out";
  const int status = in_child([&] {
    // Killed while copying: progress is reported by then.
    reshard_checkpoint(source, out, {.progress = [](auto, auto) { ::raise(SIGKILL); }});
    return 0;
  });
  REQUIRE(WIFSIGNALED(status));
  REQUIRE(names_in(out).size() == 1);
  const std::string left = names_in(out)[0];
  CHECK(left.ends_with(".tmp"));
  CHECK(find_checkpoints(out).empty());
  const std::string of_parent =
      fmt::format("{}{}.tmp", left.substr(0, left.rfind('-') + 1), ::getppid());
  fs::create_directory(out / of_parent);  // of a process that still runs
  fs::create_directory(out / "step-00000007.reshard-elsewhere-1.tmp");
  fs::create_directory(out / "step-00000007.run-a.tmp");
  const auto report = reshard_checkpoint(source, out, {.world_size = 2});
  CHECK(verify_checkpoint(CheckpointReader::open(report.path)).problems.empty());
  std::vector<std::string> kept{"latest", "step-00000007", of_parent,
                                "step-00000007.reshard-elsewhere-1.tmp", "step-00000007.run-a.tmp"};
  std::ranges::sort(kept);
  CHECK(names_in(out) == kept);
}

}  // namespace
}  // namespace tessera::io
