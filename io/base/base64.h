#pragma once

#include <string>
#include <string_view>

namespace tessera::io {

std::string encode_base64(std::string_view bytes);
/// @return false if it is not base64 with padding
bool decode_base64(std::string_view text, std::string& bytes);

}  // namespace tessera::io
