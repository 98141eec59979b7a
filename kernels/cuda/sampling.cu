#include "kernels/cuda/device/random.h"
#include "kernels/cuda/device/reduce.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch/sampling.h"
#include "kernels/sampling.h"
#include "kernels/sampling_weight.h"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = SamplingShape::kThreads, kWarps = SamplingShape::kWarps;
constexpr int kDigitBits = SamplingShape::kDigitBits, kDigits = SamplingShape::kDigits;

struct Arguments {
  const float* logits;
  std::int64_t stride;
  int columns;
  std::int32_t* tokens;
  bool greedy;
  double octaves_per_logit;
  std::uint64_t top_k;
  double top_p;
  std::uint64_t least_weight;
  RngKey key;
  std::uint64_t first_draw;

  // Whether top-k, or top-p, drops tokens.
  __host__ __device__ bool selects_count() const {
    return top_k > 0 && top_k < static_cast<std::uint64_t>(columns);
  }
  __host__ __device__ bool selects_weight() const { return top_p < 1.0; }
};

/// The row of a block. All threads call each function with the same arguments and get the same
/// result; shared memory can be reused on return. amount(logit, key, id) of a token is an integer:
/// the order of sums does not matter.
struct Row {
  const float* logits;
  int columns;
  SharedArray<std::uint64_t> sums;  ///< at least one per warp
  SharedArray<std::uint64_t> bins;  ///< kDigits per thread; only for top-k and top-p

  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
  static __device__ __forceinline__ int warp() { return thread() / kWarpSize; }
  static __device__ __forceinline__ int lane() { return thread() % kWarpSize; }

  template <typename Amount>
  __device__ __forceinline__ std::uint64_t amount_of(int id, const Amount& amount) const {
    const float logit = logits[id];
    return amount(logit, logit_key(logit), id);
  }

  struct Threshold {
    std::uint32_t key;
    std::uint64_t needed;
  };
  /// Key at which the sum of amounts from the largest key down reaches `needed`, and how much of
  /// `needed` is left for tokens with that key. Radix selection from the top digit. Each thread has
  /// bins of its own, in the same banks for every digit, so that there are no bank conflicts.
  template <typename Amount>
  __device__ __forceinline__ Threshold select(std::uint64_t needed, const Amount& amount) const {
    std::uint32_t found = 0, mask = 0;
    for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
      for (int digit = 0; digit < kDigits; ++digit) bins[digit * kThreads + thread()] = 0;
      for (int id = thread(); id < columns; id += kThreads) {
        const float logit = logits[id];
        const std::uint32_t key = logit_key(logit);
        if (((key ^ found) & mask) != 0) continue;
        const int digit = static_cast<int>(key >> shift & (kDigits - 1));
        bins[digit * kThreads + thread()] += amount(logit, key, id);
      }
      __syncthreads();
      std::uint64_t sum = 0;
      for (int i = lane(); i < kThreads; i += kWarpSize) sum += bins[warp() * kThreads + i];
      sum = warp_reduce(sum, Sum{});
      if (lane() == 0) sums[warp()] = sum;
      __syncthreads();
      int digit = kDigits - 1;
      for (; digit > 0 && sums[digit] < needed; --digit) needed -= sums[digit];
      found |= static_cast<std::uint32_t>(digit) << shift;
      mask |= (kDigits - 1U) << shift;
    }
    __syncthreads();
    return {found, needed};
  }

  /// First id at which the running sum of amounts exceeds `target`, which must be below the total.
  /// Each round splits a range into one part per warp; the part with the id is the next range.
  template <typename Amount>
  __device__ __forceinline__ int find(std::uint64_t target, const Amount& amount) const {
    int begin = 0, end = columns;
    while (end - begin > kWarpSize) {
      const int part = (end - begin + kWarps - 1) / kWarps;
      const int first = begin + warp() * part;
      const int last = first + part < end ? first + part : end;
      std::uint64_t sum = 0;
      for (int id = first + lane(); id < last; id += kWarpSize) sum += amount_of(id, amount);
      sum = warp_reduce(sum, Sum{});
      if (lane() == 0) sums[warp()] = sum;
      __syncthreads();
      int holder = 0;
      for (; holder < kWarps - 1 && sums[holder] <= target; ++holder) target -= sums[holder];
      begin += holder * part;
      end = begin + part < end ? begin + part : end;
      __syncthreads();
    }
    const int id = begin + lane();
    std::uint64_t up_to = id < end ? amount_of(id, amount) : 0;
    for (int lanes = 1; lanes < kWarpSize; lanes *= 2) {
      const std::uint64_t below = __shfl_up_sync(kAllLanes, up_to, lanes);
      if (lane() >= lanes) up_to += below;
    }
    const unsigned beyond = __ballot_sync(kAllLanes, up_to > target);
    return begin + __ffs(static_cast<int>(beyond)) - 1;
  }

  template <typename Amount>
  __device__ __forceinline__ std::uint64_t sum(const Amount& amount) const {
    std::uint64_t own = 0;
    for (int id = thread(); id < columns; id += kThreads) own += amount_of(id, amount);
    own = block_reduce(own, sums, std::uint64_t{0}, Sum{});
    __syncthreads();
    return own;
  }

  /// Keeps the tokens with keys above `threshold`, and the first `count` with that key.
  __device__ __forceinline__ KeptTokens keep(std::uint32_t threshold, std::uint64_t count) const {
    return {threshold, find(count - 1, [=](float, std::uint32_t key, int) {
              return static_cast<std::uint64_t>(key == threshold);
            })};
  }

  /// Largest key in the upper half, and in the lower half the complement of the first id with that
  /// key. NaN has the largest key.
  __device__ __forceinline__ std::uint64_t best() const {
    std::uint64_t own = 0;
    for (int id = thread(); id < columns; id += kThreads) {
      const float logit = logits[id];
      const std::uint32_t key = logit != logit ? 0xffffffffU : logit_key(logit);
      const std::uint64_t at = std::uint64_t{key} << 32 | ~static_cast<std::uint32_t>(id);
      own = at > own ? at : own;
    }
    own = block_reduce(own, sums, std::uint64_t{0}, Maximum{});
    __syncthreads();
    return own;
  }
};

// A block owns a row and passes over it up to 20 times: once from memory, then from the caches.
// Bound by the arithmetic of one multiprocessor per row, some 40 instructions per weight.
__global__ void __launch_bounds__(kThreads) sample_kernel(const Arguments args) {
  SharedMemory memory;
  const auto sums = memory.take<std::uint64_t>(kWarpSize);
  const Row row{args.logits + blockIdx.x * args.stride, args.columns, sums,
                memory.take<std::uint64_t>(kDigits * kThreads)};
  std::int32_t* const token = args.tokens + blockIdx.x;

  const std::uint64_t best = row.best();
  const auto best_key = static_cast<std::uint32_t>(best >> 32);
  const bool usable = best_key > kNegativeInfinityKey && best_key < kInfinityKey;
  if (!usable || args.greedy) {
    if (threadIdx.x == 0)
      *token = usable ? static_cast<int>(~static_cast<std::uint32_t>(best)) : -1;
    return;
  }

  const float largest = logit_of_key(best_key);
  const double scale = args.octaves_per_logit;
  KeptTokens kept;
  std::uint64_t least = 0;
  const auto kept_weight = [&](float logit, std::uint32_t key, int id) {
    const std::uint64_t weight =
        kept.contains(key, id) ? sampling_weight(logit, largest, scale) : 0;
    return weight >= least ? weight : 0;
  };
  if (args.selects_count()) {
    const auto at =
        row.select(args.top_k, [](float, std::uint32_t, int) { return std::uint64_t{1}; });
    kept = row.keep(at.key, at.needed);
  }
  std::uint64_t total = row.sum(kept_weight);
  if (args.selects_weight()) {
    const std::uint64_t needed = fraction_of_weights(total, args.top_p);
    const auto at = row.select(needed, kept_weight);
    // Tokens with equal keys have equal weights.
    const std::uint64_t each = sampling_weight(logit_of_key(at.key), largest, scale);
    const std::uint64_t count = (at.needed + each - 1) / each;
    kept = row.keep(at.key, count);
    total = needed - at.needed + count * each;
  }
  if (args.least_weight > 0) {
    least = args.least_weight;
    total = row.sum(kept_weight);
  }
  std::uint32_t words[1];
  draw<1>(args.key, args.first_draw + blockIdx.x, words);
  const int drawn = row.find(draw_below(total, words[0]), kept_weight);
  if (threadIdx.x == 0) *token = drawn;
}

}  // namespace

void sample(Context& context, const Sampling& args) {
  const std::int64_t rows = args.logits.shape[0];
  require<Unsupported>(rows <= SamplingShape::kMostRows,
                       "sample: {} rows are more than a launch takes ({})", rows,
                       SamplingShape::kMostRows);
  const Arguments arguments{.logits = static_cast<const float*>(args.logits.data),
                            .stride = args.logits.strides[0],
                            .columns = static_cast<int>(args.logits.shape[1]),
                            .tokens = static_cast<std::int32_t*>(args.tokens.data),
                            .greedy = args.temperature == 0.0,
                            .octaves_per_logit = octaves_per_logit(args.temperature),
                            .top_k = static_cast<std::uint64_t>(args.top_k),
                            .top_p = args.top_p,
                            .least_weight = least_weight(args.min_p),
                            .key = args.key,
                            .first_draw = args.first_draw};
  const bool selects =
      !arguments.greedy && (arguments.selects_count() || arguments.selects_weight());
  using Shared = SharedMemory;
  launch(context, "sample", sample_kernel,
         LaunchShape{.grid = static_cast<unsigned>(rows),
                     .block = kThreads,
                     .shared_bytes =
                         Shared::shared_bytes<std::uint64_t>(kWarpSize) +
                         (selects ? Shared::shared_bytes<std::uint64_t>(kDigits * kThreads) : 0)},
         arguments);
}

TESSERA_CUDA_KERNEL(sample, Sampling)

}  // namespace tessera::kernels::cuda
