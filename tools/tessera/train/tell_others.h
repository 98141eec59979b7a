#pragma once

#include <exception>
#include <string_view>

#include "comm/control/store.h"

namespace tessera::tools {

/// Tells the other ranks that this one ends by an error that may be its own: wherever they are,
/// they end soon and name it. Not if the error is theirs, too: one of communication, or of a loss
/// that all have seen. Bounded as the store's calls are; whom it can't tell will notice that it
/// leaves.
/// @param process  "host, pid 12"
/// @return whether it may be its own
bool tell_others(comm::Store& store, int rank, std::string_view process,
                 const std::exception& error) noexcept;

}  // namespace tessera::tools
