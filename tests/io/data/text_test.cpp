#include "io/data/text.h"

#include <doctest/doctest.h>

#include "core/base/error.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::io;

TEST_CASE("UTF-8 round-trips at the limits of every length") {
  for (const char32_t point : {0x0U, 0x7FU, 0x80U, 0x7FFU, 0x800U, 0xD7FFU, 0xE000U, 0xFFFDU,
                               0xFFFFU, 0x10000U, 0x10FFFFU}) {
    std::string text = "x";
    append_utf8(point, text);
    const auto points = decode_utf8(text, "t");
    REQUIRE(points.size() == 2);
    CHECK(points[1] == point);
  }
}

TEST_CASE("malformed UTF-8 is refused with the byte where it starts") {
  const char* bad[] = {"\x80",
                       "\xC0\x80",
                       "\xC1\xBF",
                       "\xC3",
                       "\xE0\x9F\xBF",
                       "\xED\xA0\x80",
                       "\xE2\x82",
                       "\xE2\x28\xA1",
                       "\xF0\x8F\xBF\xBF",
                       "\xF4\x90\x80\x80",
                       "\xF5\x80\x80\x80",
                       "\xF0\x9F\x98",
                       "\xFF"};
  for (const char* sequence : bad) {
    CHECK_THROWS_HOLDING(InvalidArgument, "file.txt: byte 2 ",
                         decode_utf8(std::string("ab") + sequence, "file.txt"));
    CHECK_THROWS_HOLDING(InvalidArgument, "byte 2 ",
                         decode_utf8(std::string("ab") + sequence + "cdef", "file.txt"));
  }
}

TEST_CASE("descriptions of characters make control characters visible") {
  CHECK(describe_character('a') == "'a' (U+0061)");
  CHECK(describe_character('\n') == "(U+000A)");
  CHECK(describe_character(0x20AC) == "'\xE2\x82\xAC' (U+20AC)");
}
