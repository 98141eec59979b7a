#include "io/data/token_file.h"

#include <doctest/doctest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <vector>

#include "core/base/error.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

using namespace tessera;
using namespace tessera::io;
using tessera::test::TempDir;

namespace {

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

std::string header(std::int32_t magic, std::int32_t version, std::int32_t count) {
  std::vector<std::int32_t> words(256, 0);
  words[0] = magic;
  words[1] = version;
  words[2] = count;
  return bytes_of(words);
}

std::vector<std::int32_t> read_all(const TokenSource& source) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(source.size()));
  source.read(0, source.size(), out.data());
  return out;
}

using U16 = std::vector<std::uint16_t>;
using U32 = std::vector<std::uint32_t>;

}  // namespace

TEST_CASE("the three formats are recognized by their first word") {
  const TempDir dir;
  const auto raw = dir.write("raw.bin", bytes_of(U16{5, 0, 65535, 7}));
  const auto small = dir.write("a.bin", header(20240520, 1, 3) + bytes_of(U16{50256, 1, 2}));
  const auto large = dir.write("b.bin", header(20240801, 7, 2) + bytes_of(U32{128255, 4}));
  CHECK(read_all(*open_token_file(raw)) == std::vector<std::int32_t>{5, 0, 65535, 7});
  CHECK(read_all(*open_token_file(small)) == std::vector<std::int32_t>{50256, 1, 2});
  CHECK(read_all(*open_token_file(large)) == std::vector<std::int32_t>{128255, 4});
  CHECK(open_token_file(dir.write("one.bin", bytes_of(U16{9})))->size() == 1);
}

TEST_CASE("reads at any position match the whole, beyond the block size") {
  const TempDir dir;
  U16 ids(10001);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::uint16_t>(i * 7919);
  const auto source = open_token_file(dir.write("x.bin", bytes_of(ids)));
  std::vector<std::int32_t> part(9000);
  source->read(1000, 9000, part.data());
  CHECK(std::equal(part.begin(), part.end(), ids.begin() + 1000));
  CHECK_THROWS_AS(source->read(9999, 3, part.data()), InvalidArgument);
}

TEST_CASE("every malformation has its own message") {
  const TempDir dir;
  const auto refused = [&](const std::string& content, const char* part) {
    CHECK_THROWS_HOLDING(IoError, part, open_token_file(dir.write("bad.bin", content)));
  };
  const std::string tokens = bytes_of(U16{1, 2, 3});
  refused("", "empty");
  refused("abc", "odd size");
  refused(header(20240520, 1, 4) + tokens, "counts 4 tokens");
  refused(header(20240520, 1, 2) + tokens, "counts 2 tokens");
  refused(header(20240520, 1, 3) + tokens + "x", "the file has 1031");
  refused(header(20240520, 2, 3) + tokens, "version 2, expected 1");
  refused(header(20240801, 1, 3) + tokens, "version 1, expected 7");
  refused(header(20240801, 7, 3) + tokens, "a size of 1036 bytes");
  refused(header(20240520, 1, -1) + tokens, "2^31 - 1");
  refused(header(20240520, 1, 0), "without tokens");
  refused(header(20240520, 1, 3).substr(0, 700), "it was truncated");
  refused(header(20240522, 1, 3) + tokens, "evaluation file");
  refused(header(20240326, 3, 3) + tokens, "unknown magic 20240326");
}

TEST_CASE("a non-regular file is refused at once") {
  const TempDir dir;
  CHECK_THROWS_HOLDING(IoError, "No such file", open_token_file(dir.file("absent.bin")));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "is a directory", open_token_file(dir.path().string()));
  const auto fifo = dir.file("fifo.bin");
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "is a FIFO", open_token_file(fifo));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "is a device", open_token_file("/dev/null"));
}

TEST_CASE("ids outside of the vocabulary are refused with position and value") {
  const TempDir dir;
  U16 ids(5000, 3);
  ids[4500] = 10;
  const auto path = dir.write("x.bin", bytes_of(ids));
  const auto source = open_token_file(path, 10);
  std::vector<std::int32_t> out(5000);
  CHECK_NOTHROW(source->read(0, 4500, out.data()));
  CHECK_THROWS_HOLDING(IoError, "token 4500 has id 10", source->read(4000, 1000, out.data()));
  CHECK_NOTHROW(open_token_file(path, 11)->read(0, 5000, out.data()));

  const auto wide = dir.write("w.bin", header(20240801, 7, 2) + bytes_of(U32{1, 0x80000000U}));
  CHECK_THROWS_HOLDING(IoError, "has id 2147483648", open_token_file(wide)->read(0, 2, out.data()));
}

TEST_CASE("more than 2^31 tokens are accessible in a raw file") {
  const TempDir dir;
  const auto path = dir.write("sparse.bin", "");
  constexpr std::int64_t kTokens = (std::int64_t{1} << 31) + 10;
  std::filesystem::resize_file(path, kTokens * 2);  // sparse: needs no disk space
  const auto source = open_token_file(path);
  CHECK(source->size() == kTokens);
  std::vector<std::int32_t> out(4, -1);
  source->read(kTokens - 4, 4, out.data());
  CHECK(out == std::vector<std::int32_t>(4, 0));
}

TEST_CASE("a file that shrinks while open is an error, not a signal") {
  const TempDir dir;
  const auto path = dir.write("x.bin", bytes_of(U16(50000, 1)));
  const auto source = open_token_file(path);
  std::vector<std::int32_t> out(50000);
  CHECK_NOTHROW(source->read(0, 50000, out.data()));
  std::filesystem::resize_file(path, 100);
  CHECK_NOTHROW(source->prefetch(0, 50000));
  CHECK_THROWS_HOLDING(IoError, "it was truncated", source->read(49000, 1000, out.data()));
  CHECK_THROWS_HOLDING(IoError, "has 100 bytes, but had 100000", source->read(0, 10, out.data()));
  std::filesystem::resize_file(path, 100002);  // growth is harmless
  CHECK_NOTHROW(source->read(49000, 1000, out.data()));
}

TEST_CASE("a text's bytes are tokens") {
  const TempDir dir;
  const auto source = open_byte_file(dir.write("t.txt", std::string("a\xff\0b", 4)));
  CHECK(read_all(*source) == std::vector<std::int32_t>{'a', 255, 0, 'b'});
  CHECK_THROWS_HOLDING(IoError, "empty", open_byte_file(dir.write("e.txt", "")));
}
