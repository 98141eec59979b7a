#pragma once

#include <charconv>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::comm {

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

using Deadline = std::chrono::steady_clock::time_point;
/// Time until `deadline`, rounded up; at least 0.
std::chrono::milliseconds time_until(Deadline deadline);
/// The same for poll(); at most 1000 s.
int milliseconds_until(Deadline deadline);

/// Name of this host; "?" if unknown.
std::string this_host();
/// Whether the host name resolves now; a cluster may publish it after its ranks start.
bool has_address(const std::string& host);
/// Whether all addresses of a host name are loopback addresses. @throws CommError if it has none
bool is_loopback(const std::string& host);
/// A listening, non-blocking TCP socket. Port 0: any free one.
/// @throws CommError(Aborted) with the address and the system's reason, EADDRINUSE included
FileDescriptor listen_on(const std::string& host, std::uint16_t port, int backlog);
/// Disables Nagle's algorithm, and probes an idle connection every 30 s, because firewalls drop
/// idle connections.
void keep_alive(int fd);
std::uint16_t bound_port(int fd);
/// Numeric address that a socket is bound to.
std::string bound_address(int fd);
/// A connected, non-blocking TCP socket; empty if nothing connects before the deadline.
/// @throws CommError(Aborted) if the host name can't be resolved
FileDescriptor connect_to(const std::string& host, std::uint16_t port, Deadline deadline);

/// A non-blocking TCP socket that is connecting; empty, with errno set, on failure.
/// @throws CommError(Aborted) if the host name can't be resolved
FileDescriptor start_connecting(const std::string& host, std::uint16_t port);

/// Numeric address of this host's interface towards the first of `hosts` that is not reached over
/// loopback; nothing if there is none. Sends nothing.
std::optional<std::string> address_towards(const std::vector<std::string>& hosts);

/// A message of the store. Frame: u32 length of the body; body: u8 type, then fields, each a u32
/// length and bytes. Little-endian.
struct Message {
  std::uint8_t type = 0;
  std::vector<std::string> fields;

  std::string encode() const;
  std::string encode_body() const { return encode().substr(4); }
  /// Decodes a frame's body. @return false if malformed
  static bool decode(std::string_view body, Message& out);
};
inline constexpr std::size_t kMaxFrame = 1 << 20;
/// Bytes of the first frame in `buffer`, including its length word; 0 if that is incomplete.
std::size_t frame_size(std::string_view buffer);
/// Little-endian; `bytes` holds at least 4.
std::uint32_t read_u32(std::string_view bytes);
void append_u32(std::string& out, std::size_t value);

/// Parses `text` as a decimal integer. @return false if it is anything else
template <typename Int>
bool parse_number(std::string_view text, Int& value) {
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  return result.ec == std::errc() && result.ptr == text.data() + text.size();
}

}  // namespace tessera::comm
