// What a client sends to the store of a run: its introduction, then requests.
#include "comm/control/authentication.h"
#include "comm/control/client_session.h"
#include "comm/control/socket.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;
using comm::ClientSession;
using comm::Message;
using Next = ClientSession::Next;

namespace {

constexpr std::string_view kHello("\x1f\0\0\0H\x0f\0\0\0tessera-store-3\x03\0\0\0run\0\0\0\0", 35);

// A request as the server reads it: if it is well-formed, the same bytes come of it again.
void read_request(const std::string& body) {
  Message m;
  if (Message::decode(body, m)) fuzz::expect(m.encode().substr(4) == body);
}

// Introduces an honest client that has the token.
void join(ClientSession& session, const comm::StoreSecrets& secrets) {
  const std::string nonce(comm::kNonceBytes, 'n');
  std::string out;
  Message m;
  m.type = 'H';
  m.fields = {"tessera-store-3", secrets.run_id, nonce};
  fuzz::expect(session.take(m.encode(), out) == Next::Wait);
  fuzz::expect(Message::decode(std::string_view(out).substr(4), m) && m.fields.size() == 1);
  const std::string proof =
      comm::make_proof(secrets.token, comm::ProofRole::Client, secrets.run_id, nonce, m.fields[0]);
  m.type = 'P';
  m.fields = {proof};
  fuzz::expect(session.take(m.encode(), out) == Next::Joined);
}

// `sealed`: no request is taken, for want of the key.
void feed(ClientSession& session, std::string_view bytes, std::size_t piece, bool may_join,
          bool sealed) {
  while (!bytes.empty()) {
    const bool joined = session.introduced();
    const std::string_view part = bytes.substr(0, piece);
    bytes.remove_prefix(part.size());
    std::string out;
    const Next next = session.take(part, out);
    fuzz::expect(may_join || !session.introduced());
    // No stranger is told more than a nonce and "no".
    fuzz::expect(joined ? out.empty() : out.size() <= 9 + 32);
    if (next == Next::Refuse || next == Next::Close) return;
    const std::size_t most =
        joined ? comm::kMaxFrame + comm::FrameSeal::kBytes : ClientSession::kMaxHelloFrame;
    fuzz::expect(session.held() <= 4 + most);
    fuzz::expect(!sealed || next != Next::Request);
    if (next == Next::Request) read_request(session.take_request());
  }
}

}  // namespace

// The first byte says whether there is a token, and whether the client has joined before; the
// second in what pieces the rest comes.
TESSERA_FUZZ_TARGET(control_frame, "control_frame") {
  if (size < 2) return 0;
  const std::string_view bytes = fuzz::text_of(data + 2, size - 2);
  const std::size_t piece = data[1] == 255 ? 16384 : std::size_t{1} + data[1];
  const comm::StoreSecrets open{"run", ""}, locked{"run", "a token that nobody guesses"};
  const bool has_token = data[0] % 4 == 1, sealed = data[0] % 4 == 3;
  ClientSession session(has_token || sealed ? locked : open);
  if (data[0] % 4 == 2) {
    std::string out;
    fuzz::expect(session.take(kHello, out) == Next::Joined);
  }
  if (sealed) join(session, locked);
  feed(session, bytes, piece, !has_token, sealed);
  return 0;
}
