// Ranks as processes: the effect on the others when one is killed, stopped, or leaves.
#include <fmt/ranges.h>

#include "comm/control/tcp_store.h"
#include "tests/comm/mismatches.h"
#include "tests/comm/ranks.h"
#include "tests/support/multiprocess.h"

using namespace tessera;
using namespace tessera::test;
using comm::ReduceOp;

namespace {

constexpr const char* kBackends[] = {"tcp", "shm", "shm, staged"};

std::shared_ptr<comm::TcpStore> connect(const std::string& port) {
  return std::make_shared<comm::TcpStore>("127.0.0.1", static_cast<std::uint16_t>(std::stoi(port)),
                                          "run", 10s);
}

// Joins as a rank of a forked group, over the test's store.
std::unique_ptr<comm::Communicator> join(const std::string& backend, int rank, int world,
                                         const std::string& port,
                                         std::chrono::milliseconds timeout = 20s) {
  std::vector<std::string> processes;
  for (int r = 0; r < world; ++r) processes.push_back(fmt::format("here, pid of {}", r));
  const bool staged = backend == "shm, staged";
  auto c = join_over(staged ? "shm" : backend, connect(port), rank, world, {.timeout = timeout},
                     std::move(processes));
  if (!staged) return c;
  device_context() = fiber_context();
  return comm::make_host_staged_communicator(std::move(c), device_context());
}

std::string describe(const CommError& error) {
  return fmt::format("{} [{}] {}", static_cast<int>(error.failure()),
                     fmt::join(error.culprits(), ","), error.what());
}

// Runs collectives until one fails; returns its error.
std::string train_until_failure(comm::Communicator& c, std::size_t count) {
  std::vector<float> ones(count * static_cast<std::size_t>(c.world_size()), 1.0F), part(count);
  const Mirror<float> whole(ones), sums(part);
  try {
    for (;;) {
      c.all_gather(whole.view(), {.label = "h.1"});
      c.reduce_scatter(whole.view(), sums.view(), {.label = "h.1"});
    }
  } catch (const CommError& error) {
    return describe(error);
  }
}

struct Served {
  comm::TcpStoreServer server{{.run_id = "run"}};
  std::string port() const { return std::to_string(server.port()); }
  void wait_until_joined(int world) const {
    const auto store = connect(port());
    for (int rank = 0; rank < world; ++rank) store->get(fmt::format("joined/{}", rank), 20s);
  }
};

}  // namespace

TEST_CASE("a killed rank: every survivor names it within 3 s") {
  for (const std::string backend : kBackends) {
    CAPTURE(backend);
    for (const std::size_t count : {std::size_t{10}, std::size_t{300'000}}) {
      CAPTURE(count);
      Processes ranks(4, [&](int rank, const std::string& port) {
        const auto c = join(backend, rank, 4, port);
        connect(port)->set(fmt::format("joined/{}", rank), "");
        return train_until_failure(*c, count);
      });
      const Served served;
      ranks.go(served.port());
      served.wait_until_joined(4);
      std::this_thread::sleep_for(200ms);
      const Stopwatch since_kill;
      ranks.signal(2, SIGKILL);
      const auto outcomes = ranks.wait(kSlack * 10s);
      CHECK(since_kill.elapsed() < kSlack * 3s);
      CHECK(outcomes[2].signal == SIGKILL);
      for (std::size_t r : {0U, 1U, 3U}) {
        CHECK(outcomes[r].in_time);
        CHECK(outcomes[r].exit_code == 0);
        CHECK(outcomes[r].text.find("1 [2] ") == 0);  // PeerLost, culprit 2
        CHECK(outcomes[r].text.find("lost rank 2 (here, pid of 2)") != std::string::npos);
        CHECK(outcomes[r].text.find("(h.1)") != std::string::npos);
      }
    }
  }
}

TEST_CASE("a killed rank is detected while another one is slow") {
  for (const std::string backend : kBackends) {
    for (const bool has_come : {false, true}) {  // to the collective, before being killed
      CAPTURE(backend);
      CAPTURE(has_come);
      Processes ranks(3, [&](int rank, const std::string& port) -> std::string {
        const auto c = join(backend, rank, 3, port);
        c->barrier({});
        if (rank == 1) std::this_thread::sleep_for(30s);  // busy; must not hide the death of rank 2
        if (rank == 2 && !has_come) {
          std::this_thread::sleep_for(kSlack * 100ms);  // until others left the first barrier
          ::raise(SIGKILL);
        }
        try {
          const auto work = c->start_barrier({.label = "step"});
          if (rank == 2) {
            std::this_thread::sleep_for(200ms);
            ::raise(SIGKILL);
          }
          work->wait();
        } catch (const CommError& error) {
          return describe(error);
        }
        return "no error";
      });
      const Served served;
      ranks.go(served.port());
      const auto outcomes = ranks.wait(kSlack * 10s, 1);
      CAPTURE(outcomes[0].text);
      CHECK(outcomes[0].in_time);
      CHECK(outcomes[0].text.find("1 [2] barrier#1 (step): lost rank 2") == 0);
    }
  }
}

TEST_CASE("a stopped rank is named by every survivor at the deadline") {
  for (const std::string backend : kBackends) {
    CAPTURE(backend);
    Processes ranks(3, [&](int rank, const std::string& port) -> std::string {
      const auto c = join(backend, rank, 3, port, 700ms);
      c->barrier({.label = "start", .deadline = 10s});
      if (rank == 1) ::raise(SIGSTOP);
      return train_until_failure(*c, 1000);
    });
    const Served served;
    ranks.go(served.port());
    const auto outcomes = ranks.wait(kSlack * 10s, 1);
    for (std::size_t r : {0U, 2U}) {
      CHECK(outcomes[r].in_time);
      CHECK(outcomes[r].text.find("0 [1] all_gather#1 (h.1): 2 of 3 ranks arrived within 0.7 s, "
                                  "missing: rank 1") == 0);
    }
    CHECK_FALSE(outcomes[1].in_time);
  }
}

TEST_CASE("a rank stopped at any point of a transfer is blamed by all others") {
  for (const std::string backend : kBackends) {
    CAPTURE(backend);
    for (const int milliseconds : {50, 63, 77}) {
      Processes ranks(3, [&](int rank, const std::string& port) {
        const auto c = join(backend, rank, 3, port, 1500ms);
        connect(port)->set(fmt::format("joined/{}", rank), "");
        return train_until_failure(*c, 500'000);
      });
      const Served served;
      ranks.go(served.port());
      served.wait_until_joined(3);
      std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
      ranks.signal(1, SIGSTOP);
      // Deadlines are extended by stolen time.
      const auto outcomes = ranks.wait(kSlack * 10s, 1);
      for (std::size_t r : {0U, 2U}) {
        CAPTURE(outcomes[r].text);
        CHECK(outcomes[r].in_time);
        CHECK(outcomes[r].text.find("0 [1] ") == 0);
        CHECK(outcomes[r].text.find("rank 1 (here, pid of 1)") != std::string::npos);
      }
    }
  }
}

TEST_CASE("processes that disagree all say so, before data move, and name the odd one") {
  const std::vector<Mismatch> all = mismatches();
  int odd = 0;
  for (const std::string backend : kBackends) {
    for (const int world : {2, 3, 4}) {
      for (const Mismatch& mismatch : all) {
        odd = std::max(first_odd(world), (odd + 1) % world);
        CAPTURE(backend);
        CAPTURE(world);
        CAPTURE(mismatch.name);
        CAPTURE(odd);
        Processes ranks(world, [&](int rank, const std::string& port) -> std::string {
          const auto c = join(backend, rank, world, port);
          const std::vector<float> before(32, static_cast<float>(rank + 1));
          std::vector<float> values = before;
          Mirror<float> buffer(values);
          try {
            mismatch.call(*c, buffer.view(), rank == odd);
          } catch (const CommError& error) {
            buffer.fetch();
            const bool same = values == before;
            return describe(error) + (same || mismatch.is_later ? "" : ", and data moved");
          }
          return "no error";
        });
        const Served served;
        ranks.go(served.port());
        const auto outcomes = ranks.wait(kSlack * 10s);
        for (const Outcome& outcome : outcomes) {
          CHECK(outcome.in_time);
          CHECK(outcome.exit_code == 0);
          CHECK(outcome.text.starts_with(fmt::format("2 [{}] ", odd)));
          CHECK(outcome.text.find(text_of(mismatch, world, odd)) != std::string::npos);
          CHECK(outcome.text == outcomes[0].text);
        }
      }
    }
  }
}

TEST_CASE("a rank that leaves right after the last collective loses no data of others") {
  for (const std::string backend : kBackends) {
    CAPTURE(backend);
    for (int round = 0; round < 3; ++round) {
      Processes ranks(3, [&](int rank, const std::string& port) -> std::string {
        auto c = join(backend, rank, 3, port);
        std::vector<std::int64_t> x(600'000, rank + 1);
        c->all_reduce(view_of(x), ReduceOp::Sum, {.label = "last"});
        c.reset();
        for (const std::int64_t v : x) {
          if (v != 6) return "wrong";
        }
        return "right";
      });
      const Served served;
      ranks.go(served.port());
      for (const Outcome& outcome : ranks.wait(kSlack * 15s)) CHECK(outcome.text == "right");
    }
  }
}
