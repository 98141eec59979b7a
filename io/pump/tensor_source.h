#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "io/base/file.h"
#include "io/pump/chunk.h"

namespace tessera::io {

struct TensorInfo {
  std::string name;
  Shape shape;
  DType dtype = DType::F32;
};

struct ReadPart;     // read_parts.h
struct ReadOptions;  // read_parts.h

struct BoxOptions {
  int threads = 1;
  /// Whether the first read of any part of a chunk verifies all of it. False reads only wanted
  /// elements, and up to 32 KiB between them, and verifies chunks that lie inside the box.
  bool verify_partial = true;
};

/// Named tensors and the locations of their bytes in files. Each file format has an implementation;
/// the pump reads, verifies and converts. Thread-safe.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  /// File or directory of the tensors.
  virtual const fs::path& path() const = 0;
  virtual const std::vector<TensorInfo>& tensors() const = 0;
  /// Chunks of a tensor. @throws InvalidArgument on an unknown name, Unsupported on a dtype that
  /// tessera can neither read nor copy
  virtual std::shared_ptr<const TensorRecord> record(const std::string& name) const = 0;
  /// Opens a file named by a chunk and checks that it belongs to this source.
  /// @throws IoError, CorruptCheckpoint
  virtual File open_file(const std::string& name) const { return File::open(path() / name); }
  /// Name of a tensor in error messages.
  virtual std::string title(const std::string& name) const { return name; }

  /// Reads elements [begin, end) of a tensor, in row-major order, converted to `dtype`. The first
  /// read of a chunk verifies all of it.
  /// @param out  room for end - begin elements of dtype
  /// @throws InvalidArgument on an unknown name or a range outside the tensor, Unsupported if the
  ///         dtypes do not convert (see can_convert), IoError, CorruptCheckpoint
  void read(const std::string& name, std::int64_t begin, std::int64_t end, void* out,
            DType dtype) const;
  /// Reads a box of a tensor, row-major, converted to `dtype`. @throws as read()
  void read_box(const std::string& name, const Box& box, void* out, DType dtype,
                const BoxOptions& options = {}) const;

 private:
  // @param verifies  whether to verify a chunk of the one tensor of `parts`; empty: all
  void read_verified(std::span<const ReadPart> parts, ReadOptions& options,
                     const std::function<bool(std::size_t chunk)>& verifies = {}) const;
  mutable std::mutex verified_mutex_;
  mutable std::set<std::pair<std::string, std::size_t>> verified_;  // tensor, index of the chunk
};

}  // namespace tessera::io
