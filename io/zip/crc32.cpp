#include "io/zip/crc32.h"

#include <isa-l/crc.h>

namespace tessera::io {

std::uint32_t crc32(const void* data, std::size_t bytes, std::uint32_t crc) {
  return crc32_gzip_refl(crc, static_cast<const unsigned char*>(data), bytes);
}

}  // namespace tessera::io
