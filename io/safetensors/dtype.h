#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/base/dtype.h"

namespace tessera::io {

/// Bits of one element of a safetensors dtype ("F32", "F8_E4M3", "F4", ...); 0 if unknown.
int safetensors_dtype_bits(std::string_view name);
/// The DType of a safetensors dtype; empty if tessera has none (U64, F8_E4M3, ...).
std::optional<DType> dtype_from_safetensors(std::string_view name);
/// The DType in which elements of a safetensors dtype are copied as they are: its own, or, if
/// tessera has none, an integer of as many bytes ("U32" as I32, "F8_E4M3" as U8). Empty if the name
/// is unknown or an element is no whole bytes.
std::optional<DType> carrier_of_safetensors(std::string_view name);
/// "F32", "BF16", "BOOL", ...
std::string_view safetensors_dtype_name(DType dtype);

}  // namespace tessera::io
