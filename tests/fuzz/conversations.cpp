// A line of a file of conversations, tokenized as bytes.
#include "io/chat/conversation_reader.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;

TESSERA_FUZZ_TARGET(conversations, "conversations") {
  static const io::ConversationReader reader = [] {
    const auto tokenizer = io::make_byte_tokenizer();
    const std::string text =
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ m.tool_calls | tojson if "
        "m.tool_calls }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    const fuzz::InputFile file;
    const std::string path =
        file.write(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
    return io::ConversationReader(
        tokenizer, io::ChatFormat(*tokenizer, path, io::parse_chat_date("2024-07-26"), "option"));
  }();
  fuzz::try_parse([&] {
    const io::Conversation found = reader.read(fuzz::text_of(data, size), "line");
    fuzz::expect(found.has_loss.size() == found.tokens.size());
  });
  return 0;
}
