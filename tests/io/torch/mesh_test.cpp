#include "io/torch/mesh.h"

#include <doctest/doctest.h>

#include <vector>

#include "core/base/error.h"
#include "tests/support/check_throws.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kHuge = std::int64_t{1} << 62;

MeshAxis axis(std::int64_t size, std::int64_t coordinate, std::optional<int> dim = {},
              std::int64_t split_factor = 1) {
  return {size, coordinate, dim, split_factor};
}

Box box_of(const Shape& shape, const std::vector<MeshAxis>& axes) {
  return local_box(shape, axes, "x");
}

TEST_CASE("parts of a dim are of equal size, but for the last") {
  CHECK(box_of({7, 3}, {axis(3, 0, 0)}) == Box{{0, 0}, {3, 3}});
  CHECK(box_of({7, 3}, {axis(3, 2, 0)}) == Box{{6, 0}, {1, 3}});
  CHECK(box_of({5, 3}, {axis(4, 2, 0)}) == Box{{4, 0}, {1, 3}});
  CHECK(box_of({5, 3}, {axis(4, 3, 0)}) == Box{{5, 0}, {0, 3}});
  CHECK(box_of({5, 3}, {axis(2, 1, 1)}) == Box{{0, 2}, {5, 1}});
  CHECK(box_of({0, 3}, {axis(2, 1, 0)}) == Box{{0, 0}, {0, 3}});
  CHECK(box_of({5}, {axis(4, 3)}) == Box{{0}, {5}});
  CHECK(box_of({}, {axis(4, 3)}) == Box{{}, {}});
  CHECK(box_of({5}, {axis(kHuge, kHuge - 1, 0)}) == Box{{5}, {0}});
}

TEST_CASE("axes cut one dim in turn, and a split factor changes the turns") {
  // Halves of 7 are 4 and 3; the second half is cut into 2 and 1.
  CHECK(box_of({7}, {axis(2, 1, 0), axis(2, 1, 0)}) == Box{{6}, {1}});
  CHECK(box_of({7}, {axis(2, 1, 0), axis(2, 0, 0)}) == Box{{4}, {2}});
  CHECK(box_of({7}, {axis(2, 1, 0, 2), axis(2, 0, 0)}) == Box{{2}, {2}});
  CHECK(box_of({7}, {axis(2, 0, 0, 2), axis(2, 1, 0)}) == Box{{4}, {2}});
  // Replicas, then two axes that follow the last: 12, cut by the last into 6, then 3, then 2.
  const auto three = [](std::int64_t a, std::int64_t b, std::int64_t c) {
    return box_of({12}, {axis(2, 1), axis(2, a, 0, 4), axis(2, b, 0, 2), axis(2, c, 0)});
  };
  CHECK(three(0, 0, 1) == Box{{6}, {2}});
  CHECK(three(1, 0, 1) == Box{{8}, {1}});
  CHECK(three(1, 1, 1) == Box{{11}, {1}});
  CHECK(box_of({8, 6}, {axis(2, 1, 1), axis(2, 1, 0)}) == Box{{4, 3}, {4, 3}});
}

TEST_CASE("meshes that fit no tensor are refused") {
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "a coordinate of 2 on an axis of 2 ranks",
                       box_of({4}, {axis(2, 2, 0)}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "a coordinate of -1", box_of({4}, {axis(2, -1, 0)}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "dim 1 of shape [4] is sharded",
                       box_of({4}, {axis(2, 0, 1)}));
  for (const std::int64_t factor : {std::int64_t{3}, std::int64_t{4}, kHuge}) {
    CHECK_THROWS_HOLDING(Unsupported, "axis 0 of the mesh shards dim 0 with a split factor of",
                         box_of({4}, {axis(2, 0, 0, factor), axis(2, 0, 0)}));
  }
  CHECK_THROWS_HOLDING(
      Unsupported, "no product of sizes of later axes",
      box_of({4}, {axis(2, 0, 0, INT64_MAX), axis(kHuge, 0, 0), axis(kHuge, 0, 0)}));
}

}  // namespace
}  // namespace tessera::io
