#include "tools/tessera/report/advice.h"

#include <fmt/format.h>

namespace tessera::tools {

void MemoryAdvice::add(const std::string& flag, const std::string& why) {
  if (text_.empty()) text_ = "to use less memory, set one or more of:";
  text_ += fmt::format("\n  {:<30} # {}", flag, why);
}

std::string with_advice(std::string message, const MemoryAdvice& advice) {
  if (advice.text().empty()) return message;
  if (!message.ends_with('\n')) message += '\n';
  return message + advice.text();
}

}  // namespace tessera::tools
