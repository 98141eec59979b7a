#include "comm/control/client_session.h"

#include "comm/control/authentication.h"
#include "tests/comm/control/raw_client.h"

using namespace tessera;
using namespace tessera::test;
using comm::ClientSession;
using comm::Message;
using comm::ProofRole;
using Next = ClientSession::Next;

namespace {

const std::string kToken = "the secret of this run, long enough";
const comm::StoreSecrets kOpen{"run", ""}, kLocked{"run", kToken};

std::string hello(const std::string& nonce = {}, const std::string& run = "run") {
  return message('H', {std::string(comm::StoreProtocol::kMagic), run, nonce});
}

Message decoded(const std::string& frame) {
  Message m;
  REQUIRE(comm::frame_size(frame) == frame.size());
  REQUIRE(Message::decode(std::string_view(frame).substr(4), m));
  return m;
}

}  // namespace

TEST_CASE("without a token the run's name suffices for requests") {
  ClientSession session(kOpen);
  std::string out;
  CHECK(session.take(hello(), out) == Next::Joined);
  CHECK(out == message('y', {""}));
  CHECK(session.introduced());
  out.clear();
  const std::string request = message('S', {"key", "value"});
  for (std::size_t i = 0; i + 1 < request.size(); ++i) {
    CHECK(session.take(request.substr(i, 1), out) == Next::Wait);
  }
  CHECK(session.take(request.substr(request.size() - 1), out) == Next::Request);
  CHECK(session.take_request() == request.substr(4));
  CHECK(session.held() == 0);
  CHECK(out == "");
  CHECK(session.take(request + "x", out) == Next::Close);  // a request before the answer
}

TEST_CASE("with a token both sides prove knowledge of it") {
  ClientSession session(kLocked);
  std::string out;
  const std::string nonce = comm::make_nonce();
  CHECK(session.take(hello(nonce), out) == Next::Wait);
  CHECK_FALSE(session.introduced());
  const Message challenge = decoded(out);
  CHECK(challenge.type == 'C');
  const std::string& theirs = challenge.fields.at(0);
  CHECK(theirs.size() == comm::kNonceBytes);
  out.clear();
  const std::string proof = comm::make_proof(kToken, ProofRole::Client, "run", nonce, theirs);
  CHECK(session.take(message('P', {proof}), out) == Next::Joined);
  CHECK(decoded(out).fields.at(0) ==
        comm::make_proof(kToken, ProofRole::Server, "run", nonce, theirs));
  const std::string largest = message('S', {"key", std::string(comm::kMaxFrame - 12, 'x')});
  REQUIRE(largest.size() == 4 + comm::kMaxFrame);
  CHECK(session.take(largest, out) == Next::Request);
  CHECK(session.take_request() == largest.substr(4));
}

TEST_CASE("another run, or a token on one side only, is answered with no and nothing else") {
  const struct {
    const comm::StoreSecrets& secrets;
    std::string hello;
  } cases[] = {{kOpen, hello({}, "another")},
               {kOpen, hello(comm::make_nonce())},
               {kLocked, hello()},
               {kLocked, hello("short")},
               {kLocked, hello(comm::make_nonce(), "another")}};
  for (const auto& c : cases) {
    ClientSession session(c.secrets);
    std::string out;
    CHECK(session.take(c.hello, out) == Next::Refuse);
    CHECK(out == message('n', {""}));
    CHECK_FALSE(session.introduced());
  }
}

TEST_CASE("a wrong proof is answered with no and nothing else") {
  const std::string nonce = comm::make_nonce();
  const auto answer_to = [&](const auto& make) {
    ClientSession session(kLocked);
    std::string out;
    CHECK(session.take(hello(nonce), out) == Next::Wait);
    const std::string challenge = decoded(out).fields.at(0);
    out.clear();
    CHECK(session.take(message('P', {make(challenge)}), out) == Next::Refuse);
    CHECK_FALSE(session.introduced());
    return out;
  };
  const std::string no = message('n', {""});
  CHECK(answer_to([](const std::string&) { return std::string(); }) == no);
  CHECK(answer_to([](const std::string& challenge) { return challenge; }) == no);
  CHECK(answer_to([&](const std::string& challenge) {
          return comm::make_proof("another token", ProofRole::Client, "run", nonce, challenge);
        }) == no);
  CHECK(answer_to([&](const std::string& challenge) {  // a server's proof, reflected
          return comm::make_proof(kToken, ProofRole::Server, "run", nonce, challenge);
        }) == no);
  CHECK(answer_to([&](const std::string& challenge) {  // a proof for another run with this token
          return comm::make_proof(kToken, ProofRole::Client, "old run", nonce, challenge);
        }) == no);
}

TEST_CASE("oversized frames are refused by their length word, and little memory is used") {
  for (const comm::StoreSecrets* secrets : {&kOpen, &kLocked}) {
    for (const std::uint32_t length : {0xffffffffU, 1025U}) {
      ClientSession session(*secrets);
      std::string out, word(4, '\0');
      for (std::size_t i = 0; i < 4; ++i) word[i] = static_cast<char>(length >> (8 * i));
      CHECK(session.take(word, out) == Next::Close);
      CHECK(session.held() == 4);
      CHECK(out == "");
    }
  }
  ClientSession joined(kOpen);
  std::string out;
  REQUIRE(joined.take(hello(), out) == Next::Joined);
  CHECK(joined.take(std::string("\x01\x00\x10\x00", 4), out) == Next::Close);  // 1 MiB + 1
}

TEST_CASE("requests, and proofs without a challenge, are refused before authentication") {
  for (const std::string& bytes :
       {message('S', {"k", "v"}), message('G', {"k", "5"}), message('P', {std::string(32, 'x')}),
        message('y', {""}), message('H', {}), message('H', {"tessera-store-1", "run", ""})}) {
    for (const comm::StoreSecrets* secrets : {&kOpen, &kLocked}) {
      ClientSession session(*secrets);
      std::string out;
      CHECK(session.take(bytes, out) == Next::Close);
      CHECK(out == "");
    }
  }
  ClientSession challenged(kLocked);
  std::string out;
  CHECK(challenged.take(hello(comm::make_nonce()), out) == Next::Wait);
  CHECK(challenged.take(hello(comm::make_nonce()), out) == Next::Close);
}
