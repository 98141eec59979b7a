#pragma once

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>

namespace tessera::test {

/// A port at which ranks that are started by hand may meet. It and the 15 after it, which rank 0
/// tries, too, are this process's while it lives: no other test of this machine is given them, and
/// the system gives them to nobody by itself.
inline std::string meeting_port() {
  constexpr int kFirst = 10'000, kPorts = 16, kBlocks = 1'400;
  for (int i = 0; i < kBlocks; ++i) {
    const int port = kFirst + (::getpid() * 7 + i) % kBlocks * kPorts;
    // A name that only one process can have, and that goes with it.
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    const std::string text = fmt::format("tessera-test-port-{}", port);
    std::memcpy(name.sun_path + 1, text.data(), text.size());
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
    const int claim = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (::bind(claim, reinterpret_cast<const sockaddr*>(&name), length) == 0)
      return std::to_string(port);
    ::close(claim);
  }
  throw std::runtime_error("all ports for tests are taken");
}

}  // namespace tessera::test
