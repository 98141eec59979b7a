// Files of other tokenizers: a letter, then parts separated by NUL. m: vocab.json, merges.txt, text; t: ranks of
// tiktoken, pattern, text; k: tekken.json, text.
#include "io/tokenizer/files.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(tokenizer_files, "tokenizer_files") {
  std::string_view input = fuzz::text_of(data, size);
  if (input.empty()) return 0;
  const char kind = input[0];
  input.remove_prefix(1);
  const auto part = [&] {
    const std::size_t end = std::min(input.find('\0'), input.size());
    const std::string text(input.substr(0, end));
    input.remove_prefix(std::min(end + 1, input.size()));
    return text;
  };
  fuzz::try_parse([&] {
    io::TokenizerFiles files;
    if (kind == 'm') {
      files.content[io::kVocabJson] = part();
      files.content[io::kMergesTxt] = part();
    } else if (kind == 't') {
      files.content[io::kTiktokenModel] = part();
      files.pattern = part();
    } else {
      files.content[io::kTekkenJson] = part();
    }
    const auto tokenizer = io::make_tokenizer(std::move(files));
    const std::string text = part();
    const auto ids = tokenizer->encode(text);
    for (const std::int32_t id : ids) fuzz::expect(id >= 0 && id < tokenizer->vocab_size());
    // Ranks have a token for every byte.
    if (kind != 'm' && tokenizer->special_tokens().empty())
      fuzz::expect(tokenizer->decode(ids) == text);
  });
  return 0;
}
