// Remains of interrupted exports, and files that exports never touch.

#include <doctest/doctest.h>

#include "core/base/error.h"
#include "io/consolidate/consolidate.h"
#include "io/hf/model_source.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

struct Fixture {
  TempDir dir;
  SampleModel model = make_sample_model();
  fs::path run = dir.path() / "run", out = dir.path() / "out";
  fs::path attempt = dir.path() / "out.tmp", journal = dir.path() / "out.tmp.journal";
  ConsolidateOptions options;

  Fixture() {
    save(model, run / "checkpoints", {.world_size = 2});
    options.max_shard_size = 2000;  // many files, so that some are finished when it stops
  }
  bool nothing_left() const { return !fs::exists(attempt) && !fs::exists(journal); }
};

TEST_CASE_FIXTURE(Fixture, "a source in the export's place is refused and unchanged") {
  options.overwrite = true;
  options.format = ExportFormat::Safetensors;
  consolidate(run, attempt, options);  // a model named out.tmp
  const std::string before = read_text(attempt / "tessera.json");
  for (const char* content : {"", "x\n"}) {
    CAPTURE(content);
    write_text(journal, content);
    CHECK_THROWS_HOLDING(InvalidArgument, "out.tmp, the working directory of an export to",
                         consolidate(attempt, out, options));
    CHECK_THROWS_HOLDING(InvalidArgument, "contains the source",
                         consolidate(attempt / ".", out, options));
    // An export of another source does not empty it, either.
    CHECK_THROWS_HOLDING(InvalidArgument, "is not the journal of an export; move it and",
                         consolidate(run, out, options));
    CHECK(read_text(attempt / "tessera.json") == before);
    CHECK(read_text(journal) == content);
  }
  fs::remove(journal);
  fs::create_directory_symlink(attempt, dir.path() / "link");
  CHECK_THROWS_HOLDING(InvalidArgument, "contains the source",
                       consolidate(dir.path() / "link", out, options));
  CHECK_THROWS_HOLDING(InvalidArgument, "is inside the source",
                       consolidate(attempt, attempt / "out", options));
  fs::rename(attempt, dir.path() / "model");
  fs::create_directory_symlink(dir.path() / "model", attempt);
  CHECK_THROWS_HOLDING(InvalidArgument, "contains the source",
                       consolidate(dir.path() / "model", out, options));
  CHECK(read_text(dir.path() / "model/tessera.json") == before);
}

TEST_CASE_FIXTURE(Fixture, "an attempt that cannot be resumed is discarded, with a message") {
  std::vector<std::string> warnings;
  options.warn = [&](const std::string& text) { warnings.push_back(text); };
  options.memory = 128 << 10;
  const auto stop = [&] {
    options.progress = [](const ConsolidateProgress& at) { return at.done < at.total / 2; };
    CHECK_THROWS_AS(consolidate(run, out, options), ConsolidationStopped);
    options.progress = nullptr;
  };
  stop();
  options.dtype = DType::BF16;
  CHECK(warnings.empty());
  CHECK(consolidate(run, out, options).reused_bytes == 0);
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].starts_with(attempt.string() + " held an unfinished export that this one "));

  options.overwrite = true;
  stop();
  CHECK(consolidate(run, out, options).reused_bytes > 0);
  CHECK(warnings.size() == 1);
}

TEST_CASE_FIXTURE(Fixture, "a plan is refused where the export would be") {
  CHECK(plan_consolidation(run, out, options).tensors.size() == model.tensors.size());
  CHECK_FALSE(fs::exists(out));
  CHECK(nothing_left());
  consolidate(run, out, options);
  CHECK_THROWS_HOLDING(InvalidArgument, "out exists already; choose another directory",
                       plan_consolidation(run, out, options));
  options.overwrite = true;
  CHECK_FALSE(plan_consolidation(run, out, options).tensors.empty());
  write_text(out / "diary.txt", "dear");
  CHECK_THROWS_HOLDING(InvalidArgument, "out contains diary.txt",
                       plan_consolidation(run, out, options));
  const fs::path checkpoint = plan_consolidation(run, options).source;
  CHECK_THROWS_HOLDING(InvalidArgument, "is inside the source",
                       plan_consolidation(run, checkpoint / "out", options));
}

TEST_CASE_FIXTURE(Fixture, "neither a link nor its target is replaced") {
  consolidate(run, dir.path() / "real", options);
  fs::create_directory_symlink("real", out);
  options.overwrite = true;
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "out is a symbolic link; give the directory that it points to, or remove",
                       consolidate(run, out, options));
  CHECK(fs::is_symlink(out));
  CHECK(fs::exists(dir.path() / "real/config.json"));
}

TEST_CASE_FIXTURE(Fixture, "a finished copy that cannot be committed is kept and reused") {
  // The output name is taken when all data are written.
  options.progress = [&](const ConsolidateProgress& progress) {
    if (progress.done == progress.total) {
      fs::create_directories(out);
      write_text(out / "diary.txt", "dear");
    }
    return true;
  };
  SUBCASE("without --overwrite") {}
  SUBCASE("with --overwrite") { options.overwrite = true; }
  CHECK_THROWS_AS(consolidate(run, out, options), InvalidArgument);
  CHECK(read_text(out / "diary.txt") == "dear");
  REQUIRE(fs::exists(attempt));
  fs::remove_all(out);
  options.progress = nullptr;
  const ConsolidateReport report = consolidate(run, out, options);
  CHECK(report.reused_bytes > report.bytes);  // reused_bytes includes headers
  CHECK(nothing_left());
  CHECK(open_model(out)->tensors().size() == model.tensors.size());
}

TEST_CASE_FIXTURE(Fixture, "a disk error loses only unwritten data") {
  options.progress = [&](const ConsolidateProgress& progress) {
    if (progress.done * 2 > progress.total) throw IoError("no more");
    return true;
  };
  CHECK_THROWS_HOLDING(IoError, "no more; finished files are in", consolidate(run, out, options));
  CHECK_THROWS_HOLDING(IoError, "the same command continues from there",
                       consolidate(run, out, options));
  REQUIRE(fs::exists(attempt));
  options.progress = nullptr;
  const ConsolidateReport report = consolidate(run, out, options);
  CHECK(report.reused_bytes * 2 > report.bytes);
  CHECK(nothing_left());
}

TEST_CASE_FIXTURE(Fixture, "a stopped export names the step that it would resume with") {
  options.progress = [](const ConsolidateProgress&) { return false; };
  CHECK_THROWS_HOLDING(ConsolidationStopped, "with --step 7 if the run has saved again",
                       consolidate(run, out, options));
  save(model, run / "checkpoints", {.world_size = 2, .step = 9});
  options.step = 7;
  options.progress = nullptr;
  CHECK(consolidate(run, out, options).reused_bytes > 0);
  // A checkpoint named by path or step is unambiguous.
  fs::remove_all(out);
  options.progress = [](const ConsolidateProgress&) { return false; };
  CHECK_THROWS_HOLDING(ConsolidationStopped, "continues from there; the finished files",
                       consolidate(run, out, options));
}

}  // namespace
}  // namespace tessera::io
