// Saving at one world size and reading at others, faults of a rank, and kills at every point.

#include "io/checkpoint/save.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "core/base/error.h"
#include "io/checkpoint/find.h"
#include "io/checkpoint/shard.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/file_limit.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

std::vector<float> read_split(const CheckpointReader& reader, Section section,
                              const SampleModel::Tensor& tensor, int world_size) {
  const std::int64_t size = numel(tensor.shape);
  std::vector<float> values(static_cast<std::size_t>(size), -1);
  for (int rank = 0; rank < world_size; ++rank) {
    const std::int64_t begin = size * rank / world_size, end = size * (rank + 1) / world_size;
    reader.read(section, tensor.name, begin, end, values.data() + begin, DType::F32);
  }
  return values;
}

TEST_CASE("a checkpoint of any world size is read at every other, with the same digest") {
  const SampleModel model = make_sample_model();
  TempDir dir;
  std::set<std::string> digests;
  for (int saved = 1; saved <= 4; ++saved) {
    CAPTURE(saved);
    const std::int64_t chunk = saved == 1 ? 0 : std::int64_t{8} << saved;
    const fs::path path =
        save(model, dir.path(), {.world_size = saved, .step = saved, .chunk_bytes = chunk});
    const auto reader = CheckpointReader::open(path);
    CHECK(reader.index().world_size == saved);
    CHECK(reader.index().files.size() == static_cast<std::size_t>(saved));
    CHECK(reader.trainer_json() == R"({"step": 7})");
    digests.insert(reader.digest());
    for (int split = 1; split <= 5; ++split) {
      const auto again = CheckpointReader::open(path);  // no data verified yet
      for (const auto& tensor : model.tensors) {
        CHECK(read_split(again, kModelSection, tensor, split) == tensor.weight);
        CHECK(read_split(again, Section{"exp_avg"}, tensor, split) == tensor.exp_avg);
        CHECK(read_split(again, Section{"exp_avg_sq"}, tensor, split) == tensor.exp_avg_sq);
      }
    }
  }
  CHECK(digests.size() == 1);
  const fs::path other = save(make_sample_model(1), dir.path(), {.step = 9});
  CHECK(CheckpointReader::open(other).digest() != *digests.begin());
  CHECK(read_text(dir.path() / "latest") == "step-00000009\n");
}

TEST_CASE("a shard is a safetensors file with the rank's parts, without padding") {
  const SampleModel model = make_sample_model();
  TempDir dir;
  const fs::path path = save(model, dir.path(), {.world_size = 3});
  std::int64_t weights = 0;
  for (int rank = 0; rank < 3; ++rank) {
    const SafetensorsReader shard(path / fmt::format("rank-{:05}-of-00003.safetensors", rank));
    CHECK(shard.header().metadata.at("format") == "pt");
    CHECK(shard.header().metadata.at("rank") == std::to_string(rank));
    for (const SafetensorsEntry& entry : shard.header().tensors) {
      CHECK(entry.shape.size() == 1);
      if (entry.name.starts_with("model/")) weights += entry.shape[0];
    }
  }
  std::int64_t expected = 0;
  for (const auto& tensor : model.tensors) expected += numel(tensor.shape);
  CHECK(weights == expected);
}

TEST_CASE("chunk sizes are the power of two asked for, except a rank's last chunk") {
  const SampleModel model = make_sample_model();
  TempDir dir;
  const auto reader =
      CheckpointReader::open(save(model, dir.path(), {.world_size = 3, .chunk_bytes = 64}));
  int whole = 0;
  for (const auto& [name, tensor] : reader.tensors(Section{"exp_avg"})) {
    std::map<std::string, std::int64_t> last;  // bytes, by file
    for (const Chunk& chunk : tensor.chunks) {
      CHECK((!last.contains(chunk.file) || last[chunk.file] == 64));
      last[chunk.file] = chunk.byte_end - chunk.byte_begin;
      CHECK(last[chunk.file] <= 64);
      whole += last[chunk.file] == 64 ? 1 : 0;
    }
  }
  CHECK(whole > 100);
  for (const std::int64_t wrong : {-8, 4, 12}) {
    CHECK(save_ranks(model, dir.path(), {.step = 9, .chunk_bytes = wrong})[0].find(
              "expected a power of two") != std::string::npos);
  }
}

TEST_CASE("chunks are small, but limited in number") {
  constexpr std::int64_t kKiB = 1 << 10, kMiB = kKiB << 10, kGiB = kMiB << 10, kTiB = kGiB << 10;
  CHECK(chunk_bytes_of(0, 0) == 256 * kKiB);
  CHECK(chunk_bytes_of(4 * kGiB, 0) == 256 * kKiB);
  CHECK(chunk_bytes_of(100 * kGiB, 0) == 8 * kMiB);
  CHECK(chunk_bytes_of(2 * kTiB, 0) == 16 * kMiB);
  for (std::int64_t total = 1; total < 10'000 * kTiB; total *= 3) {
    CHECK(total / chunk_bytes_of(total, 0) * 400 <= kMaxIndexBytes / 4);
  }
  CHECK(chunk_bytes_of(kTiB, 64) == 64);
}

TEST_CASE("a weights-only checkpoint says where to get the optimizer state") {
  const SampleModel model = make_sample_model();
  TempDir dir;
  save(model, dir.path(), {.step = 300});
  const auto reader =
      CheckpointReader::open(save(model, dir.path(), {.step = 400, .optimizer = false}));
  CHECK_FALSE(reader.has(Section{"exp_avg"}));
  const std::string expected =
      "checkpoint " + reader.path().string() +
      " holds no optimizer state (it was saved with checkpoint.what=model); "
      "start from its weights with --model.init_from, or resume from "
      "step-00000300, which has it";
  CHECK_THROWS_WITH_AS(reader.tensors(Section{"exp_avg"}), expected.c_str(), InvalidArgument);
}

TEST_CASE("if one rank cannot write, all get the same error and the former checkpoint stays") {
  const SampleModel model = make_sample_model();
  TempDir dir;
  save(model, dir.path(), {.world_size = 3, .step = 1});
  const auto before = names_in(dir.path());
  for (const char* point : {"shard-created", "shard-synced", "part-written"}) {
    const auto errors = save_ranks(model, dir.path(),
                                   {.world_size = 3, .step = 2, .at_point = [&](int rank, auto at) {
                                      if (rank == 1 && at == point) throw IoError("disk on fire");
                                    }});
    CHECK(holds(errors[0], "step 2 was not saved: rank 1: disk on fire"));
    CHECK(errors[1] == errors[0]);
    CHECK(errors[2] == errors[0]);
    CHECK(names_in(dir.path()) == before);
  }
}

TEST_CASE("inconsistent save requests are refused") {
  const SampleModel model = make_sample_model();
  TempDir dir;
  ThreadCoordinator::Board board(1);
  auto request = make_request(model, dir.path(), 0, {});
  SUBCASE("a tensor with a hole") { request.parts[kModelSection][0].end -= 1; }
  SUBCASE("a part outside its tensor") { request.parts[kModelSection][0].end += 1; }
  SUBCASE("a duplicate tensor") {
    request.parts[kModelSection].push_back(request.parts[kModelSection][0]);
  }
  SUBCASE("moments of a parameter are missing") { request.parts[Section{"exp_avg"}].pop_back(); }
  SUBCASE("a run id that leaves the directory") { request.run_id = "../x"; }
  ThreadCoordinator coordinator(board, 0);
  CHECK_THROWS_AS(save_checkpoint(request, coordinator), IoError);
  CHECK(names_in(dir.path()).empty());
}

/// A coordinator that enforces the promised message size.
class NarrowCoordinator : public SaveCoordinator {
 public:
  std::vector<std::string> exchange(const std::string& phase, std::string_view mine) override {
    if (mine.size() > 4096) {
      throw CommError(CommFailure::Aborted, {0}, "{}: {} bytes are too many", phase, mine.size());
    }
    return {std::string(mine)};
  }
};

TEST_CASE("the data that ranks exchange do not grow with the model") {
  TempDir dir;
  const std::vector<float> value{1.5F};
  SaveRequest request;
  request.checkpoints_dir = dir.path();
  request.run_id = "run-a";
  for (int i = 0; i < 3000; ++i) {
    request.parts[kModelSection].push_back(
        {fmt::format("h.{}.weight", i), {1}, DType::F32, 0, 1, value.data()});
  }
  NarrowCoordinator coordinator;
  const SaveReport report = save_checkpoint(request, coordinator);
  const auto reader = CheckpointReader::open(report.path);
  CHECK(reader.tensors(kModelSection).size() == 3000);
  CHECK(report.total_bytes == reader.index().files.at("rank-00000-of-00001.safetensors"));
  CHECK(names_in(report.path) ==
        std::vector<std::string>{"index.json", "rank-00000-of-00001.safetensors"});

  request.step = 1;
  request.max_index_bytes = 600'000;
  CHECK_THROWS_HOLDING(IoError, "but readers accept 600000", save_checkpoint(request, coordinator));
  request.parts[kModelSection][0].name = std::string(3000, 'x');
  request.parts[kModelSection][0].end = 2;
  CHECK_THROWS_HOLDING(IoError, "part of xxx", save_checkpoint(request, coordinator));
  CHECK(names_in(dir.path()) == std::vector<std::string>{"latest", "step-00000000"});
}

TEST_CASE("an index part that differs from what its rank wrote is refused") {
  const SampleModel model = make_sample_model();
  TempDir dir;
  const auto errors =
      save_ranks(model, dir.path(), {.world_size = 2, .at_point = [&](int rank, auto at) {
                                       if (rank != 1 || at != "part-written") return;
                                       for (const auto& item : fs::directory_iterator(dir.path())) {
                                         flip_bit(item.path() / "rank-00001.part.json", 20);
                                       }
                                     }});
  CHECK(holds(errors[0], "rank-00001.part.json differs from what rank 1 wrote"));
  CHECK(errors[1] == errors[0]);
  CHECK(names_in(dir.path()).empty());
}

TEST_CASE("a checkpoint of the same step is replaced only by one that was verified") {
  const SampleModel old_model = make_sample_model(), new_model = make_sample_model(1);
  TempDir dir;
  const fs::path path = save(old_model, dir.path(), {.world_size = 2});
  const std::string old_digest = CheckpointReader::open(path).digest();
  const auto damage = [&](int rank, std::string_view at) {
    if (rank != 1 || at != "part-written") return;
    const fs::path shard =
        dir.path() / "step-00000007.run-a.tmp" / "rank-00001-of-00002.safetensors";
    flip_bit(shard, -1);
  };
  const auto errors = save_ranks(new_model, dir.path(), {.world_size = 2, .at_point = damage});
  for (const char* part :
       {"of step 7 was not saved: rank 1: ", "rank-00001-of-00002.safetensors: tensor ",
        "elements ", "(bytes ", "the checksum is wrong; former checkpoints are unchanged"}) {
    CAPTURE(part);
    CHECK(holds(errors[0], part));
  }
  CHECK(errors[1] == errors[0]);
  CHECK(names_in(dir.path()) == std::vector<std::string>{"latest", "step-00000007"});
  CHECK(CheckpointReader::open(path).digest() == old_digest);
  save(new_model, dir.path(), {.world_size = 2});
  CHECK(CheckpointReader::open(path).digest() != old_digest);
  CHECK(names_in(dir.path()) == std::vector<std::string>{"latest", "step-00000007"});
}

TEST_CASE("remains of an attempt that cannot be removed do not stop later saves") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  const fs::path left = dir.path() / "step-00000001.other.tmp";
  fs::create_directories(left);
  write_text(left / "f", "x");
  fs::permissions(left, fs::perms::owner_read | fs::perms::owner_exec);
  fs::permissions(dir.path(), fs::perms::all);
  const int status = in_child([&] {  // root could remove it
    if (::geteuid() == 0 && ::setuid(65534) != 0) return 2;
    SoloCoordinator coordinator;
    try {
      save_checkpoint(make_request(model, dir.path(), 0, {.step = 2}), coordinator);
    } catch (const Error&) {
      return 1;
    }
    return 0;
  });
  fs::permissions(left, fs::perms::owner_all);
  CHECK(status == 0);
  CHECK(fs::exists(left / "f"));
  CHECK(newest_valid(dir.path()).reader->index().step == 2);
}

TEST_CASE(
    "without space for all ranks nothing is written, and the bytes needed and free are named") {
  const SampleModel model = make_sample_model();
  TempDir dir;
  save(model, dir.path(), {.world_size = 3, .step = 1});
  const auto before = names_in(dir.path());
  std::int64_t written = 0;
  for (const auto& item : fs::directory_iterator(dir.path() / "step-00000001")) {
    written += static_cast<std::int64_t>(fs::file_size(item.path()));
  }
  // Enough for two of three ranks.
  const std::int64_t available = written * 2 / 3;
  const auto save_with = [&](std::int64_t bytes) {
    bool touched = false;
    const auto errors = save_ranks(model, dir.path(),
                                   {.world_size = 3,
                                    .step = 2,
                                    .at_point =
                                        [&](int, auto at) {
                                          if (at == "shard-created") touched = true;
                                        },
                                    .free_bytes = bytes});
    CHECK(touched == errors[0].empty());
    CHECK(errors[1] == errors[0]);
    CHECK(errors[2] == errors[0]);
    return errors[0];
  };
  const std::string error = save_with(available);
  CHECK(holds(error, "bytes needed for all 3 ranks"));
  CHECK(holds(error, fmt::format("{} bytes free on the file system of {}", available,
                                 dir.path().string())));
  CHECK(holds(error, "rank 2: "));
  CHECK(names_in(dir.path()) == before);
  // The required space is close to the bytes written.
  CHECK(save_with(written * 2).empty());
  CHECK(save_with(-1).empty());  // unknown
}

TEST_CASE("replicated state is written once, by the rank with the smallest shard") {
  const SampleModel model = make_sample_model();
  TempDir dir;
  const int world_size = 4;
  std::mutex mutex;
  std::vector<int> writers;
  const fs::path path =
      save(model, dir.path(), {.world_size = world_size, .at_point = [&](int rank, auto at) {
                                 const std::lock_guard lock(mutex);
                                 if (at == "trainer-written") writers.push_back(rank);
                               }});
  int least = 0;
  std::vector<std::uintmax_t> sizes;
  for (int rank = 0; rank < world_size; ++rank) {
    sizes.push_back(fs::file_size(path / fmt::format("rank-{:05}-of-00004.safetensors", rank)));
    if (sizes.back() <= sizes[static_cast<std::size_t>(least)]) least = rank;
  }
  REQUIRE(sizes.front() != sizes.back());
  CHECK(writers == std::vector<int>{least});
  CHECK(CheckpointReader::open(path).trainer_json() == R"({"step": 7})");

  ThreadCoordinator::Board board(2);
  std::thread other([&] {
    ThreadCoordinator coordinator(board, 1);
    auto request = make_request(model, dir.path(), 1, {.world_size = 2, .step = 8});
    request.trainer_json.clear();
    save_checkpoint(request, coordinator);
  });
  ThreadCoordinator coordinator(board, 0);
  save_checkpoint(make_request(model, dir.path(), 0, {.world_size = 2, .step = 8}), coordinator);
  other.join();
  CHECK(CheckpointReader::open(dir.path() / "step-00000008").trainer_json() == R"({"step": 7})");
}

TEST_CASE("a full disk is reported with the bytes needed") {
  const SampleModel model = make_sample_model();
  TempDir dir;
  save(model, dir.path(), {.step = 1});
  {
    const FileLimit limit(4096);
    SoloCoordinator coordinator;
    const auto request = make_request(model, dir.path(), 0, {.step = 2});
    CHECK_THROWS_HOLDING(IoError, "bytes needed", save_checkpoint(request, coordinator));
    CHECK_THROWS_HOLDING(IoError, "rank-00000-of-00001", save_checkpoint(request, coordinator));
  }
  CHECK(names_in(dir.path()) == std::vector<std::string>{"latest", "step-00000001"});
}

// @return whether the save reached the point, at which it is killed
bool save_until(const SampleModel& model, const fs::path& dir, std::int64_t step,
                std::string_view stop) {
  const int status = in_child([&] {
    SoloCoordinator coordinator;
    const SaveOptions options{.step = step, .at_point = [&](int, std::string_view point) {
                                if (point == stop) ::_exit(42);
                              }};
    save_checkpoint(make_request(model, dir, 0, options), coordinator);
    return 0;
  });
  return WIFEXITED(status) && WEXITSTATUS(status) == 42;
}

TEST_CASE("a kill at any point of a save leaves the old or the new checkpoint") {
  const SampleModel old_model = make_sample_model(), new_model = make_sample_model(1);
  for (const std::int64_t new_step : {1, 2}) {  // 1: replaces a checkpoint, 2: adds one
    for (const auto* point :
         {"directory-created", "shard-created", "shard-written", "shard-synced", "part-written",
          "trainer-written", "index-written", "renamed", "committed", "latest-written"}) {
      CAPTURE(new_step);
      CAPTURE(point);
      TempDir dir;
      const auto old_digest =
          CheckpointReader::open(save(old_model, dir.path(), {.step = 1})).digest();
      REQUIRE(save_until(new_model, dir.path(), new_step, point));
      const auto found = newest_valid(dir.path(), {.verify_data = true});
      REQUIRE(found.reader);
      CHECK(found.skipped.empty());
      const bool committed =
          std::set<std::string>{"renamed", "committed", "latest-written"}.contains(point);
      CHECK((found.reader->digest() == old_digest) == !committed);
      save(new_model, dir.path(), {.step = new_step});
      for (const std::string& name : names_in(dir.path())) CHECK_FALSE(name.ends_with(".tmp"));
      CHECK(newest_valid(dir.path(), {.verify_data = true}).reader->digest() != old_digest);
    }
  }
}

}  // namespace
}  // namespace tessera::io
