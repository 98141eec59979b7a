#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace tessera {

enum class ControlGroupVersion { V1, V2 };

/// Visits the directories of the control groups that limit this process, nested ones after the group
/// that contains them.
/// @param root        mount point of control groups, version 1 or 2; may be absent
/// @param membership  file that lists this process's groups, as /proc/self/cgroup does
/// @param controller  such as "memory" or "cpu"
void for_each_control_group(
    const std::string& root, const std::string& membership, std::string_view controller,
    const std::function<void(const std::filesystem::path&, ControlGroupVersion)>& visit);

}  // namespace tessera
