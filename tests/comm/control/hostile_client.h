#pragma once

#include <sys/socket.h>

#include <atomic>
#include <deque>
#include <random>
#include <string>

#include "comm/control/authentication.h"
#include "tests/comm/control/raw_client.h"

namespace tessera::test {

/// A store server's address, run and token, as an attacker sees them.
struct Door {
  std::string host;
  std::uint16_t port = 0;
  std::string run_id;
};

inline Door door_of(const comm::TcpStoreServer& server) {
  return {server.host(), server.port(), server.run_id()};
}

inline comm::FileDescriptor raw(const Door& door) {
  return comm::connect_to(door.host, door.port, std::chrono::steady_clock::now() + 5s);
}

inline std::string hello(const std::string& run_id, const std::string& nonce) {
  return message('H', {std::string(comm::StoreProtocol::kMagic), run_id, nonce});
}

/// An honest client's messages, as an eavesdropper records them.
struct Recording {
  std::string hello, proof, request;
};

/// Joins with the token, and requests a missing key.
/// @throws std::runtime_error if the server refuses the client
inline Recording record(const Door& door, const std::string& token) {
  const auto fd = raw(door);
  const std::string nonce = comm::make_nonce();
  Recording said;
  said.hello = hello(door.run_id, nonce);
  send_all(fd, said.hello);
  const comm::Message challenge = receive_message(fd);
  if (challenge.fields.size() != 1) throw std::runtime_error("the store did not challenge");
  said.proof = message('P', {comm::make_proof(token, comm::ProofRole::Client, door.run_id, nonce,
                                              challenge.fields[0])});
  send_all(fd, said.proof);
  if (receive_message(fd).type != 'y') throw std::runtime_error("the store refused the token");
  said.request = message('?', {"nothing"});
  send_all(fd, said.request);
  if (receive_frame(fd).empty()) throw std::runtime_error("the store did not answer");
  return said;
}

inline std::string random_bytes(std::mt19937& random, std::size_t most) {
  std::string bytes(random() % most, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  return bytes;
}

/// First bytes of a random kind of attacker.
inline std::string hostile_bytes(std::mt19937& random, const Door& door, const Recording& said) {
  switch (random() % 10) {
    case 0:
      return "";  // silent
    case 1:
      return hello(door.run_id, "").substr(0, 1 + random() % 20);  // slow
    case 2:
      return std::string(4, '\xff') + random_bytes(random, 4000);  // huge
    case 3:
      return random_bytes(random, 4000);
    case 4:
      return "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    case 5:
      return said.hello;  // replayed; its proof comes later
    case 6:
      return said.hello + said.proof;
    case 7:
      return hello(door.run_id, "");  // no token
    case 8:
      return said.request;  // replayed
    default:
      return message('S', {"key", "of a stranger"});
  }
}

struct Attack {
  std::atomic<int> made{0}, joined{0}, refused{0};
};

/// Reads the server's answers so far and closes the connection without TIME_WAIT. A client that
/// received a yes (to its hello, proof or request) has joined.
inline void leave(const comm::FileDescriptor& fd, Attack& attack) {
  std::string said;
  char bytes[4096];
  ssize_t n = 0;
  while ((n = ::recv(fd.get(), bytes, sizeof(bytes), MSG_DONTWAIT)) > 0) {
    said.append(bytes, static_cast<std::size_t>(n));
  }
  bool yes = false, no = false;
  std::string_view left = said;
  for (std::size_t size = 0; left.size() > 4 && (size = comm::frame_size(left)) <= left.size();) {
    yes = yes || left[4] == 'y';
    no = no || left[4] == 'n';
    left.remove_prefix(size);
  }
  if (yes) ++attack.joined;
  if (!yes && (no || n == 0)) ++attack.refused;
  const linger now{1, 0};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &now, sizeof(now));
}

/// Opens one more hostile connection of a random kind, continues a random open one, and keeps at
/// most `most_open`.
inline void attack_once(std::mt19937& random, const Door& door, const Recording& said,
                        std::deque<comm::FileDescriptor>& open, std::size_t most_open,
                        Attack& attack) {
  comm::FileDescriptor fd = raw(door);
  if (!fd) return;
  ++attack.made;
  send_all(fd, hostile_bytes(random, door, said));
  if (random() % 10 == 0) ::shutdown(fd.get(), SHUT_WR);
  open.push_back(std::move(fd));
  // Some continue: a replayed proof or request, a guess, the next byte.
  const comm::FileDescriptor& again = open[random() % open.size()];
  const unsigned what = random() % 4;
  send_all(again, what < 2 ? said.proof : what == 2 ? said.request : random_bytes(random, 40));
  if (open.size() <= most_open) return;
  leave(open.front(), attack);
  open.pop_front();
}

}  // namespace tessera::test
