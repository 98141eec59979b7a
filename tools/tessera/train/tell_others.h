#pragma once

#include <exception>
#include <string_view>

#include "comm/control/store.h"

namespace tessera::tools {

/// Publishes this rank's error, so that the other ranks exit soon and name this rank. Ignores
/// errors that all ranks share: communication, a non-finite loss. Blocks no longer than a store
/// call.
/// @param process  "host, pid 12"
/// @return whether the error concerns this rank alone
bool tell_others(comm::Store& store, int rank, std::string_view process,
                 const std::exception& error) noexcept;

}  // namespace tessera::tools
