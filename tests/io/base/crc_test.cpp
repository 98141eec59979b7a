#include "io/base/crc.h"

#include <doctest/doctest.h>

#include <string>

namespace tessera::io {
namespace {

std::uint64_t of(std::string_view text, std::uint64_t before = 0) {
  return crc64(text.data(), text.size(), before);
}

TEST_CASE("crc64 is CRC-64/XZ") {
  CHECK(of("123456789") == 0x995dc9bbdf1939faULL);
  CHECK(of("") == 0);
  CHECK(of("56789", of("1234")) == of("123456789"));
}

TEST_CASE("crc64_combine is the checksum of the concatenation") {
  std::string text;
  for (int i = 0; i < 5000; ++i) text += static_cast<char>(i * 37 + i / 7);
  const std::string_view all = text;
  for (const std::size_t cut : {0UL, 1UL, 7UL, 8UL, 255UL, 4096UL, 4999UL, 5000UL}) {
    CAPTURE(cut);
    CHECK(crc64_combine(of(all.substr(0, cut)), of(all.substr(cut)), all.size() - cut) == of(all));
  }
  // Lengths beyond memory: doubling the zeros.
  const std::uint64_t million = of(std::string(1 << 20, '\0'));
  std::uint64_t zeros = million;
  std::uint64_t bytes = 1 << 20;
  for (int i = 0; i < 20; ++i) {
    zeros = crc64_combine(zeros, zeros, bytes);
    bytes *= 2;
  }
  std::uint64_t by_steps = 0;
  for (int i = 0; i < (1 << 20); ++i) by_steps = crc64_combine(by_steps, million, 1 << 20);
  CHECK(zeros == by_steps);
}

TEST_CASE("checksums are read back as written, and other texts are refused") {
  std::uint64_t crc = 0;
  CHECK(parse_checksum(format_checksum(0x00ab), crc));
  CHECK(crc == 0xab);
  CHECK(format_checksum(0x995dc9bbdf1939faULL) == "crc64:995dc9bbdf1939fa");
  for (const char* bad :
       {"", "995dc9bbdf1939fa", "crc64:", "crc64:995dc9bbdf1939f", "crc64:995DC9BBDF1939FA",
        "crc64:995dc9bbdf1939fa0", "crc64:0x5dc9bbdf1939fa", "crc64: 95dc9bbdf1939fa",
        "md5:995dc9bbdf1939fa"}) {
    CAPTURE(bad);
    CHECK_FALSE(parse_checksum(bad, crc));
  }
}

}  // namespace
}  // namespace tessera::io
