// Background saves: snapshot at start(), error reporting, and no wait for a hung writer.

#include "io/checkpoint/async_saver.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <future>
#include <thread>

#include "core/base/error.h"
#include "core/base/memory.h"
#include "io/checkpoint/find.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

std::shared_ptr<Context> make_context() { return Context::create({.threads = 2}); }

std::string message_of(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

FinishedSave wait_for(AsyncSaver& saver) {
  REQUIRE(saver.wait_until(Clock::now() + 20s));
  auto finished = saver.take();
  REQUIRE(finished);
  return *finished;
}

// Blocks a writer until the test opens it.
class Gate {
 public:
  void pass() {
    arrived_ = true;
    open_.get_future().wait_for(20s);
  }
  void open() { open_.set_value(); }
  bool arrived() const { return arrived_; }

 private:
  std::promise<void> open_;
  std::atomic<bool> arrived_{false};
};

struct Ranks {
  struct Rank {
    std::shared_ptr<Context> context = make_context();
    std::unique_ptr<AsyncSaver> saver;
  };
  explicit Ranks(int count) : board(std::make_shared<ThreadCoordinator::Board>(count)) {
    ranks.resize(static_cast<std::size_t>(count));
  }

  void start(const SampleModel& model, const fs::path& dir, SaveOptions options) {
    options.world_size = static_cast<int>(ranks.size());
    for (int r = 0; r < options.world_size; ++r) {
      Rank& rank = ranks[static_cast<std::size_t>(r)];
      SaveRequest request = make_request(model, dir, r, options);
      if (!rank.saver) {
        rank.saver = std::make_unique<AsyncSaver>(rank.context, AsyncSaver::staging_bytes(request),
                                                  std::chrono::milliseconds(20s));
      }
      const auto coordinator = std::make_shared<ThreadCoordinator>(*board, r);
      rank.saver->start(request, [coordinator, board = board](const SaveRequest& staged) {
        return save_checkpoint(staged, *coordinator);
      });
    }
  }
  std::vector<FinishedSave> finish() {
    std::vector<FinishedSave> finished;
    for (Rank& rank : ranks) finished.push_back(wait_for(*rank.saver));
    board->values.clear();  // phase names repeat in the next save
    return finished;
  }

  std::shared_ptr<ThreadCoordinator::Board> board;
  std::vector<Rank> ranks;
};

TEST_CASE("a save contains the values at its start, whatever training changes meanwhile") {
  TempDir dir;
  for (const int world : {1, 3}) {
    CAPTURE(world);
    Ranks ranks(world);
    const SampleModel original = make_sample_model();
    const std::string expected =
        CheckpointReader::open(save(original, dir.path(), {.world_size = 2, .step = 1})).digest();
    SampleModel model = original;
    // Blocks the writers until the values have changed.
    std::promise<void> changed;
    const std::shared_future<void> wait_for_change = changed.get_future().share();
    ranks.start(model, dir.path(), {.step = 2, .at_point = [&](int, std::string_view point) {
                                      if (point == "shard-created") wait_for_change.wait_for(20s);
                                    }});
    for (const auto& rank : ranks.ranks) rank.saver->wait_copied();
    for (auto& tensor : model.tensors) {
      std::fill(tensor.weight.begin(), tensor.weight.end(), -1.0F);
      std::fill(tensor.exp_avg.begin(), tensor.exp_avg.end(), -1.0F);
      std::fill(tensor.exp_avg_sq.begin(), tensor.exp_avg_sq.end(), -1.0F);
    }
    for (const auto& rank : ranks.ranks) {
      CHECK(rank.saver->busy());
      CHECK_FALSE(rank.saver->take());
    }
    changed.set_value();
    for (const FinishedSave& finished : ranks.finish()) {
      CHECK(message_of(finished.error).empty());
      CHECK(finished.step == 2);
      CHECK(finished.report.path == dir.path() / "step-00000002");
      CHECK(finished.stall_seconds <= finished.seconds);
    }
    const auto reader = CheckpointReader::open(dir.path() / "step-00000002");
    CHECK(reader.digest() == expected);
    for (const auto& tensor : original.tensors) {
      std::vector<float> values(tensor.weight.size());
      const auto read = [&](Section section) {
        reader.read(section, tensor.name, 0, static_cast<std::int64_t>(values.size()),
                    values.data(), DType::F32);
        return values;
      };
      CHECK(read(kModelSection) == tensor.weight);
      CHECK(read(Section{"exp_avg"}) == tensor.exp_avg);
      CHECK(read(Section{"exp_avg_sq"}) == tensor.exp_avg_sq);
    }
  }
}

TEST_CASE("staging memory is booked, allocated once, and released at the end") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  Ranks ranks(2);
  std::vector<std::int64_t> bytes;
  for (std::int64_t step = 1; step <= 4; ++step) {
    ranks.start(model, dir.path(), {.step = step, .optimizer = step != 2});
    for (const FinishedSave& finished : ranks.finish()) CHECK(message_of(finished.error).empty());
    const auto lines = ranks.ranks[1].context->ledger().lines();
    const auto line = std::find_if(lines.begin(), lines.end(), [](const auto& candidate) {
      return candidate.category == MemoryCategory::Staging;
    });
    REQUIRE(line != lines.end());
    CHECK(line->owner == "checkpoint");
    CHECK(line->usage.current == line->usage.peak);
    bytes.push_back(line->usage.peak);
  }
  CHECK(bytes == std::vector<std::int64_t>(4, bytes[0]));
  const auto request = make_request(model, dir.path(), 1, {.world_size = 2});
  CHECK(static_cast<std::size_t>(bytes[0]) == AsyncSaver::staging_bytes(request));
  std::int64_t elements = 0;
  for (const auto& part : request.parts.at(kModelSection)) elements += part.end - part.begin;
  CHECK(bytes[0] >= 3 * 4 * elements);
  CHECK(bytes[0] <= 3 * (4 * elements +
                         64 * static_cast<std::int64_t>(request.parts.at(kModelSection).size())));
  ranks.ranks[1].saver.reset();
  CHECK(ranks.ranks[1].context->ledger().usage(MemoryCategory::Staging).current == 0);
  CHECK(ranks.ranks[0].context->ledger().usage(MemoryCategory::Staging).current > 0);
}

TEST_CASE("an error on one rank is reported on all, and the next save succeeds") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  Ranks ranks(3);
  ranks.start(model, dir.path(), {.step = 1});
  ranks.finish();
  for (const char* point : {"shard-created", "shard-written", "part-written"}) {
    ranks.start(model, dir.path(), {.step = 2, .at_point = [&](int rank, std::string_view at) {
                                      if (rank == 1 && at == point) throw IoError("disk on fire");
                                    }});
    for (const FinishedSave& finished : ranks.finish()) {
      CHECK(holds(message_of(finished.error), "step 2 was not saved: rank 1: disk on fire"));
    }
    CHECK(find_checkpoints(dir.path()).size() == 1);
  }
  ranks.start(model, dir.path(), {.step = 2});
  for (const FinishedSave& finished : ranks.finish()) CHECK(message_of(finished.error).empty());
  CHECK(newest_valid(dir.path(), {.verify_data = true}).reader->index().step == 2);
}

TEST_CASE("concurrent saves, and saves larger than the staging memory, are refused") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  const SaveRequest request = make_request(model, dir.path(), 0, {});
  AsyncSaver saver(make_context(), AsyncSaver::staging_bytes(request), 20s);
  Gate gate;
  saver.start(request, [&](const SaveRequest&) {
    gate.pass();
    return SaveReport{};
  });
  const auto nothing = [](const SaveRequest&) { return SaveReport{}; };
  CHECK_THROWS_HOLDING(InternalError, "before the outcome", saver.start(request, nothing));
  CHECK_FALSE(saver.wait_until(Clock::now() + 10ms));
  gate.open();
  REQUIRE(saver.wait_until(Clock::now() + 20s));
  CHECK_FALSE(saver.busy());
  CHECK_THROWS_HOLDING(InternalError, "before the outcome", saver.start(request, nothing));
  CHECK(saver.take());
  CHECK_FALSE(saver.take());

  AsyncSaver small(make_context(), AsyncSaver::staging_bytes(request) - 1, 20s);
  CHECK_THROWS_HOLDING(InvalidArgument, "but the buffer has", small.start(request, nothing));
  CHECK_FALSE(small.busy());
  AsyncSaver none(make_context(), 0, 20s);
  none.start(SaveRequest{}, nothing);
  CHECK(message_of(wait_for(none).error).empty());
}

TEST_CASE("start returns while the writer works") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  const SaveRequest request = make_request(model, dir.path(), 0, {});
  AsyncSaver saver(make_context(), AsyncSaver::staging_bytes(request), 20s);
  saver.start(request, [](const SaveRequest&) {
    std::this_thread::sleep_for(300ms);
    sigset_t blocked;
    ::pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    if (::sigismember(&blocked, SIGTERM) != 1) throw InternalError("would take a SIGTERM");
    return SaveReport{};
  });
  const FinishedSave finished = wait_for(saver);
  CHECK(message_of(finished.error).empty());
  CHECK(finished.seconds >= 0.3);
  CHECK(finished.stall_seconds < 0.2);
  sigset_t blocked;
  ::pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
  CHECK(::sigismember(&blocked, SIGTERM) == 0);
}

TEST_CASE("the destructor waits for a save, but not for a hung one") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  const SaveRequest request = make_request(model, dir.path(), 0, {});
  const auto context = make_context();
  {
    AsyncSaver saver(context, AsyncSaver::staging_bytes(request), 20s);
    saver.start(request, [](const SaveRequest& staged) {
      std::this_thread::sleep_for(50ms);
      SoloCoordinator coordinator;
      return save_checkpoint(staged, coordinator);
    });
  }
  CHECK(newest_valid(dir.path(), {.verify_data = true}).reader);

  const auto gate = std::make_shared<Gate>();
  const auto ended = std::make_shared<std::promise<void>>();
  const auto start = Clock::now();
  {
    AsyncSaver saver(context, AsyncSaver::staging_bytes(request), 20s);
    saver.start(request, [gate, ended](const SaveRequest& staged) {
      gate->pass();
      const auto* value = static_cast<const float*>(staged.parts.at(kModelSection).front().data);
      if (*value != 0.0F) ended->set_value();
      return SaveReport{};
    });
    while (!gate->arrived()) std::this_thread::sleep_for(1ms);
    saver.set_patience(100ms);
  }
  CHECK(Clock::now() - start < 5s);
  CHECK(context->ledger().usage(MemoryCategory::Staging).current > 0);
  gate->open();
  CHECK(ended->get_future().wait_for(20s) == std::future_status::ready);
  const auto deadline = Clock::now() + 20s;
  while (context->ledger().usage(MemoryCategory::Staging).current > 0 && Clock::now() < deadline) {
    std::this_thread::sleep_for(1ms);
  }
  CHECK(context->ledger().usage(MemoryCategory::Staging).current == 0);
}

}  // namespace
}  // namespace tessera::io
