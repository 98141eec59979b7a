#include "io/chat/chat_format.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>

#include "io/base/file.h"
#include "io/base/json.h"
#include "io/tokenizer/files.h"

namespace tessera::io {
namespace {

using chat::Dict;
using chat::List;
using chat::Rendering;
using chat::Value;

constexpr std::int64_t kMaxTemplate = 1 << 20;  // bytes
constexpr std::string_view kAssistant = "assistant";
constexpr std::size_t kMostMarks = 64;  // texts of a message that are tried
/// Marks a place in a message; no template changes it.
constexpr std::string_view kMark = "qZ7turnEnd7Zq";

/// Variables of the special tokens: texts, or objects with "content".
void read_tokens(const TokenizerFiles& files, Dict& tokens) {
  for (const char* name : {kTokenizerConfigJson, kSpecialTokensMapJson}) {
    if (!files.has(name)) continue;
    const Json json = parse_json(files.content.at(name), files.path(name));
    for (const char* key : {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token",
                            "cls_token", "mask_token"}) {
      const auto found = json.is_object() ? json.find(key) : json.end();
      if (found == json.end() || chat::find(tokens, key) != nullptr) continue;
      const bool is_object = found->is_object() && found->contains("content");
      const Json& text = is_object ? found->at("content") : *found;
      if (text.is_string()) tokens.emplace_back(key, text.get<std::string>());
    }
  }
}

/// As transformers passes messages: without null entries, and with the reasoning under both of its
/// names.
Value normalized(const Value& message) {
  if (message.dict() == nullptr) return message;
  Dict out;
  for (const auto& [key, value] : *message.dict())
    if (!value.is_none()) out.emplace_back(key, value);
  for (const char* name : {"reasoning_content", "thinking", "reasoning"}) {
    const Value* const found = chat::find(out, name);
    if (found == nullptr) continue;
    const Value reasoning = *found;
    if (chat::find(out, "thinking") == nullptr) out.emplace(out.begin(), "thinking", reasoning);
    chat::slot(out, "reasoning_content") = reasoning;
    break;
  }
  return out;
}

const List& messages_of(const Dict& conversation) {
  const Value* const messages = chat::find(conversation, "messages");
  const List* const list = messages == nullptr ? nullptr : messages->list();
  require(list != nullptr && !list->empty(),
          "\"messages\" must be a list of messages that is not empty");
  return *list;
}

bool is_assistant(const Value& message) {
  const Value* const role = message.dict() ? chat::find(*message.dict(), "role") : nullptr;
  return role != nullptr && role->string() != nullptr && *role->string() == kAssistant;
}

/// The conversation's first `count` messages.
Dict cut(const Dict& conversation, std::size_t count) {
  Dict out = conversation;
  const List& all = messages_of(conversation);
  chat::slot(out, "messages") = List(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count));
  return out;
}

/// A copy in which `change` has replaced the text number `left`. Texts are counted in depth first order,
/// without empty ones and roles; `left` goes down by their number.
template <typename F>
Value with_text(const Value& value, std::size_t& left, F change) {
  if (const std::string* text = value.string())
    return !text->empty() && left-- == 0 ? Value(change(*text)) : value;
  if (const List* list = value.list()) {
    List out;
    for (const Value& element : *list) out.push_back(with_text(element, left, change));
    return out;
  }
  if (value.dict() == nullptr) return value;
  Dict out;
  for (const auto& [key, element] : *value.dict())
    out.emplace_back(key, key == "role" ? element : with_text(element, left, change));
  return out;
}

/// The text with kMark before or after it; within surrounding white space, if `within`.
std::string with_mark(std::string text, bool at_begin, bool within) {
  constexpr const char* kSpace = " \t\r\n";
  const std::size_t first = text.find_first_not_of(kSpace);
  const std::size_t begin = within && first != text.npos ? first : 0;
  const std::size_t end = within ? text.find_last_not_of(kSpace) + 1 : text.size();
  return text.insert(at_begin ? begin : end, kMark);
}

}  // namespace

std::tm parse_chat_date(const std::string& text) {
  std::tm date{};
  int end = 0;
  const int fields =
      std::sscanf(text.c_str(), "%4d-%2d-%2d%n", &date.tm_year, &date.tm_mon, &date.tm_mday, &end);
  date.tm_year -= 1900;
  date.tm_mon -= 1;
  std::tm same = date;
  const bool is_date = fields == 3 && static_cast<std::size_t>(end) == text.size() &&
                       ::timegm(&same) != -1 && same.tm_mon == date.tm_mon &&
                       same.tm_mday == date.tm_mday;
  require(is_date, "'{}' is not a date such as 2024-07-26", text);
  return same;
}

ChatFormat::ChatFormat(const Tokenizer& tokenizer, const std::string& file, const std::tm& now,
                       const std::string& option)
    : now_(now) {
  const TokenizerFiles* const files = tokenizer.files();
  if (files != nullptr) read_tokens(*files, tokens_);
  for (const SpecialToken& token : tokenizer.special_tokens()) special_.push_back(token.text);
  const auto add = [&](const char* key, std::int32_t id) {
    if (id >= 0 && chat::find(tokens_, key) == nullptr)
      tokens_.emplace_back(key, tokenizer.decode({&id, 1}));
  };
  add("bos_token", tokenizer.bos_id());
  add("eos_token", tokenizer.eos_id());
  if (!file.empty()) {
    template_.emplace(read_file(file, kMaxTemplate), file);
  } else if (files != nullptr && files->has(kChatTemplateJinja)) {
    template_.emplace(files->content.at(kChatTemplateJinja), files->path(kChatTemplateJinja));
  } else if (files != nullptr && files->has(kTokenizerConfigJson)) {
    const std::string path = files->path(kTokenizerConfigJson);
    const std::string name = path + ": chat_template";
    const Json config = parse_json(files->content.at(kTokenizerConfigJson), path);
    const Json found = config.is_object() ? config.value("chat_template", Json()) : Json();
    if (found.is_string()) template_.emplace(found.get<std::string>(), name);
    for (std::size_t i = 0; found.is_array() && i < found.size(); ++i) {
      const JsonReader entry = JsonReader(found, name).at(i);
      const std::string& title = entry.at("name").string();
      const std::string where = fmt::format("{}[{}]", name, i);
      if (title == "default") template_.emplace(entry.at("template").string(), where);
      if (title == "tool_use") tool_use_.emplace(entry.at("template").string(), where);
    }
  }
  no_template_ = fmt::format(
      "the {} tokenizer has no chat template (chat_template.jinja, or chat_template in "
      "tokenizer_config.json); give a file with one with {}",
      tokenizer.kind(), option);
}

const chat::Template& ChatFormat::template_of(const Dict& conversation) const {
  require<Unsupported>(template_.has_value(), "{}", no_template_);
  const Value* const tools = chat::find(conversation, "tools");
  return tool_use_ && tools != nullptr && !tools->is_none() ? *tool_use_ : *template_;
}

Rendering ChatFormat::render(const Dict& conversation, bool add_generation_prompt) const {
  const Value* const messages = chat::find(conversation, "messages");
  List list;
  if (messages != nullptr && messages->list() != nullptr)
    for (const Value& message : *messages->list()) list.push_back(normalized(message));
  Dict variables = tokens_;
  for (const char* key : {"tools", "documents"})
    chat::slot(variables, key) = Value::Data(chat::None{});
  for (const auto& [key, value] : conversation) chat::slot(variables, key) = value;
  chat::slot(variables, "messages") = std::move(list);
  chat::slot(variables, "add_generation_prompt") = add_generation_prompt;
  return template_of(conversation).render(variables, now_);
}

Rendering ChatFormat::render_marked(const Dict& conversation) const {
  const List& messages = messages_of(conversation);
  Rendering whole = render(conversation, false);
  if (template_of(conversation).marks_generation()) return whole;
  for (std::size_t i = 0; i < messages.size(); ++i)
    if (is_assistant(messages[i])) whole.generated.push_back(turn(conversation, whole.text, i));
  return whole;
}

Rendering ChatFormat::render_completion(const Dict& conversation, std::size_t prompt) const {
  Rendering whole = render(conversation, false);
  whole.generated = {{turn(conversation, whole.text, prompt).first, whole.text.size()}};
  return whole;
}

// The length of the common prefix of two texts, cut back to where neither has a special token or another
// marker such as <|user|> or [INST] across its end.
std::size_t ChatFormat::shared(std::string_view a, std::string_view b) const {
  const auto common = static_cast<std::size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
  if (common == a.size() || common == b.size()) return common;
  std::size_t cut = common;
  const std::size_t open = a.substr(0, common).find_last_of("<[");
  if (open != a.npos && a.substr(open, common - open).find_first_of(">] \t\r\n") == a.npos)
    cut = open;
  for (const std::string& token : special_)
    for (std::size_t i = common - std::min(common, token.size()); i < cut; ++i)
      if (i + token.size() > common &&
          (a.substr(i).starts_with(token) || b.substr(i).starts_with(token)))
        cut = i;
  while (cut > 0 && (a[cut] & 0xC0) == 0x80) --cut;
  return cut;
}

// Where a mark stands in a conversation's text. Nothing if the mark changes anything else.
// @param marked  the message with a mark
std::optional<std::size_t> ChatFormat::mark(const Dict& conversation, std::string_view text,
                                            std::size_t message, const Value& marked) const {
  List messages = messages_of(conversation);
  messages[message] = marked;
  Dict variables = conversation;
  chat::slot(variables, "messages") = std::move(messages);
  std::string found;
  try {
    found = render(variables, false).text;
  } catch (const InvalidArgument&) {
    return std::nullopt;
  }
  const std::size_t at = found.find(kMark);
  if (at == found.npos || found.erase(at, kMark.size()) != text) return std::nullopt;
  return at;
}

// A place of a message in two conversations that have it: the begin of its first text that both show,
// or the end of its last.
std::optional<ChatFormat::Span> ChatFormat::place(const Dict& first, std::string_view first_text,
                                                  const Dict& second, std::string_view second_text,
                                                  std::size_t message, bool at_begin) const {
  const auto both = [&](const Value& marked) -> std::optional<Span> {
    const auto a = mark(first, first_text, message, marked);
    const auto b = a ? mark(second, second_text, message, marked) : std::nullopt;
    return b ? std::optional<Span>({*a, *b}) : std::nullopt;
  };
  const Value& original = messages_of(first)[message];
  std::size_t left = SIZE_MAX;
  (void)with_text(original, left, [](const std::string& text) { return text; });
  const std::size_t texts = SIZE_MAX - left;
  for (std::size_t i = 0; i < std::min(texts, kMostMarks); ++i) {
    for (const bool within : {true, false}) {
      std::size_t number = at_begin ? i : texts - 1 - i;
      const Value marked = with_text(original, number, [&](const std::string& text) {
        return with_mark(text, at_begin, within);
      });
      if (const auto found = both(marked)) return found;
    }
  }
  const Value* const content =
      original.dict() == nullptr ? nullptr : chat::find(*original.dict(), "content");
  if (content != nullptr && chat::truth(*content)) return std::nullopt;
  Dict filled = original.dict() == nullptr ? Dict() : *original.dict();
  chat::slot(filled, "content") = std::string(kMark);
  return both(filled);
}

// Where a turn begins in the whole text: after its header, if that is found.
// @param header  the generation prompt
// @param text    place of a text of the turn
std::optional<std::size_t> ChatFormat::after_header(const Dict& conversation,
                                                    std::string_view whole, std::size_t message,
                                                    std::string_view header,
                                                    std::size_t text) const {
  const std::size_t first = header.find_first_not_of(" \t\r\n");
  if (first == header.npos) return std::nullopt;
  header.remove_prefix(first);
  const std::size_t end = std::min(header.find_first_of(">]\n"), header.size() - 1);
  const auto before = message == 0 ? std::nullopt
                                   : place(conversation, whole, conversation, whole, message - 1,
                                           /*at_begin=*/false);
  const std::string_view range = whole.substr(0, text);
  const std::size_t at = range.rfind(header.substr(0, end + 1));
  if (at == range.npos || (before && at < before->first)) return std::nullopt;
  return at + shared(header, range.substr(at));
}

// The turn in the text of the whole conversation: first in the text that ends with it, where it begins
// after the generation prompt. Where the whole text begins or goes on differently (a template may show
// reasoning, a system message or an end of text with the last turn only), marks in the message's
// texts relate the places of both texts.
ChatFormat::Span ChatFormat::turn(const Dict& conversation, std::string_view whole,
                                  std::size_t message) const {
  // Templates may not expect an empty list of messages.
  const bool leads = message == 0;
  const Dict before = cut(conversation, leads ? 1 : message);
  const Dict after = cut(conversation, message + 1);
  const std::string text = render(after, false).text, prompt = render(before, true).text;
  const std::size_t header = shared(prompt, leads ? text : render(before, false).text);
  std::size_t begin = shared(prompt, text);
  if (begin == prompt.size() && header == begin && !leads) {
    // No generation prompt here, but perhaps after other messages.
    const std::string other = render(after, true).text;
    begin += shared(std::string_view(other).substr(shared(other, text)),
                    std::string_view(text).substr(begin));
  }
  // A prompt may have more than the turn's header, such as the begin of reasoning.
  const bool known = !leads && (begin >= prompt.size() || begin > header);
  if (known && whole.starts_with(text)) return {begin, text.size()};
  const auto found = [&](const auto& place) {
    require<TurnNotFound>(
        place.has_value(),
        "message {}: its tokens can't be found, because the template renders it in another way "
        "when others follow; mark the assistant's turns in the template with {{% generation %}}",
        message + 1);
    return *place;
  };
  const auto find = [&](bool at_begin) {
    return place(after, text, conversation, whole, message, at_begin);
  };
  Span result{begin, text.size()};
  if (!known || !whole.starts_with(std::string_view(text).substr(0, begin))) {
    const auto first = find(true);
    // Only a header before its end finds the begin of a text.
    const Span at = first ? *first : found(find(false));
    const std::string_view lead =
        known && begin < at.first ? std::string_view(text).substr(begin, at.first - begin) : "";
    if (known && whole.substr(0, at.second).ends_with(lead)) {
      result.first = at.second - lead.size();
    } else {
      const auto after_it = after_header(conversation, whole, message,
                                         std::string_view(prompt).substr(header), at.second);
      result.first = first ? after_it.value_or(at.second) : found(after_it);
    }
  }
  if (whole.starts_with(text)) return result;
  const Span at = found(find(false));
  result.second =
      at.second + shared(std::string_view(text).substr(at.first), whole.substr(at.second));
  return result;
}

std::vector<std::int32_t> ChatFormat::turn_ends(const Tokenizer& tokenizer,
                                                Dict conversation) const {
  std::set<std::int32_t> special;
  for (const SpecialToken& token : tokenizer.special_tokens()) special.insert(token.id);
  List messages = messages_of(conversation);
  messages.emplace_back(Dict{{"role", std::string(kAssistant)}, {"content", std::string(kMark)}});
  chat::slot(conversation, "messages") = std::move(messages);
  std::string text;
  try {
    text = render(conversation, false).text;
  } catch (const InvalidArgument&) {
    return tokenizer.eos_id() < 0 ? std::vector<std::int32_t>() : std::vector{tokenizer.eos_id()};
  }
  const std::size_t at = text.find(kMark);
  if (at == text.npos) return {};
  for (const std::int32_t id : tokenizer.encode(text.substr(at + kMark.size()), "chat template"))
    if (special.contains(id)) return {id};
  return {};
}

TokenizerPtr with_chat_template(TokenizerPtr tokenizer, const std::string& file) {
  if (tokenizer->files() == nullptr) return tokenizer;
  TokenizerFiles files = *tokenizer->files();
  files.content[kChatTemplateJinja] = read_file(file, kMaxTemplate);
  return make_tokenizer(std::move(files));
}

}  // namespace tessera::io
