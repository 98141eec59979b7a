// A tokenizer description, and text encoded with it.
#include "io/data/tokenizer.h"

#include <nlohmann/json.hpp>

#include "io/base/json.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(tokenizer, "tokenizer") {
  // JSON up to the first NUL, text after it.
  const std::string_view input = fuzz::text_of(data, size);
  const std::size_t cut = std::min(input.find('\0'), input.size());
  fuzz::try_parse([&] {
    const auto tokenizer = io::tokenizer_from_json(input.substr(0, cut));
    const std::string_view text = input.substr(std::min(cut + 1, input.size()));
    const auto ids = tokenizer->encode(text);
    for (const std::int32_t id : ids) fuzz::expect(id >= 0 && id < tokenizer->vocab_size());
    const bool is_lossless = tokenizer->kind() == "bytes" || tokenizer->kind() == "chars";
    fuzz::expect(!is_lossless || tokenizer->decode(ids) == text);
    fuzz::expect(io::tokenizer_from_json(tokenizer->to_json())->encode(text) == ids);
  });
  return 0;
}
