#include "comm/control/client_session.h"

#include <utility>

#include "comm/control/authentication.h"
#include "comm/control/socket.h"
#include "comm/control/tcp_store.h"

namespace tessera::comm {
namespace {

using P = StoreProtocol;

std::string answer(std::uint8_t status, std::string value = {}) {
  return Message{status, {std::move(value)}}.encode();
}

}  // namespace

ClientSession::Next ClientSession::take(std::string_view bytes, std::string& out) {
  in_.append(bytes);
  const std::size_t size = frame_size(in_);
  if (size > 4 + (introduced() ? kMaxFrame : kMaxHelloFrame)) return Next::Close;
  if (size == 0 || in_.size() < size) return Next::Wait;
  if (in_.size() > size) return Next::Close;  // more than one request at a time
  if (introduced()) return Next::Request;
  const std::string frame = std::exchange(in_, {});
  return introduce(std::string_view(frame).substr(4), out);
}

std::string ClientSession::take_request() { return std::exchange(in_, {}).substr(4); }

ClientSession::Next ClientSession::introduce(std::string_view body, std::string& out) {
  Message m;
  if (!Message::decode(body, m)) return Next::Close;
  if (state_ == State::Challenged) {
    if (m.type != P::kProve || m.fields.size() != 1) return Next::Close;
    return check_proof(m.fields[0], out);
  }
  if (m.type != P::kHello || m.fields.size() != 3 || m.fields[0] != P::kMagic) return Next::Close;
  const bool has_token = !secrets_->token.empty();
  if (m.fields[1] != secrets_->run_id || m.fields[2].size() != (has_token ? kNonceBytes : 0)) {
    out += answer(P::kNo);
    return Next::Refuse;
  }
  if (!has_token) {
    state_ = State::Joined;
    out += answer(P::kYes);
    return Next::Joined;
  }
  state_ = State::Challenged;
  client_nonce_ = std::move(m.fields[2]);
  server_nonce_ = make_nonce();
  out += answer(P::kChallenge, server_nonce_);
  return Next::Wait;
}

ClientSession::Next ClientSession::check_proof(std::string_view proof, std::string& out) {
  const auto expected = [&](ProofRole role) {
    return make_proof(secrets_->token, role, secrets_->run_id, client_nonce_, server_nonce_);
  };
  if (!is_same_secret(proof, expected(ProofRole::Client))) {
    out += answer(P::kNo);
    return Next::Refuse;
  }
  state_ = State::Joined;
  out += answer(P::kYes, expected(ProofRole::Server));
  return Next::Joined;
}

}  // namespace tessera::comm
