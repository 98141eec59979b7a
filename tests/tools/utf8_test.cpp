#include "tools/tessera/report/utf8.h"

#include <doctest/doctest.h>

using tessera::tools::escaped;

TEST_CASE("invalid UTF-8 and control characters are escaped") {
  CHECK(escaped("") == "");
  CHECK(escaped("tensor w\u00e9ight, 1 < 2 \\") == "tensor w\u00e9ight, 1 < 2 \\");
  CHECK(escaped("a\xff"
                "b") == "a\\xffb");
  CHECK(escaped("a\nb\x1b[31m\x7f") == "a\\x0ab\\x1b[31m\\x7f");
  CHECK(escaped("\xc3") == "\\xc3");
  CHECK(escaped("\xed\xa0\x80.") == "\\xed\\xa0\\x80.");
  CHECK(escaped(std::string_view("\0", 1)) == "\\x00");
  CHECK(escaped("\u009b31m\u00a0") == "\\xc2\\x9b31m\u00a0");  // a terminal's CSI as one character
  CHECK(escaped("a\u202eb\u2066\u2029\u20ac") == "a\\u202eb\\u2066\\u2029\u20ac");
  CHECK(tessera::tools::escaped_lines("a\x1b\n\nb\n") == "a\\x1b\n\nb\n");
}
