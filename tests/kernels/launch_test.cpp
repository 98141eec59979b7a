// Launch shapes, without a device: blocks cover all work, none is empty, and resource use is within
// every supported GPU's limits.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "kernels/cuda/launch/attention.h"
#include "kernels/cuda/launch/elementwise.h"
#include "kernels/cuda/launch/embedding.h"
#include "kernels/cuda/launch/norm.h"
#include "kernels/cuda/launch/rotary.h"
#include "kernels/cuda/launch/sampling.h"
#include "kernels/cuda/launch/sums.h"
#include "kernels/rotary.h"

namespace tessera::kernels::cuda {
namespace {

constexpr int kWarp = 32, kMostThreads = 1024;
constexpr std::int64_t kMostGrid = std::numeric_limits<std::int32_t>::max(), kMostGridY = 65535;
constexpr int kMostShared = 227 * 1024;  // per block, on compute capability 9.0

constexpr std::int64_t kSizes[] = {1,    3,     31,    33,    257,     1023,   1024,
                                   1025, 16384, 16385, 50257, 1000003, 4325377};
constexpr int kPacks[] = {1, 2, 4, 8};

void check_threads(std::int64_t threads) {
  CHECK(threads >= kWarp);
  CHECK(threads <= kMostThreads);
  CHECK(threads % kWarp == 0);
}

/// `parts` parts of `length` cover n, and none is empty.
void check_parts(std::int64_t n, std::int64_t parts, std::int64_t length) {
  CAPTURE(n);
  CAPTURE(parts);
  CAPTURE(length);
  CHECK(parts * length >= n);
  CHECK((parts - 1) * length < n);
}

TEST_CASE("elementwise: grid-stride loops visit every element once") {
  using Shape = ElementwiseShape;
  check_threads(Shape::kThreads);
  for (const std::int64_t n : kSizes) {
    for (const int pack : kPacks) {
      CAPTURE(n);
      CAPTURE(pack);
      const std::int64_t threads = std::int64_t{Shape::blocks(n, pack)} * Shape::kThreads;
      const std::int64_t whole = n / pack;
      std::vector<std::uint8_t> met(static_cast<std::size_t>(n), 0);
      for (std::int64_t first = 0; first < std::min(threads, n); ++first) {
        for (std::int64_t i = first; i < whole; i += threads)
          for (std::int64_t k = 0; k < pack; ++k) ++met[static_cast<std::size_t>(i * pack + k)];
        for (std::int64_t i = whole * pack + first; i < n; i += threads)
          ++met[static_cast<std::size_t>(i)];
      }
      CHECK(std::count(met.begin(), met.end(), 1) == n);
      CHECK((threads - Shape::kThreads) * pack < n);  // no idle block
    }
  }
  for (const int pack : kPacks) {
    CHECK(Shape::blocks(0, pack) == 1);
    CHECK(Shape::blocks((std::int64_t{1} << 31) + 1, pack) == Shape::kMostBlocks);
    CHECK(Shape::blocks(std::int64_t{1} << 45, pack) == Shape::kMostBlocks);
  }
}

TEST_CASE("norms: a team holds its row in one of the compiled shapes") {
  check_threads(NormShape::kThreads);
  for (const int pack : kPacks) {
    for (std::int64_t width = pack; width <= 70000; width += width < 20000 ? pack : 977 * pack) {
      const NormShape shape(width, pack);
      const std::int64_t team = shape.block ? NormShape::kThreads : kWarp;
      // FAIL names the width, which matters here.
      const auto is_compiled = [&] {
        if (pack == 1) return shape.kept == 0 && !shape.block;
        if (shape.block) return shape.kept == 0 || shape.kept == NormShape::kFewPacks;
        return shape.kept == NormShape::kFewPacks || shape.kept == NormShape::kManyPacks;
      };
      const bool holds = shape.kept == 0 || shape.kept * team * pack >= width;
      if (!is_compiled() || !holds) FAIL("width " << width << ", pack " << pack);
    }
  }
  CHECK_FALSE(NormShape(768, 8).block);
  CHECK_FALSE(NormShape(1600, 8).block);
  CHECK(NormShape(2056, 8).block);
  CHECK(NormShape(8200, 8).kept == 0);
}

TEST_CASE("norms: blocks cover all rows, none is empty") {
  for (const std::int64_t width : {64, 2056, 8200}) {
    const NormShape shape(width, 8);
    const std::int64_t teams = shape.block ? 1 : NormShape::kThreads / kWarp;
    for (const std::int64_t rows : kSizes) check_parts(rows, shape.blocks(rows), teams);
    CHECK(shape.blocks(0) == 0);
    check_parts(kMostGrid * teams, shape.blocks(kMostGrid * teams), teams);
  }
}

/// For layer norm in the dtype of a pack's size, on a device with this much shared memory per block.
NormGradientsShape norm_gradients(std::int64_t width, int pack, bool input_sums = false,
                                  bool accumulate = true, int shared = kMostShared) {
  return {width, pack, 2, input_sums, accumulate, sizeof(float), {.shared_bytes = shared}};
}

TEST_CASE("norms: teams hold the rows whose gradients take one pass") {
  using Shape = NormGradientsShape;
  for (const int pack : {4, 8}) {
    for (const bool input_sums : {false, true}) {
      const int most = Shape::most_packs(input_sums);
      const std::int64_t longest = std::int64_t{Shape::kMostThreads} * most * pack;
      for (std::int64_t width = pack; width <= longest; width += pack) {
        const Shape shape = norm_gradients(width, pack, input_sums);
        const std::int64_t team = std::int64_t{shape.team_warps} * kWarp;
        // FAIL names the width, which matters here.
        const bool holds = shape.packs * team * pack >= width;
        const bool needed = (shape.packs - 1) * team * pack < width;
        const bool short_enough =
            shape.team_warps == 1 || shape.team_warps / 2 * kWarp * most * pack < width;
        if (!holds || !needed || !short_enough || shape.packs > most)
          FAIL("width " << width << ", pack " << pack);
        if (shape.threads % team != 0 || shape.threads > Shape::kMostThreads)
          FAIL("width " << width << ", pack " << pack << ": " << shape.threads << " threads");
        const std::int64_t rows = std::int64_t{shape.threads} * shape.packs * 16 * 3 * 2;
        const std::int64_t sums = shape.teams() * shape.block_sums * 4;
        const std::int64_t scratch = std::int64_t{2} * 2 * Shape::kMostWarps * 4;
        if (shape.shared_bytes > kMostShared || shape.shared_bytes < scratch + std::max(rows, sums))
          FAIL("width " << width << ", pack " << pack << ": " << shape.shared_bytes << " bytes");
      }
      CHECK(norm_gradients(longest + pack, pack, input_sums).packs == 0);
      CHECK(norm_gradients(std::int64_t{1} << 40, pack, input_sums).packs == 0);
    }
  }
  check_threads(Shape::kFewThreads);
  check_threads(Shape::kMostThreads);
  for (const bool input_sums : {false, true}) {
    CHECK(norm_gradients(768, 8, input_sums).team_warps == 1);
    CHECK(norm_gradients(768, 8, input_sums).packs == 3);
  }
  CHECK(norm_gradients(1600, 8).team_warps == 2);
  CHECK(norm_gradients(1600, 8, true).team_warps == 4);
  CHECK(norm_gradients(8192, 8).threads == Shape::kFewThreads);
  CHECK(norm_gradients(16384, 8, false, true, 99 * 1024).packs == 0);
}

TEST_CASE("norms: blocks of the fused gradient are all resident, and each has rows") {
  using Shape = NormGradientsShape;
  constexpr int kAmpere = 163 * 1024, kSmall = 99 * 1024;
  const auto blocks = [](std::int64_t width, std::int64_t rows, bool accumulate,
                         int shared = kMostShared) {
    const DeviceLimits gpu{.shared_bytes = shared};
    return norm_gradients(width, 8, false, accumulate, shared).blocks(rows, gpu);
  };
  const DeviceLimits gpu{.shared_bytes = kMostShared};
  for (const std::int64_t width : {64, 768, 1600, 4096, 8192, 12288}) {
    for (const std::int64_t rows : kSizes) {
      for (const bool input_sums : {false, true}) {
        const Shape shape = norm_gradients(width, 8, input_sums);
        const std::int64_t grid = shape.blocks(rows, gpu);
        CHECK(grid >= 1);
        CHECK((grid - 1) * shape.teams() < rows);
        CHECK(grid <= gpu.processors * Shape::kMostThreads / shape.threads);
        const std::int64_t together = (grid + gpu.processors - 1) / gpu.processors;
        CHECK(together * (shape.shared_bytes + 1024) <= kMostShared + 1024);
      }
    }
  }
  const std::int64_t many = 65536;
  CHECK(blocks(768, many, false) == 2 * gpu.processors);
  CHECK(blocks(768, 9, false) == 2);
  CHECK(blocks(8192, many, true) == 2 * gpu.processors);
  CHECK(blocks(8192, many, true, kAmpere) == gpu.processors);
  CHECK(blocks(8192, many, false, kSmall) == gpu.processors);
  CHECK(blocks(16384, many, false) == gpu.processors);
}

TEST_CASE("sums: parts cover the range, none is empty") {
  check_threads(SumShape::kThreads);
  check_threads(SumShape::kFinalThreads);
  for (const std::int64_t n : kSizes) check_parts(n, SumShape::parts(n), SumShape::kPart);
  CHECK(SumShape::parts(0) == 0);
  const std::int64_t huge = kMostGrid * SumShape::kPart;
  check_parts(huge, SumShape::parts(huge), SumShape::kPart);
  // Indices within a part are ints, up to one step beyond its end.
  CHECK(SumShape::kPart + std::int64_t{SumShape::kThreads} * 8 < kMostGrid);
}

TEST_CASE("sampling: digit sums of all threads fit into shared memory") {
  using Shape = SamplingShape;
  check_threads(Shape::kThreads);
  constexpr int kSum = sizeof(std::uint64_t);
  CHECK((kWarp + Shape::kDigits * Shape::kThreads) * kSum <= kMostShared);
  CHECK(32 % Shape::kDigitBits == 0);
  CHECK(Shape::kMostRows <= kMostGrid);
}

TEST_CASE("embedding: warps cover all rows, and slabs all columns") {
  using Shape = EmbeddingShape;
  check_threads(Shape::kThreads);
  for (const std::int64_t rows : kSizes) check_parts(rows, Shape::blocks(rows), Shape::kWarps);
  CHECK(Shape::blocks(0) == 0);
  const std::int64_t huge = kMostGrid * Shape::kWarps;
  check_parts(huge, Shape::blocks(huge), Shape::kWarps);
  for (const int pack : kPacks) {
    for (const std::int64_t width : {1, 3, 31, 33, 257, 768, 50257, 2000003}) {
      check_parts(width, Shape::slabs(width, pack), std::int64_t{kWarp} * pack);
      CHECK(Shape::slabs(width, pack) <= kMostGridY);
    }
  }
}

TEST_CASE("rotary: whole warps, and angles that fit into shared memory") {
  using Shape = RotaryShape;
  for (const std::int64_t packs : {std::int64_t{1}, std::int64_t{3}, std::int64_t{31},
                                   std::int64_t{33}, std::int64_t{50257}, Shape::kMostWork}) {
    CAPTURE(packs);
    const std::int64_t threads = Shape::threads(packs);
    check_threads(threads);
    CHECK(threads <= Shape::kMostThreads);
    CHECK(threads >= std::min<std::int64_t>(packs, Shape::kMostThreads));
    CHECK(threads - kWarp < packs);  // no idle warp
  }
  CHECK(Shape::threads(0) == kWarp);
  CHECK(Shape::threads(std::int64_t{1} << 40) == Shape::kMostThreads);
  CHECK(Shape::kMostBatch <= kMostGridY);
  CHECK(2 * RotaryAngles::kMostPairs * static_cast<std::int64_t>(sizeof(double)) <= kMostShared);
  // A thread's index is an int, up to one step beyond the last.
  CHECK(Shape::kMostWork + Shape::kMostThreads <= kMostGrid);
}

template <typename Shape>
void check_tiles() {
  check_threads(Shape::kThreads);
  CHECK(Shape::kThreads == Shape::kWarps * kWarp);
  CHECK(Shape::kRows == Shape::kWarps * Shape::kRowTiles * 16);
  CHECK(Shape::kStep % 16 == 0);  // depth of one tensor core product
  CHECK(Shape::kSharedBytes <= kMostShared);
  CHECK(Shape::kSharedBytes % 16 == 0);
}

/// Rows of kDim bf16: every chunk has a unique position, and 8 rows put a chunk into 8 different
/// groups of 4 banks.
template <int kDim>
void check_swizzle() {
  constexpr int kRows = 64, kChunks = kDim / 8;
  std::set<int> places;
  for (int row = 0; row < kRows; ++row)
    for (int chunk = 0; chunk < kChunks; ++chunk) places.insert(swizzled<kDim>(row, chunk));
  CHECK(places.size() == std::size_t{kRows * kChunks});
  CHECK(*places.begin() == 0);
  CHECK(*places.rbegin() == (kRows * kChunks - 1) * 8);
  for (int first = 0; first < kRows; first += 8) {
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      std::set<int> groups;
      for (int row = first; row < first + 8; ++row)
        groups.insert(swizzled<kDim>(row, chunk) / 8 % 8);
      CHECK(groups.size() == 8);
    }
  }
}

template <int... kDims>
void check_tensor_core_attention() {
  const auto check = []<int kDim>(std::integral_constant<int, kDim>) {
    CAPTURE(kDim);
    check_tiles<AttentionForwardShape<kDim>>();
    check_tiles<AttentionQueryShape<kDim>>();
    check_tiles<AttentionKeyShape<kDim>>();
    using Key = AttentionKeyShape<kDim>;
    CHECK(Key::kParts * Key::kPartDim == kDim);
    CHECK(Key::kPartDim % 16 == 0);
    check_swizzle<kDim>();
  };
  (check(std::integral_constant<int, kDims>{}), ...);
}

TEST_CASE("attention on tensor cores: tiles fit into a block, without bank conflicts") {
  check_tensor_core_attention<64, 96, 128, 192, 256>();
}

template <typename T, int... kDims>
void check_plain_attention() {
  const auto check = []<int kDim>(std::integral_constant<int, kDim>) {
    CAPTURE(kDim);
    using Shape = AttentionPlainShape<T, kDim>;
    check_threads(Shape::kThreads);
    CHECK(Shape::kRows % Shape::kSide == 0);
    CHECK(kDim % Shape::kSide == 0);
    CHECK(Shape::kStride * sizeof(T) % 16 == 0);  // rows are vector-aligned
    CHECK(Shape::kScoreStride * sizeof(T) % 16 == 0);
    // The gradients of keys and values need the most shared memory.
    CHECK(Shape::shared_bytes(4, 2) <= kMostShared);
  };
  (check(std::integral_constant<int, kDims>{}), ...);
}

TEST_CASE("attention on CUDA cores: tiles fit into a block") {
  check_plain_attention<float, 64, 128, 256>();
  check_plain_attention<double, 64, 256>();
}

TEST_CASE("attention: teams of a warp cover the rows of delta") {
  using Shape = AttentionDeltaShape;
  check_threads(Shape::kThreads);
  CHECK(kWarp % Shape::kTeam == 0);
  CHECK(Shape::kTeam * Shape::kTeams == Shape::kThreads);
}

TEST_CASE("attention: a head uses the narrowest kernel that fits, or none") {
  for (int dim = 1; dim <= 300; ++dim) {
    CAPTURE(dim);
    int calls = 0, taken = 0;
    const bool found = visit_bf16_head_dim(dim, [&]<int kDim>(std::integral_constant<int, kDim>) {
      ++calls;
      taken = kDim;
    });
    CHECK(found == (dim <= 256));
    CHECK(calls == (found ? 1 : 0));
    int narrowest = 0;
    for (const int held : {256, 192, 128, 96, 64})
      if (dim <= held) narrowest = held;
    CHECK(taken == narrowest);
  }
  CHECK_FALSE(visit_head_dim<32, 64>(std::int64_t{1} << 40, [](auto) {}));
}

TEST_CASE("attention: a line of blocks covers the tiles of all heads, up to the launch limit") {
  CHECK(attention_blocks("k", 5, 12, 8) == 480);
  CHECK(attention_blocks("k", 0, 12, 8) == 0);
  CHECK(attention_blocks("k", 5, 0, 8) == 0);
  CHECK(attention_blocks("k", kMostGrid, 1, 1) == kMostGrid);
  CHECK_THROWS_WITH_AS(attention_blocks("k", 1 << 20, 1 << 10, 2),
                       "k: 1048576 tiles for each of 1024 heads in a batch of 2 are more than a "
                       "launch takes (2147483647)",
                       Unsupported);
  constexpr int kMost = std::numeric_limits<std::int32_t>::max();
  CHECK_THROWS_AS(attention_blocks("k", std::int64_t{1} << 40, kMost, kMost), Unsupported);
}

}  // namespace
}  // namespace tessera::kernels::cuda
