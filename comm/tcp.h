#pragma once

#include <memory>
#include <string>

#include "comm/collective.h"
#include "comm/control/store.h"
#include "comm/queued_communicator.h"

namespace tessera::comm {

/// Half of connect_timeout is for publishing addresses, half for connecting.
struct TcpOptions : ConnectOptions {
  TcpOptions() { name = "tcp"; }
  /// Time within which the monitor detects an ended or stopped rank. Connecting waits at least this
  /// long, so that such a rank is reported as lost, not as unreachable.
  std::chrono::milliseconds watched_within{2000};
  /// Address or host name on which this rank listens for its peers.
  std::string address = "127.0.0.1";
  /// Both sides of a connection prove that they know run id and token; see tcp_mesh.h.
  std::string run_id = {}, token = {};
};

/// Makes a communicator over TCP between processes. All ranks call it. Its only thread runs the
/// collectives, one after another.
///
/// At the start of each collective every rank sends its header (kind, dtype, size, label) to every
/// other. No buffer is written before all headers agree; if they differ, every rank throws
/// CommError(Mismatch). A failing rank publishes its error in the store, and all survivors throw the
/// error that was published first. Reductions keep at most 256 KiB of staging per peer, which counts
/// as Communication in the memory ledger of options.communicator.context, if set.
///
/// @param store  outlives the communicator; carries addresses and errors
/// @throws CommError if not all ranks connect in time
std::unique_ptr<Communicator> make_tcp_communicator(const std::shared_ptr<Store>& store, int rank,
                                                    int world_size, const TcpOptions& options);

/// Staging memory that a collective takes on a rank, and that the communicator keeps.
std::size_t tcp_staging_bytes(const Collective& collective, int rank, int world_size);

}  // namespace tessera::comm
