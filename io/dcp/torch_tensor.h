#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "io/base/byte_range.h"

namespace tessera::io {

/// safetensors' name of a PyTorch dtype ("F32" for "float32"); empty if it has none.
std::string_view safetensors_from_torch(std::string_view name);

/// Elements of a shape. @param where  named in errors. @throws CorruptCheckpoint on an overflow
std::int64_t count_elements(const Shape& shape, const std::string& where);

/// A tensor in an archive of torch.save, and the place of its bytes.
struct TorchTensor {
  std::string_view dtype;      ///< PyTorch's name
  DType carrier = DType::F32;  ///< the same, or the dtype to copy the elements as
  Shape shape;
  Strides strides;                 ///< in elements, none negative
  std::int64_t begin = 0;          ///< its first element, in bytes counted in the archive
  std::int64_t storage_begin = 0;  ///< the storage that holds them; may hold more
  std::int64_t storage_end = 0;
  std::optional<std::uint32_t> crc32;  ///< of the storage; empty if none was written
};

/// Reads the description of the one tensor that an archive of torch.save holds: its directory and
/// the pickle data.pkl. Tensor data is not read. Executes nothing: see Pickle.
/// @throws Unsupported naming what tessera does not read: a dtype that safetensors lacks too,
///         big-endian data, elements that wait to be conjugated or negated, anything that is no
///         tensor; CorruptCheckpoint, IoError
TorchTensor read_torch_tensor(const ByteRange& archive);

}  // namespace tessera::io
