#include "comm/tcp.h"

#include <sys/socket.h>

#include <atomic>
#include <deque>
#include <future>
#include <random>

#include "comm/control/agreement.h"
#include "comm/control/authentication.h"
#include "comm/control/socket.h"
#include "core/base/context.h"
#include "core/base/memory.h"
#include "tests/comm/collective_checks.h"
#include "tests/comm/control/raw_client.h"
#include "tests/comm/ranks.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::test;
using comm::FileDescriptor;
using comm::ProofRole;

namespace {

const std::string kToken = "the secret of this run, long enough";

comm::TcpOptions options_for(std::chrono::milliseconds connect, const std::string& token = kToken) {
  comm::TcpOptions options;
  options.connect_timeout = connect;
  options.watched_within = 100ms;
  options.run_id = "run";
  options.token = token;
  return options;
}

std::string address_of(std::uint16_t port) { return fmt::format("127.0.0.1 {}", port); }

// A store that delays one rank's address exchange until `released` is ready; the others exchange
// theirs before.
class SlowStore final : public comm::Store {
 public:
  SlowStore(std::shared_ptr<comm::Store> store, std::shared_future<void> released)
      : store_(std::move(store)), released_(std::move(released)) {}
  void set(const std::string& key, std::string_view value) override { store_->set(key, value); }
  std::string get(const std::string& key, std::chrono::milliseconds deadline) override {
    return store_->get(key, deadline);
  }
  bool has(const std::string& key) override { return store_->has(key); }
  void leave(const std::string& name, int readers) override {
    released_.wait();
    store_->leave(name, readers);
  }

 private:
  const std::shared_ptr<comm::Store> store_;
  const std::shared_future<void> released_;
};

// Hostile clients at the ports of connecting ranks.
class Attack {
 public:
  // @param replayed  a hello with the run's token, made for another nonce
  Attack(std::vector<std::uint16_t> ports, std::string replayed)
      : ports_(std::move(ports)), replayed_(std::move(replayed)) {}

  void once() {
    const auto port = ports_[random_() % ports_.size()];
    FileDescriptor fd = comm::connect_to("127.0.0.1", port, std::chrono::steady_clock::now() + 1s);
    if (!fd) return;
    ++made_;
    send_all(fd, first_words());
    if (random_() % 10 == 0) ::shutdown(fd.get(), SHUT_WR);
    open_.push_back(std::move(fd));
    send_all(open_[random_() % open_.size()], random_bytes(1));  // continues a slow one
    if (open_.size() > 150) leave();
  }
  int made() const { return made_; }
  // @return number of connections that received more than a nonce, i.e. were accepted
  int let_in() {
    while (!open_.empty()) leave();
    return let_in_;
  }

 private:
  std::string first_words() {
    switch (random_() % 6) {
      case 0:
        return "";  // silent
      case 1:
        return replayed_.substr(0, 1 + random_() % 60);  // slow
      case 2:
        return replayed_;
      case 3: {  // another token
        std::string other = replayed_.substr(0, 36);
        return other + comm::make_proof("another secret of this length", ProofRole::Client,
                                        "run/tcp/2>0", other.substr(4), std::string(32, 'n'));
      }
      case 4:
        return "GET / HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\nA: " +
               std::string(40, 'a') + "\r\n\r\n";
      default:
        return random_bytes(4000);
    }
  }
  std::string random_bytes(std::size_t count) {
    std::string bytes(count, '\0');
    for (char& c : bytes) c = static_cast<char>(random_());
    return bytes;
  }
  void leave() {
    char bytes[256];
    const ssize_t n = ::recv(open_.front().get(), bytes, sizeof(bytes), MSG_DONTWAIT);
    let_in_ += n > static_cast<ssize_t>(comm::kNonceBytes);
    const linger now{1, 0};
    ::setsockopt(open_.front().get(), SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    open_.pop_front();
  }

  const std::vector<std::uint16_t> ports_;
  const std::string replayed_;
  std::mt19937 random_{5};
  std::deque<FileDescriptor> open_;
  int made_ = 0, let_in_ = 0;
};

}  // namespace

TEST_CASE("hostile clients at a data port: none is accepted, and the ranks' sums are exact") {
  const auto store = std::make_shared<comm::MemoryStore>();
  std::promise<void> attacked;
  const auto released = attacked.get_future().share();
  std::atomic<int> connected = 0;
  int let_in = -1;
  std::thread strangers([&] {
    std::vector<std::uint16_t> ports;
    for (const int rank : {0, 1}) {
      const std::string address = store->get(fmt::format("tcp/address/{}", rank), 10s);
      ports.push_back(static_cast<std::uint16_t>(std::stoi(address.substr(address.find(' ')))));
    }
    const std::string nonce = comm::make_nonce();
    Attack attack(ports, std::string("\2\0\0\0", 4) + nonce +
                             comm::make_proof(kToken, ProofRole::Client, "run/tcp/2>0", nonce,
                                              comm::make_nonce()));
    while (attack.made() < 600) attack.once();
    attacked.set_value();
    for (int i = 0; connected < 3 && i < 2000; ++i) attack.once();
    let_in = attack.let_in();
  });
  const auto results = run_ranks(3, [&](int rank) {
    const auto seen = rank == 2 ? std::make_shared<SlowStore>(store, released)
                                : std::shared_ptr<comm::Store>(store);
    const auto c = comm::make_tcp_communicator(seen, rank, 3, options_for(60s));
    ++connected;
    check_everything(*c);
  });
  strangers.join();
  for (const RankResult& result : results) CHECK(result.error == "");
  CHECK(let_in == 0);
}

TEST_CASE("an unreachable peer, or one without the token: both ends are named") {
  struct Case {
    const char* says;  // null: no listener; then reads
    const char* problem;
  };
  const std::string nonce_and_proof(64, 'n');
  for (const Case& c : {Case{nullptr, "refused"}, Case{"", "did not connect"},
                        Case{nonce_and_proof.c_str(), "does not know this run's token"}}) {
    CAPTURE(c.problem);
    std::optional<FakeServer> fake;
    if (c.says != nullptr) fake.emplace([&](const auto& client) { send_all(client, c.says); });
    const auto port =
        fake ? fake->port() : comm::bound_port(comm::listen_on("127.0.0.1", 0, 1).get());
    const auto store = std::make_shared<comm::MemoryStore>();
    std::thread peer([&] { comm::exchange(*store, "tcp/address", 0, 2, address_of(port), 10s); });
    const Stopwatch watch;
    const auto results = run_ranks(2, [&](int rank) {
      if (rank == 1) comm::make_tcp_communicator(store, 1, 2, options_for(1s));
    });
    peer.join();
    CHECK(watch.elapsed() < 5s);
    CAPTURE(results[1].error);
    CHECK(results[1].failure == CommFailure::Timeout);
    CHECK(results[1].culprits == std::vector<int>{0, 1});
    CHECK(results[1].error.find(address_of(port)) != std::string::npos);
    CHECK(results[1].error.find(c.problem) != std::string::npos);
  }
}

TEST_CASE("ranks with different tokens or of different runs do not connect") {
  for (const bool other_run : {false, true}) {
    const auto store = std::make_shared<comm::MemoryStore>();
    const auto results = run_ranks(2, [&](int rank) {
      auto options = options_for(600ms, rank == 0 || other_run ? kToken : kToken + "!");
      if (rank == 0 && other_run) options.run_id = "another";
      comm::make_tcp_communicator(store, rank, 2, options);
    });
    for (const RankResult& result : results) {
      CHECK(result.failure == CommFailure::Timeout);
      CHECK(result.culprits == std::vector<int>{0, 1});
    }
  }
}

TEST_CASE("only the rank that publishes no address is named") {
  const auto store = std::make_shared<comm::MemoryStore>();
  const auto results = run_ranks(3, [&](int rank) {
    if (rank != 1) comm::make_tcp_communicator(store, rank, 3, options_for(600ms));
  });
  for (const std::size_t rank : {0U, 2U}) {
    CHECK(results[rank].failure == CommFailure::Timeout);
    CHECK(results[rank].culprits == std::vector<int>{1});
  }
}

TEST_CASE("a verdict on the run ends pending connects") {
  const auto store = std::make_shared<comm::MemoryStore>();
  const FakeServer silent([](const auto&) {});
  std::thread peer([&] {
    comm::exchange(*store, "tcp/address", 0, 2, address_of(silent.port()), 10s);
    comm::publish_verdict(*store, CommError(CommFailure::PeerLost, {0}, "rank 0 was killed"));
  });
  auto options = options_for(60s);
  options.communicator.ends_run = true;
  CHECK_THROWS_HOLDING(CommError, "rank 0 was killed",
                       comm::make_tcp_communicator(store, 1, 2, options));
  peer.join();
}

TEST_CASE("an address on which a rank can't listen is named with that rank") {
  for (const std::string address : {"no-such-host.invalid", "192.0.2.1"}) {  // unassigned
    auto options = options_for(1s);
    options.address = address;
    const auto results = run_ranks(2, [&](int rank) {
      if (rank == 1)
        comm::make_tcp_communicator(std::make_shared<comm::MemoryStore>(), 1, 2, options);
    });
    CHECK(results[1].failure == CommFailure::Aborted);
    CHECK(results[1].culprits == std::vector<int>{1});
    CHECK(results[1].error.find(address) != std::string::npos);
  }
}

TEST_CASE("buffers larger than the socket's are exchanged both ways; staging is small and booked") {
  constexpr std::int64_t kPart = 3'000'000;
  const Group group("tcp", 3);
  const auto results = run_ranks(3, [&](int rank) {
    const auto context = Context::create();
    auto c = group.join(rank, {.context = context});
    std::vector<float> x(3 * kPart, static_cast<float>(rank + 1)), out(kPart);
    const auto booked = [&] {
      return context->ledger().usage(MemoryCategory::Communication).current;
    };
    std::vector<float> small(3 * 100), small_out(100);
    c->reduce_scatter(view_of(small), view_of(small_out), {});
    expect(booked() == 2 * 400, "booked for small parts", rank, booked());
    c->reduce_scatter(view_of(x), view_of(out), {});
    expect(booked() == 2 * 256 * 1024, "booked", rank, booked());
    c->all_gather(view_of(x), {});
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t part = i / kPart;
      expect(x[i] == static_cast<float>(part + 1), "all_gather", rank, kPart);
    }
    c->all_reduce(view_of(x), comm::ReduceOp::Sum, {});
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t part = i / kPart;
      expect(x[i] == 3 * static_cast<float>(part + 1), "all_reduce", rank, kPart);
    }
    for (const float v : out) expect(v == 6, "reduce_scatter", rank, kPart);
    c.reset();
    expect(booked() == 0, "given back", rank, 0);
  });
  for (const RankResult& result : results) CHECK(result.error == "");
}

TEST_CASE("a rank that leaves after its last collective is not lost to others still in it") {
  // Larger than a header's payload. With three ranks, the data of one may wait for another's header.
  for (int round = 0; round < 100; ++round) {
    const Group group("tcp", 3);
    const auto results = run_ranks(3, [&](int rank) {
      const auto c = group.join(rank);
      std::vector<float> x(3000, static_cast<float>(rank));
      c->all_gather(view_of(x), {.label = "last", .deadline = 20s});
    });
    for (const RankResult& result : results) REQUIRE(result.error == "");
  }
}
