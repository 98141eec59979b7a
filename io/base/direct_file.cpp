#include "io/base/direct_file.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>

#include "core/base/error.h"

namespace tessera::io {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kLeastDirectRead = std::size_t{64} << 10;  // bytes

std::int64_t round_down(std::int64_t value) {
  return value - value % static_cast<std::int64_t>(kDirectAlignment);
}
std::int64_t round_up(std::int64_t value) {
  return round_down(value + static_cast<std::int64_t>(kDirectAlignment) - 1);
}

/// Whether the page cache has all of the page-aligned [begin, end); false if unknown.
bool pages_are_cached(const File& file, std::int64_t begin, std::int64_t end) {
  // cachestat(2) is new in Linux 6.5; older system headers do not define its number.
  constexpr long kCachestat = 451;
  struct {
    std::uint64_t offset, bytes;
  } range{static_cast<std::uint64_t>(begin), static_cast<std::uint64_t>(end - begin)};
  struct {
    std::uint64_t cached, dirty, writeback, evicted, recently_evicted;
  } pages{};
  if (::syscall(kCachestat, file.descriptor(), &range, &pages, 0) != 0) return false;
  static const auto kPageBytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return pages.cached >= (range.bytes + kPageBytes - 1) / kPageBytes;
}

}  // namespace

AlignedBuffer::AlignedBuffer(std::size_t bytes)
    : size_(static_cast<std::size_t>(round_up(static_cast<std::int64_t>(bytes)))) {
  const bool large = size_ >= kHugePage;
  void* data = nullptr;
  if (::posix_memalign(&data, large ? kHugePage : kDirectAlignment, size_) != 0)
    throw std::bad_alloc();
  data_.reset(static_cast<char*>(data));
  // With contiguous physical memory, a transfer is split into fewer requests. Only a hint.
  if (large) ::madvise(data_.get(), size_, MADV_HUGEPAGE);
}

DirectFile::DirectFile(File file, bool direct) : file_(std::move(file)) {
  if (!direct) return;
  direct_ = file_.reopen_direct();
  use_direct_ = direct_.descriptor() >= 0;
}

const char* DirectFile::read(std::int64_t offset, std::size_t bytes, const AlignedBuffer& scratch,
                             char* preferred) const {
  char* const plain = preferred ? preferred : scratch.data();
  const std::int64_t begin = round_down(offset);
  const std::int64_t end = round_up(offset + static_cast<std::int64_t>(bytes));
  if (bytes < kLeastDirectRead || !use_direct_.load(std::memory_order_relaxed) ||
      pages_are_cached(file_, begin, end)) {
    file_.read(offset, plain, bytes);
    return plain;
  }
  require(static_cast<std::size_t>(end - begin) <= scratch.size(),
          "a scratch buffer of {} bytes is too small to read {} bytes", scratch.size(), bytes);
  ssize_t n = 0;
  do {
    n = ::pread(direct_.descriptor(), scratch.data(), static_cast<std::size_t>(end - begin), begin);
  } while (n < 0 && errno == EINTR);
  if (n < 0) {
    use_direct_.store(false, std::memory_order_relaxed);
    n = 0;
  }
  // A buffered read fetches what a short or failed direct read left, or reports the error.
  char* const data = scratch.data() + (offset - begin);
  const auto got = static_cast<std::size_t>(
      std::clamp<std::int64_t>(n - (offset - begin), 0, static_cast<std::int64_t>(bytes)));
  file_.read(offset + static_cast<std::int64_t>(got), data + got, bytes - got);
  return data;
}

void DirectFile::write(std::int64_t offset, const char* data, std::size_t bytes) {
  std::size_t done = 0;
  if (use_direct_.load(std::memory_order_relaxed)) {
    const auto aligned = static_cast<std::size_t>(round_down(static_cast<std::int64_t>(bytes)));
    while (done < aligned) {
      const ssize_t n = ::pwrite(direct_.descriptor(), data + done, aligned - done,
                                 offset + static_cast<std::int64_t>(done));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0 || static_cast<std::size_t>(n) % kDirectAlignment != 0) {
        use_direct_.store(false, std::memory_order_relaxed);
        break;
      }
      done += static_cast<std::size_t>(n);
    }
  }
  if (done == bytes) return;
  // A buffered write handles the unaligned end of the file, and what a failed direct write left.
  const std::int64_t rest = offset + static_cast<std::int64_t>(done);
  file_.write_at(rest, data + done, bytes - done);
  file_.start_writeback(rest, static_cast<std::int64_t>(bytes - done));
}

}  // namespace tessera::io
