#pragma once

#include <map>
#include <string>
#include <vector>

#include "io/safetensors/header.h"

namespace tessera::io {

/// A tensor to be written.
struct SafetensorsSpec {
  std::string name;
  DType dtype = DType::F32;
  Shape shape;
  /// In the place of dtype's name: of a dtype that tessera lacks, whose elements have as many
  /// bytes.
  std::string stored_dtype = {};
};

/// Where everything goes in a file that is still to be written: `preamble` at byte 0, then each
/// tensor's bytes at its entry's begin.
struct SafetensorsPlan {
  std::string preamble;                   ///< length, JSON, padding
  std::vector<SafetensorsEntry> tensors;  ///< in order of their bytes in the file
  std::int64_t file_size = 0;             ///< bytes
};

/// Lays out a safetensors file: tensors by alignment of the dtype, widest first, then by name, so
/// that each is aligned to its dtype; the data starts at a multiple of 8. `format: pt` is added to
/// the metadata, since some loaders refuse a file without it.
/// @throws InvalidArgument on a name that stands twice, is reserved, too long or no UTF-8, or a
///         header over kMaxSafetensorsHeader
SafetensorsPlan plan_safetensors(const std::vector<SafetensorsSpec>& tensors,
                                 std::map<std::string, std::string> metadata = {});

}  // namespace tessera::io
