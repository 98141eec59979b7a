#include "comm/control/authentication.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <set>

#include "tests/comm/ranks.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::test;
using comm::ProofRole;
using comm::read_token;

namespace {

const std::string kSecret = "0123456789abcdef0123456789abcdef";

// The read end of a pipe that contains the text, as TESSERA_TOKEN_FD; the write end is closed
// unless requested.
comm::Variables piped(const std::string& text, int* write_end = nullptr) {
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  REQUIRE(::write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  if (write_end != nullptr) {
    *write_end = ends[1];
  } else {
    ::close(ends[1]);
  }
  return {{"TESSERA_TOKEN_FD", std::to_string(ends[0])}};
}

bool is_open(const comm::Variables& variables) {
  return ::fcntl(std::stoi(variables.at("TESSERA_TOKEN_FD")), F_GETFD) >= 0;
}

}  // namespace

TEST_CASE("nonces and tokens never repeat") {
  std::set<std::string> seen;
  for (int i = 0; i < 1000; ++i) {
    const std::string nonce = comm::make_nonce();
    CHECK(nonce.size() == comm::kNonceBytes);
    CHECK(seen.insert(nonce).second);
  }
  const std::string token = comm::make_token();
  CHECK(token.size() == 64);
  CHECK(token.find_first_not_of("0123456789abcdef") == token.npos);
  CHECK(comm::make_token() != token);
}

TEST_CASE("a proof depends on every input") {
  const std::string a(32, 'a'), b(32, 'b');
  const auto proof = [&](const std::string& token, ProofRole role, const std::string& run,
                         const std::string& client, const std::string& server) {
    return comm::make_proof(token, role, run, client, server);
  };
  const std::string one = proof(kSecret, ProofRole::Client, "run", a, b);
  CHECK(one.size() == comm::kProofBytes);
  CHECK(one == proof(kSecret, ProofRole::Client, "run", a, b));
  std::set<std::string> all{one};
  CHECK(all.insert(proof(kSecret + "x", ProofRole::Client, "run", a, b)).second);
  CHECK(all.insert(proof(kSecret, ProofRole::Server, "run", a, b)).second);
  CHECK(all.insert(proof(kSecret, ProofRole::Client, "run2", a, b)).second);
  CHECK(all.insert(proof(kSecret, ProofRole::Client, "run", b, b)).second);
  CHECK(all.insert(proof(kSecret, ProofRole::Client, "run", a, a)).second);
  // Shifting a byte between fields changes the proof.
  CHECK(all.insert(proof(kSecret, ProofRole::Client, "runa", a.substr(1), b)).second);
}

TEST_CASE("secrets are equal if all bytes are") {
  CHECK(comm::is_same_secret("", ""));
  CHECK(comm::is_same_secret(kSecret, kSecret));
  CHECK_FALSE(comm::is_same_secret(kSecret, kSecret.substr(1)));
  CHECK_FALSE(comm::is_same_secret(kSecret, kSecret.substr(0, 31) + "x"));
}

TEST_CASE("a token comes from a variable, a pipe, or a file that ranks share; or there is none") {
  CHECK(read_token({}) == "");
  CHECK(read_token({{"TESSERA_TOKEN", kSecret}}) == kSecret);
  CHECK(read_token({{"TESSERA_TOKEN", kSecret + "\r\n"}}) == kSecret);
  const auto pipe = piped(kSecret + "\n");
  CHECK(read_token(pipe) == kSecret);
  CHECK_FALSE(is_open(pipe));
  CHECK(read_token(piped(std::string(4096, 'x'))) == std::string(4096, 'x'));

  const int file = ::memfd_create("token", MFD_CLOEXEC);
  REQUIRE(file >= 0);
  REQUIRE(::write(file, kSecret.data(), kSecret.size()) == static_cast<ssize_t>(kSecret.size()));
  for (int rank = 0; rank < 2; ++rank) {  // which share the file offset
    CHECK(read_token({{"TESSERA_TOKEN_FD", std::to_string(::dup(file))}}) == kSecret);
  }
  ::close(file);
}

TEST_CASE("an invalid token is refused with its variable's name") {
  CHECK_THROWS_HOLDING(InvalidArgument, "are both set",
                       read_token({{"TESSERA_TOKEN", kSecret}, {"TESSERA_TOKEN_FD", "0"}}));
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "TESSERA_TOKEN: a token has from 16 to 4096 bytes, this "
                       "one has 5",
                       read_token({{"TESSERA_TOKEN", "short"}}));
  CHECK_THROWS_HOLDING(InvalidArgument, "this one has 0", read_token({{"TESSERA_TOKEN", ""}}));
  CHECK_THROWS_HOLDING(InvalidArgument, "TESSERA_TOKEN_FD: a token has",
                       read_token(piped("short")));
  CHECK_THROWS_HOLDING(InvalidArgument, "holds more than 4096 bytes",
                       read_token(piped(std::string(5000, 'x'))));
  for (const char* number : {"", "x", "-1", "3x", "99999999999"}) {
    CHECK_THROWS_HOLDING(InvalidArgument, "expected the number of an open descriptor",
                         read_token({{"TESSERA_TOKEN_FD", number}}));
  }
  CHECK_THROWS_HOLDING(InvalidArgument, "descriptor 54321 is not open here",
                       read_token({{"TESSERA_TOKEN_FD", "54321"}}));
}

TEST_CASE("a descriptor whose writer never closes is read with a deadline, then closed") {
  int write_end = -1;
  const auto pipe = piped(kSecret, &write_end);
  const Stopwatch watch;
  CHECK_THROWS_HOLDING(InvalidArgument, "neither filled nor closed in time",
                       read_token(pipe, 100ms));
  CHECK(watch.elapsed() < 3s);
  CHECK_FALSE(is_open(pipe));
  ::close(write_end);
}

TEST_CASE("only loopback works without a token") {
  for (const char* host : {"127.0.0.1", "127.1.2.3", "::1", "localhost"}) {
    CHECK_NOTHROW(comm::require_token(host, ""));
  }
  for (const char* host : {"0.0.0.0", "::", "192.0.2.1"}) {
    CHECK_THROWS_HOLDING(InvalidArgument, "TESSERA_TOKEN", comm::require_token(host, ""));
    CHECK_NOTHROW(comm::require_token(host, kSecret));
  }
}
