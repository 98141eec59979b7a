#include "tools/tessera/serve/response.h"

#include <fmt/format.h>

#include <ctime>
#include <random>

#include "io/tokenizer/unicode.h"

namespace tessera::tools {
namespace {

// A token's text as OpenAI writes it: part of a character as "bytes:\xe2\x82".
std::string token_text(const std::string& text) {
  if (io::find_malformed_utf8(text) == text.npos) return text;
  std::string bytes = "bytes:";
  for (const char c : text) bytes += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  return bytes;
}

io::OrderedJson bytes_of(const std::string& text) {
  io::OrderedJson bytes = io::OrderedJson::array();
  for (const char c : text) bytes.push_back(static_cast<unsigned char>(c));
  return bytes;
}

}  // namespace

io::OrderedJson error_object(const ApiError& error) {
  const char* const type = error.status >= 500   ? "server_error"
                           : error.status == 401 ? "authentication_error"
                                                 : "invalid_request_error";
  const auto optional = [](const std::string& text) {
    return text.empty() ? io::OrderedJson() : io::OrderedJson(text);
  };
  return {{"error",
           {{"message", error.what()},
            {"type", type},
            {"param", optional(error.param)},
            {"code", optional(error.code)}}}};
}

std::string dump_line(const io::OrderedJson& json) {
  return json.dump(-1, ' ', false, io::OrderedJson::error_handler_t::replace);
}

ResponseWriter::ResponseWriter(const ApiRequest& request, const ServedModel& model)
    : model_(model),
      is_chat_(request.is_chat),
      has_logprobs_(request.work.top_logprobs.has_value()),
      created_(std::time(nullptr)),
      choices_(request.work.prompts.size() * request.work.choices) {
  for (const ServePrompt& prompt : request.work.prompts)
    prompt_tokens_ += std::ssize(prompt.tokens);
  std::random_device random;
  id_ = fmt::format("{}-{:08x}{:08x}{:08x}", is_chat_ ? "chatcmpl" : "cmpl", random(), random(),
                    random());
}

void ResponseWriter::add(const CompletionPart& part, bool keeps_text) {
  Sum& sum = choices_.at(part.choice);
  sum.generated = part.generated;
  sum.finish_reason = part.finish_reason;
  if (!keeps_text) return;
  sum.text += part.text;
  sum.tokens.insert(sum.tokens.end(), part.tokens.begin(), part.tokens.end());
}

io::OrderedJson ResponseWriter::head(bool streams) const {
  const char* const object =
      is_chat_ ? (streams ? "chat.completion.chunk" : "chat.completion") : "text_completion";
  return {{"id", id_}, {"object", object}, {"created", created_}, {"model", model_.name}};
}

io::OrderedJson ResponseWriter::usage() const {
  std::int64_t generated = 0;
  for (const Sum& sum : choices_) generated += sum.generated;
  return {{"prompt_tokens", prompt_tokens_},
          {"completion_tokens", generated},
          {"total_tokens", prompt_tokens_ + generated}};
}

std::string ResponseWriter::text_of_id(std::int32_t id) const {
  return text_of(*model_.loaded.tokenizer, {&id, 1});
}

io::OrderedJson ResponseWriter::logprobs(const std::vector<TokenRecord>& tokens) const {
  io::OrderedJson texts = io::OrderedJson::array(), log_probs = texts, tops = texts,
                  offsets = texts;
  for (const TokenRecord& token : tokens) {
    texts.push_back(token_text(token.text));
    offsets.push_back(token.offset);
    if (!token.score) {
      log_probs.push_back(nullptr);
      tops.push_back(nullptr);
      continue;
    }
    log_probs.push_back(token.score->log_prob);
    io::OrderedJson top = io::OrderedJson::object();
    // Keeps the likeliest of tokens with the same text.
    for (const auto& [id, log_prob] : token.score->top)
      top.emplace(token_text(id == token.id ? token.text : text_of_id(id)), log_prob);
    top.emplace(texts.back().get<std::string>(), token.score->log_prob);
    tops.push_back(std::move(top));
  }
  return {{"tokens", std::move(texts)},
          {"token_logprobs", std::move(log_probs)},
          {"top_logprobs", std::move(tops)},
          {"text_offset", std::move(offsets)}};
}

io::OrderedJson ResponseWriter::chat_logprobs(const std::vector<TokenRecord>& tokens) const {
  const auto entry = [](const std::string& text, double log_prob) {
    return io::OrderedJson{
        {"token", token_text(text)}, {"logprob", log_prob}, {"bytes", bytes_of(text)}};
  };
  io::OrderedJson content = io::OrderedJson::array();
  for (const TokenRecord& token : tokens) {
    io::OrderedJson one = entry(token.text, token.score->log_prob);
    one["top_logprobs"] = io::OrderedJson::array();
    for (const auto& [id, log_prob] : token.score->top)
      one["top_logprobs"].push_back(entry(id == token.id ? token.text : text_of_id(id), log_prob));
    content.push_back(std::move(one));
  }
  return {{"content", std::move(content)}};
}

io::OrderedJson ResponseWriter::whole() const {
  io::OrderedJson response = head(false);
  response["choices"] = io::OrderedJson::array();
  for (std::size_t i = 0; i < choices_.size(); ++i) {
    const Sum& sum = choices_[i];
    io::OrderedJson choice = {{"index", i}};
    if (is_chat_)
      choice["message"] = {{"role", "assistant"}, {"content", sum.text}};
    else
      choice["text"] = sum.text;
    choice["logprobs"] = nullptr;
    if (has_logprobs_)
      choice["logprobs"] = is_chat_ ? chat_logprobs(sum.tokens) : logprobs(sum.tokens);
    choice["finish_reason"] = sum.finish_reason;
    response["choices"].push_back(std::move(choice));
  }
  response["usage"] = usage();
  return response;
}

io::OrderedJson ResponseWriter::chunk(const CompletionPart& part) {
  io::OrderedJson choice = {{"index", part.choice}};
  if (is_chat_) {
    const bool first = !std::exchange(choices_.at(part.choice).began, true);
    io::OrderedJson delta = {{"content", part.text}};
    if (first) delta["role"] = "assistant";
    choice["delta"] = std::move(delta);
  } else {
    choice["text"] = part.text;
  }
  choice["logprobs"] = nullptr;
  if (has_logprobs_)
    choice["logprobs"] = is_chat_ ? chat_logprobs(part.tokens) : logprobs(part.tokens);
  choice["finish_reason"] = nullptr;
  if (part.finish_reason != nullptr) choice["finish_reason"] = part.finish_reason;
  io::OrderedJson response = head(true);
  response["choices"] = io::OrderedJson::array({std::move(choice)});
  return response;
}

io::OrderedJson ResponseWriter::usage_chunk() const {
  io::OrderedJson response = head(true);
  response["choices"] = io::OrderedJson::array();
  response["usage"] = usage();
  return response;
}

}  // namespace tessera::tools
