#include "tools/tessera/serve/connections.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <charconv>
#include <filesystem>
#include <optional>
#include <system_error>

namespace tessera::tools {
namespace {

std::optional<Peer> end_of(int socket, int (*name)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (name(socket, generic, &size) != 0) return std::nullopt;
  int port = 0;
  if (address.ss_family == AF_INET)
    port = ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  else if (address.ss_family == AF_INET6)
    port = ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  else
    return std::nullopt;
  // As httplib writes it.
  char text[NI_MAXHOST] = "";
  if (::getnameinfo(generic, size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) != 0)
    return std::nullopt;
  return Peer{text, port};
}

}  // namespace

void for_each_connection(int port, const std::function<void(int socket, const Peer& peer)>& use) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const std::string name = entry.path().filename().string();
    int socket = -1;
    std::from_chars(name.data(), name.data() + name.size(), socket);
    const auto own = end_of(socket, ::getsockname);
    if (!own || own->port != port) continue;
    if (const auto peer = end_of(socket, ::getpeername)) use(socket, *peer);
  }
}

bool is_closed_by_peer(int socket) {
  if (socket < 0) return false;
  char byte = 0;
  const ssize_t read = ::recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return read == 0 || (read < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

void end_and_drain(int socket, std::chrono::milliseconds patience, std::size_t most) {
  if (socket < 0) return;
  ::shutdown(socket, SHUT_WR);
  const auto deadline = std::chrono::steady_clock::now() + patience;
  for (std::size_t drained = 0; drained < most;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    pollfd waiting{socket, POLLIN, 0};
    if (left.count() <= 0 || ::poll(&waiting, 1, static_cast<int>(left.count())) <= 0) return;
    char bytes[1 << 14];
    const ssize_t read = ::recv(socket, bytes, sizeof(bytes), MSG_DONTWAIT);
    if (read <= 0) return;
    drained += static_cast<std::size_t>(read);
  }
}

}  // namespace tessera::tools
