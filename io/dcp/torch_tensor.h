#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "io/base/byte_range.h"

namespace tessera::io {

/// The DType of one of PyTorch's ("float32", "bfloat16", "bool"); empty if tessera has none.
std::optional<DType> dtype_from_torch(std::string_view name);

/// A tensor in an archive of torch.save, and where its bytes lie.
struct TorchTensor {
  DType dtype = DType::F32;
  Shape shape;
  std::int64_t begin = 0;  ///< first byte of its elements, row-major, counted in the archive
  std::int64_t storage_begin = 0;  ///< the storage that holds them; may hold more
  std::int64_t storage_end = 0;
  std::optional<std::uint32_t> crc32;  ///< of the storage; empty if none was written
};

/// Reads the description of the one tensor that an archive of torch.save holds: its directory and
/// the pickle data.pkl. Tensor data is not read. Executes nothing: see Pickle.
/// @throws Unsupported naming what tessera does not read: a dtype, big-endian data, memory that is
///         not in row-major order, anything that is no tensor; CorruptCheckpoint, IoError
TorchTensor read_torch_tensor(const ByteRange& archive);

}  // namespace tessera::io
