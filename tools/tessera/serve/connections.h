#pragma once

#include <chrono>
#include <functional>
#include <string>

namespace tessera::tools {

struct Peer {
  std::string address;  ///< numeric
  int port = 0;
  bool operator==(const Peer&) const = default;
};

/// This process's connections to a local TCP port; httplib does not show their sockets.
/// @param use  called with the socket and its peer
void for_each_connection(int port, const std::function<void(int socket, const Peer& peer)>& use);

/// Whether the peer has closed the connection, or its writing side. False for -1.
bool is_closed_by_peer(int socket);

/// Ends the sending side and discards what still comes, up to a time and a number of bytes: closing
/// a socket with unread bytes would make the peer lose the answer.
void end_and_drain(int socket, std::chrono::milliseconds patience, std::size_t most);

}  // namespace tessera::tools
