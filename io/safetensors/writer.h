#pragma once

#include <map>
#include <string>
#include <vector>

#include "io/safetensors/header.h"

namespace tessera::io {

/// A tensor to write.
struct SafetensorsSpec {
  std::string name;
  DType dtype = DType::F32;
  Shape shape;
  /// Overrides the name of dtype: a dtype of the same size that tessera lacks.
  std::string stored_dtype = {};
};

/// Layout of a file to write: `preamble` at byte 0, each tensor at its entry's begin.
struct SafetensorsPlan {
  std::string preamble;                   ///< length, JSON, padding
  std::vector<SafetensorsEntry> tensors;  ///< in file order
  std::vector<std::size_t> order;         ///< index of each tensor's spec
  std::int64_t file_size = 0;             ///< bytes
};

/// Lays out a safetensors file: data starts at a multiple of 8; tensors of wider dtypes first, then
/// by name, so that each is aligned. Adds `format: pt` to the metadata, which some loaders require.
/// @throws InvalidArgument on a name that is duplicate, reserved, too long or not UTF-8, or a
///         header over kMaxSafetensorsHeader
SafetensorsPlan plan_safetensors(const std::vector<SafetensorsSpec>& tensors,
                                 std::map<std::string, std::string> metadata = {});

}  // namespace tessera::io
