// Bytes that a client sends to the store: the handshake, then requests.
#include "comm/control/client_session.h"
#include "comm/control/socket.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;
using comm::ClientSession;
using comm::Message;
using Next = ClientSession::Next;

namespace {

constexpr std::string_view kHello("\x1f\0\0\0H\x0f\0\0\0tessera-store-4\x03\0\0\0run\0\0\0\0", 35);

// A well-formed request re-encodes to the same bytes.
void read_request(const std::string& body) {
  Message m;
  if (Message::decode(body, m)) fuzz::expect(m.encode().substr(4) == body);
}

void feed(ClientSession& session, std::string_view bytes, std::size_t piece, bool may_join) {
  while (!bytes.empty()) {
    const bool joined = session.introduced();
    const std::string_view part = bytes.substr(0, piece);
    bytes.remove_prefix(part.size());
    std::string out;
    const Next next = session.take(part, out);
    fuzz::expect(may_join || !session.introduced());
    // An unauthenticated client receives a nonce and "no", nothing else.
    fuzz::expect(joined ? out.empty() : out.size() <= 9 + 32);
    if (next == Next::Refuse || next == Next::Close) return;
    const std::size_t most = joined ? comm::kMaxFrame : ClientSession::kMaxHelloFrame;
    fuzz::expect(session.held() <= 4 + most);
    if (next == Next::Request) read_request(session.take_request());
  }
}

}  // namespace

// First byte: with a token, without one, or already joined. Second byte: chunk size.
TESSERA_FUZZ_TARGET(control_frame, "control_frame") {
  if (size < 2) return 0;
  const std::string_view bytes = fuzz::text_of(data + 2, size - 2);
  const std::size_t piece = data[1] == 255 ? 16384 : std::size_t{1} + data[1];
  const comm::StoreSecrets open{"run", ""}, locked{"run", "a token that nobody guesses"};
  const bool has_token = data[0] % 3 == 1;
  ClientSession session(has_token ? locked : open);
  if (data[0] % 3 == 2) {
    std::string out;
    fuzz::expect(session.take(kHello, out) == Next::Joined);
  }
  feed(session, bytes, piece, !has_token);
  return 0;
}
