#pragma once

#include <string>

namespace tessera::tools {

/// Flags that lower a command's memory, one per line, ready to paste.
class MemoryAdvice {
 public:
  void add(const std::string& flag, const std::string& why);
  /// Empty if there are none.
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

/// An OutOfMemory's message, followed by the advice, if any.
std::string with_advice(std::string message, const MemoryAdvice& advice);

}  // namespace tessera::tools
