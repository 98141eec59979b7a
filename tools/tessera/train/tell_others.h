#pragma once

#include <exception>
#include <string_view>

#include "comm/control/store.h"

namespace tessera::tools {

/// Publishes that this rank ends by an error of its own, so that the others end soon and name it.
/// Does nothing for errors that all ranks share: communication, a non-finite loss. Bounded like the
/// store's calls.
/// @param process  "host, pid 12"
/// @return whether it was published
bool tell_others(comm::Store& store, int rank, std::string_view process,
                 const std::exception& error) noexcept;

}  // namespace tessera::tools
