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
  require(messages != nullptr && messages->list() != nullptr && !messages->list()->empty(),
          "\"messages\" must be a list of messages that is not empty");
  return *messages->list();
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

std::size_t common_prefix(std::string_view a, std::string_view b) {
  return static_cast<std::size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
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

// The turn in the text of the whole conversation: first in the text that ends with it, where it begins
// after the generation prompt. Where the whole text begins or goes on differently (a template may show
// reasoning, a system message or an end of text with the last turn only), marks in the message's
// content relate the places of both texts.
std::pair<std::size_t, std::size_t> ChatFormat::turn(const Dict& conversation,
                                                     std::string_view whole,
                                                     std::size_t message) const {
  const Dict before = cut(conversation, message), after = cut(conversation, message + 1);
  const std::string prompt = render(before, true).text, text = render(after, false).text;
  const std::size_t begin = common_prefix(prompt, text);
  const auto fail = [&] {
    throw InvalidArgument(
        "message {}: its tokens can't be found, because the template renders it in another way "
        "when "
        "others follow; mark the assistant's turns in the template with {{% generation %}}",
        message + 1);
  };
  // A prompt may have more than the beginning of a turn, such as a line's end; but another text before
  // the turn makes it useless.
  const bool known = begin == prompt.size() || begin >= render(before, false).text.size();
  if (known && whole.starts_with(text)) return {begin, text.size()};
  // The place of the content's begin or end in a text.
  const auto place = [&](const Dict& variables, std::string_view in, bool at_begin) {
    List messages = messages_of(variables);
    Dict changed = *messages[message].dict();
    Value& content = chat::slot(changed, "content");
    std::string body = content.string() ? *content.string() : std::string();
    constexpr const char* kSpace = " \t\r\n";
    const std::size_t first = body.find_first_not_of(kSpace);
    body.insert(at_begin ? (first == body.npos ? 0 : first) : body.find_last_not_of(kSpace) + 1,
                kMark);
    content = std::move(body);
    messages[message] = std::move(changed);
    Dict marked = variables;
    chat::slot(marked, "messages") = std::move(messages);
    std::string found = render(marked, false).text;
    const std::size_t at = found.find(kMark);
    if (at == found.npos || found.erase(at, kMark.size()) != in) fail();
    return at;
  };
  std::pair<std::size_t, std::size_t> result{begin, 0};
  if (!known || !whole.starts_with(std::string_view(text).substr(0, begin))) {
    const std::size_t at = place(conversation, whole, true);
    const std::size_t lead = known ? place(after, text, true) - begin : 0;
    if (lead > at || whole.substr(at - lead, lead) != std::string_view(text).substr(begin, lead))
      fail();
    result.first = at - lead;
  }
  const std::size_t end = place(conversation, whole, false);
  const std::string_view footer = std::string_view(text).substr(place(after, text, false));
  result.second = end + common_prefix(footer, whole.substr(end));
  return result;
}

std::vector<std::int32_t> ChatFormat::turn_ends(const Tokenizer& tokenizer) const {
  std::set<std::int32_t> special;
  for (const SpecialToken& token : tokenizer.special_tokens()) special.insert(token.id);
  const auto message = [](std::string_view role, std::string_view content) -> Value {
    return Dict{{"role", std::string(role)}, {"content", std::string(content)}};
  };
  const Dict conversation{
      {"messages", List{message("user", "Hello."), message(kAssistant, kMark)}}};
  const std::string text = render(conversation, false).text;
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
