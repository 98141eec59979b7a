#pragma once

#include <string>

#include "core/base/device.h"
#include "tools/tessera/config/config.h"

namespace tessera::tools {

/// Settings that must be equal on all ranks, as lines "key = value" for comm::Hello: version,
/// build, device type, and the configuration except keys that may differ between hosts (threads,
/// memory limit, device number, bind address).
std::string fingerprint(const Config& config, Device device);

}  // namespace tessera::tools
