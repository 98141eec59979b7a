#pragma once

#include <cstdint>

#include "kernels/cuda/device/shared.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch/embedding.h"

// Stable radix sort of tokens, deterministic because it uses no atomics. Two kernels per digit of 8
// bits: one counts the digits of every tile, the other moves the tokens. Bound by the latency of
// these short kernels, because 64K tokens are only half a megabyte.
namespace tessera::kernels::cuda {

struct alignas(8) TokenPlace {
  std::int32_t token, place;  // place: index in the unsorted tokens
};

/// Tokens from `first` on. Those outside [0, vocab_size) become vocab_size, so that they are sorted
/// last.
struct UnsortedTokens {
  const std::int32_t* tokens;
  std::int64_t first;
  int vocab_size;
  __device__ __forceinline__ TokenPlace operator()(int i) const {
    const std::int64_t token = tokens[i] - first;
    return {token >= 0 && token < vocab_size ? static_cast<int>(token) : vocab_size, i};
  }
};
struct SortedTokens {
  const TokenPlace* places;
  __device__ __forceinline__ TokenPlace operator()(int i) const { return places[i]; }
};

/// Tokens of one warp, 32 in each round.
template <typename Source>
struct WarpRun {
  Source source;
  int count, shift, rounds;

  /// Calls f(exists, token and place, digit, lanes) in all lanes. exists: the lane holds a token;
  /// lanes: mask of lanes with the same digit. All lanes finish f before the next round.
  template <typename F>
  __device__ __forceinline__ void for_each_round(F&& f) const {
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = static_cast<int>(blockIdx.x) * TokenSortShape::kWarps + thread / kWarpSize;
    const std::int64_t begin = static_cast<std::int64_t>(warp) * rounds * kWarpSize;
    for (int round = 0; round < rounds; ++round) {
      const std::int64_t i = begin + round * kWarpSize + thread % kWarpSize;
      const bool exists = i < count;
      const TokenPlace at = exists ? source(static_cast<int>(i)) : TokenPlace{0, 0};
      const int digit = (at.token >> shift) & (TokenSortShape::kDigits - 1);
      unsigned lanes = __ballot_sync(kAllLanes, exists);
      for (int bit = 0; bit < TokenSortShape::kDigitBits; ++bit) {
        const bool set = (digit >> bit & 1) != 0;
        const unsigned lanes_set = __ballot_sync(kAllLanes, set);
        lanes &= set ? lanes_set : ~lanes_set;
      }
      f(exists, at, digit, lanes);
      __syncwarp(kAllLanes);
    }
  }
};

__device__ __forceinline__ unsigned lanes_below() { return (1U << threadIdx.x % kWarpSize) - 1; }

/// counters[warp][digit] = occurrences of the digit in the warp's run.
template <typename Source>
__device__ __forceinline__ void count_digits(const WarpRun<Source>& run,
                                             const SharedArray<int>& counters) {
  const int thread = static_cast<int>(threadIdx.x);
  const SharedArray<int> own = counters.from(thread / kWarpSize * TokenSortShape::kDigits);
  for (int digit = thread % kWarpSize; digit < TokenSortShape::kDigits; digit += kWarpSize)
    own[digit] = 0;
  __syncwarp(kAllLanes);
  run.for_each_round([&](bool exists, TokenPlace, int digit, unsigned lanes) {
    if (exists && (lanes & lanes_below()) == 0) own[digit] += __popc(lanes);
  });
  __syncthreads();
}

/// counts[tile][digit] = occurrences of the digit in the tile.
template <typename Source>
__global__ void __launch_bounds__(TokenSortShape::kThreads)
    count_tile_digits_kernel(WarpRun<Source> run, int* counts) {
  SharedMemory shared;
  const auto counters = shared.take<int>(TokenSortShape::kWarps * TokenSortShape::kDigits);
  count_digits(run, counters);
  const int digit = static_cast<int>(threadIdx.x);
  int count = 0;
  for (int warp = 0; warp < TokenSortShape::kWarps; ++warp)
    count += counters[warp * TokenSortShape::kDigits + digit];
  counts[blockIdx.x * TokenSortShape::kDigits + digit] = count;
}

template <typename Source>
__global__ void __launch_bounds__(TokenSortShape::kThreads)
    move_tokens_kernel(WarpRun<Source> run, const int* counts, TokenPlace* to) {
  SharedMemory shared;
  const auto counters = shared.take<int>(TokenSortShape::kWarps * TokenSortShape::kDigits);
  const auto warp_sums = shared.take<int>(TokenSortShape::kWarps);
  count_digits(run, counters);

  // One digit per thread. Its tokens follow those with smaller digits, then those with the same
  // digit in earlier tiles, then those in earlier warps.
  const int digit = static_cast<int>(threadIdx.x);
  const int warp = digit / kWarpSize, lane = digit % kWarpSize;
  int in_all_tiles = 0, in_earlier_tiles = 0;
  for (unsigned tile = 0; tile < gridDim.x; ++tile) {
    const int count = counts[tile * TokenSortShape::kDigits + digit];
    in_all_tiles += count;
    if (tile < blockIdx.x) in_earlier_tiles += count;
  }
  int up_to_digit = in_all_tiles;
  for (int lanes = 1; lanes < kWarpSize; lanes *= 2) {
    const int below = __shfl_up_sync(kAllLanes, up_to_digit, lanes);
    if (lane >= lanes) up_to_digit += below;
  }
  if (lane == kWarpSize - 1) warp_sums[warp] = up_to_digit;
  __syncthreads();
  int next = up_to_digit - in_all_tiles + in_earlier_tiles;
  for (int w = 0; w < warp; ++w) next += warp_sums[w];
  for (int w = 0; w < TokenSortShape::kWarps; ++w) {
    const int at = w * TokenSortShape::kDigits + digit;
    const int count = counters[at];
    counters[at] = next;
    next += count;
  }
  __syncthreads();

  const SharedArray<int> own = counters.from(warp * TokenSortShape::kDigits);
  run.for_each_round([&](bool exists, TokenPlace at, int own_digit, unsigned lanes) {
    const unsigned before = lanes & lanes_below();
    int first = 0;
    if (exists) {
      first = own[own_digit];
      to[first + __popc(before)] = at;
    }
    __syncwarp(kAllLanes);
    if (exists && before == 0) own[own_digit] = first + __popc(lanes);
  });
}

/// @param first   subtracted from the tokens
/// @param a, b    memory for `count` elements each
/// @param counts  kDigits for each tile
/// @return        a or b, whichever holds the result
inline TokenPlace* sort_tokens(Context& context, const std::int32_t* tokens, std::int64_t first,
                               int count, int vocab_size, TokenPlace* a, TokenPlace* b,
                               int* counts) {
  if (count == 0) return a;
  using Shape = TokenSortShape;
  constexpr int kCounters = SharedMemory::shared_bytes<int>(Shape::kWarps * Shape::kDigits);
  const int passes = Shape::passes(static_cast<std::uint32_t>(vocab_size));
  TokenPlace* to = a;
  for (int pass = 0; pass < passes; ++pass) {
    const auto run = [&](const auto& source) {
      using Source = std::remove_cvref_t<decltype(source)>;
      const WarpRun<Source> warp_run{source, count, pass * Shape::kDigitBits, Shape::rounds(count)};
      const auto blocks = static_cast<unsigned>(Shape::tiles(count));
      launch(context, "count_tile_digits", count_tile_digits_kernel<Source>,
             LaunchShape{blocks, Shape::kThreads, kCounters}, warp_run, counts);
      launch(context, "move_tokens", move_tokens_kernel<Source>,
             LaunchShape{blocks, Shape::kThreads,
                         kCounters + SharedMemory::shared_bytes<int>(Shape::kWarps)},
             warp_run, static_cast<const int*>(counts), to);
    };
    TokenPlace* const from = to == a ? b : a;
    if (pass == 0)
      run(UnsortedTokens{tokens, first, vocab_size});
    else
      run(SortedTokens{from});
    to = from;
  }
  return to == a ? b : a;
}

}  // namespace tessera::kernels::cuda
