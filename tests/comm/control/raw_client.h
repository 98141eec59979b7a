#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/control/tcp_store.h"
#include "tests/comm/ranks.h"

namespace tessera::test {

/// A connection to a store for arbitrary bytes.
inline comm::FileDescriptor raw(const comm::TcpStoreServer& server) {
  return comm::connect_to(server.host(), server.port(), std::chrono::steady_clock::now() + 5s);
}

inline void send_all(const comm::FileDescriptor& fd, const std::string& bytes) {
  // The server may close while reading; the failed send is no error of the test.
  [[maybe_unused]] const auto n = ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

/// Waits up to 5 s for the server to close the connection.
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

/// The next frame within 5 s, with its length word; empty on timeout.
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

/// The next message within 5 s; type 0 on timeout.
inline comm::Message receive_message(const comm::FileDescriptor& fd) {
  const std::string frame = receive_frame(fd);
  comm::Message m;
  if (frame.empty() || !comm::Message::decode(std::string_view(frame).substr(4), m)) return {};
  return m;
}

/// Greets each client, and keeps the connections open.
class FakeServer {
 public:
  explicit FakeServer(std::function<void(const comm::FileDescriptor&)> greet)
      : greet_(std::move(greet)), thread_([this] { serve(); }) {}
  ~FakeServer() {
    stop_.store(true);
    thread_.join();
  }
  std::uint16_t port() const { return comm::bound_port(listener_.get()); }

 private:
  void serve() {
    while (!stop_.load()) {
      pollfd waiting{listener_.get(), POLLIN, 0};
      if (::poll(&waiting, 1, 20) <= 0) continue;
      clients_.emplace_back(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      greet_(clients_.back());
    }
  }
  const std::function<void(const comm::FileDescriptor&)> greet_;
  const comm::FileDescriptor listener_ = comm::listen_on("127.0.0.1", 0, 64);
  std::vector<comm::FileDescriptor> clients_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

/// A fake store: answers the first `turns` messages of a client.
inline std::function<void(const comm::FileDescriptor&)> answering(
    std::function<std::string(const comm::Message&)> answer, int turns = 2) {
  return [answer = std::move(answer), turns](const comm::FileDescriptor& client) {
    for (int i = 0; i < turns; ++i) {
      const comm::Message m = receive_message(client);
      if (m.type == 0) return;
      send_all(client, answer(m));
    }
  };
}

}  // namespace tessera::test
