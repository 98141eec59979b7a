#pragma once

#include <cstdint>
#include <string>

namespace tessera {

/// Memory of a host or control group, in bytes; 0 if unknown.
struct SystemMemory {
  std::int64_t total = 0;      ///< of the machine; the group's limit if that is lower
  std::int64_t available = 0;  ///< unused or in file caches
};
/// The host's memory within the limits of this process's control groups.
/// @param root        mount point of control groups, version 1 or 2; may be absent
/// @param membership  file that lists this process's groups, as /proc/self/cgroup does
SystemMemory system_memory(const std::string& root = "/sys/fs/cgroup",
                           const std::string& membership = "/proc/self/cgroup");

/// Most memory that this process had resident at once, in bytes: program, libraries, and pages of mapped
/// files included. 0 if unknown.
std::int64_t peak_resident_bytes();

}  // namespace tessera
