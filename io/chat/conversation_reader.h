#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/chat/chat_format.h"
#include "io/chat/conversations.h"
#include "io/data/tokenizer.h"

namespace tessera::io {

/// Variables of the template: messages, tools, and the entries of chat_template_kwargs.
/// @param keys  of the lists of messages, which are joined; `json` has them
/// @throws InvalidArgument
chat::Dict template_variables(const OrderedJson& json, const std::vector<const char*>& keys);

/// Turns lines of JSON into conversations.
///
///   {"messages": [{"role": ..., "content": ...}, ...]}  by the chat template; loss on the
///       assistant's turns. "tools" and "chat_template_kwargs" are passed to the template
///   {"prompt": P, "completion": C}  two texts, or two lists of messages; loss on the completion and
///       the end of text
///   {"text": T}  loss on everything
///
/// Other keys are ignored. Thread-safe.
class ConversationReader {
 public:
  ConversationReader(TokenizerPtr tokenizer, ChatFormat format)
      : tokenizer_(std::move(tokenizer)), format_(std::move(format)) {}
  /// A conversation of which a turn is not found has no loss, and Conversation::unlocated says why.
  ///
  /// @param where  of the line, for errors: "chat.jsonl:12"
  /// @throws IoError on a line that is malformed or that the template refuses; Unsupported, also
  ///   without a template; messages begin with `where`
  Conversation read(std::string_view line, const std::string& where) const;

 private:
  Conversation parse(std::string_view line) const;
  Conversation of_messages(const chat::Dict& conversation, std::size_t prompt_messages) const;
  Conversation of_texts(const std::string& prompt, const std::string& completion) const;
  Conversation tokenized(const chat::Rendering& text) const;

  TokenizerPtr tokenizer_;
  ChatFormat format_;
};

/// Calls `use` with each line that is not empty, and its file and line number, until it returns false.
/// @throws IoError
void for_each_line(const std::string& file,
                   const std::function<bool(std::string_view, const std::string&)>& use);

/// Reads all lines of files; empty lines are skipped.
/// @throws as ConversationReader::read(); IoError also if there is none
Conversations read_conversations(const std::vector<std::string>& files,
                                 const ConversationReader& reader);

}  // namespace tessera::io
