#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <random>

#include "comm/control/authentication.h"
#include "comm/control/tcp_store.h"
#include "tests/comm/control/hostile_client.h"
#include "tests/support/check_throws.h"
#include "tests/support/multiprocess.h"

using namespace tessera;
using namespace tessera::test;
using comm::FileDescriptor;
using comm::ProofRole;
using comm::TcpStore;
using comm::TcpStoreServer;

namespace {

const std::string kToken = "the secret of this run, long enough";
const std::string kOther = "another secret, as long as the first";

std::unique_ptr<TcpStore> client(const TcpStoreServer& server, const std::string& token = kToken) {
  return std::make_unique<TcpStore>(server.host(), server.port(), "run", 10s, 1, token);
}

std::string hello(const std::string& nonce) { return test::hello("run", nonce); }

Recording record(const TcpStoreServer& server) { return test::record(door_of(server), kToken); }

}  // namespace

TEST_CASE("clients with the token join and share keys") {
  const TcpStoreServer server({.run_id = "run", .token = kToken});
  client(server)->set("k", "v");
  CHECK(client(server)->get("k", 1s) == "v");
  CHECK(server.refused() == 0);
}

TEST_CASE("a wrong, missing or one-sided token is refused at once") {
  const TcpStoreServer locked({.run_id = "run", .token = kToken}), open({.run_id = "run"});
  const Stopwatch watch;
  CHECK_THROWS_HOLDING(CommError, "has another token", client(locked, kOther));
  CHECK_THROWS_HOLDING(CommError, "requires a token", client(locked, ""));
  CHECK_THROWS_HOLDING(CommError, "refused this process", client(open));
  CHECK(watch.elapsed() < 5s);
  CHECK(locked.clients() + open.clients() == 0);
  CHECK(locked.refused() == 2);
}

TEST_CASE("a client does not join a server that does not know the token, whatever it answers") {
  const auto answers = std::vector<std::function<std::string(const comm::Message&)>>{
      [](const comm::Message&) { return message('y', {""}); },
      [](const comm::Message&) { return message('C', {""}); },
      [](const comm::Message& m) {  // proofs with another token
        return m.type == 'H' ? message('C', {std::string(32, 'n')})
                             : message('y', {std::string(32, 'p')});
      },
      // Reflects the client: its nonce as the challenge, its proof as the server's.
      [](const comm::Message& m) {
        return m.type == 'H' ? message('C', {m.fields.at(2)}) : message('y', {m.fields.at(0)});
      }};
  for (const auto& answer : answers) {
    const FakeServer server(answering(answer));
    CHECK_THROWS_HOLDING(CommError, "does not know this run's token",
                         TcpStore("127.0.0.1", server.port(), "run", 10s, 1, kToken));
  }
}

TEST_CASE("a reflected challenge is no proof") {
  const TcpStoreServer server({.run_id = "run", .token = kToken});
  const auto fd = raw(server), other = raw(server);
  send_all(fd, hello(comm::make_nonce()));
  const std::string challenge = receive_message(fd).fields.at(0);
  send_all(other, hello(challenge));  // asks the server to answer its own challenge
  CHECK(receive_message(other).fields.at(0) != challenge);
  send_all(fd, message('P', {challenge}));
  CHECK(receive_message(fd).type == 'n');
  CHECK(is_closed(fd));
  CHECK(server.clients() == 0);
}

TEST_CASE("a replayed handshake is refused") {
  const TcpStoreServer server({.run_id = "run", .token = kToken});
  const Recording said = record(server);
  for (int i = 0; i < 3; ++i) {
    const auto fd = raw(server);
    send_all(fd, said.hello);
    CHECK(receive_message(fd).type == 'C');
    send_all(fd, said.proof);
    CHECK(receive_message(fd).type == 'n');
    CHECK(is_closed(fd));
  }
  const auto fd = raw(server);
  send_all(fd, said.hello + said.proof);
  CHECK(is_closed(fd));
  CHECK(server.refused() == 4);
}

TEST_CASE("slow, half-open and silent clients are closed after the same total time") {
  const TcpStoreServer server({.run_id = "run", .token = kToken, .hello_timeout = 400ms});
  const auto silent = raw(server), half_open = raw(server), slow = raw(server);
  ::shutdown(half_open.get(), SHUT_WR);
  CHECK(is_closed(half_open));
  const std::string bytes = hello(comm::make_nonce());
  const Stopwatch watch;
  std::size_t sent = 0;
  // Sending a byte now and then does not extend the deadline.
  for (; sent < bytes.size() && watch.elapsed() < 10s; ++sent) {
    if (::send(slow.get(), bytes.data() + sent, 1, MSG_NOSIGNAL) != 1) break;
    std::this_thread::sleep_for(20ms);
  }
  CHECK(sent < bytes.size());
  CHECK(is_closed(silent));
  CHECK(server.connections() == 0);
}

TEST_CASE("silent clients do not evict a client that has been challenged") {
  const TcpStoreServer server(
      {.run_id = "run", .token = kToken, .max_strangers = 16, .hello_timeout = 30s});
  const auto fd = raw(server);
  const std::string nonce = comm::make_nonce();
  send_all(fd, hello(nonce));
  const std::string challenge = receive_message(fd).fields.at(0);
  std::deque<FileDescriptor> crowd;
  for (int i = 0; i < 300; ++i) {
    crowd.push_back(raw(server));
    if (crowd.size() > 50) crowd.pop_front();
  }
  send_all(fd,
           message('P', {comm::make_proof(kToken, ProofRole::Client, "run", nonce, challenge)}));
  CHECK(receive_message(fd).type == 'y');
  CHECK(server.connections() <= 17);
}

TEST_CASE("unauthenticated clients use no rank's slot, and a full server refuses further ones") {
  const TcpStoreServer server({.run_id = "run", .max_connections = 2, .max_strangers = 4});
  std::vector<FileDescriptor> strangers;
  const auto a = client(server, ""), b = client(server, "");
  for (int i = 0; i < 20; ++i) strangers.push_back(raw(server));
  a->set("k", "v");
  CHECK(b->get("k", 1s) == "v");
  const auto third = raw(server);
  send_all(third, hello(""));
  CHECK(is_closed(third));
  CHECK(a->has("k"));
  CHECK(server.clients() == 2);
}

TEST_CASE("out of descriptors: joined clients continue, nothing spins, and the next client waits") {
  const TcpStoreServer server({.run_id = "run", .token = kToken});
  const auto good = client(server);
  good->set("k", "v");
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  rlimit low = before;
  low.rlim_cur = std::min<rlim_t>(before.rlim_cur, 256);
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &low) == 0);
  std::vector<FileDescriptor> filling;
  for (int fd = 0; (fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) filling.emplace_back(fd);
  REQUIRE_FALSE(filling.empty());
  filling.pop_back();
  const auto waits = raw(server);  // takes the last descriptor; none is left for accept
  timespec cpu_before{}, cpu_after{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu_before);
  std::this_thread::sleep_for(400ms);
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu_after);
  const bool goes_on = good->has("k");
  const std::size_t held = server.connections();
  filling.clear();
  ::setrlimit(RLIMIT_NOFILE, &before);
  CHECK(goes_on);
  CHECK(held == 1);
  CHECK((cpu_after.tv_sec - cpu_before.tv_sec) * 1000 +
            (cpu_after.tv_nsec - cpu_before.tv_nsec) / 1'000'000 <
        100);
  send_all(waits, hello(comm::make_nonce()));
  CHECK(receive_message(waits).type == 'C');
}

TEST_CASE("accepted and refused hostile clients are counted") {
  const TcpStoreServer server({.run_id = "run", .token = kToken});
  Attack attack;
  const auto prove = [&](const std::string& token) {
    const auto fd = raw(server);
    const std::string nonce = comm::make_nonce();
    send_all(fd, hello(nonce));
    const std::string challenge = receive_message(fd).fields.at(0);
    send_all(fd,
             message('P', {comm::make_proof(token, ProofRole::Client, "run", nonce, challenge)}));
    pollfd answer{fd.get(), POLLIN, 0};
    REQUIRE(::poll(&answer, 1, 5000) == 1);
    leave(fd, attack);
  };
  leave(raw(server), attack);
  CHECK(attack.joined + attack.refused == 0);
  prove(kOther);
  CHECK(attack.joined == 0);
  CHECK(attack.refused == 1);
  prove(kToken);
  CHECK(attack.joined == 1);
  CHECK(attack.refused == 1);
}

namespace {

constexpr int kThreads = 4, kConnectionsEach = 2500;
constexpr std::size_t kOpenEach = 40, kRanks = 64, kStrangers = 64;

void run_attack(const TcpStoreServer& server, const Recording& said, unsigned seed,
                std::deque<FileDescriptor>& open, Attack& attack, std::atomic<int>& running) {
  std::mt19937 random(seed);
  const Door door = door_of(server);
  for (int i = 0; i < kConnectionsEach; ++i)
    attack_once(random, door, said, open, kOpenEach, attack);
  --running;
}

}  // namespace

TEST_CASE("ten thousand hostile connections: none joins, none takes a rank's place or time") {
  const TcpStoreServer server(
      {.run_id = "run", .token = kToken, .max_connections = kRanks, .max_strangers = kStrangers});
  const Recording said = record(server);
  auto a = client(server), b = client(server);
  Attack attack;
  std::atomic<int> running{kThreads};
  std::vector<std::deque<FileDescriptor>> open(kThreads);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] { run_attack(server, said, 1000 + t, open[t], attack, running); });
  }
  std::vector<std::chrono::milliseconds> turns, introductions;
  std::size_t most_held = 0;
  std::string problem;
  std::thread echo([&] {
    try {
      for (int i = 0; b->get("a" + std::to_string(i), 60s) != "end"; ++i) {
        b->set("b" + std::to_string(i), "answer");
      }
    } catch (const std::exception& error) {
      problem = error.what();
    }
  });
  try {
    int i = 0;
    for (; running.load() > 0 || i < 20; ++i) {
      Stopwatch turn;
      a->set("a" + std::to_string(i), "question");
      a->get("b" + std::to_string(i), 30s);
      turns.push_back(turn.elapsed());
      most_held = std::max(most_held, server.connections());
      std::this_thread::sleep_for(1ms);
      if (i % 50 != 0) continue;
      const Stopwatch introduction;
      CHECK(client(server)->has("a0"));  // a rank that joins during the attack
      introductions.push_back(introduction.elapsed());
    }
    a->set("a" + std::to_string(i), "end");
  } catch (const std::exception& error) {
    FAIL_CHECK(error.what());
  }
  for (std::thread& thread : threads) thread.join();
  echo.join();
  CHECK(problem == "");
  a.reset();
  b.reset();
  server.drain(5s);
  CHECK(server.clients() == 0);  // while the last hostile connections are open
  for (auto& some : open) {
    for (const FileDescriptor& fd : some) leave(fd, attack);
  }
  CHECK(attack.made.load() > kThreads * kConnectionsEach * 9 / 10);
  CHECK(attack.joined.load() == 0);
  CHECK(server.refused() > 1000);
  CHECK(most_held <= kRanks + kStrangers);
  CHECK(server.size() == 2 * (turns.size()) + 1);  // honest clients' keys only

  std::sort(turns.begin(), turns.end());
  std::sort(introductions.begin(), introductions.end());
  CAPTURE(turns.size());
  CHECK(turns[turns.size() / 2] < 200ms * kSlack);
  CHECK(turns.back() < 4s * kSlack);
  CHECK(introductions.back() < 8s * kSlack);
  MESSAGE("turns: " << turns.size() << ", median " << turns[turns.size() / 2].count()
                    << " ms, most " << turns.back().count() << " ms; introductions: most "
                    << introductions.back().count() << " ms");
}
