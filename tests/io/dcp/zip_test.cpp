#include "io/zip/zip.h"

#include <doctest/doctest.h>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "tests/io/dcp/bytes.h"
#include "tests/support/check_throws.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

ZipPart part(const std::string& name, const std::string& data) {
  ZipPart result{name, data};
  result.crc32 = crc32(data.data(), data.size());
  return result;
}

ZipFile two_files() { return {{part("a/one", "first"), part("a/two", "the second")}}; }

std::vector<std::string> contents(const std::string& bytes) {
  const ByteRange archive(bytes, "x.zip");
  std::vector<std::string> found;
  const ZipDirectory directory(archive);
  for (const ZipEntry& entry : directory.entries()) {
    found.push_back(entry.name + "=" + read_zip_entry(archive, entry, 1000));
  }
  return found;
}

void change(ZipFile& file, void (*f)(ZipPart&)) { f(file.parts[1]); }

TEST_CASE("CRC-32 is zip's variant") {
  CHECK(crc32("123456789", 9) == 0xcbf43926);
  CHECK(crc32("456789", 6, crc32("123", 3)) == 0xcbf43926);
  CHECK(crc32("", 0) == 0);
  const std::string text(1000, 'x');
  for (const std::size_t n : {0, 1, 7, 500, 999, 1000}) {
    CHECK(crc32_combine(crc32(text.data(), n), crc32(text.data() + n, 1000 - n), 1000 - n) ==
          crc32(text.data(), 1000));
  }
}

TEST_CASE("stored entries are read, with and without zip64 and padding") {
  const std::vector<std::string> expected{"a/one=first", "a/two=the second"};
  CHECK(contents(two_files().bytes()) == expected);
  ZipFile file = two_files();
  file.zip64 = true;
  CHECK(contents(file.bytes()) == expected);
  file.parts[0].zip64 = file.parts[1].zip64 = true;
  CHECK(contents(file.bytes()) == expected);
  file.zip64 = false;
  file.parts[0].extra = std::string(37, 'Z');  // aligns the data
  CHECK(contents(file.bytes()) == expected);
  file.parts[0].crc32 = 0;  // no checksum
  CHECK(contents(file.bytes()) == expected);
  CHECK(contents(ZipFile{}.bytes()).empty());
}

TEST_CASE("a truncated archive is refused") {
  ZipFile file = two_files();
  for (const bool zip64 : {false, true}) {
    file.zip64 = zip64;
    const std::string whole = file.bytes();
    for (std::size_t n = 0; n < whole.size(); ++n) {
      CAPTURE(n);
      CHECK_THROWS_AS(contents(whole.substr(0, n)), CorruptCheckpoint);
      CHECK_THROWS_AS(contents(whole.substr(n + 1)), CorruptCheckpoint);
    }
  }
}

TEST_CASE("each kind of malformed archive has its own error") {
  const auto refuse = [](const char* reason, auto edit) {
    ZipFile file = two_files();
    edit(file);
    CAPTURE(reason);
    CHECK_THROWS_HOLDING(CorruptCheckpoint, reason, contents(file.bytes()));
  };
  refuse("zip entry a/two is wrong: found",
         [](ZipFile& f) { change(f, [](ZipPart& p) { p.data[3] ^= 1; }); });
  refuse("duplicate zip entry a/one",
         [](ZipFile& f) { change(f, [](ZipPart& p) { p.name = "a/one"; }); });
  refuse("the local header at 40 belongs to another entry",
         [](ZipFile& f) { change(f, [](ZipPart& p) { p.local_name = "a/six"; }); });
  refuse("zip entry a/two of 1010 bytes at 40 exceeds",
         [](ZipFile& f) { change(f, [](ZipPart& p) { p.size_added = 1000; }); });
  refuse("zip entry a/one of 6 bytes at 0 exceeds 40",
         [](ZipFile& f) { f.parts[0].size_added = 1; });
  refuse("4 entries in a zip directory of 102 bytes", [](ZipFile& f) { f.entries_added = 2; });
  refuse("the zip directory is truncated", [](ZipFile& f) {
    f.parts[0].name += std::string(100, 'x');
    f.entries_added = 1;
  });
  refuse("the zip directory has 112 bytes at", [](ZipFile& f) { f.directory_added = 10; });
  refuse("the zip directory has 102 bytes at", [](ZipFile& f) { f.directory_moved = 10; });
  const char* const several = "claims to span several files";
  refuse(several, [](ZipFile& f) { change(f, [](ZipPart& p) { p.disk = 3; }); });
  refuse(several, [](ZipFile& f) { f.disk = 1; });
  refuse(several, [](ZipFile& f) {
    f.disk = 1;
    f.zip64 = true;
  });
  refuse("zip entry a/two: flags 0 and method 8 in the zip directory, but 0 and 0 before its data",
         [](ZipFile& f) {
           change(f, [](ZipPart& p) {
             p.method = 8;
             p.local_differs = true;
           });
         });
  refuse("zip entry a/two: flags 1 and method 0 in the zip directory, but 0 and 0", [](ZipFile& f) {
    change(f, [](ZipPart& p) {
      p.flags = 1;
      p.local_differs = true;
    });
  });
  refuse("does not end like a zip archive", [](ZipFile& f) { f.comment = "hello"; });
  ZipFile file = two_files();
  file.zip64 = true;
  std::string bytes = file.bytes();
  bytes.replace(bytes.size() - 12, 2, bytes_of<std::uint16_t>(9));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "contradict each other", contents(bytes));

  // Two entries that share their bytes.
  file = two_files();
  bytes = file.bytes();
  const std::size_t second = bytes.find("PK\x01\x02", bytes.find("PK\x01\x02") + 1);
  bytes.replace(second + 42, 4, bytes_of<std::uint32_t>(0));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "where the next part begins", contents(bytes));
  bytes = file.bytes();
  bytes[second] = 'X';
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "has a wrong signature", contents(bytes));
  bytes = file.bytes();
  bytes[40] = 'X';
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "has no local header at 40", contents(bytes));
  bytes = file.bytes();
  bytes.replace(second + 24, 4, "\xff\xff\xff\xff");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "the zip64 field is missing", contents(bytes));
  bytes = file.bytes();
  bytes.replace(second + 24, 4, bytes_of<std::uint32_t>(9));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "is not compressed, but takes 10 bytes for 9",
                       contents(bytes));
  file.parts[1].zip64 = true;
  bytes = file.bytes();
  bytes.replace(bytes.find("a/two", second) + 9, 8, bytes_of(~std::uint64_t{0}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "a size in the zip directory is 18446744073709551615",
                       contents(bytes));

  file = two_files();
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "at most 3 are accepted",
                       read_zip_entry(ByteRange(file.bytes(), "x.zip"), {"a/one", 5, 0, 0, 40}, 3));
}

TEST_CASE("compressed and encrypted entries are refused by name") {
  const auto refuse = [](const char* reason, auto edit) {
    ZipFile file = two_files();
    edit(file);
    CHECK_THROWS_HOLDING(Unsupported, reason, contents(file.bytes()));
  };
  refuse("zip entry a/two is compressed (method 8)",
         [](ZipFile& f) { change(f, [](ZipPart& p) { p.method = 8; }); });
  refuse("zip entry a/two is encrypted",
         [](ZipFile& f) { change(f, [](ZipPart& p) { p.flags = 1; }); });
}

}  // namespace
}  // namespace tessera::io
