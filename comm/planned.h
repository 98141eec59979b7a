#pragma once

#include <memory>
#include <string_view>

#include "comm/communicator.h"

namespace tessera {
class Context;
}

namespace tessera::comm {

/// A rank of a group that does not exist, for plans on a meta context: collectives move nothing and
/// end at once. Books the memory that the backend would.
/// @param backend  "shm", "tcp", "nccl", "threads" or "single"; on a GPU, "host-staged shm" and so on
std::unique_ptr<Communicator> make_planned_communicator(std::shared_ptr<Context> context,
                                                        std::string_view backend, int rank,
                                                        int world_size);

}  // namespace tessera::comm
