#pragma once

#include <atomic>
#include <streambuf>

#include "tools/tessera/launch/log_output.h"

namespace tessera::tools {

/// Writes to a LogOutput. Of more than that keeps, the oldest lines are dropped, with a line that
/// says so. Thread-safe: what is written at once stays whole.
class LogBuffer final : public std::streambuf {
 public:
  explicit LogBuffer(LogOutput& to) : to_(to) {}

 protected:
  std::streamsize xsputn(const char* text, std::streamsize size) override;
  int_type overflow(int_type c) override;
  int sync() override;

 private:
  LogOutput& to_;
  std::atomic<bool> is_read_{true};  // so far as is known
};

/// While it lives, std::cerr hardly waits for who reads it: a run goes on, saves and stops though
/// its terminal is held, or the pipe behind it is full. At its end it waits for seconds, less than
/// a launcher leaves to a rank that ends. One at a time.
class PatientStandardError {
 public:
  PatientStandardError();
  ~PatientStandardError();
  PatientStandardError(const PatientStandardError&) = delete;
  PatientStandardError& operator=(const PatientStandardError&) = delete;

 private:
  LogOutput output_;
  LogBuffer buffer_{output_};
  std::streambuf* const before_;
};

/// Writes to standard error, and waits for who reads it, but not for long.
void say_at_last(std::string_view text);

}  // namespace tessera::tools
