#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <string>
#include <utility>
#include <vector>

#include "comm/control/tcp_store.h"
#include "tests/comm/ranks.h"

namespace tessera::test {

/// A connection to a store that says what it likes.
inline comm::FileDescriptor raw(const comm::TcpStoreServer& server) {
  return comm::connect_to(server.host(), server.port(), std::chrono::steady_clock::now() + 5s);
}

inline void send_all(const comm::FileDescriptor& fd, const std::string& bytes) {
  // The server may close as it reads: what does not go then is no error of the test.
  [[maybe_unused]] const auto n = ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

/// True if the server closes the connection within 5 s.
inline bool is_closed(const comm::FileDescriptor& fd) {
  for (;;) {
    pollfd waiting{fd.get(), POLLIN, 0};
    if (::poll(&waiting, 1, 5000) <= 0) return false;
    char bytes[256];
    const auto n = ::recv(fd.get(), bytes, sizeof(bytes), 0);
    if (n <= 0) return true;
  }
}

inline std::string message(char type, std::vector<std::string> fields) {
  comm::Message m;
  m.type = static_cast<std::uint8_t>(type);
  m.fields = std::move(fields);
  return m.encode();
}

/// The next frame within 5 s, its length word included; empty if there is none.
inline std::string receive_frame(const comm::FileDescriptor& fd) {
  std::string in;
  for (;;) {
    pollfd waiting{fd.get(), POLLIN, 0};
    char byte = 0;
    if (::poll(&waiting, 1, 5000) <= 0 || ::recv(fd.get(), &byte, 1, 0) <= 0) return {};
    in += byte;
    if (in.size() == comm::frame_size(in)) return in;
  }
}

/// The next message within 5 s; one of type 0 if there is none.
inline comm::Message receive_message(const comm::FileDescriptor& fd) {
  const std::string frame = receive_frame(fd);
  comm::Message m;
  if (frame.empty() || !comm::Message::decode(std::string_view(frame).substr(4), m)) return {};
  return m;
}

}  // namespace tessera::test
