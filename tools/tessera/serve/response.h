#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/base/json.h"
#include "tools/tessera/serve/request.h"

namespace tessera::tools {

/// OpenAI's error object.
io::OrderedJson error_object(const ApiError& error);
/// JSON on one line; bytes that are not UTF-8 become U+FFFD.
std::string dump_line(const io::OrderedJson& json);

/// Turns the parts of a request's choices into OpenAI's response objects.
class ResponseWriter {
 public:
  ResponseWriter(const ApiRequest& request, const ServedModel& model);

  /// Keeps a part for whole() and usage().
  void add(const CompletionPart& part, bool keeps_text);
  /// The response without streaming.
  io::OrderedJson whole() const;
  /// An event of a stream.
  io::OrderedJson chunk(const CompletionPart& part);
  /// The last event if the client wants it.
  io::OrderedJson usage_chunk() const;

 private:
  struct Sum {
    std::string text;
    std::vector<TokenRecord> tokens;
    std::int64_t generated = 0;
    const char* finish_reason = nullptr;
    bool began = false;
  };

  io::OrderedJson head(bool streams) const;
  io::OrderedJson usage() const;
  io::OrderedJson logprobs(const std::vector<TokenRecord>& tokens) const;
  io::OrderedJson chat_logprobs(const std::vector<TokenRecord>& tokens) const;
  std::string text_of_id(std::int32_t id) const;

  const ServedModel& model_;
  const bool is_chat_, has_logprobs_;
  std::int64_t prompt_tokens_ = 0;
  std::string id_;
  std::int64_t created_;
  std::vector<Sum> choices_;
};

}  // namespace tessera::tools
