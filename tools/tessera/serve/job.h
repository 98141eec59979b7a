#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tools/tessera/model/scoring.h"

namespace tessera::tools {

struct ServePrompt {
  Tokens tokens;
  std::size_t hidden = 0;  ///< tokens before the text: of a template, or that begin every text
};

/// Continuations of prompts. Choice c continues prompt c / choices.
struct CompletionRequest {
  std::vector<ServePrompt> prompts;
  std::size_t choices = 1;  ///< per prompt
  GenerationOptions generation;
  std::vector<std::string> stop;
  std::optional<std::int64_t> top_logprobs;  ///< none: no log-probabilities
  bool echo = false;                         ///< the prompts are part of the texts
};

/// A token with its log-probability.
struct TokenRecord {
  std::int32_t id = 0;
  std::string text;                 ///< bytes, which may be part of a character
  std::int64_t offset = 0;          ///< characters of the text before it
  std::optional<TokenScore> score;  ///< none: the first token of a prompt
};

/// Text that was added to a choice.
struct CompletionPart {
  std::size_t choice = 0;
  std::string text = {};  ///< valid UTF-8
  std::vector<TokenRecord> tokens = {};
  std::int64_t generated = 0;           ///< tokens so far
  const char* finish_reason = nullptr;  ///< "stop" or "length" in the last part
};

/// A request on its way from the connection that waits for it to the model, and back. Thread-safe.
class Job {
 public:
  explicit Job(CompletionRequest request) : request_(std::move(request)) {}
  const CompletionRequest& request() const { return request_; }

  void push(CompletionPart part);
  /// No part will follow. @param error  why the request failed, or null
  void close(std::exception_ptr error = nullptr);
  /// Waits for a part for a limited time. Nothing: none has come, or finished().
  std::optional<CompletionPart> next(std::chrono::milliseconds patience);
  /// Whether all parts were taken and none will follow. @throws the error of close()
  bool finished();

  void cancel();
  bool cancelled() const;

 private:
  const CompletionRequest request_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<CompletionPart> parts_;
  std::exception_ptr error_;
  bool closed_ = false, cancelled_ = false;
};

}  // namespace tessera::tools
