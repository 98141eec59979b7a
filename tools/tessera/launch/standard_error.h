#pragma once

#include <atomic>
#include <streambuf>

#include "tools/tessera/launch/log_output.h"

namespace tessera::tools {

/// Stream buffer on a LogOutput; drops the oldest lines, with a warning, when full. Thread-safe:
/// concurrent writes do not mix.
class LogBuffer final : public std::streambuf {
 public:
  explicit LogBuffer(LogOutput& to) : to_(to) {}

 protected:
  std::streamsize xsputn(const char* text, std::streamsize size) override;
  int_type overflow(int_type c) override;
  int sync() override {
    to_.flush();
    return 0;
  }

 private:
  LogOutput& to_;
  std::atomic<bool> is_read_{true};  // the last wait ended with an empty buffer
};

/// Makes std::cerr almost non-blocking for a scope, so that a run trains, saves and stops even if
/// its terminal is stopped or its pipe is full. The destructor waits at most 8 s, less than the
/// launcher allows an exiting rank. One instance at a time.
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

/// Writes to standard error; waits a few seconds for a slow reader.
void say_at_last(std::string_view text);

}  // namespace tessera::tools
