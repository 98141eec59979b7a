#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::comm {

/// Credentials that a store's clients must prove.
struct StoreSecrets {
  std::string run_id;
  /// Empty: no client needs a token, and a client that has one is refused.
  std::string token;
};

/// Server side of one connection, without sockets and clocks: the handshake, then requests.
/// Buffers one frame at most: kMaxHelloFrame bytes before the handshake is complete, kMaxFrame
/// after it.
///
/// Handshake without a token: hello, then yes or no. With a token: hello, challenge, the client's
/// proof, then yes with the server's proof, or no; see authentication.h.
class ClientSession {
 public:
  static constexpr std::size_t kMaxHelloFrame = 1024;
  enum class Next : std::uint8_t {
    Wait,     ///< for more bytes
    Joined,   ///< the handshake is complete
    Request,  ///< a request is complete: answer take_request() before the next take()
    Refuse,   ///< wrong run or token: send `out`, then close
    Close     ///< malformed bytes: close without an answer
  };

  /// `secrets` must outlive this.
  explicit ClientSession(const StoreSecrets& secrets) : secrets_(&secrets) {}

  /// Consumes received bytes; appends handshake replies to `out`.
  Next take(std::string_view bytes, std::string& out);
  /// Body of the request, after Next::Request.
  std::string take_request();

  bool introduced() const { return state_ == State::Joined; }
  /// Whether the client has sent a hello with the right run id.
  bool greeted() const { return state_ != State::Silent; }
  /// Bytes buffered.
  std::size_t held() const { return in_.size(); }

 private:
  enum class State : std::uint8_t { Silent, Challenged, Joined };
  Next introduce(std::string_view body, std::string& out);
  Next check_proof(std::string_view proof, std::string& out);

  const StoreSecrets* secrets_;
  State state_ = State::Silent;
  std::string in_;
  std::string client_nonce_, server_nonce_;
};

}  // namespace tessera::comm
