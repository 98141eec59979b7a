#include "core/base/system_memory.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "core/base/control_groups.h"

namespace tessera {
namespace {

SystemMemory of_machine() {
  SystemMemory out;
  std::ifstream in("/proc/meminfo");  // "MemTotal:       16384 kB"
  std::string key, unit;
  for (std::int64_t kib = 0; in >> key >> kib; std::getline(in, unit)) {
    if (key == "MemTotal:") out.total = kib * 1024;
    if (key == "MemAvailable:") out.available = kib * 1024;
  }
  return out;
}

// File names of a control group; see kVersion1 and kVersion2.
struct Names {
  const char* limit;
  const char* used;
  const char* cache;  // in memory.stat: reclaimable file cache
};
constexpr Names kVersion2 = {"memory.max", "memory.current", "inactive_file"};
constexpr Names kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                             "total_inactive_file"};

std::int64_t used_by(const std::filesystem::path& group, const Names& names) {
  std::int64_t used = 0;
  std::ifstream(group / names.used) >> used;
  std::ifstream statistics(group / "memory.stat");
  std::string key;
  for (std::int64_t bytes = 0; statistics >> key >> bytes;) {
    if (key == names.cache) used -= bytes;
  }
  return used;
}

// The tightest limit counts.
void apply(SystemMemory& memory, const std::filesystem::path& group, const Names& names) {
  std::int64_t limit = 0;
  if (!(std::ifstream(group / names.limit) >> limit) || limit <= 0 || limit >= of_machine().total)
    return;
  const std::int64_t left = limit - std::clamp<std::int64_t>(used_by(group, names), 0, limit);
  memory.total = std::min(memory.total, limit);
  memory.available = std::min(memory.available, left);
}

}  // namespace

SystemMemory system_memory(const std::string& root, const std::string& membership) {
  SystemMemory out = of_machine();
  for_each_control_group(root, membership, "memory", [&](const auto& group, auto version) {
    apply(out, group, version == ControlGroupVersion::V1 ? kVersion1 : kVersion2);
  });
  return out;
}

std::int64_t peak_resident_bytes() {
  std::ifstream in("/proc/self/status");
  std::string key, rest;
  for (std::int64_t kib = 0; in >> key; std::getline(in, rest))
    if (key == "VmHWM:" && in >> kib) return kib * 1024;
  return 0;
}

}  // namespace tessera
