#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::io {

/// Parses "5GB", "256MiB", "1.5 GB" or "4096" into bytes; decimal (kB, MB, GB, TB) and binary (KiB,
/// MiB, GiB, TiB) units.
/// @throws InvalidArgument on anything else, or a size under 1 byte or over 2^62
std::int64_t parse_bytes(std::string_view text);

}  // namespace tessera::io
