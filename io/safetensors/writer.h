#pragma once

#include <map>
#include <string>
#include <vector>

#include "io/safetensors/header.h"

namespace tessera::io {

struct SafetensorsSpec {
  std::string name;
  DType dtype = DType::F32;
  Shape shape;
  /// If not empty, the dtype in the file: one of the size of `dtype` that tessera lacks.
  std::string stored_dtype = {};
};

/// Layout of a file to write: `preamble` at byte 0, each tensor at its entry's begin.
struct SafetensorsPlan {
  std::string preamble;                   ///< length, JSON, padding
  std::vector<SafetensorsEntry> tensors;  ///< in file order
  std::vector<std::size_t> order;         ///< index of the spec of each of `tensors`
  std::int64_t file_size = 0;             ///< bytes
};

/// Lays out a safetensors file. Data starts at a multiple of 8 bytes. Tensors of wider dtypes come
/// first, so that each is aligned, and are then sorted by name. Adds `format: pt` to the metadata,
/// because some loaders require it.
/// @throws InvalidArgument on a name that is duplicate, reserved, too long or not UTF-8, or a
///         header over kMaxSafetensorsHeader
SafetensorsPlan plan_safetensors(const std::vector<SafetensorsSpec>& tensors,
                                 std::map<std::string, std::string> metadata = {});

}  // namespace tessera::io
