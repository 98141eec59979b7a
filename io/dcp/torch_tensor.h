#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "io/base/byte_range.h"

namespace tessera::io {

/// safetensors name of a PyTorch dtype ("F32" for "float32"); empty if there is none.
std::string_view safetensors_from_torch(std::string_view name);

/// numel(shape). @param where  named in errors. @throws CorruptCheckpoint on overflow
std::int64_t count_elements(const Shape& shape, const std::string& where);

/// A tensor in a torch.save archive, and the location of its bytes.
struct TorchTensor {
  std::string_view dtype;      ///< PyTorch's name
  DType carrier = DType::F32;  ///< that dtype, or the integer of its size if tessera lacks it
  Shape shape;
  Strides strides;                 ///< in elements, none negative
  std::int64_t begin = 0;          ///< offset of the first element in the archive, in bytes
  std::int64_t storage_begin = 0;  ///< offsets of its storage, which may be larger, in bytes
  std::int64_t storage_end = 0;
  std::optional<std::uint32_t> crc32;  ///< of the storage; empty if not recorded
};

/// Reads the description of the single tensor in a torch.save archive: the zip directory and the
/// pickle data.pkl, but no tensor data. Executes nothing: see Pickle.
/// @throws Unsupported on a dtype that safetensors lacks too, big-endian data, a pending
///         conjugation or negation, or another object than one tensor; CorruptCheckpoint, IoError
TorchTensor read_torch_tensor(const ByteRange& archive);

}  // namespace tessera::io
