#pragma once

#include <string>

namespace tessera::tools {

/// Flags that would make a command need less memory, to be pasted, one a line.
class MemoryAdvice {
 public:
  void add(const std::string& flag, const std::string& why);
  /// Empty if there are none.
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

/// An OutOfMemory's message with a ledger, and below it the advice, if there is any.
std::string with_advice(std::string message, const MemoryAdvice& advice);

}  // namespace tessera::tools
