#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "io/base/json.h"
#include "tools/tessera/model/text_generation.h"

namespace tessera::tools {

struct ChatPrompt {
  Tokens tokens;  ///< the conversation as the model sees it before its answer
  Tokens ends;    ///< tokens that end the answer
};

/// @param conversation   {"messages": [...]}, and what io::template_variables() takes
/// @param template_file  empty: the model's
/// @param name           of the conversation in messages
/// @throws InvalidArgument naming the conversation, or what the template raises; Unsupported without
///   a template
ChatPrompt chat_prompt(const io::Tokenizer& tokenizer, const io::OrderedJson& conversation,
                       const std::string& template_file, const std::string& name);

}  // namespace tessera::tools
