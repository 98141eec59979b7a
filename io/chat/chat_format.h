#pragma once

#include <cstdint>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/chat/template.h"
#include "io/data/tokenizer.h"

namespace tessera::io {

/// A date as strftime_now() of templates sees it. @param text  "2024-07-26" @throws InvalidArgument
std::tm parse_chat_date(const std::string& text);

/// The chat template of a model, with the special tokens that it may name. Immutable and
/// thread-safe.
class ChatFormat {
 public:
  /// The template of `file`, if that is given; else the one that came with the tokenizer:
  /// chat_template.jinja, or chat_template of tokenizer_config.json (a text, or a list of which
  /// "default" is used, and "tool_use" for conversations with tools), as transformers has it.
  /// Without one, rendering throws Unsupported.
  /// @param option  that names a template file, for errors
  /// @throws InvalidArgument on a malformed template; Unsupported; IoError
  ChatFormat(const Tokenizer& tokenizer, const std::string& file, const std::tm& now,
             const std::string& option);

  /// @param conversation  variables of the template: messages (a list of dicts), and tools or others
  /// @throws InvalidArgument what the template raises, with its file and line; Unsupported
  chat::Rendering render(const chat::Dict& conversation, bool add_generation_prompt) const;

  /// The same, where `generated` holds the assistant's turns, each with its end of turn: those that
  /// {% generation %} marks, or else what a turn adds to the messages before it with a generation
  /// prompt.
  /// @throws InvalidArgument also if the template renders a turn in another way later
  chat::Rendering render_marked(const chat::Dict& conversation) const;

  /// Tokens that end a turn of the assistant: the special token that follows its text, if any.
  std::vector<std::int32_t> turn_ends(const Tokenizer& tokenizer) const;

 private:
  const chat::Template& template_of(const chat::Dict& conversation) const;
  std::pair<std::size_t, std::size_t> turn(const chat::Dict& conversation, std::string_view whole,
                                           std::size_t message) const;

  std::tm now_;
  chat::Dict tokens_;
  std::optional<chat::Template> template_, tool_use_;
  std::string no_template_;  // for the error
};

/// The tokenizer with a chat template in the place of its own, which exports then have. Without files
/// (bytes, chars) it stays as it is.
TokenizerPtr with_chat_template(TokenizerPtr tokenizer, const std::string& file);

}  // namespace tessera::io
