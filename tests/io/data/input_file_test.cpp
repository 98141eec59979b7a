#include "io/data/input_file.h"

#include <doctest/doctest.h>

#include <string>
#include <utility>

#include "core/base/error.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

using namespace tessera;

TEST_CASE("an input file reads at offsets and survives a move") {
  const test::TempDir dir;
  io::InputFile first(dir.write("x", "0123456789"));
  CHECK(first.size() == 10);
  const io::InputFile file = std::move(first);
  std::string part(4, ' ');
  file.read(3, 4, part.data());
  CHECK(part == "3456");
  CHECK(file.read_all() == "0123456789");
  CHECK_THROWS_HOLDING(IoError, "ends at byte 10", file.read(8, 4, part.data()));
}

TEST_CASE("an input file that cannot be opened says which and why") {
  const test::TempDir dir;
  CHECK_THROWS_HOLDING(IoError, "absent: No such file", io::InputFile(dir.file("absent")));
  CHECK_THROWS_HOLDING(IoError, "name its files", io::InputFile(dir.path().string()));
}
