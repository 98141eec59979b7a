// What captured work does with a communicator, run after run.
#include "comm/sharding/replayed_communicator.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/replay.h"

namespace tessera::comm {
namespace {

class DoneWork final : public Work {
 public:
  bool is_done() const override { return true; }
  void wait() override {}
};

/// Writes down what it is asked for.
class RecordingCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 2; }
  std::string_view backend() const override { return "recording"; }

  WorkPtr start_all_gather(const TensorView&, CollectiveOptions options) override {
    return start(options);
  }
  WorkPtr start_reduce_scatter(const TensorView&, const TensorView&,
                               CollectiveOptions options) override {
    return start(options);
  }
  WorkPtr start_all_reduce(const TensorView&, ReduceOp, CollectiveOptions options) override {
    return start(options);
  }
  WorkPtr start_broadcast(const TensorView&, int, CollectiveOptions options) override {
    return start(options);
  }
  WorkPtr start_barrier(CollectiveOptions options) override { return start(options); }
  void begin_group() override { calls.emplace_back("begin"); }
  void end_group() override { calls.emplace_back("end"); }
  void drop_group() noexcept override { calls.emplace_back("drop"); }
  void abort(std::string_view) noexcept override { calls.emplace_back("abort"); }

  std::vector<std::string> calls;
  std::string refused;

 private:
  WorkPtr start(const CollectiveOptions& options) {
    require<IoError>(options.label != refused, "{} is refused", refused);
    calls.push_back(options.label);
    return std::make_shared<DoneWork>();
  }
};

using Calls = std::vector<std::string>;

struct Fixture {
  std::shared_ptr<Context> context =
      Context::create({.device = {DeviceType::CUDA, 0}, .plugin = TESSERA_FIBER_PLUGIN});
  RecordingCommunicator inner;
  ReplayedCommunicator communicator{inner, *context};

  WorkPtr start(const std::string& label) { return communicator.start_barrier({label, {}}); }
  Calls take() { return std::exchange(inner.calls, {}); }
};

TEST_CASE_FIXTURE(Fixture, "collectives of captured work are started by each run, in its order") {
  const auto work = [&] {
    const WorkPtr alone = start("alone");
    CollectiveGroup group(communicator);
    const WorkPtr a = start("a"), b = start("b");
    group.end();
    a->wait();
    b->wait();
    alone->wait();
  };
  const Calls want = {"alone", "begin", "a", "b", "end"};
  work();  // nothing is captured
  CHECK(take() == want);
  Replay replay(context, work);
  CHECK(take().empty());
  for (int i = 0; i < 2; ++i) {
    replay.run();
    CHECK(take() == want);
  }
}

TEST_CASE_FIXTURE(Fixture, "a captured group of none is none, and one that an error ends is gone") {
  Replay none(context, [&] { CollectiveGroup(communicator).end(); });
  CHECK(none.parts() == 1);
  none.run();
  CHECK(take().empty());
  CHECK_THROWS_AS(Replay(context,
                         [&] {
                           CollectiveGroup group(communicator);
                           start("a");
                           throw IoError("no");
                         }),
                  IoError);
  CHECK(take().empty());
  start("b")->wait();  // in no group
  CHECK(take() == Calls{"b"});
}

TEST_CASE_FIXTURE(Fixture, "a group that a run cannot start is dropped") {
  Replay replay(context, [&] {
    CollectiveGroup group(communicator);
    const WorkPtr a = start("a"), b = start("b");
    group.end();
    a->wait();
    b->wait();
  });
  inner.refused = "b";
  CHECK_THROWS_AS(replay.run(), IoError);
  CHECK(take() == Calls{"begin", "a", "drop"});
}

}  // namespace
}  // namespace tessera::comm
