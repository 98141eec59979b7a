#pragma once

#include <mutex>
#include <ostream>
#include <streambuf>

#include "tools/tessera/launch/log_output.h"

namespace tessera::tools {

/// Writes to a LogOutput; what comes while that is full is dropped, and told of once there is room
/// again. Thread-safe, as far as what is written at once stays whole.
class LogBuffer final : public std::streambuf {
 public:
  explicit LogBuffer(LogOutput& to) : to_(to) {}

 protected:
  std::streamsize xsputn(const char* text, std::streamsize size) override;
  int_type overflow(int_type c) override;
  int sync() override;

 private:
  LogOutput& to_;
  std::mutex mutex_;
  std::size_t dropped_ = 0;  // bytes
};

/// While it lives, std::cerr never waits for who reads it: a run goes on, saves and stops though
/// its terminal is held, or the pipe behind it is full. At its end it waits as LogOutput does. One
/// at a time.
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

}  // namespace tessera::tools
