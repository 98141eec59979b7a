#include "io/seal/seal.h"

#include <nlohmann/json.hpp>
#include <string>

#include "io/base/crc.h"
#include "io/base/json.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(seal, "seal") {
  const std::string_view given = fuzz::text_of(data, size);
  fuzz::try_parse([&] { io::parse_seal(given, "seal"); });
  fuzz::try_parse([&] {
    io::Json json = io::parse_json(given, "seal");
    if (!json.is_object()) return;
    // With the checksum that the rest should have.
    json.erase("checksum");
    const std::string text = json.dump();
    json["checksum"] = io::format_checksum(io::crc64(text.data(), text.size()));
    const io::Seal seal = io::parse_seal(json.dump(), "seal");
    // An accepted seal survives format and parse.
    const std::string formatted = io::format_seal(seal);
    fuzz::expect(io::format_seal(io::parse_seal(formatted, "again")) == formatted);
  });
  return 0;
}
