#pragma once

#include <string>

#include "core/base/device.h"
#include "tools/tessera/config/config.h"

namespace tessera::tools {

/// What must be equal on all ranks, as lines "key = value" for comm::Hello: version, build, kind of
/// device, and the configuration; but not threads and memory, which may differ between hosts, the
/// number of the device, nor where rank 0 listens, which only it must know.
std::string fingerprint(const Config& config, Device device);

}  // namespace tessera::tools
