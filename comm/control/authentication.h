#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "comm/control/launch_environment.h"

namespace tessera::comm {

/// Mutual authentication with a token, a secret that the processes of one run share and never send.
/// Each side of a connection sends a fresh nonce and proves that it knows the token. The proof is
/// an HMAC-SHA256, keyed with the token, of protocol version, role, run id and both nonces, so that
/// recorded or reflected proofs are refused. Later messages are neither signed nor encrypted.

enum class ProofRole { Client, Server };

inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::size_t kProofBytes = 32;
/// Limits of a token's length, in bytes.
inline constexpr std::size_t kMaxToken = 4096, kMinToken = 16;

/// kNonceBytes random bytes. @throws IoError
std::string make_nonce();
/// A new token: 64 hexadecimal digits. @throws IoError
std::string make_token();

/// Proof of knowing the token, kProofBytes long. @throws InternalError if libcrypto fails
std::string make_proof(std::string_view token, ProofRole role, std::string_view run_id,
                       std::string_view client_nonce, std::string_view server_nonce);
/// Compares in constant time if the lengths are equal.
bool is_same_secret(std::string_view a, std::string_view b);

/// Reads the token from TESSERA_TOKEN, or to the end of the descriptor TESSERA_TOKEN_FD. Closes the
/// descriptor, so call it once. Drops trailing white space. Reads a file from its start, so that
/// several ranks may inherit one descriptor.
/// @param deadline  for reading the descriptor
/// @return empty if neither variable is set
/// @throws InvalidArgument naming the variable if both are set, reading fails or is late, or the
/// length is not within kMinToken and kMaxToken
std::string read_token(const Variables& variables,
                       std::chrono::milliseconds deadline = std::chrono::milliseconds(5000));

/// Requires a token unless `host` is a loopback address.
/// @throws InvalidArgument explaining how to make one; CommError if the host has no address
void require_token(const std::string& host, std::string_view token);

}  // namespace tessera::comm
