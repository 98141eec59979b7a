#include "io/chat/conversations.h"

#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/error.h"
#include "io/base/file.h"
#include "io/base/json.h"

namespace tessera::io {
namespace {

using chat::Dict;
using chat::List;
using chat::Rendering;
using chat::Value;
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

bool is_conversation_file(const std::string& path) {
  return path.ends_with(".jsonl") || path.ends_with(".ndjson");
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
  Dict conversation;
  if (has("tools")) conversation.emplace_back("tools", chat::from_json(json.at("tools")));
  if (has("chat_template_kwargs")) {
    const Value more = chat::from_json(json.at("chat_template_kwargs"));
    require(more.dict() != nullptr, "\"chat_template_kwargs\" must be an object");
    for (const auto& [key, value] : *more.dict()) chat::slot(conversation, key) = value;
  }
  List messages;
  const auto add = [&](const char* key) {
    require(json.at(key).is_array(), "\"{}\" must be a list of messages, found {}", key,
            json.at(key).type_name());
    for (const OrderedJson& message : json.at(key)) {
      const bool has_role =
          message.is_object() && message.contains("role") && message["role"].is_string();
      require(has_role, "message {}: expected an object with a string \"role\"",
              messages.size() + 1);
      messages.push_back(chat::from_json(message));
    }
    require(!messages.empty(), "\"{}\" is empty", key);
  };
  std::size_t in_prompt = 0;
  if (pair) {
    add("prompt");
    in_prompt = messages.size();
    add("completion");
  } else {
    add("messages");
  }
  chat::slot(conversation, "messages") = std::move(messages);
  return of_messages(std::move(conversation), in_prompt);
}

// @param prompt_messages  number of messages without loss, if the line says so; else 0
Conversation ConversationReader::of_messages(Dict conversation, std::size_t prompt_messages) const {
  if (prompt_messages == 0) return tokenized(format_.render_marked(conversation));
  Rendering whole = format_.render(conversation, false);
  Value& messages = chat::slot(conversation, "messages");
  const List& all = *messages.list();
  messages = List(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(prompt_messages));
  const std::string prompt = format_.render(conversation, true).text;
  require(whole.text.starts_with(prompt),
          "the template renders the prompt in another way when the completion follows");
  whole.generated = {{prompt.size(), whole.text.size()}};
  return tokenized(whole);
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

void Conversations::add(const Conversation& conversation) {
  tokens.insert(tokens.end(), conversation.tokens.begin(), conversation.tokens.end());
  has_loss.insert(has_loss.end(), conversation.has_loss.begin(), conversation.has_loss.end());
  ends.push_back(std::ssize(tokens));
}

Conversations Conversations::slice(std::int64_t first, std::int64_t last) const {
  const std::int64_t from = first < count() ? begin(first) : std::ssize(tokens);
  const std::int64_t to = last > first ? end(last - 1) : from;
  Conversations part{{tokens.begin() + from, tokens.begin() + to},
                     {has_loss.begin() + from, has_loss.begin() + to},
                     {ends.begin() + first, ends.begin() + last}};
  for (std::int64_t& end : part.ends) end -= from;
  return part;
}

Conversations read_conversations(const std::vector<std::string>& files,
                                 const ConversationReader& reader) {
  Conversations all;
  for (const std::string& file : files) {
    const std::string text = read_file(file, std::numeric_limits<std::int64_t>::max());
    const std::int64_t before = all.count();
    std::int64_t number = 0;
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = std::min(text.find('\n', begin), text.size());
      const std::string_view line = std::string_view(text).substr(begin, end - begin);
      begin = end + 1;
      ++number;
      if (line.find_first_not_of(" \t\r") == line.npos) continue;
      all.add(reader.read(line, fmt::format("{}:{}", file, number)));
    }
    require<IoError>(all.count() > before, "{} has no line of JSON", file);
  }
  return all;
}

std::string PackingReport::str() const {
  std::string text = fmt::format(
      "{} conversations, {} tokens; {} rows with {} predictions that have loss, {} positions of "
      "padding",
      conversations, tokens, rows, targets, padding);
  if (truncated > 0)
    text += fmt::format("; {} conversations are truncated and lose {} tokens (raise model.seq_len)",
                        truncated, lost);
  if (dropped > 0) text += fmt::format("; {} are dropped: no token with loss is left", dropped);
  return text;
}

ConversationSamples::ConversationSamples(std::shared_ptr<const Conversations> data,
                                         std::int64_t seq_len, DataOrder order, std::uint64_t seed,
                                         std::string_view name)
    : data_(std::move(data)), seq_len_(seq_len), order_(order), seed_(seed) {
  require(seq_len_ >= 1, "seq_len must be at least 1, got {}", seq_len_);
  const auto positions = [&](std::int64_t i) {
    return std::min(data_->end(i) - data_->begin(i) - 1, seq_len_);
  };
  const auto targets = [&](std::int64_t i) {
    const auto first = data_->has_loss.begin() + data_->begin(i) + 1;
    return positions(i) < 1 ? 0 : std::int64_t{std::count(first, first + positions(i), true)};
  };
  report_.conversations = data_->count();
  report_.tokens = std::ssize(data_->tokens);
  std::vector<std::int64_t> kept;
  for (std::int64_t i = 0; i < data_->count(); ++i) {
    if (targets(i) == 0) {
      ++report_.dropped;
      continue;
    }
    kept.push_back(i);
    report_.targets += targets(i);
    report_.padding -= positions(i);
    const std::int64_t lost = data_->end(i) - data_->begin(i) - 1 - positions(i);
    report_.lost += lost;
    if (lost > 0) ++report_.truncated;
  }
  require(!kept.empty(),
          "{} has {} conversations, and none has a token with loss within the first {}; raise "
          "model.seq_len, or see what has loss with tessera data render",
          name, data_->count(), seq_len_ + 1);
  const bool shuffled = order_ == DataOrder::Shuffled;
  if (shuffled) std::ranges::stable_sort(kept, std::greater<>(), positions);

  std::vector<std::vector<std::int64_t>> rows;
  std::multimap<std::int64_t, std::size_t> open;  // free positions -> row
  for (const std::int64_t i : kept) {
    auto row = open.lower_bound(positions(i));
    if (row == open.end()) {
      if (!shuffled) open.clear();
      row = open.emplace(seq_len_, rows.size());
      rows.emplace_back();
    }
    rows[row->second].push_back(i);
    const std::pair left{row->first - positions(i), row->second};
    open.erase(row);
    if (left.first > 0) open.insert(left);
  }
  for (const auto& row : rows) {
    packed_.insert(packed_.end(), row.begin(), row.end());
    row_ends_.push_back(std::ssize(packed_));
    targets_.push_back(0);
    for (const std::int64_t i : row) targets_.back() += targets(i);
  }
  report_.rows = std::ssize(rows);
  report_.padding += report_.rows * seq_len_;
}

std::int64_t ConversationSamples::row_of(std::int64_t sample) const {
  require(sample >= 0, "a sample number must not be negative, got {}", sample);
  return order_ == DataOrder::Shuffled ? shuffled_row(sample, samples_per_epoch(), seed_)
                                       : sample % samples_per_epoch();
}

// Calls f(first token, first position, positions) for each document of a row.
template <typename F>
void ConversationSamples::for_each_document(std::int64_t row, F f) const {
  const auto at = static_cast<std::size_t>(row);
  std::int64_t position = 0;
  for (std::int64_t k = row == 0 ? 0 : row_ends_[at - 1]; k < row_ends_[at]; ++k) {
    const std::int64_t i = packed_[static_cast<std::size_t>(k)];
    const std::int64_t count = std::min(data_->end(i) - data_->begin(i) - 1, seq_len_);
    f(data_->begin(i), position, count);
    position += count;
  }
}

void ConversationSamples::fill_batch(std::int64_t first, std::int64_t rows, std::int32_t* inputs,
                                     std::int32_t* targets) const {
  std::fill(inputs, inputs + rows * seq_len_, 0);
  std::fill(targets, targets + rows * seq_len_, kNoTarget);
  for (std::int64_t r = 0; r < rows; ++r) {
    for_each_document(row_of(first + r),
                      [&](std::int64_t token, std::int64_t position, std::int64_t count) {
                        const std::int64_t to = r * seq_len_ + position;
                        for (std::int64_t i = 0; i < count; ++i) {
                          const auto from = static_cast<std::size_t>(token + i);
                          inputs[to + i] = data_->tokens[from];
                          if (data_->has_loss[from + 1]) targets[to + i] = data_->tokens[from + 1];
                        }
                      });
  }
}

void ConversationSamples::fill_documents(std::int64_t first, std::int64_t rows,
                                         std::int32_t* documents, std::int32_t* positions) const {
  for (std::int64_t r = 0; r < rows; ++r) {
    std::int32_t id = 0;
    std::int64_t filled = 0;
    const auto add = [&](std::int64_t count) {
      for (std::int64_t i = 0; i < count; ++i) {
        documents[r * seq_len_ + filled] = id;
        positions[r * seq_len_ + filled++] = static_cast<std::int32_t>(i);
      }
      ++id;
    };
    for_each_document(row_of(first + r),
                      [&](std::int64_t, std::int64_t, std::int64_t count) { add(count); });
    add(seq_len_ - filled);  // padding
  }
}

std::int64_t ConversationSamples::count_targets(std::int64_t first, std::int64_t rows) const {
  std::int64_t sum = 0;
  for (std::int64_t r = 0; r < rows; ++r)
    sum += targets_[static_cast<std::size_t>(row_of(first + r))];
  return sum;
}

}  // namespace tessera::io
