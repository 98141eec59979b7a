#include "tools/tessera/launch/standard_error.h"

#include <unistd.h>

#include <iostream>

namespace tessera::tools {
namespace {

// Longest wait for a slow reader, such as a remote terminal.
constexpr std::chrono::milliseconds kSlowReader{100};
// Limits of the final wait: without progress, and in total.
constexpr std::chrono::milliseconds kPatience{3'000}, kMost{8'000};

}  // namespace

std::streamsize LogBuffer::xsputn(const char* text, std::streamsize size) {
  to_.write({text, static_cast<std::size_t>(size)});
  // Wait, because no thread flushes the rest; after a timeout not again until the buffer is empty.
  if (to_.fd() < 0)
    is_read_ = true;
  else if (is_read_)
    is_read_ = to_.wait(kSlowReader, kSlowReader);
  if (to_.is_full()) to_.drop_oldest();
  return size;
}

LogBuffer::int_type LogBuffer::overflow(int_type c) {
  if (traits_type::eq_int_type(c, traits_type::eof())) return traits_type::not_eof(c);
  const char one = traits_type::to_char_type(c);
  xsputn(&one, 1);
  return c;
}

PatientStandardError::PatientStandardError()
    : output_(STDERR_FILENO), before_(std::cerr.rdbuf(&buffer_)) {}

PatientStandardError::~PatientStandardError() {
  std::cerr.rdbuf(before_);
  output_.finish(kPatience, kMost);
}

void say_at_last(std::string_view text) {
  LogOutput log(STDERR_FILENO);
  log.write(text);
  log.finish(kPatience, kMost);
}

}  // namespace tessera::tools
