#include "comm/control/tcp_store.h"

#include <atomic>
#include <optional>
#include <thread>

#include "comm/control/agreement.h"
#include "comm/control/heartbeat.h"
#include "tests/comm/control/raw_client.h"
#include "tests/comm/ranks.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::test;
using comm::FileDescriptor;
using comm::TcpStore;
using comm::TcpStoreServer;

namespace {

std::unique_ptr<TcpStore> client(const TcpStoreServer& server, const std::string& run = "run") {
  return std::make_unique<TcpStore>(server.host(), server.port(), run, 5s);
}

const std::string kHello = message('H', {std::string(comm::StoreProtocol::kMagic), "run", ""});

}  // namespace

TEST_CASE("clients share keys, get waits, and several threads may use one client") {
  TcpStoreServer server({.run_id = "run"});
  const auto a = client(server), b = client(server);
  CHECK_FALSE(a->has("k"));
  const std::string binary("\0\1\xff", 3);
  a->set("k", binary);
  a->set("k", binary);
  CHECK(b->has("k"));
  CHECK(b->get("k", 0ms) == binary);
  CHECK_THROWS_HOLDING(InvalidArgument, "'k' already has another value", b->set("k", "other"));
  CHECK_THROWS_HOLDING(CommError, "'none' was not set within 0.05 s", b->get("none", 50ms));

  const auto results = run_ranks(4, [&](int rank) {
    // Ranks wait, through one shared client, for keys that the previous rank sets.
    const auto key = [](int r) { return "turn " + std::to_string(r); };
    if (rank > 0) a->get(key(rank - 1), 10s);
    a->set(key(rank), "done");
  });
  for (const RankResult& result : results) CHECK(result.error == "");
}

TEST_CASE("large values pass; larger ones are refused with the limit's name") {
  TcpStoreServer server({.run_id = "run"});
  const auto a = client(server);
  const std::string large(1'000'000, 'x');
  a->set("large", large);
  CHECK(a->get("large", 5s) == large);
  CHECK_THROWS_HOLDING(InvalidArgument, "limit of 1048576",
                       a->set("larger", std::string(1 << 20, 'x')));
  CHECK(a->has("large"));
}

TEST_CASE("a client finds its run's store among several ports") {
  TcpStoreServer other({.run_id = "other"});
  std::unique_ptr<TcpStoreServer> mine;
  int offset = 1;
  for (; !mine && offset < 20; ++offset) {
    try {
      mine = std::make_unique<TcpStoreServer>(comm::TcpStoreServerOptions{
          .port = static_cast<std::uint16_t>(other.port() + offset), .run_id = "run"});
    } catch (const CommError&) {
    }
  }
  REQUIRE(mine);
  TcpStore store("127.0.0.1", other.port(), "run", 10s, offset);
  store.set("a", "1");
  CHECK(client(*mine)->has("a"));
}

TEST_CASE("no store: the deadline holds and the address is named") {
  std::uint16_t port = 0;
  {
    TcpStoreServer gone({.run_id = "run"});
    port = gone.port();
  }
  const Stopwatch watch;
  CHECK_THROWS_HOLDING(CommError,
                       fmt::format("no store answered at 127.0.0.1:{} within 0.3 s", port),
                       TcpStore("127.0.0.1", port, "run", 300ms));
  CHECK(watch.elapsed() < 3s);
}

TEST_CASE("an unresponsive store server is blamed, and later requests fail at once") {
  const FakeServer mute(answering([](auto&) { return message('y', {""}); }, 1));
  const comm::StoreHost host{{0}, "rank 0 (there, pid 1)"};
  TcpStore store("127.0.0.1", mute.port(), "run", 5s, 1, "", host);
  const auto expect_blame = [&](auto&& call) {
    const Stopwatch watch;
    try {
      call();
      FAIL("no error");
    } catch (const CommError& error) {
      CHECK(error.failure() == CommFailure::PeerLost);
      CHECK(error.culprits() == std::vector<int>{0});
      CHECK(error.fate() == comm::kNoAnswer);
      CHECK(std::string(error.what()).find("rank 0 (there, pid 1), which serves it, ended") !=
            std::string::npos);
    }
    return watch.elapsed();
  };
  expect_blame([&] { store.separate(200ms)->set("k", "v"); });
  std::thread soon([&] {
    std::this_thread::sleep_for(300ms);
    store.give_up();
  });
  CHECK(expect_blame([&] { store.get("k", 60s); }) < 10s);
  soon.join();
  CHECK(expect_blame([&] { store.set("k", "v"); }) < 3s);
  CHECK(expect_blame([&] {
          comm::publish_verdict(store, CommError(CommFailure::PeerLost, {1}, "w"));
        }) < 3s);
  // A heartbeat's destructor does not wait for the store's timeout of one hour.
  const Stopwatch watch;
  {
    const comm::Heartbeat heartbeat(store.separate(1h), 1,
                                    std::make_shared<comm::RankStatus>("here, pid 2"), {});
    std::this_thread::sleep_for(100ms);
  }
  CHECK(watch.elapsed() < 9s);

  // A client that gave up still reaches a server that answers after all.
  TcpStoreServer server({.run_id = "run"});
  const auto there = client(server);
  there->give_up();
  there->set("k", "v");
  CHECK(client(server)->has("k"));
}

TEST_CASE("an unresolved host name is retried until the deadline, then named") {
  const std::string host(70, 'x');  // longer than a DNS label may be: never resolves
  const Stopwatch watch;
  CHECK_THROWS_HOLDING(
      CommError,
      fmt::format("no store answered at {}:900 within 0.3 s: host '{}' has no address", host, host),
      TcpStore(host, 900, "run", 300ms, 16));
  CHECK(watch.wall() >= 300ms);
  CHECK(watch.elapsed() < 3s);
}

TEST_CASE("a port in use is an error with the address") {
  TcpStoreServer first({.run_id = "run"});
  CHECK_THROWS_HOLDING(CommError, fmt::format("cannot listen on 127.0.0.1:{}", first.port()),
                       TcpStoreServer({.port = first.port(), .run_id = "run"}));
}

TEST_CASE("a store that closes ends pending gets") {
  auto server = std::make_unique<TcpStoreServer>(comm::TcpStoreServerOptions{.run_id = "run"});
  const auto a = client(*server);
  std::thread end([&] {
    std::this_thread::sleep_for(50ms);
    server.reset();
  });
  const Stopwatch watch;
  CHECK_THROWS_HOLDING(CommError, "did not answer", a->get("never", 30s));
  CHECK(watch.elapsed() < 3s);
  end.join();
}

TEST_CASE("garbage, HTTP and malformed frames close only their connection") {
  TcpStoreServer server({.run_id = "run"});
  const auto good = client(server);
  std::string noise;
  std::uint32_t state = 12345;
  for (int i = 0; i < 5000; ++i) noise += static_cast<char>((state = state * 1664525 + 1) >> 24);
  const std::vector<std::string> strangers = {
      noise,
      "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
      std::string("\xff\xff\xff\xff", 4),                   // a frame of 2^32 - 1 bytes
      std::string("\x00\x00\x00\x00", 4),                   // an empty frame
      std::string("\x05\x00\x00\x00H\xff\x00\x00\x00", 9),  // a field longer than its frame
      std::string("\x03\x00\x00\x00H\x01\x00", 7),          // half a field length
      message('H', {"tessera-store-9", "run", ""}),
      message('H', {std::string(comm::StoreProtocol::kMagic), "run"}),
      message('S', {"key", "set without a hello"}),
      kHello + std::string("\xff\xff\xff\x7f", 4),
  };
  for (const std::string& bytes : strangers) {
    const auto fd = raw(server);
    send_all(fd, bytes);
    CHECK(is_closed(fd));
  }
  // After the handshake.
  for (const std::string& bytes :
       {message('X', {"k"}), message('G', {"k", "soon"}), message('G', {"k", "-5"}),
        message('L', {"k", "0"}), message('L', {"k"}), message('S', {"k"}),
        std::string("\x01\x00\x20\x00", 4)}) {
    const auto fd = raw(server);
    send_all(fd, kHello);
    REQUIRE(receive_message(fd).type == 'y');
    send_all(fd, bytes);
    CHECK(is_closed(fd));
  }
  good->set("k", "v");
  CHECK(client(server)->get("k", 1s) == "v");
}

TEST_CASE("the store's server can wait for clients to leave") {
  TcpStoreServer server({.run_id = "run"});
  auto a = client(server);
  Stopwatch watch;
  server.drain(50ms);
  CHECK(watch.wall() >= 50ms);
  std::thread leave([&] { a.reset(); });
  watch = {};
  server.drain(10s);
  CHECK(watch.elapsed() < 2s);
  leave.join();
}

TEST_CASE("the server process reads and writes the store directly, and wakes waiting clients") {
  TcpStoreServer server({.run_id = "run"});
  const auto store = client(server);
  CHECK(server.find("a") == std::nullopt);
  std::string got;
  std::thread waiting([&] { got = client(server)->get("a", 10s); });
  std::this_thread::sleep_for(50ms);
  CHECK(server.set_or_get("a", "1") == "1");
  waiting.join();
  CHECK(got == "1");
  CHECK(server.set_or_get("a", "2") == "1");
  CHECK(store->get("a", 1s) == "1");
  store->set("b", "3");
  CHECK(server.find("b") == std::optional<std::string>("3"));
  CHECK(server.set_or_get("b", "4") == "3");
  CHECK(server.size() == 2);
}

TEST_CASE("the server process publishes verdicts without a connection") {
  TcpStoreServer server({.run_id = "run", .max_connections = 1});
  const auto store = client(server);
  CHECK_FALSE(comm::find_verdict(server));
  const CommError error(CommFailure::PeerLost, {2}, "rank 2 was killed");
  CHECK(std::string(comm::publish_verdict(server, error).what()) == "rank 2 was killed");
  const CommError later(CommFailure::PeerLost, {0}, "what follows");
  CHECK(std::string(comm::publish_verdict(server, later).what()) == "rank 2 was killed");
  CHECK(comm::find_verdict(*store, 0ms)->culprits() == std::vector<int>{2});
  CHECK(comm::find_verdict(server)->culprits() == std::vector<int>{2});
  TcpStoreServer other({.run_id = "run"});
  client(other)->set(comm::kVerdict, "nonsense");
  CHECK(comm::find_verdict(other)->failure() == CommFailure::Mismatch);
}

TEST_CASE("a server stops at once, even right after a request") {
  for (int i = 0; i < 500; ++i) {
    std::optional<TcpStoreServer> server(std::in_place, comm::TcpStoreServerOptions{});
    server->set_or_get("verdict", "a rank was killed");
    const auto start = std::chrono::steady_clock::now();
    for (int wait = i % 50; wait > 0 && std::chrono::steady_clock::now() - start < 1us * wait;) {
    }
    server.reset();
    REQUIRE(std::chrono::steady_clock::now() - start < 30s);  // its poll interval is 60 s
  }
}
