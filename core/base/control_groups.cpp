#include "core/base/control_groups.h"

#include <fmt/core.h>

#include <fstream>

namespace tessera {

void for_each_control_group(
    const std::string& root, const std::string& membership, std::string_view controller,
    const std::function<void(const std::filesystem::path&, ControlGroupVersion)>& visit) {
  const auto visit_nested = [&](const std::filesystem::path& top, std::string_view path,
                                ControlGroupVersion version) {
    std::filesystem::path group = top;
    for (const auto& part : std::filesystem::path(path).relative_path()) {
      if (part == "..") return;  // outside this namespace
      group /= part;
      visit(group, version);
    }
  };
  const std::filesystem::path top = root;
  visit(top, ControlGroupVersion::V2);
  std::ifstream in(membership);  // "0::/a/b" or "4:cpu,memory:/a/b"
  for (std::string line; std::getline(in, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    const std::string path = line.substr(second + 1);
    if (line.starts_with("0::")) {
      visit_nested(top, path, ControlGroupVersion::V2);
    } else if (controllers.find(fmt::format(",{},", controller)) != std::string::npos) {
      visit(top / controller, ControlGroupVersion::V1);
      visit_nested(top / controller, path, ControlGroupVersion::V1);
    }
  }
}

}  // namespace tessera
