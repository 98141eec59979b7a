#pragma once

#include <stdexcept>
#include <string>

#include "io/base/json.h"
#include "tools/tessera/model/loaded_model.h"
#include "tools/tessera/serve/job.h"

namespace tessera::tools {

/// An error that the client gets as OpenAI's error object.
class ApiError : public std::runtime_error {
 public:
  /// @param param  the field at fault; empty: none
  ApiError(int status, const std::string& message, std::string param = {}, std::string code = {})
      : std::runtime_error(message),
        status(status),
        param(std::move(param)),
        code(std::move(code)) {}

  const int status;
  const std::string param, code;
};

struct ServedModel {
  LoadedModel& loaded;
  std::string name;
  std::string chat_template;  ///< file; empty: the model's
};

struct ApiRequest {
  CompletionRequest work = {};
  bool is_chat = false;
  bool streams = false;
  bool streams_usage = false;
};

/// Reads the body of POST /v1/completions or /v1/chat/completions.
/// @throws ApiError
ApiRequest parse_api_request(const std::string& body, bool is_chat, const ServedModel& model);

}  // namespace tessera::tools
