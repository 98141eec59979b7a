#include "comm/control/authentication.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "comm/control/socket.h"
#include "comm/control/tcp_store.h"
#include "core/base/error.h"

namespace tessera::comm {
namespace {

constexpr std::string_view kToken = "TESSERA_TOKEN", kTokenFd = "TESSERA_TOKEN_FD";

// Appends at most `room` bytes; returns false at the end. Files are read by position, because other
// ranks may share the descriptor's offset.
bool read_some(int fd, bool is_file, std::string& text, std::size_t room, Deadline deadline) {
  std::array<char, 1024> bytes;
  const std::size_t wanted = std::min(room, bytes.size());
  for (;;) {
    pollfd waiting{fd, POLLIN, 0};
    const int ready = ::poll(&waiting, 1, milliseconds_until(deadline));
    if (ready < 0 && errno == EINTR) continue;
    require(ready > 0, "{}: descriptor {} was neither filled nor closed in time", kTokenFd, fd);
    const ssize_t n = is_file ? ::pread(fd, bytes.data(), wanted, static_cast<off_t>(text.size()))
                              : ::read(fd, bytes.data(), wanted);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    require(n >= 0, "{}: descriptor {} can't be read: {}", kTokenFd, fd, std::strerror(errno));
    text.append(bytes.data(), static_cast<std::size_t>(n));
    return n > 0;
  }
}

std::string read_descriptor(std::string_view number, std::chrono::milliseconds at_most) {
  int fd = -1;
  require(parse_number(number, fd) && fd >= 0,
          "{}: expected the number of an open descriptor, got '{}'", kTokenFd, number);
  struct stat status {};
  require(::fstat(fd, &status) == 0,
          "{}: descriptor {} is not open here; the parent process must pass it on", kTokenFd, fd);
  const FileDescriptor owner(fd);
  const Deadline deadline = std::chrono::steady_clock::now() + at_most;
  std::string text;
  while (read_some(fd, S_ISREG(status.st_mode), text, kMaxToken + 1 - text.size(), deadline)) {
    require(text.size() <= kMaxToken, "{}: descriptor {} holds more than {} bytes", kTokenFd, fd,
            kMaxToken);
  }
  return text;
}

std::string hmac_sha256(std::string_view key, std::string_view text) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> mac{};
  unsigned int length = 0;
  const auto* const made =
      ::HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
             reinterpret_cast<const unsigned char*>(text.data()), text.size(), mac.data(), &length);
  require<InternalError>(made != nullptr && length == kProofBytes, "HMAC-SHA256 failed");
  return {reinterpret_cast<const char*>(mac.data()), length};
}

}  // namespace

std::string make_nonce() {
  std::string nonce(kNonceBytes, '\0');
  // getrandom() returns up to 256 bytes completely or not at all.
  require<IoError>(::getrandom(nonce.data(), nonce.size(), 0) == static_cast<ssize_t>(nonce.size()),
                   "getrandom failed: {}", std::strerror(errno));
  return nonce;
}

std::string make_token() {
  std::string token;
  for (const char c : make_nonce()) {
    token += fmt::format("{:02x}", static_cast<unsigned char>(c));
  }
  return token;
}

std::string make_proof(std::string_view token, ProofRole role, std::string_view run_id,
                       std::string_view client_nonce, std::string_view server_nonce) {
  const Message message{
      // a Message stores the length of each field, so that the encoding is unambiguous
      StoreProtocol::kProve,
      {std::string(StoreProtocol::kMagic), role == ProofRole::Client ? "client" : "server",
       std::string(run_id), std::string(client_nonce), std::string(server_nonce)}};
  return hmac_sha256(token, message.encode());
}

bool is_same_secret(std::string_view a, std::string_view b) {
  return a.size() == b.size() && ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::string read_token(const Variables& variables, std::chrono::milliseconds deadline) {
  const auto given = variables.find(kToken), descriptor = variables.find(kTokenFd);
  if (given == variables.end() && descriptor == variables.end()) return {};
  require(given == variables.end() || descriptor == variables.end(),
          "{} and {} are both set; set one of them", kToken, kTokenFd);
  const bool is_given = given != variables.end();
  std::string token = is_given ? given->second : read_descriptor(descriptor->second, deadline);
  token.erase(token.find_last_not_of(" \t\r\n") + 1);
  require(token.size() >= kMinToken && token.size() <= kMaxToken,
          "{}: a token has from {} to {} bytes, this one has {}; make one with: openssl rand -hex "
          "32",
          is_given ? kToken : kTokenFd, kMinToken, kMaxToken, token.size());
  return token;
}

void require_token(const std::string& host, std::string_view token) {
  if (!token.empty() || is_loopback(host)) return;
  throw InvalidArgument(
      "rank 0 would serve the rendezvous on {}, which other hosts can reach, without a token to "
      "keep strangers out; make one, for example with: export TESSERA_TOKEN=$(openssl rand -hex "
      "32), and set the same on all ranks (or set TESSERA_TOKEN_FD to the number of a descriptor "
      "to read it from); if all ranks are on one host, use 127.0.0.1 instead",
      host);
}

}  // namespace tessera::comm
