#include "comm/control/frame_seal.h"

#include <set>

#include "tests/comm/control/raw_client.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::test;
using comm::FrameSeal;
using comm::ProofRole;

namespace {

const std::string kSecret = "0123456789abcdef0123456789abcdef";
const std::string kA(32, 'a'), kB(32, 'b');

std::string key() { return comm::make_session_key(kSecret, "run", kA, kB); }

// Both ends of a connection.
struct Ends {
  FrameSeal client{key(), ProofRole::Client}, server{key(), ProofRole::Server};
};

std::string sealed(FrameSeal& seal, std::string frame) {
  seal.seal(frame);
  return frame;
}

bool opens(FrameSeal& seal, std::string_view frame) {
  std::string_view body = frame.substr(4);
  return seal.open(body);
}

const std::string kFrame = message('S', {"key", "value"});

}  // namespace

TEST_CASE("without a key frames stay as they are") {
  FrameSeal seal;
  CHECK(seal.overhead() == 0);
  CHECK(sealed(seal, kFrame) == kFrame);
  std::string_view body = std::string_view(kFrame).substr(4);
  CHECK(seal.open(body));
  CHECK(body == kFrame.substr(4));
}

TEST_CASE("an empty or cut key is no key, rather than none needed") {
  for (const std::size_t size : {0, 31}) {
    CHECK_THROWS_HOLDING(InternalError, fmt::format("has {} bytes, expected 32", size),
                         FrameSeal(key().substr(0, size), ProofRole::Client));
  }
}

TEST_CASE("what one end seals the other opens, both ways, however many") {
  Ends ends;
  std::set<std::string> seen;
  for (int i = 0; i < 300; ++i) {
    const std::string request = sealed(ends.client, kFrame);
    CHECK(comm::frame_size(request) == request.size());
    CHECK(request.size() == kFrame.size() + ends.client.overhead());
    CHECK(seen.insert(request).second);  // equal frames never look the same
    std::string_view body = std::string_view(request).substr(4);
    CHECK(ends.server.open(body));
    CHECK(body == kFrame.substr(4));
    const std::string answer = sealed(ends.server, kFrame);
    CHECK(seen.insert(answer).second);
    CHECK(opens(ends.client, answer));
  }
}

TEST_CASE("a frame with any bit changed, or cut, or grown, is not taken") {
  Ends ends;
  const std::string frame = sealed(ends.client, kFrame);
  for (std::size_t i = 4; i < frame.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string other = frame;
      other[i] = static_cast<char>(other[i] ^ (1 << bit));
      CHECK_FALSE(opens(ends.server, other));
    }
  }
  for (std::size_t size = 4; size < frame.size(); ++size) {
    CHECK_FALSE(opens(ends.server, frame.substr(0, size)));
  }
  CHECK_FALSE(opens(ends.server, frame + '\0'));
  CHECK_FALSE(opens(ends.server, kFrame));
  CHECK(opens(ends.server, frame));  // which it was all the while
}

TEST_CASE("a frame is taken once, in its turn, by the other end of its own connection") {
  Ends ends;
  const std::string first = sealed(ends.client, kFrame), second = sealed(ends.client, kFrame);
  CHECK_FALSE(opens(ends.server, second));
  CHECK(opens(ends.server, first));
  CHECK_FALSE(opens(ends.server, first));
  CHECK(opens(ends.server, second));
  Ends others;
  CHECK_FALSE(opens(others.client, sealed(others.client, kFrame)));  // reflected
  FrameSeal elsewhere(comm::make_session_key(kSecret, "run", kA, kA), ProofRole::Server);
  CHECK_FALSE(opens(elsewhere, first));
}

TEST_CASE("a session's key depends on all that it is made of, and is no proof") {
  std::set<std::string> all{key()};
  CHECK(key().size() == 32);
  CHECK(key() == key());
  const auto differs = [&](const std::string& other) { return all.insert(other).second; };
  CHECK(differs(comm::make_session_key(kSecret + "x", "run", kA, kB)));
  CHECK(differs(comm::make_session_key(kSecret, "run2", kA, kB)));
  CHECK(differs(comm::make_session_key(kSecret, "run", kB, kB)));
  CHECK(differs(comm::make_session_key(kSecret, "run", kA, kA)));
  CHECK(differs(comm::make_session_key(kSecret, "runa", kA.substr(1), kB)));
  for (const ProofRole role : {ProofRole::Client, ProofRole::Server}) {
    CHECK(differs(comm::make_proof(kSecret, role, "run", kA, kB)));
  }
}
