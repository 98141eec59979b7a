#include "io/base/zstd.h"

#include <doctest/doctest.h>
#include <zstd.h>

#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

/// A frame, as a stream of unknown size writes it.
std::string frame_of(std::string_view bytes, int level = 3, int window_log = 0,
                     bool checksum = false) {
  ZSTD_CCtx* const context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_compressionLevel, level);
  ZSTD_CCtx_setParameter(context, ZSTD_c_windowLog, window_log);
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, checksum ? 1 : 0);
  std::string out(ZSTD_compressBound(bytes.size()) + 64, '\0');
  ZSTD_inBuffer input{bytes.data(), bytes.size(), 0};
  ZSTD_outBuffer output{out.data(), out.size(), 0};
  while (input.pos < input.size) ZSTD_compressStream2(context, &output, &input, ZSTD_e_continue);
  REQUIRE(ZSTD_compressStream2(context, &output, &input, ZSTD_e_end) == 0);
  ZSTD_freeCCtx(context);
  out.resize(output.pos);
  return out;
}

/// Half compressible.
std::string sample(std::size_t n) {
  std::mt19937 random(7);
  std::string bytes(n, '\0');
  for (std::size_t i = 0; i < n; i += 2) bytes[i] = static_cast<char>(random());
  return bytes;
}

struct Stored {
  TempDir dir;
  std::shared_ptr<const File> file;
  ZstdRange range;
  /// In the middle of a file.
  explicit Stored(const std::string& bytes) : range{3, std::ssize(bytes)} {
    dir.write("f", "abc" + bytes + "def");
    file = std::make_shared<const File>(File::open(dir.path() / "f"));
  }
  std::string read_all() const {
    ZstdDecoder decoder(file, range);
    std::string all, part(1000, '\0');
    for (;;) {
      const std::size_t n = decoder.read(part.data(), part.size());
      all.append(part, 0, n);
      if (n < part.size()) return all;
    }
  }
};

TEST_CASE("frames are decoded one after the other, from any position") {
  const std::string a = sample(300'000), b = sample(5000);
  const std::string skipped("\x5e\x2a\x4d\x18\x03\0\0\0xyz", 11);
  const Stored stored(frame_of(a) + skipped + frame_of("") + frame_of(b, 19, 0, true));
  const std::string all = a + b;
  CHECK(stored.read_all() == all);
  ZstdDecoder decoder(stored.file, stored.range);
  for (const std::size_t at : {0, 5, 299'990, 299'990, 17, 304'000}) {
    CAPTURE(at);
    std::string part(100, '\0');
    decoder.read_at(static_cast<std::int64_t>(at), part.data(), part.size());
    CHECK(part == all.substr(at, 100));
  }
  char one = 0;
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "decodes to 305000 bytes, but holds data at 305000",
                       decoder.read_at(305'000, &one, 1));
  CHECK(Stored("").read_all().empty());

  ZstdDecoder again(stored.file, stored.range);
  const ZstdEnds ends = read_zstd_ends(again, 305'000);
  CHECK(ends.size == 305'000);
  CHECK(ends.head == all.substr(0, ZstdEnds::kKept));
  CHECK(ends.tail == all.substr(all.size() - ZstdEnds::kKept));
  ZstdDecoder third(stored.file, stored.range);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "decodes to more than 304999 bytes",
                       read_zstd_ends(third, 304'999));
}

TEST_CASE("each malformed stream has its own error") {
  const auto refuse = [](const std::string& bytes, std::string_view message) {
    CAPTURE(message);
    CHECK_THROWS_HOLDING(Error, message, Stored(bytes).read_all());
  };
  const std::string good = frame_of(sample(1000), 3, 0, true);
  for (std::size_t n = 1; n < good.size(); ++n) {
    CAPTURE(n);
    CHECK_THROWS_AS(Stored(good.substr(0, n)).read_all(), CorruptCheckpoint);
  }
  refuse(good.substr(0, good.size() / 2), "it ends inside a frame, after");
  refuse(good + "PK", "after 1000 decoded bytes it goes on with 00004b50, which begins no frame");
  refuse("PK\x03\x04", "begins no frame of zstd");
  refuse("\x27\xb5\x2f\xfd", "begins no frame of zstd");  // of zstd 0.7
  std::string wrong = good;
  wrong.back() = static_cast<char>(wrong.back() + 1);
  refuse(wrong, "checksum: the data was damaged");
  // A header that asks for a window of 2 GiB, and one that names a dictionary.
  refuse(std::string("\x28\xb5\x2f\xfd\x00\xa8", 6) + std::string(100, '\0'),
         "compressed with a window of more than 8 MiB; compress it with a smaller one");
  refuse(std::string("\x28\xb5\x2f\xfd\x01\x58\x07", 7) + std::string(100, '\0'),
         "compressed with a dictionary");
  refuse(frame_of(sample(20'000'000), 3, 24), "a window of more than 8 MiB");
  // A frame of one block of 3 bytes that says it has 9.
  refuse(std::string("\x28\xb5\x2f\xfd\x20\x09\x19\0\0abc", 12), "the data was damaged");
  CHECK(Stored(std::string("\x28\xb5\x2f\xfd\x20\x03\x19\0\0abc", 12)).read_all() == "abc");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "f",
                       ZstdDecoder(Stored("").file, ZstdRange{0, 100}).read(wrong.data(), 1));
}

TEST_CASE("a pool continues where a decoder stopped") {
  const std::string bytes = sample(400'000);
  const Stored stored(frame_of(bytes));
  ZstdPool pool;
  std::string out(100'000, '\0');
  for (const std::int64_t at : {0, 100'000, 250'000}) {
    ZstdPool::Lease lease(pool, stored.file, stored.range, at, at + 100'000);
    CHECK(lease->position() == (at == 250'000 ? 200'000 : at));
    lease->read_at(at, out.data(), out.size());
    CHECK(out == bytes.substr(static_cast<std::size_t>(at), out.size()));
  }
  {
    // The first is behind the position, so there are two.
    ZstdPool::Lease lease(pool, stored.file, stored.range, 50'000, 60'000);
    CHECK(lease->position() == 0);
    lease->read_at(50'000, out.data(), 10'000);
  }
  CHECK(ZstdPool::Lease(pool, stored.file, stored.range, 200'000, 200'001)->position() == 60'000);
  CHECK(ZstdPool::Lease(pool, stored.file, stored.range, 350'000, 350'001)->position() == 350'000);
}

TEST_CASE("threads read blocks of a stream in any order") {
  const std::string bytes = sample(1 << 20);
  const Stored stored(frame_of(bytes));
  ZstdPool pool;
  constexpr std::int64_t kBlock = 10'000;
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> same{true};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      std::string out(kBlock, '\0');
      for (std::int64_t at; (at = next.fetch_add(kBlock)) + kBlock <= std::ssize(bytes);) {
        ZstdPool::Lease lease(pool, stored.file, stored.range, at, at + kBlock);
        lease->read_at(at, out.data(), out.size());
        if (bytes.compare(static_cast<std::size_t>(at), kBlock, out) != 0) same = false;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(same);
}

}  // namespace
}  // namespace tessera::io
