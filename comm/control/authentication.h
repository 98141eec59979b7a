#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "comm/control/launch_environment.h"

namespace tessera::comm {

/// A token is a secret that the processes of one run share. It never travels: a server and a client
/// of the store each send a fresh nonce, and prove to the other that they know the token by an
/// HMAC-SHA256 with it over both nonces, the run id, the protocol's version and who is speaking. So
/// a recorded or reflected answer is worth nothing. What is said afterwards is signed, see
/// frame_seal.h, and not encrypted.

/// Who proves that it knows the token.
enum class ProofRole { Client, Server };

inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::size_t kProofBytes = 32;
/// Of a token, in bytes: the most, and the fewest, below which it could be guessed.
inline constexpr std::size_t kMaxToken = 4096, kMinToken = 16;

/// Random bytes of the kernel. @throws IoError
std::string make_nonce();
/// A new token: 64 hexadecimal digits. @throws IoError
std::string make_token();

/// What a role sends to prove that it knows the token. @throws InternalError if libcrypto fails
std::string make_proof(std::string_view token, ProofRole role, std::string_view run_id,
                       std::string_view client_nonce, std::string_view server_nonce);
/// HMAC-SHA256, 32 bytes. @throws InternalError if libcrypto fails
std::string hmac_sha256(std::string_view key, std::string_view text);
/// Compares in a time that depends on the lengths only.
bool is_same_secret(std::string_view a, std::string_view b);

/// The token that this process was given: TESSERA_TOKEN, or what the descriptor TESSERA_TOKEN_FD
/// holds, which is read to its end and closed. White space at the end does not count. A file is
/// read from its beginning, so that several ranks may inherit one. Call it once.
/// @param deadline  for reading the descriptor
/// @return empty if neither variable is there
/// @throws InvalidArgument naming the variable, if it can't be read in time, both are set, or the
/// token is shorter than kMinToken or longer than kMaxToken bytes
std::string read_token(const Variables& variables,
                       std::chrono::milliseconds deadline = std::chrono::milliseconds(5000));

/// Refuses to serve on an address that others reach, unless there is a token.
/// @throws InvalidArgument that says how to make and pass one; CommError if the host has no address
void require_token(const std::string& host, std::string_view token);

}  // namespace tessera::comm
