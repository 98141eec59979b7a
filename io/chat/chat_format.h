#pragma once

#include <cstdint>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/error.h"
#include "io/chat/template.h"
#include "io/data/tokenizer.h"

namespace tessera::io {

/// A date as strftime_now() of templates sees it. @param text  "2024-07-26" @throws InvalidArgument
std::tm parse_chat_date(const std::string& text);

/// A template renders a turn of the assistant differently when other messages follow, so that its
/// place in the conversation is unknown.
class TurnNotFound : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

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
  /// @throws TurnNotFound; as render()
  chat::Rendering render_marked(const chat::Dict& conversation) const;

  /// The same, where `generated` is the text after the first `prompt` messages with a generation
  /// prompt.
  chat::Rendering render_completion(const chat::Dict& conversation, std::size_t prompt) const;

  /// Tokens that end the assistant's answer to a conversation: the special token that follows the
  /// answer's text, if any; the end of text if the template refuses an answer there.
  std::vector<std::int32_t> turn_ends(const Tokenizer& tokenizer, chat::Dict conversation) const;

 private:
  using Span = std::pair<std::size_t, std::size_t>;

  const chat::Template& template_of(const chat::Dict& conversation) const;
  Span turn(const chat::Dict& conversation, std::string_view whole, std::size_t message) const;
  std::size_t shared(std::string_view a, std::string_view b) const;
  std::optional<std::size_t> after_header(const chat::Dict& conversation, std::string_view whole,
                                          std::size_t message, std::string_view header,
                                          std::size_t text) const;
  std::optional<std::size_t> mark(const chat::Dict& conversation, std::string_view text,
                                  std::size_t message, const chat::Value& marked) const;
  std::optional<Span> place(const chat::Dict& first, std::string_view first_text,
                            const chat::Dict& second, std::string_view second_text,
                            std::size_t message, bool at_begin) const;

  std::tm now_;
  chat::Dict tokens_;
  std::optional<chat::Template> template_, tool_use_;
  std::vector<std::string> special_;  // texts of the tokenizer's special tokens
  std::string no_template_;           // for the error
};

/// The tokenizer with a chat template in the place of its own, which exports then have. Without files
/// (bytes, chars) it stays as it is.
TokenizerPtr with_chat_template(TokenizerPtr tokenizer, const std::string& file);

}  // namespace tessera::io
