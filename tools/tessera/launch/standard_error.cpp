#include "tools/tessera/launch/standard_error.h"

#include <fmt/format.h>
#include <unistd.h>

#include <iostream>

namespace tessera::tools {

std::streamsize LogBuffer::xsputn(const char* text, std::streamsize size) {
  const std::lock_guard lock(mutex_);
  const auto bytes = static_cast<std::size_t>(size);
  to_.flush();
  if (to_.is_full()) {
    dropped_ += bytes;
    return size;
  }
  if (dropped_ > 0) {
    to_.write(fmt::format(
        "tessera: warning: {} bytes of this log were dropped, as nobody read it\n", dropped_));
    dropped_ = 0;
  }
  to_.write({text, bytes});
  return size;
}

LogBuffer::int_type LogBuffer::overflow(int_type c) {
  if (traits_type::eq_int_type(c, traits_type::eof())) return traits_type::not_eof(c);
  const char one = traits_type::to_char_type(c);
  xsputn(&one, 1);
  return c;
}

int LogBuffer::sync() {
  to_.flush();
  return 0;
}

PatientStandardError::PatientStandardError()
    : output_(STDERR_FILENO), before_(std::cerr.rdbuf(&buffer_)) {}

PatientStandardError::~PatientStandardError() {
  std::cerr.rdbuf(before_);
  output_.finish();
}

}  // namespace tessera::tools
