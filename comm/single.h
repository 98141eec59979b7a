#pragma once

#include <memory>

#include "comm/communicator.h"
#include "comm/subgroup.h"

namespace tessera::comm {

/// A group of one rank: collectives run immediately, on the calling thread.
std::unique_ptr<Communicator> make_single_communicator(Membership membership = {});

/// A collective that has ended.
WorkPtr finished_work();

}  // namespace tessera::comm
