// A pattern in its first line, matched against the rest.
#include "io/tokenizer/regex.h"
#include "io/tokenizer/unicode.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(tokenizer_regex, "tokenizer_regex") {
  const std::string_view input = fuzz::text_of(data, size);
  const std::size_t cut = std::min(input.find('\n'), input.size());
  const std::string text =
      io::replace_malformed_utf8(input.substr(std::min(cut + 1, input.size())));
  for (const auto syntax : {io::RegexSyntax::Oniguruma, io::RegexSyntax::Rust}) {
    fuzz::try_parse([&] {
      const io::Regex regex(input.substr(0, cut), syntax, "pattern");
      io::RegexMatches matches(regex);
      matches.start(text);
      std::size_t last = 0;
      for (std::size_t begin = 0, end = 0; matches.next(begin, end); last = end)
        fuzz::expect(last <= begin && begin <= end && end <= text.size());
    });
  }
  return 0;
}
