#include "tools/tessera/model/chat_prompt.h"

#include <ctime>
#include <nlohmann/json.hpp>

#include "io/chat/conversation_reader.h"

namespace tessera::tools {

ChatPrompt chat_prompt(const io::Tokenizer& tokenizer, const io::OrderedJson& conversation,
                       const std::string& template_file, const std::string& name) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  const io::ChatFormat format(tokenizer, template_file, local, "--chat-template");
  io::chat::Dict variables;
  try {
    variables = io::template_variables(conversation, {"messages"});
  } catch (const InvalidArgument& error) {
    throw InvalidArgument("{}: {}", name, error.what());
  }
  return {tokenizer.encode(format.render(variables, true).text, name),
          format.turn_ends(tokenizer, variables)};
}

}  // namespace tessera::tools
