#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace tessera::kernels::cuda {

/// Work split of the radix sort of tokens: each block sorts a tile, and each of its warps a contiguous
/// part of that, 32 tokens per round.
struct TokenSortShape {
  static constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;
  static constexpr int kThreads = kDigits, kWarps = kThreads / 32;
  /// Limited, because each block of move_tokens_kernel reads the counts of all tiles.
  static constexpr std::int64_t kMostTiles = 256;
  static constexpr std::int64_t kLeastRounds = 4;

  static int rounds(std::int64_t tokens) {
    constexpr std::int64_t kAll = kThreads * kMostTiles;
    return static_cast<int>(std::max(kLeastRounds, (tokens + kAll - 1) / kAll));
  }
  static int tiles(std::int64_t tokens) {
    const std::int64_t tile = std::int64_t{kThreads} * rounds(tokens);
    return static_cast<int>((tokens + tile - 1) / tile);
  }
  /// Number of passes that sort keys in [0, largest].
  static int passes(std::uint32_t largest) {
    return std::max(1, (static_cast<int>(std::bit_width(largest)) + kDigitBits - 1) / kDigitBits);
  }
};

/// A warp owns a row, or 32 packs of its columns in sums of rows.
struct EmbeddingShape {
  static constexpr unsigned kThreads = 256, kWarps = kThreads / 32;
  /// Number of sorted tokens that one warp sums beforehand, so that the warp of a frequent token
  /// adds one row per piece.
  static constexpr int kPiece = 128;

  static unsigned blocks(std::int64_t rows) {
    return static_cast<unsigned>((rows + kWarps - 1) / kWarps);
  }
  static unsigned slabs(std::int64_t width, int pack) {
    return static_cast<unsigned>((width + 32 * pack - 1) / (32 * pack));
  }
};

/// Scratch memory of the gradient of token embeddings: offsets in bytes, multiples of 64.
struct TokenGradientScratch {
  static constexpr std::int64_t kPlaceBytes = 8;  ///< of a token and its place

  std::int64_t a = 0, b = 0, counts = 0, starts = 0, partials = 0;
  std::int64_t bytes = 0;

  /// @param sum_bytes  of an element of the gradient
  TokenGradientScratch(std::int64_t tokens, std::int64_t vocab_size, std::int64_t width,
                       std::int64_t sum_bytes) {
    const auto reserve = [this](std::int64_t size) {
      const std::int64_t at = bytes;
      bytes += (size + 63) / 64 * 64;
      return at;
    };
    constexpr std::int64_t kIntBytes = sizeof(int);
    if (vocab_size == 0) return;
    a = reserve(tokens * kPlaceBytes);
    b = reserve(tokens * kPlaceBytes);
    counts =
        reserve(std::int64_t{TokenSortShape::tiles(tokens)} * TokenSortShape::kDigits * kIntBytes);
    starts = reserve((vocab_size + 1) * kIntBytes);
    partials = reserve(tokens / EmbeddingShape::kPiece * width * sum_bytes);
  }
};

}  // namespace tessera::kernels::cuda
