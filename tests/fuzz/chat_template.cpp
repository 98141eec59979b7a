// A chat template up to the first NUL, then the variables that it renders, as JSON.
#include <nlohmann/json.hpp>

#include "io/chat/chat_format.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(chat_template, "chat_template") {
  const std::string_view input = fuzz::text_of(data, size);
  const std::size_t cut = std::min(input.find('\0'), input.size());
  fuzz::try_parse([&] {
    const io::chat::Template parsed(input.substr(0, cut), "template");
    const io::OrderedJson json =
        io::parse_ordered_json(input.substr(std::min(cut + 1, input.size())), "variables");
    if (!json.is_object()) return;
    const io::chat::Rendering found =
        parsed.render(*io::chat::from_json(json).dict(), io::parse_chat_date("2024-07-26"));
    std::size_t last = 0;
    for (const auto& [first, end] : found.generated) {
      fuzz::expect(last <= first && first <= end && end <= found.text.size());
      last = end;
    }
    fuzz::expect(nlohmann::json(found.text).dump().size() > 1);  // throws on malformed UTF-8
  });
  return 0;
}
