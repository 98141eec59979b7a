#include "comm/control/frame_seal.h"

#include <utility>

#include "comm/control/socket.h"
#include "comm/control/tcp_store.h"
#include "core/base/error.h"

namespace tessera::comm {
namespace {

constexpr std::size_t kLengthWord = 4;

ProofRole other(ProofRole role) {
  return role == ProofRole::Client ? ProofRole::Server : ProofRole::Client;
}

}  // namespace

FrameSeal::FrameSeal(std::string key, ProofRole own) : key_(std::move(key)), own_(own) {
  // None would mean that nothing is signed.
  require<InternalError>(key_.size() == kBytes, "the key of a connection has {} bytes, expected {}",
                         key_.size(), kBytes);
}

std::string FrameSeal::mac(ProofRole speaker, std::uint64_t count, std::string_view body) const {
  // The first nine bytes have a fixed meaning, so no two different inputs give the same bytes.
  std::string said(1, speaker == ProofRole::Client ? 'c' : 's');
  for (int i = 0; i < 8; ++i) said += static_cast<char>((count >> (8 * i)) & 0xff);
  said += body;
  return hmac_sha256(key_, said);
}

void FrameSeal::seal(std::string& frame) {
  if (key_.empty()) return;
  const std::size_t size = frame_size(frame);
  require<InternalError>(size == frame.size(), "sealed {} bytes as a frame of {}", frame.size(),
                         size);
  frame += mac(own_, sent_++, std::string_view(frame).substr(kLengthWord));
  const std::size_t length = frame.size() - kLengthWord;
  for (std::size_t i = 0; i < kLengthWord; ++i) {
    frame[i] = static_cast<char>((length >> (8 * i)) & 0xff);
  }
}

bool FrameSeal::open(std::string_view& body) {
  if (key_.empty()) return true;
  if (body.size() < kBytes) return false;
  const std::string_view said = body.substr(0, body.size() - kBytes);
  if (!is_same_secret(body.substr(said.size()), mac(other(own_), received_, said))) return false;
  ++received_;
  body = said;
  return true;
}

std::string make_session_key(std::string_view token, std::string_view run_id,
                             std::string_view client_nonce, std::string_view server_nonce) {
  Message said;  // with lengths, and a type and a label that no proof has
  said.type = 'K';
  said.fields = {std::string(StoreProtocol::kMagic), "key of a connection", std::string(run_id),
                 std::string(client_nonce), std::string(server_nonce)};
  return hmac_sha256(token, said.encode());
}

}  // namespace tessera::comm
