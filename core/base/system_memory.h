#pragma once

#include <cstdint>
#include <filesystem>

namespace tessera {

/// Memory that processes of this host, or of this process's control group, can have. Bytes; 0 if
/// the system doesn't tell.
struct SystemMemory {
  std::int64_t total = 0;      ///< of the machine; the group's limit if that is lower
  std::int64_t available = 0;  ///< of it, without what others hold; file caches count as available
};
/// @param root        where control groups are, of either version; may be absent
/// @param membership  says which of them this process is in: within these, too, limits count
SystemMemory system_memory(const std::filesystem::path& root = "/sys/fs/cgroup",
                           const std::filesystem::path& membership = "/proc/self/cgroup");

}  // namespace tessera
