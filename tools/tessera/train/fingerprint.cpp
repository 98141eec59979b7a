#include "tools/tessera/train/fingerprint.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace tessera::tools {

std::string fingerprint(const Config& config, Device device) {
  std::string text = fmt::format("tessera = {}\nbuild = {}\ndevice = {}\n", TESSERA_VERSION,
                                 TESSERA_BUILD, device.type == DeviceType::CUDA ? "cuda" : "cpu");
  const auto json = to_json(config);
  for (const auto& [section, keys] : json.items()) {
    for (const auto& [key, value] : keys.items()) {
      const bool of_host = key == "threads" || key == "memory_limit" || key == "device";
      if (section == "train" && of_host) continue;
      if (section == "comm" && key == "bind") continue;
      text += fmt::format("{}.{} = {}\n", section, key, value.dump());
    }
  }
  return text;
}

}  // namespace tessera::tools
