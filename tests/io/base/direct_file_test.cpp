#include "io/base/direct_file.h"

#include <doctest/doctest.h>
#include <fcntl.h>

#include <string>

#include "core/base/error.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

std::string make_content(std::size_t bytes) {
  std::string content(bytes, '\0');
  std::uint32_t next = 1;
  for (char& c : content) c = static_cast<char>((next = next * 1664525 + 1013904223) >> 24);
  return content;
}

TEST_CASE("any range is read, bypassing the page cache or through it") {
  TempDir dir;
  const std::string content = make_content(1'000'003);
  const fs::path path = dir.path() / "file";
  write_text(path, content);
  const AlignedBuffer scratch(content.size() + 2 * kDirectAlignment);
  std::string preferred(content.size(), '\0');
  for (const bool direct : {false, true}) {
    for (const bool cached : {false, true}) {
      const DirectFile file(File::open(path), direct);
      if (!cached) {
        File::open_for_update(path).sync();
        ::posix_fadvise(file.file().descriptor(), 0, 0, POSIX_FADV_DONTNEED);
      }
      for (const std::size_t offset : {0, 1, 4095, 4096, 500'000, 1'000'002}) {
        for (const std::size_t bytes : {0, 1, 4096, 65'536, 65'537, 499'999}) {
          if (offset + bytes > content.size()) continue;
          for (char* const target : {preferred.data(), static_cast<char*>(nullptr)}) {
            const char* const data =
                file.read(static_cast<std::int64_t>(offset), bytes, scratch, target);
            CHECK(content.compare(offset, bytes, data, bytes) == 0);
          }
        }
      }
      CHECK_THROWS_HOLDING(CorruptCheckpoint, "ends at byte 1000003",
                           file.read(900'000, 100'004, scratch, nullptr));
    }
  }
  const DirectFile file(File::open(path));
  CHECK_THROWS_HOLDING(IoError, "cannot write", [&] {
    DirectFile read_only(File::open(path));
    read_only.write(0, scratch.data(), 4096);
  }());
}

TEST_CASE("a file written in blocks is complete, whatever its size") {
  TempDir dir;
  for (const bool direct : {false, true}) {
    for (const std::size_t bytes : {1, 4096, 300'000, 393'216, 393'217}) {
      const std::string content = make_content(bytes);
      const fs::path path = dir.path() / fmt::format("{}-{}", direct, bytes);
      DirectFile file(create_sized_file(path, static_cast<std::int64_t>(bytes)), direct);
      CHECK(fs::file_size(path) == bytes);
      constexpr std::size_t kBlock = 65536;
      const AlignedBuffer block(kBlock);
      for (std::size_t at = (bytes - 1) / kBlock * kBlock;; at -= kBlock) {
        const std::size_t n = content.copy(block.data(), kBlock, at);
        file.write(static_cast<std::int64_t>(at), block.data(), n);
        if (at == 0) break;
      }
      file.sync();
      CHECK(read_text(path) == content);
    }
  }
}

TEST_CASE("a file larger than the disk is refused with both sizes") {
  TempDir dir;
  const std::int64_t size = std::int64_t{1} << 43;  // ext4's limit is 16 TiB
  if (free_bytes(dir.path()) > size) return;
  CHECK_THROWS_HOLDING(IoError, "8796093022208 bytes needed",
                       create_sized_file(dir.path() / "file", size));
}

}  // namespace
}  // namespace tessera::io
