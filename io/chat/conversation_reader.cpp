#include "io/chat/conversation_reader.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/file.h"
#include "io/base/json.h"

namespace tessera::io {
namespace {

using chat::Dict;
using chat::List;
using chat::Rendering;
using Ids = std::vector<std::int32_t>;
using Span = std::pair<std::size_t, std::size_t>;

/// End of each token in the text, in bytes; empty if the tokenizer changes the text.
std::vector<std::size_t> token_ends(const Tokenizer& tokenizer, const Ids& ids,
                                    std::string_view text) {
  std::vector<std::size_t> ends;
  std::size_t at = 0;
  for (const std::int32_t& id : ids) {
    const std::string piece = tokenizer.decode({&id, 1});
    if (text.compare(at, piece.size(), piece) != 0) return {};
    ends.push_back(at += piece.size());
  }
  return at == text.size() ? ends : std::vector<std::size_t>();
}

/// Tokens that overlap a part of the text, as [first, last).
class TokenFinder {
 public:
  TokenFinder(const Tokenizer& tokenizer, const Ids& ids, std::string_view text)
      : tokenizer_(tokenizer), ids_(ids), text_(text), ends_(token_ends(tokenizer, ids, text)) {}

  Span find(Span part) const {
    if (!ends_.empty()) {
      const auto first = std::ranges::upper_bound(ends_, part.first) - ends_.begin();
      const auto last = std::ranges::lower_bound(ends_, part.second) - ends_.begin();
      return {first, std::min<std::size_t>(last + 1, ids_.size())};
    }
    return {before(part.first).first, before(part.second).second};
  }

 private:
  // Tokens that the text before an offset has; the second also counts one that goes on after it.
  Span before(std::size_t offset) const {
    if (offset == text_.size()) return {ids_.size(), ids_.size()};
    const Ids prefix = tokenizer_.encode(text_.substr(0, offset));
    const auto same =
        static_cast<std::size_t>(std::ranges::mismatch(prefix, ids_).in1 - prefix.begin());
    return {same, std::min(same + (same < prefix.size() ? 1 : 0), ids_.size())};
  }

  const Tokenizer& tokenizer_;
  const Ids& ids_;
  std::string_view text_;
  std::vector<std::size_t> ends_;
};

}  // namespace

Dict template_variables(const OrderedJson& json, const std::vector<const char*>& keys) {
  Dict variables;
  const auto given = [&](const char* key) {
    const auto found = json.find(key);
    return found == json.end() || found->is_null() ? nullptr : &*found;
  };
  if (const OrderedJson* tools = given("tools"))
    variables.emplace_back("tools", chat::from_json(*tools));
  if (const OrderedJson* more = given("chat_template_kwargs")) {
    require(more->is_object(), "\"chat_template_kwargs\" must be an object");
    for (const auto& [key, value] : more->items())
      chat::slot(variables, key) = chat::from_json(value);
  }
  List messages;
  for (const char* key : keys) {
    const OrderedJson& list = json.at(key);
    require(list.is_array(), "\"{}\" must be a list of messages, found {}", key, list.type_name());
    require(!list.empty(), "\"{}\" is empty", key);
    for (const OrderedJson& message : list) {
      const bool has_role =
          message.is_object() && message.contains("role") && message["role"].is_string();
      require(has_role, "message {}: expected an object with a string \"role\"",
              messages.size() + 1);
      messages.push_back(chat::from_json(message));
    }
  }
  chat::slot(variables, "messages") = std::move(messages);
  return variables;
}

Conversation ConversationReader::read(std::string_view line, const std::string& where) const {
  try {
    return parse(line);
  } catch (const Unsupported& error) {
    throw Unsupported("{}: {}", where, error.what());
  } catch (const Error& error) {
    throw IoError("{}: {}", where, error.what());
  }
}

Conversation ConversationReader::parse(std::string_view line) const {
  const OrderedJson json = parse_ordered_json(line, "the line");
  const auto has = [&](const char* key) {
    const auto found = json.is_object() ? json.find(key) : json.end();
    return found != json.end() && !found->is_null();
  };
  const auto text = [&](const char* key) {
    require(json.at(key).is_string(), "\"{}\" must be a string, found {}", key,
            json.at(key).type_name());
    return json.at(key).get<std::string>();
  };
  const bool pair = has("prompt") && has("completion");
  const bool listed = pair && json.at("prompt").is_array() && json.at("completion").is_array();
  if (pair && !listed) return of_texts(text("prompt"), text("completion"));
  if (!pair && has("text") && !has("messages")) return of_texts("", text("text"));
  require(pair || has("messages"),
          "expected an object with \"messages\", with \"prompt\" and \"completion\", or with "
          "\"text\"");
  if (!pair) return of_messages(template_variables(json, {"messages"}), 0);
  return of_messages(template_variables(json, {"prompt", "completion"}), json.at("prompt").size());
}

// @param prompt_messages  number of messages without loss, if the line says so; else 0
Conversation ConversationReader::of_messages(const Dict& conversation,
                                             std::size_t prompt_messages) const {
  try {
    return tokenized(prompt_messages == 0
                         ? format_.render_marked(conversation)
                         : format_.render_completion(conversation, prompt_messages));
  } catch (const TurnNotFound& error) {
    Conversation result = tokenized(format_.render(conversation, false));
    result.has_loss.assign(result.tokens.size(), false);
    result.unlocated = error.what();
    return result;
  }
}

Conversation ConversationReader::of_texts(const std::string& prompt,
                                          const std::string& completion) const {
  const std::string text = prompt + completion;
  Conversation result = tokenized({text, {{prompt.size(), text.size()}}});
  const auto add = [&](std::size_t at, const Ids& ids, bool has_loss) {
    result.tokens.insert(result.tokens.begin() + static_cast<std::ptrdiff_t>(at), ids.begin(),
                         ids.end());
    result.has_loss.insert(result.has_loss.begin() + static_cast<std::ptrdiff_t>(at), ids.size(),
                           has_loss);
  };
  add(0, tokenizer_->prefix(), prompt.empty());
  add(result.tokens.size(), tokenizer_->suffix(), true);
  const std::int32_t end = tokenizer_->eos_id();
  const bool ended = end < 0 || (!result.tokens.empty() && result.tokens.back() == end);
  if (!ended) add(result.tokens.size(), {end}, true);
  return result;
}

Conversation ConversationReader::tokenized(const Rendering& text) const {
  Conversation result{tokenizer_->encode(text.text), {}};
  result.has_loss.resize(result.tokens.size());
  const TokenFinder finder(*tokenizer_, result.tokens, text.text);
  for (const Span& part : text.generated) {
    if (part.first >= part.second) continue;
    const Span tokens = finder.find(part);
    for (std::size_t i = tokens.first; i < tokens.second; ++i) result.has_loss[i] = true;
  }
  return result;
}

void for_each_line(const std::string& file,
                   const std::function<bool(std::string_view, const std::string&)>& use) {
  const std::string text = read_file(file, std::numeric_limits<std::int64_t>::max());
  std::int64_t number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = std::string_view(text).substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    if (!use(line, fmt::format("{}:{}", file, number))) return;
  }
}

Conversations read_conversations(const std::vector<std::string>& files,
                                 const ConversationReader& reader) {
  Conversations all;
  for (const std::string& file : files) {
    const std::int64_t before = all.count();
    for_each_line(file, [&](std::string_view line, const std::string& where) {
      all.add(reader.read(line, where), where);
      return true;
    });
    require<IoError>(all.count() > before, "{} has no line of JSON", file);
  }
  return all;
}

}  // namespace tessera::io
