// Entry point of a libFuzzer program with one target.
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return tessera::fuzz::targets().front().run(data, size);
}
