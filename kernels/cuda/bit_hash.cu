// Hash of a tensor's bits. Blocks sum parts of fixed length, one block adds the sums. Memory-bound:
// reads each word once.

#include "core/base/context.h"
#include "kernels/bit_hash.h"
#include "kernels/cuda/device/reduce.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch/sums.h"
#include "kernels/scratch.h"
#include "kernels/workspace.h"

namespace tessera::kernels::cuda {
namespace {

using Word = unsigned long long;

/// @tparam T  Word, or unsigned if x is aligned to 4 bytes only
template <typename T>
__device__ __forceinline__ Word load_word(const T* x, std::int64_t i) {
  if constexpr (sizeof(T) == 8)
    return x[i];
  else
    return static_cast<Word>(x[2 * i]) | static_cast<Word>(x[2 * i + 1]) << 32;
}

template <typename T>
__global__ void __launch_bounds__(SumShape::kThreads)
    bit_hash_parts_kernel(const T* x, std::int64_t words, std::uint64_t first, Word* partials) {
  SharedMemory shared;
  const auto scratch = shared.take<Word>(kWarpSize);
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * SumShape::kPart;
  const std::int64_t end = begin + SumShape::kPart < words ? begin + SumShape::kPart : words;
  Word sum = 0;
  for (std::int64_t i = begin + threadIdx.x; i < end; i += blockDim.x)
    sum += mix_bits(load_word(x, i), first + static_cast<std::uint64_t>(i));
  sum = block_reduce(sum, scratch, Word{0}, Sum{});
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// Adds the partial sums, and the last bytes, which are no whole word.
__global__ void __launch_bounds__(SumShape::kFinalThreads)
    bit_hash_kernel(const Word* partials, std::int64_t count, const unsigned char* last_bytes,
                    int last_count, std::uint64_t last_position, bool accumulate, Word* hash) {
  SharedMemory shared;
  const auto scratch = shared.take<Word>(kWarpSize);
  Word sum = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
  sum = block_reduce(sum, scratch, Word{0}, Sum{});
  if (threadIdx.x != 0) return;
  std::uint64_t last = 0;
  for (int i = 0; i < last_count; ++i) last |= static_cast<std::uint64_t>(last_bytes[i]) << (8 * i);
  if (last_count > 0) sum += mix_bits(last, last_position);
  *hash = accumulate ? *hash + sum : sum;
}

}  // namespace

void bit_hash(Context& context, const BitHash& args) {
  constexpr int kScratch = SharedMemory::shared_bytes<Word>(kWarpSize);
  const auto bytes = static_cast<std::int64_t>(args.x.bytes());
  const std::int64_t words = bytes / 8;
  const unsigned parts = SumShape::parts(words);
  const Workspace workspace(context, scratch_bytes(context.limits(), args), "bit_hash");
  auto* partials = static_cast<Word*>(workspace.data());
  const LaunchShape shape{parts, SumShape::kThreads, kScratch};
  const bool aligned = reinterpret_cast<std::uintptr_t>(args.x.data) % sizeof(Word) == 0;
  if (parts > 0 && aligned)
    launch(context, "bit_hash", bit_hash_parts_kernel<Word>, shape,
           static_cast<const Word*>(args.x.data), words, args.first_position, partials);
  else if (parts > 0)
    launch(context, "bit_hash", bit_hash_parts_kernel<unsigned>, shape,
           static_cast<const unsigned*>(args.x.data), words, args.first_position, partials);
  launch(context, "bit_hash", bit_hash_kernel, LaunchShape{1, SumShape::kFinalThreads, kScratch},
         partials, static_cast<std::int64_t>(parts),
         static_cast<const unsigned char*>(args.x.data) + 8 * words, static_cast<int>(bytes % 8),
         args.first_position + static_cast<std::uint64_t>(words), args.accumulate,
         static_cast<Word*>(args.hash.data));
}

TESSERA_CUDA_KERNEL(bit_hash, BitHash)

}  // namespace tessera::kernels::cuda
