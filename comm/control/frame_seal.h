#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "comm/control/authentication.h"

namespace tessera::comm {

/// Signs what one side of a connection says after the introduction, and checks what it hears: an
/// HMAC-SHA256, with the connection's own key, over who speaks, how many frames that side said
/// before, and the frame's body. So whoever passed the introduction on between the two, and knows
/// no token, can add, change, repeat, reorder, reflect or swap nothing; it reads along, and can
/// cut, delay or drop.
///
/// A frame as it travels: u32 length, body, MAC; the length counts both. Not thread-safe.
class FrameSeal {
 public:
  /// What a MAC takes, in bytes.
  static constexpr std::size_t kBytes = 32;

  /// For connections without a token: adds nothing and takes everything.
  FrameSeal() = default;
  /// @param key  of this connection alone; see make_session_key()
  /// @param own  the side that has this object
  /// @throws InternalError if that is no such key
  FrameSeal(std::string key, ProofRole own);

  /// By how much a frame grows.
  std::size_t overhead() const { return key_.empty() ? 0 : kBytes; }
  /// Signs the next frame to be sent, length word included. @throws InternalError if libcrypto
  /// fails
  void seal(std::string& frame);
  /// Whether `body`, a frame that came, without its length word, is what the other side said next;
  /// then its MAC is taken off. If not, the connection is worth nothing more: close it.
  /// @throws InternalError if libcrypto fails
  bool open(std::string_view& body);

 private:
  std::string mac(ProofRole speaker, std::uint64_t count, std::string_view body) const;

  std::string key_;
  ProofRole own_ = ProofRole::Client;
  std::uint64_t sent_ = 0, received_ = 0;
};

/// The key of one connection, the same for both of its sides. @throws InternalError if libcrypto
/// fails
std::string make_session_key(std::string_view token, std::string_view run_id,
                             std::string_view client_nonce, std::string_view server_nonce);

}  // namespace tessera::comm
