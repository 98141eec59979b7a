#include "io/checkpoint/index.h"

#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(index, "index") {
  fuzz::try_parse([&] {
    const io::CheckpointIndex index = io::parse_index(fuzz::text_of(data, size), "index.json");
    // An accepted index survives format and parse.
    const std::string text = io::format_index(index);
    fuzz::expect(io::format_index(io::parse_index(text, "again")) == text);
  });
  return 0;
}
