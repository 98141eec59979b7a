#include "tools/tessera/serve/request.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>

#include "tools/tessera/model/chat_prompt.h"

namespace tessera::tools {
namespace {

constexpr std::size_t kMostMembers = 1000;
constexpr std::size_t kMostChoices = 256;
constexpr std::size_t kMostStops = 16;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 30;
constexpr std::int64_t kMostTopLogprobs = 20;
constexpr std::int64_t kDefaultTokens = 16;  // of completions; of chats the context
constexpr std::int64_t kMostInteger = std::int64_t{1} << 53;

/// Fields that change results, and that this server does not have; null and `neutral` are accepted.
struct UnsupportedField {
  const char* name;
  const char* neutral;  // JSON
};
constexpr UnsupportedField kUnsupported[] = {{"presence_penalty", "0"},
                                             {"frequency_penalty", "0"},
                                             {"logit_bias", "{}"},
                                             {"suffix", "\"\""},
                                             {"tools", "[]"},
                                             {"functions", "[]"},
                                             {"response_format", R"({"type":"text"})"}};

[[noreturn]] void refuse(const std::string& param, const std::string& message) {
  throw ApiError(400, message, param);
}

/// Limits the members of objects: OrderedJson takes time quadratic in their number. Leaves syntax
/// errors to the parser.
class MemberLimit final : public nlohmann::json_sax<io::Json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override {
    members_.push_back(0);
    return true;
  }
  bool key(string_t&) override {
    if (++members_.back() > kMostMembers)
      throw ApiError(
          400, fmt::format("the request has an object with more than {} members", kMostMembers));
    return true;
  }
  bool end_object() override {
    members_.pop_back();
    return true;
  }
  bool start_array(std::size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(std::size_t, const std::string&, const io::Json::exception&) override {
    return false;
  }

 private:
  std::vector<std::size_t> members_;  // per enclosing object
};

/// Typed access to the fields of a JSON object; null is as if the field were missing.
class Fields {
 public:
  explicit Fields(const io::OrderedJson& json) : json_(json) {}

  const io::OrderedJson* find(const std::string& name) const {
    const auto found = json_.find(name);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }
  double number(const std::string& name, double fallback) const {
    const io::OrderedJson* const value = find(name);
    if (value == nullptr) return fallback;
    if (!value->is_number()) wrong_type(name, "a number", *value);
    return value->get<double>();
  }
  std::int64_t integer(const std::string& name, std::int64_t fallback, std::int64_t low,
                       std::int64_t high) const {
    const io::OrderedJson* const value = find(name);
    if (value == nullptr) return fallback;
    if (!value->is_number_integer()) wrong_type(name, "an integer", *value);
    const bool fits = value->is_number_unsigned()
                          ? value->get<std::uint64_t>() <= static_cast<std::uint64_t>(kMostInteger)
                          : value->get<std::int64_t>() >= -kMostInteger;
    const std::int64_t number = fits ? value->get<std::int64_t>() : kMostInteger + 1;
    if (number < low || number > high)
      refuse(name,
             fmt::format("'{}' must be between {} and {}, got {}", name, low, high, value->dump()));
    return number;
  }
  bool flag(const std::string& name) const {
    const io::OrderedJson* const value = find(name);
    if (value != nullptr && !value->is_boolean()) wrong_type(name, "true or false", *value);
    return value != nullptr && value->get<bool>();
  }
  [[noreturn]] static void wrong_type(const std::string& name, const std::string& expected,
                                      const io::OrderedJson& value) {
    refuse(name, fmt::format("'{}' must be {}, got {}", name, expected, value.type_name()));
  }

 private:
  const io::OrderedJson& json_;
};

std::vector<std::string> stops_of(const Fields& fields) {
  const io::OrderedJson* const value = fields.find("stop");
  if (value == nullptr) return {};
  const io::OrderedJson list = value->is_array() ? *value : io::OrderedJson::array({*value});
  std::vector<std::string> stops;
  for (const io::OrderedJson& stop : list) {
    if (!stop.is_string()) Fields::wrong_type("stop", "a string or a list of strings", stop);
    stops.push_back(stop.get<std::string>());
    if (stops.back().empty()) refuse("stop", "'stop' has an empty string");
  }
  if (stops.size() > kMostStops)
    refuse("stop", fmt::format("'stop' has {} strings, at most {}", stops.size(), kMostStops));
  return stops;
}

Tokens ids_of(const io::OrderedJson& list, std::int64_t vocab_size) {
  Tokens tokens;
  for (const io::OrderedJson& id : list) {
    if (!id.is_number_integer())
      Fields::wrong_type("prompt", "a string, token ids, or a list of either", id);
    if (id < 0 || id >= vocab_size)
      refuse("prompt", fmt::format("{} is not one of the model's token ids, 0 to {}", id.dump(),
                                   vocab_size - 1));
    tokens.push_back(id.get<std::int32_t>());
  }
  return tokens;
}

std::vector<ServePrompt> prompts_of(const Fields& fields, const LoadedModel& loaded) {
  const io::OrderedJson* const value = fields.find("prompt");
  if (value == nullptr) refuse("prompt", "'prompt' is missing");
  const bool is_list = value->is_array() && !value->empty() && !value->front().is_number();
  const io::OrderedJson list = is_list ? *value : io::OrderedJson::array({*value});
  std::vector<ServePrompt> prompts;
  for (const io::OrderedJson& prompt : list) {
    if (prompt.is_string()) {
      Tokens tokens = loaded.tokenizer->prefix();
      const std::size_t hidden = tokens.size();
      const Tokens own = loaded.tokenizer->encode(prompt.get<std::string>(), "'prompt'");
      tokens.insert(tokens.end(), own.begin(), own.end());
      prompts.push_back({std::move(tokens), hidden});
    } else if (prompt.is_array()) {
      prompts.push_back({ids_of(prompt, loaded.model->arch().vocab_size), 0});
    } else {
      Fields::wrong_type("prompt", "a string, token ids, or a list of either", prompt);
    }
    if (prompts.back().tokens.empty()) refuse("prompt", "'prompt' is empty");
  }
  return prompts;
}

// Messages whose content is a list of texts get one text.
void join_parts(io::OrderedJson& messages) {
  if (!messages.is_array()) return;
  for (io::OrderedJson& message : messages) {
    if (!message.is_object() || !message.contains("content") || !message["content"].is_array())
      continue;
    std::string text;
    for (const io::OrderedJson& part : message["content"]) {
      const bool is_text = part.is_object() && part.contains("text") && part["text"].is_string();
      if (!is_text) refuse("messages", "'messages': only parts of type text are supported");
      text += part["text"].get<std::string>();
    }
    message["content"] = std::move(text);
  }
}

std::vector<ServePrompt> chat_prompts_of(const io::OrderedJson& json, const ServedModel& model,
                                         Tokens& ends) {
  if (!Fields(json).find("messages")) refuse("messages", "'messages' is missing");
  io::OrderedJson conversation = {{"messages", json["messages"]}};
  if (json.contains("chat_template_kwargs"))
    conversation["chat_template_kwargs"] = json["chat_template_kwargs"];
  join_parts(conversation["messages"]);
  ChatPrompt prompt =
      chat_prompt(*model.loaded.tokenizer, conversation, model.chat_template, "'messages'");
  ends = std::move(prompt.ends);
  if (prompt.tokens.empty()) refuse("messages", "the chat template makes no text of 'messages'");
  const std::size_t hidden = prompt.tokens.size();
  return {{std::move(prompt.tokens), hidden}};
}

std::optional<std::int64_t> top_logprobs_of(const Fields& fields, bool is_chat) {
  if (!is_chat) {
    const std::int64_t top = fields.integer("logprobs", -1, 0, kMostTopLogprobs);
    return top < 0 ? std::nullopt : std::optional(top);
  }
  const std::int64_t top = fields.integer("top_logprobs", 0, 0, kMostTopLogprobs);
  if (!fields.flag("logprobs")) return std::nullopt;
  return top;
}

// The number of new tokens, which must fit the context with each prompt.
std::int64_t token_count(const Fields& fields, bool is_chat,
                         const std::vector<ServePrompt>& prompts, std::int64_t positions) {
  std::size_t longest = 0;
  for (const ServePrompt& prompt : prompts) longest = std::max(longest, prompt.tokens.size());
  const auto length = static_cast<std::int64_t>(longest);
  const char* const name =
      is_chat && fields.find("max_completion_tokens") ? "max_completion_tokens" : "max_tokens";
  // The last new token needs no position.
  const std::int64_t room = positions - length + 1;
  const std::int64_t fallback = is_chat ? room : std::min(kDefaultTokens, room);
  const std::int64_t count =
      fields.integer(name, std::max<std::int64_t>(fallback, 0), 0, kMostTokens);
  if (count > room || length > positions)
    throw ApiError(
        400,
        fmt::format("the model's context is {} tokens, but the prompt has {} and {} is {}",
                    positions, length, name, count),
        is_chat ? "messages" : "prompt", "context_length_exceeded");
  return count;
}

ApiRequest parse(const io::OrderedJson& json, bool is_chat, const ServedModel& model) {
  if (!json.is_object()) throw ApiError(400, "the request must be a JSON object");
  const Fields fields(json);
  if (const io::OrderedJson* const name = fields.find("model")) {
    if (!name->is_string()) Fields::wrong_type("model", "a string", *name);
    if (*name != model.name)
      throw ApiError(404,
                     fmt::format("the model '{}' does not exist; this server has '{}'",
                                 name->get<std::string>(), model.name),
                     "model", "model_not_found");
  }
  for (const UnsupportedField& field : kUnsupported) {
    const io::OrderedJson* const value = fields.find(field.name);
    if (value != nullptr && *value != io::OrderedJson::parse(field.neutral))
      refuse(field.name, fmt::format("'{}' is not supported", field.name));
  }
  ApiRequest request{.is_chat = is_chat};
  CompletionRequest& work = request.work;
  GenerationOptions& generation = work.generation;
  work.prompts =
      is_chat ? chat_prompts_of(json, model, generation.ends) : prompts_of(fields, model.loaded);
  generation.count = token_count(fields, is_chat, work.prompts, model.loaded.model->arch().seq_len);
  // vLLM's value for no limit is -1.
  const std::int64_t top_k = fields.integer("top_k", 0, -1, kMostInteger);
  generation.sampling = {.temperature = fields.number("temperature", 1.0),
                         .top_k = std::max<std::int64_t>(top_k, 0),
                         .top_p = fields.number("top_p", 1.0),
                         .min_p = fields.number("min_p", 0.0),
                         .repetition_penalty = fields.number("repetition_penalty", 1.0)};
  generation.sampling.validate();
  const bool has_seed = fields.find("seed") != nullptr;
  const std::uint64_t seed =
      has_seed ? static_cast<std::uint64_t>(fields.integer("seed", 0, -kMostInteger, kMostInteger))
               : std::random_device()();
  generation.key = RngKey::make(seed, RngPurpose::Sampling, 0);
  work.choices = static_cast<std::size_t>(fields.integer("n", 1, 1, kMostChoices));
  const std::int64_t best_of =
      fields.integer("best_of", static_cast<std::int64_t>(work.choices), 1, kMostChoices);
  if (best_of != static_cast<std::int64_t>(work.choices))
    refuse("best_of", "'best_of' is not supported, except if it equals 'n'");
  if (work.prompts.size() * work.choices > kMostChoices)
    refuse("prompt", fmt::format("{} prompts times {} choices are more than {}",
                                 work.prompts.size(), work.choices, kMostChoices));
  work.stop = stops_of(fields);
  work.top_logprobs = top_logprobs_of(fields, is_chat);
  work.echo = !is_chat && fields.flag("echo");
  request.streams = fields.flag("stream");
  if (const io::OrderedJson* const options = fields.find("stream_options")) {
    if (!options->is_object()) Fields::wrong_type("stream_options", "an object", *options);
    request.streams_usage = Fields(*options).flag("include_usage");
  }
  return request;
}

}  // namespace

ApiRequest parse_api_request(const std::string& body, bool is_chat, const ServedModel& model) {
  MemberLimit limit;
  io::Json::sax_parse(body, &limit);
  try {
    return parse(io::parse_ordered_json(body, "the request"), is_chat, model);
  } catch (const Error& error) {
    throw ApiError(400, error.what());
  }
}

}  // namespace tessera::tools
