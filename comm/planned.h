#pragma once

#include <memory>
#include <string_view>

#include "comm/communicator.h"

namespace tessera {
class Context;
}

namespace tessera::comm {

/// How fast ranks send, for a plan's time. Rings, as NCCL's: across hosts, all ranks of a host send at once.
struct Links {
  double in_host = 0;  ///< bytes per second that a rank sends within its host; 0: all takes no time
  double between_hosts = 0;  ///< and to another host
  int per_host = 1;          ///< ranks of a host
  /// Seconds of a collective, of each step of its ring within a host, and of each between hosts. The defaults
  /// are those by which NCCL 2.27 chooses its algorithms (ring, Simple, NVLink).
  double start = 8.4e-6, step_in_host = 3.4e-6, step_between_hosts = 14e-6;
};

/// A rank of a group that does not exist, for plans on a meta context: collectives move nothing.
/// In a context with a trace, they take the time that `links` need, one after another within a group, and kernels
/// wait for them where the program waits. Groups don't slow each other down. Books the memory that the backend would.
/// @param backend  "shm", "tcp", "nccl", "threads" or "single"; on a GPU, "host-staged shm" and so on
std::unique_ptr<Communicator> make_planned_communicator(std::shared_ptr<Context> context,
                                                        std::string_view backend, int rank,
                                                        int world_size, const Links& links = {});

}  // namespace tessera::comm
