#pragma once

#include <vector>

#include "comm/control/socket.h"
#include "comm/tcp.h"

namespace tessera::comm {

/// Connects this rank to all lower ranks and accepts all higher ones; then stops listening.
///
/// Both sides authenticate before data moves, with the proofs of control/authentication.h over run
/// id, name, both ranks and both nonces:
///
///     server: nonce            32 bytes
///     client: rank, nonce, proof   4 + 32 + 32 bytes, little-endian
///     server: proof            32 bytes
///
/// A stranger, a connection not authenticated yet, may send 68 bytes within 2 s. At most 64 of them
/// are kept; a new one replaces a random one, and a rank that was replaced connects again.
///
/// @return non-blocking sockets by rank; an empty one for this rank
/// @throws CommError Timeout naming the ranks that published no address, or both ends of a
/// connection that could not be made; Aborted if this rank can't listen; the run's verdict, if
/// there is one and options.communicator.ends_run
std::vector<FileDescriptor> connect_tcp_mesh(Store& store, int rank, int world_size,
                                             const TcpOptions& options);

}  // namespace tessera::comm
