// Staging of collectives on a fiber device: copies and memory accounting. communicator_test checks
// the values.
#include "comm/host_staged.h"

#include <latch>

#include "core/base/device_backend.h"
#include "core/base/memory.h"
#include "tests/comm/collective_checks.h"
#include "tests/comm/ranks.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::test;
using comm::ReduceOp;

namespace {

MemoryUsage staged_bytes() {
  return device_context()->host_ledger().usage(MemoryCategory::Communication);
}

void on_two_ranks(const std::function<void(comm::Communicator&)>& body) {
  const Group group("threads, staged", 2);
  const auto results = run_ranks(2, [&](int rank) {
    const auto c = group.join(rank);
    body(*c);
    c->barrier({});
  });
  for (const RankResult& result : results) CHECK(result.error == "");
}

}  // namespace

TEST_CASE("the name says that data are staged, and a CPU context needs no staging") {
  on_two_ranks([](comm::Communicator& c) {
    expect(c.backend() == "host-staged threads", "name", c.rank(), 0);
  });
  CHECK_THROWS_HOLDING(
      InvalidArgument, "got one on cpu",
      comm::make_host_staged_communicator(comm::make_single_communicator(), Context::create()));
}

TEST_CASE("staging memory is booked while a collective is pending, and released by wait()") {
  on_two_ranks([](comm::Communicator& c) {
    std::vector<float> in(2000, 1.0F), out(1000);
    Mirror<float> in_mirror(in), out_mirror(out);
    const auto work = c.start_reduce_scatter(in_mirror.view(), out_mirror.view(), {});
    expect(staged_bytes().current >= 12'000, "booked at the start", c.rank(), 0);
    work->wait();
    expect(staged_bytes().current == 0, "given back", c.rank(), 0);
    out_mirror.fetch();
    expect(out[999] == 2.0F, "sum", c.rank(), 0);
    for (int i = 0; i < 3; ++i) c.reduce_scatter(in_mirror.view(), out_mirror.view(), {});
    expect(staged_bytes().peak < 12'200, "peak of one after the other", c.rank(), 0);
    work->wait();
  });
}

TEST_CASE("an all-gather copies the other ranks' parts only") {
  on_two_ranks([](comm::Communicator& c) {
    std::vector<float> buffer = {1.0F, 2.0F, 3.0F, 4.0F};
    Mirror<float> mirror(buffer);
    const auto work = c.start_all_gather(mirror.view(), {});
    const float other = 9.0F;
    auto* own = mirror.view().as<float>() + 2 * c.rank();
    device_context()->backend().copy_from_host(own, &other, sizeof other);
    work->wait();
    mirror.fetch();
    const std::vector<float> wanted =
        c.rank() == 0 ? std::vector<float>{9, 2, 3, 4} : std::vector<float>{1, 2, 9, 4};
    expect(buffer == wanted, "parts", c.rank(), 4);
  });
}

TEST_CASE("a group of one rank copies only what a sum writes") {
  const Group group("single, staged", 1);
  const auto c = group.join(0);
  check_everything(*c);
  device_context()->host_ledger().reset_peaks();
  std::vector<float> x(1000, 1.0F);
  const Mirror<float> mirror(x);
  c->all_gather(mirror.view(), {});
  c->all_reduce(mirror.view(), ReduceOp::Sum, {});
  c->broadcast(mirror.view(), 0, {});
  CHECK(staged_bytes().peak == 0);
  device_context().reset();
}

TEST_CASE("host buffers go directly to the inner communicator") {
  on_two_ranks([](comm::Communicator& c) {
    std::vector<double> x(1, c.rank() + 1.0);
    c.all_reduce(view_of(x), ReduceOp::Sum, {});
    expect(x[0] == 3.0, "sum", c.rank(), 1);
    expect(staged_bytes().peak == 0, "staged", c.rank(), 1);
  });
}

TEST_CASE("staging outlives an abandoned work, and is released later") {
  std::latch dropped(1);
  on_two_ranks([&](comm::Communicator& c) {
    std::vector<float> x(5000, 1.0F);
    const Mirror<float> mirror(x);
    c.barrier({});
    if (c.rank() == 0) {
      // The peer joins later.
      static_cast<void>(c.start_all_reduce(mirror.view(), ReduceOp::Sum, {}));
      expect(staged_bytes().current == 20'000, "kept", c.rank(), 0);
      dropped.count_down();
    } else {
      dropped.wait();
      c.all_reduce(mirror.view(), ReduceOp::Sum, {});
    }
    c.barrier({});
    c.all_reduce(mirror.view(), ReduceOp::Sum, {});
    expect(staged_bytes().current == 0, "given back", c.rank(), 0);
    expect(staged_bytes().peak == 20'000, "peak", c.rank(), 0);
  });
}

TEST_CASE("arguments are checked before staging") {
  const Group group("threads, staged", 2);
  const auto c = group.join(0);  // the refused calls need no peer
  std::vector<float> odd(5), even(4), half(2);
  {
    const Mirror<float> odd_mirror(odd), even_mirror(even);
    CHECK_THROWS_HOLDING(InvalidArgument, "do not split into 2",
                         c->all_gather(odd_mirror.view(), {}));
    CHECK_THROWS_HOLDING(InvalidArgument, "expected a buffer on cuda:0, got one on cpu",
                         c->reduce_scatter(even_mirror.view(), view_of(half), {}));
    CHECK_THROWS_HOLDING(InvalidArgument, "is not a rank", c->broadcast(even_mirror.view(), 2, {}));
  }
  device_context().reset();
}
