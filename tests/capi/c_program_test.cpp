#include "tests/capi/c_program.h"

#include <doctest/doctest.h>
#include <tessera/c_api.h>

#include "tests/support/temp_dir.h"

TEST_CASE("a C program saves, reads, verifies and consolidates a checkpoint") {
  const tessera::test::TempDir dir;
  const int line = run_c_program(dir.path().c_str());
  CAPTURE(line);
  CAPTURE(tessera_error_message());
  CHECK(line == 0);
}
