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

/// A rendezvous port for ranks that a test starts itself. The port and the next 15, which rank 0
/// also tries, stay reserved for this process: no other test gets them, and they lie outside of the
/// ephemeral range.
inline std::string meeting_port() {
  constexpr int kFirst = 10'000, kPorts = 16, kBlocks = 1'400;
  for (int i = 0; i < kBlocks; ++i) {
    const int port = kFirst + (::getpid() * 7 + i) % kBlocks * kPorts;
    // Lock: an abstract socket name, exclusive and released when the process ends.
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
