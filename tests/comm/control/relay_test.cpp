// Somebody who took a port of the run before its store did, passes the introduction on, and then
// would like to have a say.
#include <atomic>
#include <deque>

#include "comm/control/authentication.h"
#include "comm/control/tcp_store.h"
#include "tests/comm/control/hostile_client.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::test;
using comm::FileDescriptor;
using comm::FrameSeal;
using comm::ProofRole;
using comm::TcpStore;
using comm::TcpStoreServer;

namespace {

const std::string kToken = "the secret of this run, long enough";

// Passes frames on between one client at a time and the store, requests and answers in turn. What
// follows the introduction goes through `request` and `answer`, which see how many of them came
// before on all connections; an empty one closes the connection.
class Relay {
 public:
  using Change = std::function<std::string(int count, const std::string& frame)>;

  Relay(const TcpStoreServer& server, Change request, Change answer)
      : door_(door_of(server)),
        request_(std::move(request)),
        answer_(std::move(answer)),
        listener_(comm::listen_on("127.0.0.1", 0, 8)),
        thread_([this] { serve(); }) {}
  ~Relay() {
    stop_.store(true);
    thread_.join();
  }
  std::uint16_t port() const { return comm::bound_port(listener_.get()); }
  // Connections that it has passed on.
  int connections() const { return connections_.load(); }

 private:
  void serve() {
    while (!stop_.load()) {
      pollfd waiting{listener_.get(), POLLIN, 0};
      if (::poll(&waiting, 1, 20) <= 0) continue;
      const FileDescriptor client(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      const FileDescriptor store = raw(door_);
      if (!client || !store) continue;
      ++connections_;
      bool goes_on = true;
      for (int i = 0; i < 2 && goes_on; ++i) {  // hello and proof, as they are
        goes_on = pass(client, store, as_is, 0) && pass(store, client, as_is, 0);
      }
      while (goes_on) {
        goes_on = pass(client, store, request_, count_) && pass(store, client, answer_, count_);
        ++count_;
      }
    }
  }
  static std::string as_is(int, const std::string& frame) { return frame; }
  static bool pass(const FileDescriptor& from, const FileDescriptor& to, const Change& change,
                   int count) {
    std::string frame = receive_frame(from);
    if (!frame.empty()) frame = change(count, frame);
    if (!frame.empty()) send_all(to, frame);
    return !frame.empty();
  }

  const Door door_;
  const Change request_, answer_;
  const FileDescriptor listener_;
  std::atomic<bool> stop_{false};
  std::atomic<int> connections_{0};
  int count_ = 0;
  std::thread thread_;
};

std::string as_is(int, const std::string& frame) { return frame; }

std::unique_ptr<TcpStore> client(std::uint16_t port) {
  return std::make_unique<TcpStore>("127.0.0.1", port, "run", 10s, 1, kToken);
}

// Whether the server turns away so many, of all connections so far, within 5 s.
bool are_refused(const TcpStoreServer& server, std::uint64_t count) {
  for (const auto end = std::chrono::steady_clock::now() + 5s;
       server.refused() < count && std::chrono::steady_clock::now() < end;) {
    std::this_thread::sleep_for(2ms);
  }
  return server.refused() >= count;
}

}  // namespace

TEST_CASE("a relay that passes everything on is in nobody's way, and has learnt nothing") {
  const TcpStoreServer server({.run_id = "run", .token = kToken});
  const Relay relay(server, as_is, as_is);
  const auto store = client(relay.port());
  for (int i = 0; i < 20; ++i) store->set(std::to_string(i), "v");
  CHECK(store->get("7", 1s) == "v");
  CHECK_THROWS_HOLDING(CommError, "'none' was not set within 0.02 s", store->get("none", 20ms));
  CHECK_FALSE(store->has("none"));
  CHECK(server.refused() == 0);
}

TEST_CASE("a relay has no say on the connection that it passed the introduction of") {
  const TcpStoreServer server({.run_id = "run", .token = kToken});
  const std::string verdict = message('S', {"verdict", "0|1||rank 1 did it"});
  std::string with_guess = verdict, of_nothing = verdict;
  FrameSeal(comm::make_session_key("a guess of the token", "run", "", ""), ProofRole::Client)
      .seal(with_guess);
  FrameSeal(std::string(32, '\0'), ProofRole::Client).seal(of_nothing);
  std::string with_zeros = with_guess;
  with_zeros.replace(with_zeros.size() - FrameSeal::kBytes, FrameSeal::kBytes, FrameSeal::kBytes,
                     '\0');
  std::uint64_t refused = 0;
  for (const std::string& own : {verdict, with_zeros, with_guess, of_nothing}) {
    const Relay relay(
        server, [&](int, const std::string&) { return own; }, as_is);
    CHECK_THROWS_HOLDING(CommError, "did not answer", client(relay.port())->set("k", "v"));
    // On the first connection, and on the one on which the client tried again.
    CHECK(relay.connections() >= 2);
    CHECK(are_refused(server, refused += 2));
    CHECK(server.size() == 0);
  }
  CHECK_FALSE(client(server.port())->has("verdict"));
}

TEST_CASE("requests that a relay repeats, carries over, changes or adds to are refused") {
  const TcpStoreServer server({.run_id = "run", .token = kToken});
  std::string kept;
  {  // The first request again instead of the second: the client's second try makes it good.
    const Relay relay(
        server,
        [&](int count, const std::string& frame) {
          if (count == 0) kept = frame;
          return count == 1 ? kept : frame;
        },
        as_is);
    const auto store = client(relay.port());
    store->set("a", "1");
    store->set("b", "1");
    CHECK(relay.connections() >= 2);
    CHECK(are_refused(server, 1));
    store->set("c", "1");  // on the new connection, counted from its beginning
    CHECK(store->has("b"));
  }
  {  // What an earlier connection carried, on a new one.
    const Relay relay(
        server, [&](int, const std::string&) { return kept; }, as_is);
    CHECK_THROWS_HOLDING(CommError, "did not answer", client(relay.port())->has("a"));
    CHECK(are_refused(server, 3));
  }
  {  // The value, of the same length; and two requests in one piece, the relay's own last.
    const Relay relay(
        server,
        [&](int count, const std::string& frame) {
          if (count > 0) return frame + message('S', {"verdict", "mine"});
          std::string other = frame;
          other[other.find("true")] = 'T';
          return other;
        },
        as_is);
    CHECK_THROWS_HOLDING(CommError, "did not answer", client(relay.port())->set("d", "true"));
    CHECK(are_refused(server, 5));
  }
  const auto honest = client(server.port());
  for (const char* key : {"a", "b", "c"}) CHECK(honest->has(key));
  for (const char* key : {"d", "verdict"}) CHECK_FALSE(honest->has(key));
}

TEST_CASE("answers that a relay makes up, repeats, reflects or changes are not taken") {
  const TcpStoreServer server({.run_id = "run", .token = kToken});
  client(server.port())->set("there", "right");
  std::string request, former;
  const auto note = [&](int, const std::string& frame) { return request = frame; };
  const std::vector<Relay::Change> answers = {
      [](int, const std::string&) { return message('y', {"wrong"}); },
      [](int, const std::string& frame) {
        std::string other = frame;
        other[4] = 'n';
        return other;
      },
      [](int, const std::string& frame) {
        std::string other = frame;
        other[other.find("right")] = 'b';
        return other;
      },
      [&](int, const std::string&) { return request; },
      [](int, const std::string& frame) {  // without its seal
        comm::Message m;
        comm::Message::decode(
            std::string_view(frame).substr(4, frame.size() - 4 - FrameSeal::kBytes), m);
        return m.encode();
      }};
  for (const auto& answer : answers) {
    {
      const Relay relay(server, note, answer);
      CHECK_THROWS_HOLDING(CommError, "did not answer", client(relay.port())->get("there", 1s));
    }
    // Once only: then the second try has the true one.
    const Relay once(server, note, [&](int count, const std::string& frame) {
      return count == 0 ? answer(count, frame) : frame;
    });
    CHECK(client(once.port())->get("there", 1s) == "right");
    CHECK(once.connections() >= 2);
  }
  const Relay relay(server, note, [&](int count, const std::string& frame) {
    if (count == 0) former = frame;
    return count == 1 ? former : frame;
  });
  const auto store = client(relay.port());
  CHECK(store->has("there"));
  CHECK_FALSE(store->has("not there"));  // though the answer to the other question came first
  CHECK(relay.connections() >= 2);
}

TEST_CASE("values at the limit fit with a token, too") {
  const TcpStoreServer server({.run_id = "run", .token = kToken});
  const auto store = client(server.port());
  const std::string largest(comm::kMaxFrame - 1 - 4 - 1 - 4, 'x');
  store->set("k", largest);
  CHECK(store->get("k", 5s) == largest);
  CHECK_THROWS_HOLDING(InvalidArgument, "limit of 1048576", store->set("l", largest + 'x'));
  CHECK(store->has("k"));
}
