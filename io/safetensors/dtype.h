#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/base/dtype.h"

namespace tessera::io {

/// Bits of one element of a safetensors dtype ("F32", "F8_E4M3", "F4", ...); 0 if unknown.
int safetensors_dtype_bits(std::string_view name);
/// DType for a safetensors dtype; empty if tessera lacks it (U64, F8_E4M3, ...).
std::optional<DType> dtype_from_safetensors(std::string_view name);
/// DType for copying elements of a safetensors dtype unchanged: the same dtype or, if tessera lacks
/// it, an integer of its size ("U32" as I32, "F8_E4M3" as U8). Empty if the name is unknown or an
/// element is not a whole number of bytes.
std::optional<DType> carrier_of_safetensors(std::string_view name);
/// safetensors name: "F32", "BF16", "BOOL", ...
std::string_view safetensors_dtype_name(DType dtype);

}  // namespace tessera::io
