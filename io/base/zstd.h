#pragma once

#include <compare>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "io/base/file.h"

struct ZSTD_DCtx_s;

namespace tessera::io {

/// Largest window of a zstd frame: 8 MiB, which RFC 8878 asks every decoder to support. A decoder's
/// memory is about a window, whatever its frames say.
inline constexpr int kMaxZstdWindowLog = 23;

/// Range of a file that holds zstd frames.
struct ZstdRange {
  std::int64_t offset = 0, length = 0;  ///< bytes
  // clang-tidy 14 mistakes its 0 for a null pointer. NOLINTNEXTLINE(modernize-use-nullptr)
  friend auto operator<=>(const ZstdRange&, const ZstdRange&) = default;
};

/// Decodes the frames of a range, one after the other. Skips skippable frames.
class ZstdDecoder {
 public:
  /// @param range       if the file is shorter, read() throws CorruptCheckpoint
  /// @param window_log  largest window of a frame, as a power of 2
  ZstdDecoder(std::shared_ptr<const File> file, const ZstdRange& range,
              int window_log = kMaxZstdWindowLog);
  ~ZstdDecoder();
  ZstdDecoder(const ZstdDecoder&) = delete;
  ZstdDecoder& operator=(const ZstdDecoder&) = delete;

  /// "run/__0_0.distcp, zstd stream in bytes 0 to 900"
  const std::string& name() const { return name_; }
  /// Bytes decoded so far.
  std::int64_t position() const { return position_; }
  /// Bytes of the range read so far.
  std::int64_t consumed() const { return read_; }
  bool failed() const { return failed_; }
  bool is_of(const std::string& path, const ZstdRange& range) const {
    return file_->path().native() == path && range_ == range;
  }
  std::int64_t memory() const;  ///< bytes

  /// Decodes up to `bytes` more, fewer only at the end.
  /// @throws CorruptCheckpoint on damaged or truncated frames or other bytes between them;
  ///         Unsupported on a larger window or a dictionary; errors of File::read
  std::size_t read(char* out, std::size_t bytes);
  /// Decodes exactly `bytes` from a position; begins anew if it is behind.
  /// @throws as read(), and CorruptCheckpoint if the frames have fewer bytes
  void read_at(std::int64_t position, char* out, std::size_t bytes);

 private:
  struct Free {
    void operator()(ZSTD_DCtx_s* context) const;
  };
  void reset();
  /// Reads more of the file behind what is left of `input_`.
  void refill();

  const std::shared_ptr<const File> file_;
  const ZstdRange range_;
  const int window_log_;
  const std::string name_;
  std::unique_ptr<ZSTD_DCtx_s, Free> context_;
  std::vector<char> input_;
  std::size_t input_at_ = 0, input_end_ = 0;  // range of input_ that is not decoded yet
  std::int64_t read_ = 0;                     // bytes of the range in or before input_
  std::int64_t position_ = 0;
  bool between_frames_ = true, failed_ = false;
};

/// First and last bytes of what frames decode to.
struct ZstdEnds {
  static constexpr std::size_t kKept = std::size_t{64} << 10;
  std::string head, tail;  ///< up to kKept bytes each
  std::int64_t size = 0;   ///< bytes in total
};
/// @param most  maximum size. @throws as ZstdDecoder::read; CorruptCheckpoint if it is exceeded
ZstdEnds read_zstd_ends(ZstdDecoder& decoder, std::int64_t most);

/// Decoders that are kept where they stopped: reads of a range in ascending order decode it once,
/// also those of several threads. Idle decoders take up to 64 MiB. Thread-safe.
class ZstdPool {
 public:
  /// A decoder for one thread, which returns to the pool unless it failed.
  class Lease {
   public:
    /// For reads in [begin, end) of what a range decodes to. Waits for a decoder of another thread
    /// that will stop at or before `begin`: it is ahead of a new one.
    /// @throws as ZstdDecoder
    Lease(ZstdPool& pool, std::shared_ptr<const File> file, const ZstdRange& range,
          std::int64_t begin, std::int64_t end);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ZstdDecoder* operator->() { return &decoder_.front(); }

   private:
    void release() noexcept;
    ZstdPool& pool_;
    const std::string path_;
    const ZstdRange range_;
    const std::int64_t end_;
    std::list<ZstdDecoder> decoder_;  // one, moved from and to idle_
  };

 private:
  std::mutex mutex_;
  std::condition_variable released_;
  // Guarded by mutex_.
  std::list<ZstdDecoder> idle_;    // last used first
  std::set<const Lease*> active_;  // have a decoder, or make one
  // Path, range and `begin` of those that choose or wait.
  std::multiset<std::tuple<std::string, ZstdRange, std::int64_t>> waiting_;
};

/// A range that a source's files hold, and the pool with its decoders.
struct ZstdItem {
  std::shared_ptr<ZstdPool> pool;
  ZstdRange range;
};

}  // namespace tessera::io
