#include "comm/control/waiting_ranks.h"

#include <doctest/doctest.h>

#include "comm/control/memory_store.h"

using namespace tessera;
using comm::find_cut;
using Ranks = std::vector<int>;

TEST_CASE("who is cut off from whom is found by who waits for whom") {
  CHECK(find_cut({}) == Ranks{});
  // One does not send: nobody is cut off.
  CHECK(find_cut({{0, {2}}, {1, {2}}}) == Ranks{});
  CHECK(find_cut({{0, {1, 2}}, {1, {2}}}) == Ranks{});
  // Two wait for each other, and others for both.
  CHECK(find_cut({{1, {2}}, {2, {1}}}) == Ranks{1, 2});
  CHECK(find_cut({{1, {2, 2}}, {2, {1}}}) == Ranks{1, 2});
  CHECK(find_cut({{0, {1, 2}}, {1, {2}}, {2, {1}}}) == Ranks{1, 2});
  // One is cut off from several.
  CHECK(find_cut({{0, {1}}, {1, {0, 2}}, {2, {1}}}) == Ranks{1});
  CHECK(find_cut({{0, {3}}, {1, {3}}, {2, {3}}, {3, {0, 1, 2}}}) == Ranks{3});
  // Several are cut off from several.
  CHECK(find_cut({{0, {1}}, {1, {0}}, {2, {3}}, {3, {2}}}) == Ranks{0, 1, 2, 3});
  CHECK(find_cut({{0, {1, 2}}, {1, {0, 2}}, {2, {0, 1}}}) == Ranks{0, 1, 2});
}

TEST_CASE("a wait is followed to who is silent, or to who is cut off") {
  comm::Waits waits;
  const auto cause = [&](int rank, const Ranks& owing) {
    return comm::find_wait_cause(rank, owing, [&](int r) -> std::optional<Ranks> {
      const auto found = waits.find(r);
      return found == waits.end() ? std::nullopt : std::optional(found->second);
    });
  };
  // Nobody else is known to wait.
  CHECK(cause(0, {2}).silent == Ranks{2});
  CHECK(cause(0, {1, 2}).silent == Ranks{1, 2});
  CHECK(cause(0, {2}).apart == Ranks{});
  // The one that it waits for waits for another, who is silent.
  waits = {{1, {2}}, {0, {1}}};
  CHECK(cause(0, {1}).silent == Ranks{2});
  CHECK(cause(1, {2}).silent == Ranks{2});
  // Two of three are apart; the third waits for both.
  waits = {{0, {1, 2}}, {1, {2}}, {2, {1}}};
  for (const int rank : {0, 1, 2}) {
    CHECK(cause(rank, waits[rank]).silent == Ranks{});
    CHECK(cause(rank, waits[rank]).apart == Ranks{1, 2});
  }
  // Two are apart and a third is silent: that comes first, as it may be why.
  waits = {{0, {1, 3}}, {1, {0}}};
  CHECK(cause(0, {1, 3}).silent == Ranks{3});
  CHECK(cause(1, {0}).silent == Ranks{3});
  // Those whom it does not wait for, even through others, do not count.
  waits = {{0, {1}}, {1, {0}}, {2, {3}}};
  CHECK(cause(2, {3}).silent == Ranks{3});
  // A circle of three explains nothing.
  waits = {{0, {1}}, {1, {2}}, {2, {0}}};
  CHECK(cause(0, {1}).silent == Ranks{});
  CHECK(cause(0, {1}).apart == Ranks{});
}

TEST_CASE("what ranks tell of their waits counts until it is over, and for collectives beside it") {
  const auto store = std::make_shared<comm::MemoryStore>();
  comm::WaitingRanks one(store, "g", 1, 12), two(store, "g", 2, 12), eleven(store, "g", 11, 12);
  using Note = std::optional<Ranks>;
  one.tell(7, {2});
  two.tell(8, {1, 11});
  eleven.tell(4, {1});
  CHECK(two.of(1, 7) == Note(Ranks{2}));
  CHECK(two.of(1, 6) == Note(Ranks{2}));
  CHECK(two.of(1, 8) == Note(Ranks{2}));
  CHECK(two.of(1, 9) == std::nullopt);
  CHECK(two.of(1, 5) == std::nullopt);
  CHECK(one.of(2, 7) == Note(Ranks{1, 11}));
  CHECK(one.of(11, 4) == Note(Ranks{1}));
  CHECK(one.of(0, 0) == std::nullopt);
  one.tell(7, {3});
  one.tell(7, {3, 4});  // the last stands
  CHECK(two.of(1, 7) == Note(Ranks{3, 4}));
  one.tell_over(7);
  CHECK(two.of(1, 7) == std::nullopt);
  one.tell(8, {11});
  CHECK(two.of(1, 7) == Note(Ranks{11}));
  // Another communicator's are its own.
  CHECK(comm::WaitingRanks(store, "h", 1, 12).of(2, 8) == std::nullopt);
}
