// Failures that users of other systems report.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "comm/control/socket.h"
#include "comm/control/tcp_store.h"
#include "core/base/memory.h"
#include "core/base/system_memory.h"
#include "tests/e2e/small_run.h"
#include "tests/faults/campaign.h"
#include "tests/support/meeting_port.h"

using namespace tessera;
using namespace tessera::test;
using std::chrono::seconds;

namespace {

constexpr int kUsage = 2, kComm = 4, kMemory = 5;

// A rank's final error line; empty if there is none.
std::string last_words(const std::string& err, int rank) {
  const std::string prefix =
      rank == 0 ? "tessera: error: " : fmt::format("[rank {}] tessera: error: ", rank);
  for (std::size_t at = err.find(prefix); at != err.npos; at = err.find(prefix, at + 1)) {
    if (at == 0 || err[at - 1] == '\n') return err.substr(at, err.find('\n', at) - at);
  }
  return {};
}

std::unique_ptr<CliProcess> start_rank(const Arguments& words, int rank, int world,
                                       const std::string& port) {
  return std::make_unique<CliProcess>(words, rank_variables(rank, world, port));
}

}  // namespace

TEST_CASE_FIXTURE(InMemory, "founding case: a save for which there is no space") {
  const std::string run = dir.file("run");
  // A write of the first save fails; the second save succeeds.
  for (int i = 0; i < 6; ++i) {
    const int world = 2 + i / 2;
    const int call = i % 2 == 0 ? 2 : 5;
    CAPTURE(world);
    CAPTURE(call);
    std::filesystem::remove_all(run);
    const auto result =
        run_to(0,
               joined(small_run(text, run, world, 6),
                      {"--train.global_batch=12", "--checkpoint.every=3", "--train.eval_every=0"}),
               {{"LD_PRELOAD", kFailingCalls},
                {"TESSERA_FAULT_RANK", "1"},
                {"TESSERA_FAULT_CALL", std::to_string(call)},
                {"TESSERA_FAULT_KIND", "ENOSPC"}});
    CHECK(holds(result.err, "rank 1"));
    CHECK(holds(result.err, "No space left on device"));
    CHECK(holds(result.err, " bytes needed, "));
    CHECK(holds(result.err, " bytes free on that file system"));
    const Newest newest = newest_of(run + "/checkpoints");
    CHECK(newest.step == 6);
    CHECK(newest.skipped.empty());
  }
}

TEST_CASE_FIXTURE(InMemory,
                  "founding case: weights alone are saved, and a run goes on from them and is "
                  "fine-tuned") {
  const std::string run = dir.file("weights");
  run_to(0, joined(small_run(text, run, 2, 20),
                   {"--checkpoint.what=model", "--optim.lr=0.01", "--train.global_batch=12"}));
  const std::string checkpoint = run + "/checkpoints/step-00000020";
  const double reached = std::stod(read_metrics(run).steps.back().loss);

  // Optimizer moments are missing: one sentence says so and what to do.
  for (const int world : {1, 2, 3, 4}) {
    Arguments words = joined(small_run(text, run, world, 30), {"--train.global_batch=12"});
    if (world % 2 == 0) words.push_back("--checkpoint.resume=" + checkpoint);
    const std::string line = last_words(run_to(kUsage, words).err, 0);
    CHECK(holds(line, "holds no optimizer state (it was saved with checkpoint.what=model)"));
    CHECK(holds(line, "start from its weights with --model.init_from"));
  }
  CHECK(read_metrics(run).steps.size() == 20);  // refused before any file was changed
  for (const int world : {1, 2, 3, 4}) {
    CAPTURE(world);
    const std::string tuned = dir.file(fmt::format("tuned-{}", world));
    run_to(0, joined(small_run(text, tuned, world, 10),
                     {"--train.global_batch=12",
                      "--model.init_from=" + (world % 2 == 0 ? checkpoint : run),
                      "--optim.lr=0.001"}));
    CHECK(std::stod(read_metrics(tuned).steps.front().loss) < reached + 0.3);
    CHECK(newest_of(tuned + "/checkpoints").step == 10);
  }
}

TEST_CASE_FIXTURE(InMemory,
                  "founding case: a run that needs more memory than there is is refused before it "
                  "takes any") {
  struct Case {
    const char* what;
    Arguments words;
    Arguments advice;
  };
  const Case cases[] = {
      {"sequences too long", {"--model.seq_len=8000", "--train.global_batch=3000000"}, {}},
      {"batches too large", {"--train.global_batch=300000000"}, {"--train.micro_batch "}},
      // Like an FSDP wrapping policy that matches no block; here a unit is always one block.
      {"nothing is split",
       {"--shard.mode=none", "--model.n_embd=32768", "--model.n_layer=24"},
       {"--shard.mode full"}},
  };
  for (const Case& c : cases) {
    for (const int world : {1, 3}) {
      const std::string_view what = c.what;
      if (world == 1 && what == "nothing is split") continue;
      CAPTURE(what);
      CAPTURE(world);
      const std::string run = dir.file("large");
      std::filesystem::remove_all(run);
      const auto result = run_to(
          kMemory,
          joined(joined(small_run(text, run, world, 10), {"--train.global_batch=12"}), c.words));
      CHECK(result.time < seconds(20));
      const std::string line = last_words(result.err, 0);
      CHECK(holds(line, " up to "));
      CHECK(holds(line, "this host has " + format_bytes(system_memory().total)));
      CHECK(holds(line, "activations "));
      CHECK(holds(line, "optimizer state "));
      CHECK(holds(line, "Nothing was started"));
      for (const std::string& flag : joined(c.advice, {"--train.precision bf16"}))
        CHECK(holds(result.err, flag));
      // Only rank 0 prints the error; the others name it as the culprit.
      CHECK(holds(last_words(result.err, world - 1), world == 1 ? "" : "culprit=rank 0 ("));
      CHECK_FALSE(std::filesystem::exists(run + "/metrics.jsonl"));
    }
  }
}

TEST_CASE_FIXTURE(
    InMemory, "founding case: a precision that needs too much memory is told, with what would do") {
  // Two blocks of width 64 need 5.4, 4.0 and 3.3 MiB per rank on 2, 3 and 4 ranks, and 3.4, 2.6 and
  // 2.2 MiB in bf16.
  const std::map<int, std::string> limits = {{2, "4200000"}, {3, "3100000"}, {4, "2500000"}};
  for (const auto& [world, limit] : limits) {
    CAPTURE(world);
    for (const bool narrow : {false, true}) {
      CAPTURE(narrow);
      const std::string run = dir.file(fmt::format("precision-{}-{}", world, narrow));
      const auto result =
          run_to((narrow ? 0 : kMemory),
                 joined(small_run(text, run, world, 2),
                        {"--train.global_batch=12", "--model.n_embd=64", "--model.seq_len=64",
                         "--train.memory_limit=" + limit,
                         fmt::format("--train.precision={}", narrow ? "bf16-true" : "fp32")}));
      CHECK(holds(result.err, "train.memory_limit allows") == !narrow);
      if (!narrow) CHECK(holds(result.err, "--train.precision bf16"));
      if (!narrow) CHECK(holds(result.err, "optimizer state "));
    }
  }
}

TEST_CASE_FIXTURE(InMemory,
                  "ports that others hold, and a store of a former run, are passed over") {
  for (const int world : kWorlds) {
    CAPTURE(world);
    const std::string port = meeting_port();
    const auto first = static_cast<std::uint16_t>(std::stoi(port));
    const auto silent = comm::listen_on("127.0.0.1", first, 64);
    const comm::TcpStoreServer former(
        {.port = static_cast<std::uint16_t>(first + 1), .run_id = "a former run"});
    std::vector<std::unique_ptr<CliProcess>> ranks;
    for (int rank = 0; rank < world; ++rank) {
      ranks.push_back(
          start_rank(joined(small_run(text, dir.file(fmt::format("ports-{}", world)), 1, 3),
                            {"--train.global_batch=12"}),
                     rank, world, port));
    }
    for (const auto& rank : ranks) {
      end_of(*rank, 0);
    }
    CHECK(former.size() == 0);
  }
}

TEST_CASE_FIXTURE(InMemory, "founding case: a start to which one rank never comes") {
  for (const int world : kWorlds) {
    // One start per missing rank, all in parallel.
    std::vector<std::vector<std::unique_ptr<CliProcess>>> starts(static_cast<std::size_t>(world));
    for (int missing = 0; missing < world; ++missing) {
      const std::string port = meeting_port();
      const auto words =
          joined(small_run(text, dir.file(fmt::format("run-{}-{}", world, missing)), 1, 10),
                 {"--train.global_batch=12", "--comm.init_timeout=8"});
      for (int rank = 0; rank < world; ++rank) {
        if (rank == missing) continue;
        starts[static_cast<std::size_t>(missing)].push_back(start_rank(words, rank, world, port));
      }
    }
    for (int missing = 0; missing < world; ++missing) {
      CAPTURE(world);
      CAPTURE(missing);
      for (const auto& rank : starts[static_cast<std::size_t>(missing)]) {
        const auto result = end_of(*rank, kComm);
        CHECK(holds(result.err, fmt::format("culprit=rank {}", missing)));
        // Without rank 0, the rendezvous server, a rank learns nothing about the others.
        CHECK(holds(result.err, missing == 0
                                    ? "127.0.0.1"
                                    : fmt::format("{} of {} ranks arrived ", world - 1, world)));
        if (missing != 0) CHECK(holds(result.err, fmt::format("missing: rank {}", missing)));
      }
    }
  }
}

TEST_CASE_FIXTURE(
    InMemory, "founding case: a rank that would call in another order is refused at the start") {
  for (const int world : kWorlds) {
    for (int odd = 0; odd < world; ++odd) {
      CAPTURE(world);
      CAPTURE(odd);
      const std::string port = meeting_port();
      std::vector<std::unique_ptr<CliProcess>> ranks;
      for (int rank = 0; rank < world; ++rank) {
        // Gathers its units earlier than the others.
        ranks.push_back(
            start_rank(joined(small_run(text, dir.file("run"), 1, 3),
                              {"--train.global_batch=12",
                               fmt::format("--shard.gather_ahead={}", rank == odd ? 0 : 1)}),
                       rank, world, port));
      }
      for (const auto& rank : ranks) {
        const auto result = end_of(*rank, kComm);
        CHECK(holds(result.err, "E045"));
        CHECK(holds(result.err, "shard.gather_ahead"));
        // With two ranks, the lower one is taken as the reference.
        CHECK(holds(result.err, fmt::format("culprit=rank {}", world == 2 ? 1 : odd)));
      }
    }
  }
}
