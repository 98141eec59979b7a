#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::io {

/// CRC-64/XZ (polynomial of ECMA-182, reflected, start and final xor all ones) of `bytes` bytes.
/// @param crc  checksum of the preceding bytes; 0 at the start
/// crc64("123456789") is 995dc9bbdf1939fa.
std::uint64_t crc64(const void* data, std::size_t bytes, std::uint64_t crc = 0);

/// Checksum of A followed by B, from their checksums and the length of B in bytes; O(log bytes_b).
std::uint64_t crc64_combine(std::uint64_t crc_a, std::uint64_t crc_b, std::uint64_t bytes_b);

/// CRC-32 of zip and gzip. @param crc  checksum of the preceding bytes; 0 at the start
/// crc32("123456789") is cbf43926.
std::uint32_t crc32(const void* data, std::size_t bytes, std::uint32_t crc = 0);
/// As crc64_combine, for CRC-32.
std::uint32_t crc32_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t bytes_b);

/// "crc64:995dc9bbdf1939fa"
std::string format_checksum(std::uint64_t crc);
/// Inverse of format_checksum. False on anything but "crc64:" and 16 lower-case hex digits.
bool parse_checksum(std::string_view text, std::uint64_t& crc);

}  // namespace tessera::io
