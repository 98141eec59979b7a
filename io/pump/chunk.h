#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "io/base/zstd.h"

namespace tessera::io {

/// A block of a tensor: offsets and extents in elements, per dim.
struct Box {
  Shape offsets, shape;
  friend bool operator==(const Box&, const Box&) = default;
};

/// Whether a storage was verified. Shared by its chunks, so that it is read for that only once.
struct StorageCheck {
  std::mutex mutex;
  bool verified = false;  ///< guarded by mutex
};

/// Storage of a chunk whose elements are strided, or whose checksum covers more than its elements.
struct ChunkStorage {
  Shape shape;                     ///< of the chunk's box
  std::optional<Strides> strides;  ///< in elements; empty: row-major
  /// Bytes of the file covered by the checksum.
  std::int64_t checked_begin = 0, checked_end = 0;
  std::shared_ptr<StorageCheck> check = std::make_shared<StorageCheck>();
};

enum class Checksum : std::uint8_t { None, Crc64, Crc32 };

/// A contiguous range of a box's elements in row-major order, and its location in a file.
struct Chunk {
  std::string file;             ///< name inside the source's directory
  std::int64_t byte_begin = 0;  ///< from the start of the file
  std::int64_t byte_end = 0;
  std::int64_t begin = 0;  ///< first element, relative to the box
  std::int64_t end = 0;
  std::optional<Box> box;   ///< absent: the box is the whole tensor
  std::uint64_t crc64 = 0;  ///< checksum of the bytes; a CRC-32 if `checksum` is Crc32
  Checksum checksum = Checksum::Crc64;
  std::shared_ptr<const ChunkStorage> storage{};  ///< null: row-major, all checksummed
  /// Null: bytes are those of the file; else of what a range of the file decodes to.
  std::shared_ptr<const ZstdItem> zstd{};

  /// The bytes of the file that hold the chunk.
  std::pair<std::int64_t, std::int64_t> file_bytes() const {
    return zstd ? std::pair(zstd->range.offset, zstd->range.offset + zstd->range.length)
                : std::pair(byte_begin, byte_end);
  }
};

/// The StorageCheck of each storage of a source. Thread-safe.
class StorageChecks {
 public:
  /// @param begin  first byte of the storage in the file
  std::shared_ptr<StorageCheck> at(const Chunk& chunk, std::int64_t begin) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<StorageCheck>& check =
        checks_[{chunk.file, chunk.zstd ? chunk.zstd->range : ZstdRange(), begin}];
    if (!check) check = std::make_shared<StorageCheck>();
    return check;
  }

 private:
  std::mutex mutex_;
  std::map<std::tuple<std::string, ZstdRange, std::int64_t>, std::shared_ptr<StorageCheck>> checks_;
};

/// Values that are added to a tensor's elements as they are read: those of merged adapters.
class Addend {
 public:
  virtual ~Addend() = default;
  /// Adds those of elements [begin, begin + n), row-major, to `values`. Thread-safe.
  virtual void add(std::int64_t begin, std::int64_t n, float* values) const = 0;
  /// Checksum of all values.
  virtual std::uint64_t checksum() const = 0;
};

struct TensorRecord {
  DType dtype = DType::F32;
  Shape shape;
  std::vector<Chunk> chunks;  ///< by box, then by first element; cover the tensor exactly once
  std::shared_ptr<const Addend> addend{};  ///< null: elements are as stored; else computed in f32
  std::int64_t addend_begin = 0;           ///< position of the first element in the addend

  std::int64_t width() const { return static_cast<std::int64_t>(dtype_size(dtype)); }
};

}  // namespace tessera::io
