// A SentencePiece model, parsed by our own reader, and text encoded with it.
#include "io/tokenizer/sentence_piece_model.h"

#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(sentence_piece_model, "sentence_piece_model") {
  const std::string_view input = fuzz::text_of(data, size);
  fuzz::try_parse([&] {
    const auto model = io::parse_sentence_piece_model(input);
    if (!model) return;
    auto parts = io::sentence_piece_pipeline(*model);
    if (!parts) return;
    const auto tokenizer = io::make_pipeline_tokenizer(*std::move(parts));
    for (const std::int32_t id : tokenizer->encode("Hello  \u6211 world<s>"))
      fuzz::expect(id >= 0 && id < tokenizer->vocab_size());
  });
  return 0;
}
