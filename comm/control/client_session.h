#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "comm/control/frame_seal.h"

namespace tessera::comm {

/// What clients of a store must know.
struct StoreSecrets {
  std::string run_id;
  /// Empty: a client needs none, and one that has a token is refused.
  std::string token;
};

/// What a server makes of the bytes of one client: its introduction, then its requests. It knows no
/// sockets and no clocks. Holds at most one frame: until the client is introduced kMaxHelloFrame
/// bytes, then kMaxFrame and a seal, and never more than has come.
///
/// Introduction without a token: the client says hello, the server yes or no. With one: hello, the
/// server's challenge, the client's proof, yes with the server's proof; see authentication.h. From
/// then on every request and every answer is sealed; see frame_seal.h. A client that fails learns
/// "no" and nothing else.
class ClientSession {
 public:
  static constexpr std::size_t kMaxHelloFrame = 1024;
  enum class Next : std::uint8_t {
    Wait,     ///< for more bytes
    Joined,   ///< it is introduced
    Request,  ///< request() holds one, to be answered before more is taken
    Refuse,   ///< send what is to be sent, then close: its run or token is another
    Close     ///< malformed, or not what the introduced client said
  };

  /// `secrets` must outlive this.
  explicit ClientSession(const StoreSecrets& secrets) : secrets_(&secrets) {}

  /// Takes bytes as they came. What is to be answered at once is appended to `out`.
  Next take(std::string_view bytes, std::string& out);
  /// The body of the request that take() told of.
  std::string take_request();
  /// Makes the frame of the next answer to a request what is to be sent.
  void seal(std::string& answer) { seal_.seal(answer); }

  bool introduced() const { return state_ == State::Joined; }
  /// Whether it has named the run, at least.
  bool greeted() const { return state_ != State::Silent; }
  /// Bytes that are held.
  std::size_t held() const { return in_.size(); }

 private:
  enum class State : std::uint8_t { Silent, Challenged, Joined };
  Next introduce(std::string_view body, std::string& out);
  Next check_proof(std::string_view proof, std::string& out);

  const StoreSecrets* secrets_;
  State state_ = State::Silent;
  std::string in_;
  std::string client_nonce_, server_nonce_;
  FrameSeal seal_;
};

}  // namespace tessera::comm
