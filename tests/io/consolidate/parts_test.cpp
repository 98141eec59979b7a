// Exports that several processes write, a part each.

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include "core/base/error.h"
#include "io/consolidate/consolidate.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

std::map<std::string, std::string> contents(const fs::path& dir) {
  std::map<std::string, std::string> files;
  for (const fs::path& path : list_directory(dir)) {
    files[path.filename().string()] = read_text(path);
  }
  return files;
}

struct Fixture {
  TempDir dir;
  SampleModel model = make_sample_model();
  fs::path run = dir.path() / "run", out = dir.path() / "out", whole = dir.path() / "whole";
  ConsolidateOptions options;

  Fixture() {
    save(model, run / "checkpoints", {.world_size = 2});
    options.max_shard_size = 2000;  // many files
    consolidate(run, whole, options);
  }
  ConsolidateReport part(int number, int count = 3) {
    ConsolidateOptions with = options;
    with.part = ExportShare{number, count};
    return consolidate(run, out, with);
  }
  /// Directories of parts and attempts.
  std::vector<fs::path> remains() const {
    std::vector<fs::path> found = list_directory(dir.path());
    std::erase_if(found, [&](const fs::path& path) {
      return path == out || !path.filename().string().starts_with("out");
    });
    return found;
  }
  void check_complete() const {
    CHECK(contents(out) == contents(whole));
    CHECK(remains().empty());
  }
};

TEST_CASE_FIXTURE(Fixture, "parts give the same export, in any order, and hf and safetensors") {
  for (const auto& order : {std::vector{1, 2, 3}, {3, 1, 2}, {2, 2, 3, 3, 1}}) {
    for (const ExportFormat format : {ExportFormat::HF, ExportFormat::Safetensors}) {
      fs::remove_all(out);
      fs::remove_all(whole);
      options.format = format;
      consolidate(run, whole, options);
      std::set<int> done;
      std::set<std::string> files;
      for (const int number : order) {
        const ConsolidateReport report = part(number);
        done.insert(number);
        CHECK(report.committed == (done.size() == 3));
        CHECK(report.waiting.size() == 3 - done.size());
        CHECK(fs::exists(out) == report.committed);
        for (const int other : report.waiting) CHECK(!done.contains(other));
        if (!report.committed) CHECK(report.bytes > 0);
        files.insert(report.files.begin(), report.files.end());
      }
      CHECK(files.size() == contents(out).size());
      check_complete();
    }
  }
}

TEST_CASE_FIXTURE(Fixture, "each part gets about the same number of bytes") {
  std::vector<std::int64_t> bytes;
  ConsolidateOptions with = options;
  std::size_t files = 0;
  for (int k = 1; k <= 3; ++k) {
    with.part = ExportShare{k, 3};
    const ConsolidatePlan plan = plan_consolidation(run, out, with);
    std::int64_t sum = 0;
    for (const auto& file : plan.files) sum += file.bytes;
    bytes.push_back(sum);
    files += plan.files.size();
  }
  std::int64_t largest = 0;
  for (const auto& file : plan_consolidation(run, options).files)
    largest = std::max(largest, file.bytes);
  CHECK(files == plan_consolidation(run, options).files.size());
  const auto [least, most] = std::minmax_element(bytes.begin(), bytes.end());
  CHECK(*most - *least <= largest);
}

TEST_CASE_FIXTURE(Fixture, "parts that run at the same time, and one commit") {
  for (int round = 0; round < 5; ++round) {
    fs::remove_all(out);
    std::vector<ConsolidateReport> reports(3);
    {
      std::vector<std::jthread> threads;
      for (int k = 1; k <= 3; ++k) {
        threads.emplace_back([&, k] { reports[static_cast<std::size_t>(k - 1)] = part(k); });
      }
    }
    CHECK(std::ranges::any_of(reports, &ConsolidateReport::committed));
    check_complete();
  }
}

TEST_CASE_FIXTURE(Fixture, "a part that is killed or stopped continues; the others wait for it") {
  part(1);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    options.memory = 128 << 10;
    options.progress = [](const ConsolidateProgress& at) {
      if (at.done >= at.total * 2 / 3) ::raise(SIGKILL);
      return true;
    };
    part(2);
    ::_exit(1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  CHECK(part(3).waiting == std::vector{2});
  CHECK(!fs::exists(out));
  const ConsolidateReport last = part(2);
  CHECK(last.committed);
  CHECK(last.reused_bytes > 0);
  check_complete();
}

TEST_CASE_FIXTURE(Fixture, "a part that runs twice at once is an error of the second") {
  bool tried = false;
  options.progress = [&](const ConsolidateProgress&) {
    if (std::exchange(tried, true)) return true;
    const auto progress = std::exchange(options.progress, nullptr);
    CHECK_THROWS_HOLDING(InvalidArgument, "another process is writing", part(1));
    options.progress = progress;
    return true;
  };
  CHECK(part(1).waiting == std::vector{2, 3});
  CHECK(tried);
}

TEST_CASE_FIXTURE(Fixture, "parts of other options, numbers or sources are refused") {
  const char* const refused =
      "is a part of an export with other options or another number of parts";
  part(1);
  const auto before = remains();
  CHECK_THROWS_HOLDING(InvalidArgument, refused, part(2, 2));
  options.dtype = DType::BF16;
  CHECK_THROWS_HOLDING(InvalidArgument, refused, part(2));
  options.dtype = std::nullopt;
  options.max_shard_size = 3000;
  CHECK_THROWS_HOLDING(InvalidArgument, refused, part(2));
  options.max_shard_size = 2000;
  model.tensors[0].weight[0] += 1;
  save(model, run / "checkpoints", {.world_size = 2, .step = 8});
  CHECK_THROWS_HOLDING(InvalidArgument, refused, part(2));
  CHECK(remains() == before);
  // A stopped part counts, too.
  for (const fs::path& path : before) fs::remove_all(path);
  options.progress = [](const ConsolidateProgress&) { return false; };
  CHECK_THROWS_AS(part(1), ConsolidationStopped);
  options.progress = nullptr;
  CHECK_THROWS_HOLDING(InvalidArgument, refused, part(1, 2));
}

TEST_CASE_FIXTURE(Fixture, "nothing is committed with a missing file") {
  part(1);
  part(2);
  std::vector<fs::path> parts = remains();
  REQUIRE(parts.size() == 2);
  fs::remove(list_directory(parts[0]).front());
  CHECK(part(3).waiting == std::vector{1});
  CHECK_THROWS_HOLDING(InvalidArgument, "but not with all of its files; remove it", part(1));
  fs::remove_all(parts[0]);
  CHECK(part(1).committed);
  check_complete();
}

TEST_CASE_FIXTURE(Fixture, "a commit that fails is repeated by any part") {
  part(1);
  part(2);
  options.progress = [&](const ConsolidateProgress&) {
    fs::create_directory(out);  // appears while the last part is written
    return true;
  };
  CHECK_THROWS_HOLDING(InvalidArgument, "exists already", part(3));
  options.progress = nullptr;
  fs::remove_all(out);
  CHECK(part(1).committed);
  check_complete();
  // An export in its place is replaced only if that is asked for.
  CHECK_THROWS_HOLDING(InvalidArgument, "exists already", part(1));
  options.overwrite = true;
  for (int k = 1; k <= 3; ++k) CHECK(part(k).committed == (k == 3));
  check_complete();
}

TEST_CASE_FIXTURE(Fixture, "what cannot be divided is refused") {
  CHECK_THROWS_HOLDING(InvalidArgument, "there is no part 4 of 3", part(4));
  options.format = ExportFormat::GGUF;
  CHECK_THROWS_HOLDING(InvalidArgument, "one file, which cannot be divided", part(1));
  options.format = ExportFormat::HF;
  options.max_shard_size = 1 << 30;
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "1 file of tensors, which cannot be divided into 3 parts; give fewer",
                       part(1));
  CHECK(remains().empty());
}

}  // namespace
}  // namespace tessera::io
