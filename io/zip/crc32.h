#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::io {

/// CRC-32 of zip and gzip. @param crc  checksum of the preceding bytes; 0 at the start
/// crc32("123456789") is cbf43926.
std::uint32_t crc32(const void* data, std::size_t bytes, std::uint32_t crc = 0);

/// Checksum of A followed by B; see crc64_combine.
std::uint32_t crc32_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t bytes_b);

}  // namespace tessera::io
