#include <doctest/doctest.h>

#include "core/base/shard_layout.h"

namespace tessera {
namespace {

std::vector<ShardLayout::Parameter> odd_parameters() {
  return {{"wte", {33, 7}, true}, {"bias", {1}, false},  {"empty", {0, 5}, false},
          {"w", {64, 2}, true},   {"scalar", {}, false}, {"last", {130}, false}};
}

TEST_CASE("parameter offsets are aligned and independent of the world size") {
  const ShardLayout one("h.0", odd_parameters(), 1);
  CHECK(one.unit() == "h.0");
  CHECK(one.parameter_count() == 231 + 1 + 0 + 128 + 1 + 130);
  const std::int64_t offsets[] = {0, 256, 320, 320, 448, 512};
  for (const int world : {1, 2, 3, 7, 100}) {
    CAPTURE(world);
    const ShardLayout layout("h.0", odd_parameters(), world);
    REQUIRE(layout.slots().size() == 6);
    for (std::size_t i = 0; i < 6; ++i) {
      CHECK(layout.slots()[i].offset == offsets[i]);
      CHECK(layout.slots()[i].numel == numel(odd_parameters()[i].shape));
      CHECK(layout.slots()[i].name == odd_parameters()[i].name);
      CHECK(layout.slots()[i].decay == odd_parameters()[i].decay);
    }
    CHECK(layout.segment_size() % ShardLayout::kAlignment == 0);
    CHECK(layout.padded_size() == layout.segment_size() * world);
    CHECK(layout.padded_size() >= 512 + 130);
    CHECK(layout.padded_size() < 704 + ShardLayout::kAlignment * world);
  }
}

TEST_CASE("the ranks' ranges cover every parameter exactly once, in order") {
  for (const int world : {1, 2, 3, 7, 100}) {
    CAPTURE(world);
    const ShardLayout layout("h.0", odd_parameters(), world);
    std::vector<std::int64_t> covered(layout.slots().size(), 0);
    for (int rank = 0; rank < world; ++rank) {
      std::int64_t end_of_last = 0;
      for (const SlotRange& range : layout.ranges_of_rank(rank)) {
        const auto slot = static_cast<std::size_t>(range.slot);
        CHECK(range.begin == covered[slot]);  // continues the previous rank's range
        CHECK(range.begin < range.end);
        CHECK(range.offset >= end_of_last);
        CHECK(rank * layout.segment_size() + range.offset ==
              layout.slots()[slot].offset + range.begin);
        end_of_last = range.offset + range.end - range.begin;
        covered[slot] = range.end;
      }
      CHECK(end_of_last <= layout.segment_size());
    }
    for (std::size_t i = 0; i < covered.size(); ++i) CHECK(covered[i] == layout.slots()[i].numel);
  }
}

TEST_CASE("ranges of any part of the buffer count from the part's start") {
  const ShardLayout layout("h.0", odd_parameters(), 2);
  const auto ranges = layout.ranges(200, 330);
  REQUIRE(ranges.size() == 3);
  CHECK(ranges[0].slot == 0);
  CHECK(ranges[0].begin == 200);
  CHECK(ranges[0].end == 231);
  CHECK(ranges[0].offset == 0);
  CHECK(ranges[1].slot == 1);
  CHECK(ranges[1].offset == 56);
  CHECK(ranges[2].slot == 3);
  CHECK(ranges[2].begin == 0);
  CHECK(ranges[2].end == 10);
  CHECK(ranges[2].offset == 120);
  CHECK(layout.ranges(231, 256).empty());  // padding only
  CHECK(layout.ranges(300, 300).empty());
}

TEST_CASE("an empty unit has no elements") {
  const ShardLayout layout("empty", {}, 4);
  CHECK(layout.padded_size() == 0);
  CHECK(layout.ranges_of_rank(3).empty());
}

TEST_CASE("duplicate names and ranks outside of the world are refused") {
  CHECK_THROWS_WITH_AS(ShardLayout("h.0", {{"a", {1}, false}, {"a", {2}, false}}, 1),
                       "unit h.0: parameter a appears twice", InvalidArgument);
  CHECK_THROWS_WITH_AS(ShardLayout("h.0", {}, 0), "unit h.0: world size must be at least 1, got 0",
                       InvalidArgument);
  const ShardLayout layout("h.0", odd_parameters(), 2);
  CHECK_THROWS_WITH_AS(layout.ranges_of_rank(2),
                       "unit h.0: rank 2 is out of range for world size 2", InvalidArgument);
  CHECK_THROWS_AS(layout.ranges_of_rank(-1), InvalidArgument);
}

}  // namespace
}  // namespace tessera
