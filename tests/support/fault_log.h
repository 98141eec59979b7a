#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace tessera::test {

/// Appends a line to the file TESSERA_FAULT_LOG, which tools/fault_table.py evaluates; does nothing
/// if it is unset. Safe across threads and processes.
/// @param json  {"world", "share"} for a run of which this process counts the fraction `share`;
///          {"fault", "point", "world", "wrong"} for a trial of a campaign, with "rank" and "ms"
///          from the fault to the last process's end, or "count" trials; "wrong" is empty on
///          success
inline void log_fault(std::string json) {
  const char* const path = std::getenv("TESSERA_FAULT_LOG");
  if (path == nullptr) return;
  json += '\n';
  const int file = ::open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  const bool written =
      file >= 0 && ::write(file, json.data(), json.size()) == static_cast<ssize_t>(json.size());
  if (file >= 0) ::close(file);
  if (!written) throw std::runtime_error(std::string("cannot write ") + path);
}

}  // namespace tessera::test
