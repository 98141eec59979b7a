#include "io/data/token_file.h"

#include <vector>

#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(token_file, "token_file") {
  static const fuzz::InputFile file;
  constexpr std::int64_t kVocabulary = 50257;
  const std::string path = file.write(data, size);
  fuzz::try_parse([&] {
    const auto tokens = io::open_token_file(path, kVocabulary);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens->size()));
    tokens->read(0, ids.size(), ids.data());
    for (const std::int32_t id : ids) fuzz::expect(id >= 0 && id < kVocabulary);
  });
  return 0;
}
