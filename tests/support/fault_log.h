#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace tessera::test {

/// Appends a line to the file that TESSERA_FAULT_LOG names, from which tools/fault_table.py counts
/// what was tried; without that variable, nothing. Any thread, any process.
/// @param json  an object: {"world", "share"} for a run of that many ranks, of which this process
///   is that share; {"fault", "point", "world", "wrong"} for a fault of a campaign, with its "rank"
///   and the "ms" until all processes were gone, or a "count" of them; "wrong" is empty if all was
///   well
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
