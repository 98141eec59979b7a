#pragma once

#include <functional>
#include <string>

namespace tessera::tools {

/// This process's connections to a local TCP port; httplib does not show their sockets.
/// @param use  called with the socket and the peer's port
void for_each_connection(int port, const std::function<void(int socket, int peer_port)>& use);

/// Whether the peer has closed the connection, or its writing side. False for -1.
bool is_closed_by_peer(int socket);

}  // namespace tessera::tools
