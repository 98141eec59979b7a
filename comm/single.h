#pragma once

#include <memory>

#include "comm/communicator.h"

namespace tessera::comm {

/// The group of one rank: collectives run at once, on the calling thread.
std::unique_ptr<Communicator> make_single_communicator();

}  // namespace tessera::comm
