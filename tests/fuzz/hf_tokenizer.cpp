// A Hugging Face tokenizer.json up to the first NUL, and text encoded with it.
#include "io/tokenizer/files.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(hf_tokenizer, "hf_tokenizer") {
  const std::string_view input = fuzz::text_of(data, size);
  const std::size_t cut = std::min(input.find('\0'), input.size());
  fuzz::try_parse([&] {
    io::TokenizerFiles files;
    files.content[io::kTokenizerJson] = input.substr(0, cut);
    const auto tokenizer = io::make_tokenizer(std::move(files));
    const std::string_view text = input.substr(std::min(cut + 1, input.size()));
    const auto ids = tokenizer->encode(text);
    for (const std::int32_t id : ids) fuzz::expect(id >= 0 && id < tokenizer->vocab_size());
    (void)tokenizer->decode(ids);
    fuzz::expect(io::tokenizer_from_json(tokenizer->to_json())->encode(text) == ids);
  });
  return 0;
}
