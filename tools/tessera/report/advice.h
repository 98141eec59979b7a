#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>

namespace tessera::tools {

/// Flags that reduce a command's memory, one per line.
class MemoryAdvice {
 public:
  void add(const std::string& flag, const std::string& why) {
    if (text_.empty()) text_ = "to use less memory, set one or more of:";
    text_ += fmt::format("\n  {:<30} # {}", flag, why);
  }
  const std::string& text() const { return text_; }
  /// Appends the flags, if any, to the message of an OutOfMemory error.
  std::string after(std::string message) const {
    if (text_.empty()) return message;
    if (!message.ends_with('\n')) message += '\n';
    return message + text_;
  }

 private:
  std::string text_;
};

}  // namespace tessera::tools
