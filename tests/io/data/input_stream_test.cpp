#include "io/data/input_stream.h"

#include <doctest/doctest.h>
#include <isa-l/igzip_lib.h>
#include <zstd.h>

#include <random>
#include <string>

#include "core/base/error.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

using namespace tessera;
using namespace tessera::io;
using tessera::test::TempDir;

namespace {

std::string sample(std::size_t bytes) {
  std::mt19937 random(7);
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>('a' + random() % 7);
  return text;
}

std::string gzip(std::string text) {
  isal_zstream stream{};
  isal_deflate_init(&stream);
  std::string out(text.size() + 1000, '\0');
  stream.end_of_stream = 1;
  stream.gzip_flag = IGZIP_GZIP;
  stream.next_in = reinterpret_cast<std::uint8_t*>(text.data());
  stream.avail_in = static_cast<std::uint32_t>(text.size());
  stream.next_out = reinterpret_cast<std::uint8_t*>(out.data());
  stream.avail_out = static_cast<std::uint32_t>(out.size());
  REQUIRE(isal_deflate(&stream) == COMP_OK);
  out.resize(stream.total_out);
  return out;
}

std::string zstd(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 1));
  return out;
}

std::string read_all(const std::string& path, std::size_t step = 1000) {
  const auto input = open_input(path);
  std::string all, block(step, '\0');
  for (std::size_t n = step; n == step;) {
    n = input->read(block.data(), step);
    all.append(block, 0, n);
  }
  CHECK(input->read(block.data(), step) == 0);
  return all;
}

}  // namespace

TEST_CASE("plain, gzip and zstd files, also of several members and frames") {
  const TempDir dir;
  const std::string a = sample(1'000'000), b = sample(300'001);
  // A header with a file name, as gzip(1) writes it.
  std::string named = gzip(b);
  named[3] = 8;
  named.insert(10, std::string("name.txt\0", 9));
  for (const std::size_t step : {std::size_t{1}, std::size_t{4096}, std::size_t{1} << 21}) {
    CAPTURE(step);
    CHECK(read_all(dir.write("x.txt", b), step) == b);
    CHECK(read_all(dir.write("x.gz", gzip(b) + gzip("") + named), step) == b + b);
    CHECK(read_all(dir.write("x.zst", zstd(b) + zstd("") + zstd(b)), step) == b + b);
  }
  CHECK(read_all(dir.write("y.gz", gzip(a))) == a);
  CHECK(read_all(dir.write("y.zstd", zstd(a))) == a);
  CHECK(read_all(dir.write("empty", "")).empty());
  CHECK(without_compression("a.b/x.jsonl.zst") == "a.b/x.jsonl");
  CHECK(without_compression("x.txt") == "x.txt");
}

TEST_CASE("damaged streams are errors that name file and position") {
  const TempDir dir;
  const std::string text = sample(500'000), packed = gzip(text);
  const auto refuse = [&](const std::string& name, const std::string& content,
                          const std::string& why) {
    CHECK_THROWS_HOLDING(CorruptCheckpoint, why, read_all(dir.write(name, content)));
  };
  for (const std::size_t size : {std::size_t{0}, std::size_t{5}, std::size_t{15}, packed.size() / 2,
                                 packed.size() - 9, packed.size() - 8, packed.size() - 1}) {
    CAPTURE(size);
    refuse("t.gz", packed.substr(0, size), "t.gz: it ends inside a gzip member, after ");
  }
  std::string flipped = packed;
  flipped[packed.size() - 5] ^= 1;
  refuse("f.gz", flipped, "f.gz: gzip data is damaged near byte ");
  refuse("f.gz", flipped, "after 500000 decoded bytes: wrong checksum");
  refuse("u.gz", packed + "more than a header", "no gzip header");
  const std::string frame = zstd(text);
  refuse("t.zst", frame.substr(0, frame.size() / 2), "it was truncated");
  refuse("u.zst", frame + "more", "begins no frame of zstd");
  CHECK_THROWS_HOLDING(IoError, "cannot open", open_input(dir.file("none.gz")));
}
