#include "comm/control/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "core/base/error.h"

namespace tessera::comm {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// Addresses of a host; null, with the reason in `why`, if it has none.
AddressList look_up(const std::string& host, std::uint16_t port, bool passive, int& why) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
  addrinfo* found = nullptr;
  why = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  return AddressList(why == 0 ? found : nullptr, freeaddrinfo);
}

AddressList resolve(const std::string& host, std::uint16_t port, bool passive) {
  int why = 0;
  AddressList list = look_up(host, port, passive, why);
  if (list) return list;
  throw CommError(CommFailure::Aborted, {}, "host '{}' has no address: {}", host,
                  gai_strerror(why));
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET6) {
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
  }
  return ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr) >> 24 == 127;
}

// A socket that is connecting; empty, with errno set, on failure.
FileDescriptor start_connecting(const addrinfo& address) {
  FileDescriptor fd(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return {};
  keep_alive(fd.get());
  if (::connect(fd.get(), address.ai_addr, address.ai_addrlen) == 0 || errno == EINPROGRESS)
    return fd;
  const int code = errno;
  fd = FileDescriptor();
  errno = code;
  return {};
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

std::chrono::milliseconds time_until(Deadline deadline) {
  using std::chrono::milliseconds;
  return std::max(milliseconds(0),
                  std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now()));
}

int milliseconds_until(Deadline deadline) {
  return static_cast<int>(std::min<std::int64_t>(time_until(deadline).count(), 1'000'000));
}

std::string this_host() {
  char name[256] = {};
  return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "?";
}

bool has_address(const std::string& host) {
  int ignored = 0;
  return look_up(host, 9, false, ignored) != nullptr;
}

bool is_loopback(const std::string& host) {
  const AddressList list = resolve(host, 9, true);
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    if (!is_loopback(a->ai_addr)) return false;
  }
  return true;
}

FileDescriptor listen_on(const std::string& host, std::uint16_t port, int backlog) {
  const AddressList list = resolve(host, port, true);
  int error = 0;
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    FileDescriptor fd(::socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const int on = 1;
    if (fd && ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
        ::bind(fd.get(), a->ai_addr, a->ai_addrlen) == 0 && ::listen(fd.get(), backlog) == 0) {
      return fd;
    }
    error = errno;
  }
  throw CommError(CommFailure::Aborted, {}, "cannot listen on {}:{}: {}", host, port,
                  std::strerror(error));
}

void keep_alive(int fd) {
  constexpr int kOn = 1, kSeconds = 30, kProbes = 4;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &kOn, sizeof(kOn));
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &kOn, sizeof(kOn));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &kSeconds, sizeof(kSeconds));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &kSeconds, sizeof(kSeconds));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &kProbes, sizeof(kProbes));
}

std::uint16_t bound_port(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw CommError(CommFailure::Aborted, {}, "getsockname failed: {}", std::strerror(errno));
  }
  if (address.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port);
  }
  return ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

std::string bound_address(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  char text[NI_MAXHOST];
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
      ::getnameinfo(reinterpret_cast<const sockaddr*>(&address), length, text, sizeof(text),
                    nullptr, 0, NI_NUMERICHOST) != 0) {
    throw CommError(CommFailure::Aborted, {}, "getsockname failed: {}", std::strerror(errno));
  }
  return text;
}

FileDescriptor start_connecting(const std::string& host, std::uint16_t port) {
  const AddressList list = resolve(host, port, false);
  int code = 0;
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    if (FileDescriptor fd = start_connecting(*a)) return fd;
    code = errno;
  }
  errno = code;
  return {};
}

FileDescriptor connect_to(const std::string& host, std::uint16_t port, Deadline deadline) {
  const AddressList list = resolve(host, port, false);
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    FileDescriptor fd = start_connecting(*a);
    pollfd waiting{fd.get(), POLLOUT, 0};
    int error = 0;
    socklen_t length = sizeof(error);
    if (fd && ::poll(&waiting, 1, milliseconds_until(deadline)) > 0 &&
        ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0) {
      return fd;
    }
  }
  return {};
}

std::optional<std::string> address_towards(const std::vector<std::string>& hosts) {
  for (const std::string& host : hosts) {
    int ignored = 0;
    // The discard port; any port will do, because nothing is sent.
    const AddressList list = look_up(host, 9, false, ignored);
    for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
      // Connecting a datagram socket only consults the routing table.
      const FileDescriptor fd(::socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
      if (!fd || ::connect(fd.get(), a->ai_addr, a->ai_addrlen) != 0) continue;
      try {
        std::string own = bound_address(fd.get());
        if (!is_loopback(own)) return own;
      } catch (const CommError&) {
        continue;
      }
    }
  }
  return std::nullopt;
}

std::string Message::encode() const {
  std::size_t length = 1;
  for (const std::string& field : fields) length += 4 + field.size();
  require(length <= kMaxFrame, "a store message of {} bytes is over the limit of {}", length,
          kMaxFrame);
  std::string frame;
  append_u32(frame, length);
  frame += static_cast<char>(type);
  for (const std::string& field : fields) {
    append_u32(frame, field.size());
    frame += field;
  }
  return frame;
}

bool Message::decode(std::string_view body, Message& out) {
  out = {};
  if (body.empty()) return false;
  out.type = static_cast<std::uint8_t>(body[0]);
  body.remove_prefix(1);
  while (!body.empty()) {
    if (body.size() < 4) return false;
    const std::uint32_t length = read_u32(body);
    body.remove_prefix(4);
    if (length > body.size()) return false;
    out.fields.emplace_back(body.substr(0, length));
    body.remove_prefix(length);
  }
  return true;
}

std::uint32_t read_u32(std::string_view bytes) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    value |= static_cast<std::uint32_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  }
  return value;
}

void append_u32(std::string& out, std::size_t value) {
  for (int i = 0; i < 4; ++i) out += static_cast<char>((value >> (8 * i)) & 0xff);
}

std::size_t frame_size(std::string_view buffer) {
  return buffer.size() < 4 ? 0 : std::size_t{4} + read_u32(buffer);
}

}  // namespace tessera::comm
