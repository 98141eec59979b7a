#include "io/base/mapped_file.h"

#include <doctest/doctest.h>

#include <string>

#include "core/base/error.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

TEST_CASE("a mapped file has the file's bytes, at any alignment") {
  TempDir dir;
  std::string content(3 * 4096 + 17, '\0');
  for (std::size_t i = 0; i < content.size(); ++i) content[i] = static_cast<char>(i * 131 >> 3);
  write_text(dir.path() / "f", content);
  const MappedFile file(File::open(dir.path() / "f"));
  CHECK(file.size() == 12305);
  for (const std::int64_t offset : {0, 1, 4095, 4096, 8191, 12304, 12305}) {
    const auto rest = static_cast<std::size_t>(file.size() - offset);
    std::string part(rest, '\0');
    file.prefetch(offset, file.size() - offset);
    file.read(offset, part.data(), rest);
    CHECK(part == content.substr(static_cast<std::size_t>(offset)));
    CHECK_THROWS_AS(file.read(offset, part.data(), rest + 1), InvalidArgument);
  }
  char one = 0;
  CHECK_THROWS_HOLDING(InvalidArgument, "the file has 12305", file.read(12306, &one, 0));
  CHECK_THROWS_AS(file.read(-1, &one, 1), InvalidArgument);
}

TEST_CASE("an empty file is mapped as empty") {
  TempDir dir;
  write_text(dir.path() / "f", "");
  const MappedFile file(File::open(dir.path() / "f"));
  CHECK(file.size() == 0);
  char one = 0;
  CHECK_NOTHROW(file.read(0, &one, 0));
  CHECK_THROWS_AS(file.read(0, &one, 1), InvalidArgument);
}

TEST_CASE("a mapped file shows later writes, and truncation is an error") {
  TempDir dir;
  const fs::path path = dir.path() / "f";
  write_text(path, std::string(20000, 'a'));
  const MappedFile file(File::open(path));
  char one = 0;
  file.read(19999, &one, 1);
  CHECK(one == 'a');
  flip_bit(path, 19999);
  file.read(19999, &one, 1);
  CHECK(one != 'a');
  fs::resize_file(path, 19999);
  CHECK_THROWS_HOLDING(IoError, "has 19999 bytes, but had 20000", file.read(0, &one, 1));
  fs::resize_file(path, 0);
  CHECK_THROWS_HOLDING(IoError, "it was truncated while in use", file.read(0, &one, 1));
}

TEST_CASE("a file that cannot be mapped is refused with the reason") {
  const fs::path path = "/sys/devices/system/cpu/online";  // a regular file that cannot be mapped
  REQUIRE(fs::exists(path));
  CHECK_THROWS_HOLDING(IoError, "cannot map the 4096 bytes of /sys/", MappedFile(File::open(path)));
}

}  // namespace
}  // namespace tessera::io
