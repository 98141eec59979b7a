#pragma once

#include <string>

#include "core/base/device.h"
#include "tools/tessera/config/config.h"

namespace tessera::tools {

/// Properties that must be equal on all ranks, as lines "key = value" for comm::Hello: version,
/// build, kind of device, and the configuration except what may differ between hosts (threads,
/// memory limit, device number, listening address).
std::string fingerprint(const Config& config, Device device);

}  // namespace tessera::tools
