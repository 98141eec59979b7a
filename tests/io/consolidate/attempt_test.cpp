#include "io/consolidate/attempt.h"

#include <doctest/doctest.h>

#include <optional>

#include "core/base/error.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

struct Fixture {
  TempDir dir;
  fs::path out = dir.path() / "out";
  fs::path attempt = dir.path() / "out.tmp";
  fs::path journal = dir.path() / "out.tmp.journal";
  bool nothing_left() const { return !fs::exists(attempt) && !fs::exists(journal); }
};

const std::vector<FileRecord> kFiles = {{0, 0xfedcba9876543210}, {1, 17}, {70'000, 0}};

void record_all(Attempt& attempt) {
  for (const FileRecord& file : kFiles) attempt.record(file);
}

void check_equal(const std::vector<FileRecord>& found, std::size_t n) {
  REQUIRE(found.size() == n);
  for (std::size_t i = 0; i < n; ++i) {
    CHECK(found[i].file == kFiles[i].file);
    CHECK(found[i].crc64 == kFiles[i].crc64);
  }
}

TEST_CASE_FIXTURE(Fixture, "an identical attempt finds the former one's journal records") {
  {
    Attempt first(out, 5);
    CHECK(first.found().empty());
    write_text(first.dir() / "data", "x");
    record_all(first);
  }
  {
    Attempt second(out, 5);
    check_equal(second.found(), 3);
    CHECK(read_text(second.dir() / "data") == "x");
  }
  Attempt third(out, 5);
  check_equal(third.found(), 3);
  third.commit(false);
  CHECK(read_text(out / "data") == "x");
  CHECK(nothing_left());
}

TEST_CASE_FIXTURE(Fixture, "another identity starts over") {
  {
    Attempt first(out, 5);
    write_text(first.dir() / "data", "x");
    record_all(first);
  }
  CHECK_FALSE(Attempt(out, 5).has_discarded());
  Attempt second(out, 6);
  CHECK(second.found().empty());
  CHECK(second.has_discarded());
  CHECK(fs::is_empty(attempt));
  second.remove();
  CHECK(nothing_left());
  { Attempt(out, 5); }
  CHECK_FALSE(Attempt(out, 6).has_discarded());  // nothing was done before
}

TEST_CASE_FIXTURE(Fixture, "a truncated or modified journal gives intact records or none") {
  {
    Attempt first(out, 5);
    record_all(first);
  }
  const std::string whole = read_text(journal);
  std::vector<std::size_t> ends;  // ends of the lines with files
  for (std::size_t at = whole.find("file"); at != std::string::npos;) {
    ends.push_back(whole.find('\n', at) + 1);
    at = whole.find("file", ends.back());
  }
  REQUIRE(ends.size() == 3);
  // Coarse steps, as each one syncs.
  for (std::size_t size = 0; size < whole.size(); size += size < 40 ? 13 : 9) {
    CAPTURE(size);
    fs::create_directories(attempt);
    write_text(journal, whole.substr(0, size));
    if (size <= whole.find('\n')) {
      CHECK_THROWS_AS(Attempt(out, 5), InvalidArgument);
      fs::remove_all(attempt);  // is created after the first line
      CHECK(Attempt(out, 5).found().empty());
      continue;
    }
    std::size_t expected = 0;
    while (expected < 3 && ends[expected] <= size) ++expected;
    check_equal(Attempt(out, 5).found(), expected);
    // Appended records follow the last intact line.
    check_equal(Attempt(out, 5).found(), expected);
  }
  for (std::size_t at = 0; at < whole.size(); at += 17) {
    CAPTURE(at);
    fs::create_directories(attempt);
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    write_text(journal, changed);
    if (at <= whole.find('\n')) {
      CHECK_THROWS_HOLDING(InvalidArgument, "is not the journal of an export", Attempt(out, 5));
      continue;
    }
    const Attempt next(out, 5);
    REQUIRE(next.found().size() < 3);
    check_equal(next.found(), next.found().size());
  }
}

TEST_CASE_FIXTURE(Fixture, "of two concurrent attempts, the second is told who holds the lock") {
  std::optional<Attempt> first(std::in_place, out, 5);
  CHECK_THROWS_HOLDING(InvalidArgument, std::to_string(::getpid()), Attempt(out, 5));
  CHECK_THROWS_HOLDING(InvalidArgument, "another process is writing", Attempt(out, 6));
  first->remove();
  Attempt third(out, 6);  // not blocked by the removed journal's lock, which `first` still holds
  CHECK(third.found().empty());
}

TEST_CASE_FIXTURE(Fixture, "a directory that is not an attempt's is left alone") {
  fs::create_directories(attempt);
  write_text(attempt / "diary.txt", "dear");
  CHECK_THROWS_HOLDING(InvalidArgument, "move it away or remove it", Attempt(out, 5));
  CHECK(read_text(attempt / "diary.txt") == "dear");
  CHECK_FALSE(fs::exists(journal));
}

TEST_CASE_FIXTURE(Fixture, "a journal that is not an attempt's is left alone, with its directory") {
  fs::create_directories(attempt);
  write_text(attempt / "diary.txt", "dear");
  for (const char* content :
       {"x\n", "x", "", "tessera-consolidate 2 0 0\n", "tessera-consolidate 2"}) {
    CAPTURE(content);
    write_text(journal, content);
    CHECK_THROWS_HOLDING(InvalidArgument, "is not the journal of an export; move it and",
                         Attempt(out, 5));
    CHECK(read_text(attempt / "diary.txt") == "dear");
    CHECK(read_text(journal) == content);
  }
  fs::remove_all(attempt);
  write_text(journal, "notes\n");
  CHECK_THROWS_AS(Attempt(out, 5), InvalidArgument);
  CHECK(read_text(journal) == "notes\n");
  // The directory was replaced by a link.
  fs::remove(journal);
  {
    Attempt first(out, 5);
    record_all(first);
  }
  fs::rename(attempt, dir.path() / "moved");
  fs::create_directory_symlink("moved", attempt);
  CHECK_THROWS_HOLDING(InvalidArgument, "is not a directory", Attempt(out, 5));
}

TEST_CASE_FIXTURE(Fixture, "a commit replaces the former output atomically, and removes it") {
  fs::create_directories(out);
  write_text(out / "data", "old");
  Attempt next(out, 5);
  write_text(next.dir() / "data", "new");
  require_exchange(next.dir(), out);
  next.commit(true);
  CHECK(read_text(out / "data") == "new");
  CHECK(nothing_left());
}

TEST_CASE_FIXTURE(Fixture, "a commit replaces nothing without permission") {
  for (const bool empty : {false, true}) {
    Attempt next(out, 5);
    write_text(next.dir() / "data", "new");
    fs::create_directories(out);
    if (!empty) write_text(out / "data", "old");
    CHECK_THROWS_HOLDING(InvalidArgument, "was created during the export", next.commit(false));
    CHECK(fs::is_empty(out) == empty);
    CHECK(read_text(attempt / "data") == "new");
    fs::remove_all(out);
  }
  write_text(out, "a file");
  CHECK_THROWS_AS(Attempt(out, 5).commit(false), InvalidArgument);
  CHECK(read_text(out) == "a file");
}

}  // namespace
}  // namespace tessera::io
