#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/base/dtype.h"
#include "io/pump/layout.h"

namespace tessera::io {

// GGUF, version 3, little-endian: the magic "GGUF", u32 version, u64 number of tensors, u64 number
// of keys; then keys {string, u32 type, value}, tensors {string, u32 dims, u64 sizes with the
// innermost first, u32 type, u64 offset}, and the data. Strings are {u64 bytes, UTF-8}, arrays {u32
// type, u64 count, values}. Offsets count from the data's begin, and they and it are multiples of
// general.alignment.
// Source: ggml, docs/gguf.md.

inline constexpr std::string_view kGgufMagic = "GGUF";
inline constexpr std::uint32_t kGgufVersion = 3;
inline constexpr std::int64_t kGgufAlignment = 32;  ///< without general.alignment
inline constexpr int kGgufDims = 4;                 ///< at most

/// Type of a key's value.
enum class GgufType : std::uint32_t {
  U8,
  I8,
  U16,
  I16,
  U32,
  I32,
  F32,
  Bool,
  String,
  Array,
  U64,
  I64,
  F64
};

/// Type of a tensor's elements.
struct GgufElements {
  std::uint32_t id = 0;
  std::string_view name;         ///< "F16", "Q4_K"
  EncodingUnit unit{};           ///< a block's elements and bytes
  std::optional<DType> dtype{};  ///< as which it is read; empty if tessera does not read it
  Encoding encoding = Encoding::Plain;
};

/// Null for an unknown type.
const GgufElements* find_gguf_elements(std::uint32_t id);
/// @throws InternalError for a dtype that GGUF lacks
const GgufElements& gguf_elements_of(DType dtype, Encoding encoding);

}  // namespace tessera::io
