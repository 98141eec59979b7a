#include "io/base/file.h"

#include <doctest/doctest.h>
#include <sys/stat.h>

#include "core/base/error.h"
#include "io/base/size.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/file_limit.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

TEST_CASE("files are written once, at offsets, and read at offsets") {
  TempDir dir;
  const fs::path path = dir.path() / "f";
  File file = File::create(path);
  file.write("abcd", 4);
  file.write_at(2, "xy", 2);
  file.finish();
  CHECK(read_text(path) == "abxy");
  CHECK_THROWS_HOLDING(IoError, "cannot create", File::create(path));
  const File back = File::open(path);
  char two[2];
  back.read(1, two, 2);
  CHECK(std::string(two, 2) == "bx");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "ends at byte 4", back.read(3, two, 2));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "at most 3", read_file(path, 3));
  CHECK(read_file(path, 4) == "abxy");
}

TEST_CASE("a failed write names the bytes needed and free") {
  File closed;  // no descriptor: every write fails
  CHECK_THROWS_HOLDING(IoError, "cannot write", closed.write("x", 1));
  CHECK_THROWS_HOLDING(IoError, "(1 bytes needed, ", closed.write_at(0, "x", 1));
}

TEST_CASE("a file is replaced as a whole, despite remains of an earlier attempt") {
  TempDir dir;
  const fs::path path = dir.path() / "f";
  write_text(path, "old");
  write_text(dir.path() / "f.tmp", "left by a crash");
  write_file_atomically(path, "new");
  CHECK(read_text(path) == "new");
  CHECK_FALSE(fs::exists(dir.path() / "f.tmp"));
  CHECK_THROWS_HOLDING(IoError, "cannot create",
                       write_file_atomically(dir.path() / "no" / "f", "x"));
}

TEST_CASE("only regular files are replaced, and a failure leaves no temporary file") {
  TempDir dir;
  const fs::path target = dir.path() / "f", link = dir.path() / "link", fifo = dir.path() / "fifo";
  write_text(target, "old");
  fs::create_symlink(target, link);
  fs::create_directory(dir.path() / "d");
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  for (const fs::path& path : {link, fifo, dir.path() / "d", fs::path("/dev/null")}) {
    CHECK_THROWS_HOLDING(IoError, path.string() + ": it is no regular file",
                         write_file_atomically(path, "new"));
  }
  CHECK(read_text(target) == "old");
  CHECK(fs::is_symlink(link));
  CHECK(fs::is_character_file("/dev/null"));

  {
    const FileLimit limit(4);
    CHECK_THROWS_HOLDING(IoError, "f.tmp", write_file_atomically(target, "longer than that"));
  }
  CHECK_FALSE(fs::exists(dir.path() / "f.tmp"));
  CHECK(read_text(target) == "old");
}

TEST_CASE("names are swapped atomically") {
  TempDir dir;
  write_text(dir.path() / "a", "1");
  write_text(dir.path() / "b", "2");
  exchange_paths(dir.path() / "a", dir.path() / "b");
  CHECK(read_text(dir.path() / "a") == "2");
  CHECK_THROWS_HOLDING(IoError, "cannot swap", exchange_paths(dir.path() / "a", dir.path() / "c"));
  CHECK_THROWS_HOLDING(IoError, "cannot rename", rename_path(dir.path() / "c", dir.path() / "d"));
}

TEST_CASE("directories are created with their parents, and not over files") {
  TempDir dir;
  make_directories_durably(dir.path() / "a" / "b" / "c");
  CHECK(fs::is_directory(dir.path() / "a" / "b" / "c"));
  make_directories_durably(dir.path() / "a" / "b");
  make_directories_durably(dir.path() / "a" / "d" / "");
  CHECK(fs::is_directory(dir.path() / "a" / "d"));
  write_text(dir.path() / "f", "x");
  CHECK_THROWS_HOLDING(IoError, "it is a file", make_directories_durably(dir.path() / "f"));
  CHECK_THROWS_HOLDING(IoError, "cannot make directory " + dir.file("f/x"),
                       make_directories_durably(dir.path() / "f" / "x"));
}

TEST_CASE("free space is known, also for a directory that does not exist yet") {
  TempDir dir;
  CHECK(free_bytes(dir.path() / "x" / "y") > 0);
}

TEST_CASE("sizes are parsed and printed") {
  CHECK(parse_bytes("4096") == 4096);
  CHECK(parse_bytes("5GB") == 5'000'000'000);
  CHECK(parse_bytes("256MiB") == 256 << 20);
  CHECK(parse_bytes("1.5 kb") == 1500);
  CHECK(parse_bytes("2TiB") == std::int64_t{2} << 40);
  for (const char* bad :
       {"", "GB", "-1GB", "0", "5 G B", "5XB", "1e30TB", "9999999999TB", "nan", "inf"}) {
    CAPTURE(bad);
    CHECK_THROWS_AS(parse_bytes(bad), InvalidArgument);
  }
}

}  // namespace
}  // namespace tessera::io
