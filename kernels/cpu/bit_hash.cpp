#include "kernels/bit_hash.h"

#include <algorithm>
#include <cstring>

#include "core/base/thread_pool.h"
#include "kernels/cpu/loops.h"
#include "kernels/workspace.h"

TESSERA_CPU_BEGIN

void bit_hash(Context& context, const BitHash& args) {
  constexpr std::int64_t kBlock = 16384;  // words
  const auto bytes = static_cast<std::int64_t>(args.x.bytes());
  const std::int64_t words = bytes / 8, blocks = (words + kBlock - 1) / kBlock;
  const Workspace workspace(context, static_cast<std::size_t>(blocks) * 8, "bit_hash");
  if (workspace.is_planned()) return;
  const auto* x = static_cast<const char*>(args.x.data);
  const std::uint64_t first = args.first_position;
  auto* partials = static_cast<std::uint64_t*>(workspace.data());
  context.threads().parallel_for(blocks, 1, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      std::uint64_t sum = 0;
      const std::int64_t stop = std::min(words, (block + 1) * kBlock);
#pragma omp simd reduction(+ : sum)
      for (std::int64_t i = block * kBlock; i < stop; ++i) {
        std::uint64_t word = 0;
        std::memcpy(&word, x + 8 * i, 8);
        sum += mix_bits(word, first + static_cast<std::uint64_t>(i));
      }
      partials[block] = sum;
    }
  });
  auto* const hash = static_cast<std::uint64_t*>(args.hash.data);
  std::uint64_t sum = args.accumulate ? *hash : 0;
  for (std::int64_t block = 0; block < blocks; ++block) sum += partials[block];
  if (bytes % 8 != 0) {
    std::uint64_t last = 0;
    std::memcpy(&last, x + 8 * words, static_cast<std::size_t>(bytes % 8));
    sum += mix_bits(last, first + static_cast<std::uint64_t>(words));
  }
  *hash = sum;
}

TESSERA_CPU_END
