#include "comm/gloo.h"

#include "core/base/context.h"
#include "tests/comm/ranks.h"

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
