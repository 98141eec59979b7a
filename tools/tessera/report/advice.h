#pragma once

#include <string>

namespace tessera::tools {

/// Flags that reduce a command's memory, one per line.
class MemoryAdvice {
 public:
  void add(const std::string& flag, const std::string& why);
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

/// Appends the advice, if any, to the message of an OutOfMemory.
std::string with_advice(std::string message, const MemoryAdvice& advice);

}  // namespace tessera::tools
