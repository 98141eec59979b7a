#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "io/base/file.h"
#include "io/checkpoint/index.h"

namespace tessera::io {

/// Name, shape and stored dtype of a tensor.
struct TensorInfo {
  std::string name;
  Shape shape;
  DType dtype = DType::F32;
};

/// Where the bytes of a tensor lie.
struct TensorLayout {
  std::vector<Chunk> chunks;   ///< as in TensorRecord; files are names inside the source's path()
  bool has_checksums = false;  ///< false: crc64 of the chunks means nothing
  bool is_crc32 = false;       ///< that checksum is a CRC-32, as zip archives have it
};

/// Named tensors, wherever and however they are stored: in shards, in boxes, in somebody else's
/// files. Reads ranges on demand and keeps no data. Threads may read at once.
class TensorSource {
 public:
  /// Receives elements [begin, begin + n) in the stored dtype.
  using Sink = std::function<void(std::int64_t begin, const void* data, std::int64_t n)>;

  virtual ~TensorSource() = default;
  /// The file or directory that holds the tensors.
  virtual const fs::path& path() const = 0;
  virtual const std::vector<TensorInfo>& tensors() const = 0;
  /// Reads elements [begin, end) of a tensor, in row-major order, converted to `dtype`.
  /// @param out  room for end - begin elements of dtype
  /// @throws InvalidArgument on an unknown name or a range outside the tensor, Unsupported if the
  ///         dtypes do not convert (see can_convert), IoError, CorruptCheckpoint
  virtual void read(const std::string& name, std::int64_t begin, std::int64_t end, void* out,
                    DType dtype) const = 0;
  /// Passes a whole tensor, in order and in its stored dtype, through a buffer of at most
  /// `buffer_bytes` (or of one element). Checksums, where the source has any, are checked; the sink
  /// may have seen the data by then, so what it made of it must not be used if this throws.
  virtual void stream(const std::string& name, std::size_t buffer_bytes,
                      const Sink& sink) const = 0;

  /// Where a tensor lies, for readers that copy ranges of bytes and check checksums themselves;
  /// empty: only read() and stream() know. @throws InvalidArgument on an unknown name
  virtual std::optional<TensorLayout> layout(const std::string& name) const {
    static_cast<void>(name);
    return std::nullopt;
  }
  /// Opens a file that a layout names, and makes sure that it belongs to this source.
  /// @throws IoError, CorruptCheckpoint
  virtual File open_file(const std::string& name) const { return File::open(path() / name); }
};

}  // namespace tessera::io
