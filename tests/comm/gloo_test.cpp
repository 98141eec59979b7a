#include "comm/gloo.h"

#include "comm/control/agreement.h"
#include "core/base/context.h"
#include "tests/comm/ranks.h"
#include "tests/support/multiprocess.h"

using namespace tessera;
using namespace tessera::test;

TEST_CASE("ranks that do not all connect end at the deadline") {
  const auto store = std::make_shared<comm::MemoryStore>();
  comm::GlooOptions options;
  options.connect_timeout = 300ms;
  const Stopwatch watch;
  CHECK_THROWS_AS(comm::make_gloo_communicator(store, 0, 2, options), CommError);
  CHECK(watch.elapsed() < 3s);
}

TEST_CASE("a host without an address is told, with what helps") {
  const auto store = std::make_shared<comm::MemoryStore>();
  comm::GlooOptions options;
  options.address = "no-such-host.invalid";
  try {
    comm::make_gloo_communicator(store, 1, 2, options);
    FAIL("it connected");
  } catch (const CommError& error) {
    CHECK(error.culprits() == std::vector<int>{1});
    CHECK(std::string(error.what()).find("no-such-host.invalid, has no address") !=
          std::string::npos);
  }
}

TEST_CASE("staging is booked in the ledger, and kept for the next collective") {
  const Group group("gloo", 2);
  const auto results = run_ranks(2, [&](int rank) {
    const auto context = Context::create();
    auto c = group.join(rank, {.context = context});
    std::vector<float> in(2 * 10'000, 1.0F), out(10'000);
    for (int i = 0; i < 3; ++i) c->reduce_scatter(view_of(in), view_of(out), {});
    const auto usage = context->ledger().usage(MemoryCategory::Communication);
    if (usage.current != 40'000 || usage.peak != 40'000) {
      throw std::runtime_error(fmt::format("booked {} of {}", usage.current, usage.peak));
    }
    c.reset();
    if (context->ledger().usage(MemoryCategory::Communication).current != 0) {
      throw std::runtime_error("not given back");
    }
  });
  for (const RankResult& result : results) CHECK(result.error == "");
}

namespace {

std::unique_ptr<comm::Communicator> join_gloo(const std::shared_ptr<comm::Store>& store, int rank,
                                              int world, std::chrono::milliseconds connect,
                                              std::chrono::milliseconds timeout) {
  comm::GlooOptions options;
  options.connect_timeout = connect;
  options.communicator.timeout = timeout;
  return comm::make_gloo_communicator(store, rank, world, options);
}

}  // namespace

TEST_CASE("the time to connect limits no collective") {
  const auto store = std::make_shared<comm::MemoryStore>();
  const auto results = run_ranks(2, [&](int rank) {
    auto c = join_gloo(store, rank, 2, 4s, 60s);  // 0.4 s of it for a wait of Gloo's
    if (rank == 1) std::this_thread::sleep_for(2500ms);
    c->barrier({});
  });
  for (const RankResult& result : results) CHECK(result.error == "");
}

TEST_CASE("a wait that was long and is over blames nobody of a later one") {
  // Rank 1 is late once, so the others tell that they wait for it. Then rank 0 never comes.
  const auto store = std::make_shared<comm::MemoryStore>();
  const auto results = run_ranks(3, [&](int rank) {
    auto c = join_gloo(store, rank, 3, 30s, 3s);
    c->barrier({});
    if (rank == 1) std::this_thread::sleep_for(2200ms);
    c->barrier({});
    if (rank == 0) {
      std::this_thread::sleep_for(6s);
      return;
    }
    c->barrier({});
  });
  for (const int rank : {1, 2}) {
    const RankResult& result = results[static_cast<std::size_t>(rank)];
    CAPTURE(result.error);
    CHECK(result.error.find("missing: rank 0") != std::string::npos);
    CHECK(result.culprits == std::vector<int>{0});
  }
}

TEST_CASE("a rank that does not say where it listens is named, and no other") {
  const auto store = std::make_shared<comm::MemoryStore>();
  const auto results = run_ranks(3, [&](int rank) {
    if (rank != 1) join_gloo(store, rank, 3, 4s, 3s);
  });
  for (const int rank : {0, 2}) {
    const RankResult& result = results[static_cast<std::size_t>(rank)];
    CAPTURE(result.error);
    CHECK(result.error.find("rank 1 did not say where it listens within 2 s") == 0);
    CHECK(result.culprits == std::vector<int>{1});
  }
}

TEST_CASE("an address that is not this host's is told by the rank that has it") {
  comm::GlooOptions options;
  options.address = "192.0.2.1";  // of documentation: nobody's
  try {
    comm::make_gloo_communicator(std::make_shared<comm::MemoryStore>(), 1, 2, options);
    FAIL("it connected");
  } catch (const CommError& error) {
    CAPTURE(std::string(error.what()));
    CHECK(error.failure() == CommFailure::Aborted);
    CHECK(error.culprits() == std::vector<int>{1});
    CHECK(std::string(error.what()).find("rank 1 can't listen on 192.0.2.1") == 0);
  }
}

TEST_CASE("addresses of two families are told to be that") {
  const auto store = std::make_shared<comm::MemoryStore>();
  const auto results = run_ranks(2, [&](int rank) {
    comm::GlooOptions options;
    options.connect_timeout = 10s;
    options.address = rank == 0 ? "127.0.0.1" : "::1";
    comm::make_gloo_communicator(store, rank, 2, options);
  });
  for (const char* none : {"can't listen on ::1", "has no address"}) {  // no IPv6 here
    if (results[1].error.find(none) != std::string::npos) return;
  }
  for (const RankResult& result : results) {
    CAPTURE(result.error);
    CHECK(result.failure == CommFailure::Mismatch);
    CHECK(result.culprits == std::vector<int>{0, 1});
    CHECK(result.error.find("IPv4") != std::string::npos);
    CHECK(result.error.find("IPv6") != std::string::npos);
  }
}

TEST_CASE("who waits for an address learns of a verdict before its deadline") {
  const auto store = std::make_shared<comm::MemoryStore>();
  comm::publish_verdict(*store, CommError(CommFailure::PeerLost, {1}, "rank 1 was killed"));
  comm::GlooOptions options;
  options.communicator.ends_run = true;
  const Stopwatch watch;
  try {
    comm::make_gloo_communicator(store, 0, 2, options);
    FAIL("it connected");
  } catch (const CommError& error) {
    CHECK(std::string(error.what()) == "rank 1 was killed");
  }
  CHECK(watch.elapsed() < 10s);
}
