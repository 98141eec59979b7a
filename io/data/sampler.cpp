#include "io/data/sampler.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/rng.h"

namespace tessera::io {
namespace {

/// Image of `index` under a pseudo-random permutation of [0, n): a balanced Feistel network on the
/// next even number of bits, applied until the result is below n (under 4 times on average).
/// Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 3.
std::uint64_t permute(std::uint64_t index, std::uint64_t n, const RngKey& key) {
  if (n <= 1) return 0;
  constexpr std::uint64_t kRounds = 6;
  const auto half = (static_cast<int>(std::bit_width(n - 1)) + 1) / 2;
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  do {
    std::uint64_t left = index >> half;
    std::uint64_t right = index & mask;
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      const std::uint64_t mixed = key.words(round << 32 | right)[0] & mask;
      left = std::exchange(right, left ^ mixed);
    }
    index = left << half | right;
  } while (index >= n);
  return index;
}

}  // namespace

DataOrder parse_data_order(std::string_view name) {
  if (name == "shuffled") return DataOrder::Shuffled;
  require(name == "sequential", "data order must be shuffled or sequential, got {}", name);
  return DataOrder::Sequential;
}

std::int64_t shuffled_row(std::int64_t sample, std::int64_t rows, std::uint64_t seed) {
  const auto key =
      RngKey::make(seed, RngPurpose::DataOrder, static_cast<std::uint64_t>(sample / rows));
  return static_cast<std::int64_t>(
      permute(static_cast<std::uint64_t>(sample % rows), static_cast<std::uint64_t>(rows), key));
}

void Samples::fill_documents(std::int64_t /*first*/, std::int64_t /*rows*/,
                             std::int32_t* /*documents*/, std::int32_t* /*positions*/) const {
  throw InvalidArgument("these samples are single documents; see is_packed()");
}

Sampler::Sampler(TokenSourcePtr source, std::int64_t seq_len, DataOrder order, std::uint64_t seed,
                 std::string_view name)
    : source_(std::move(source)), seq_len_(seq_len), order_(order), seed_(seed) {
  require(seq_len_ >= 1, "seq_len must be at least 1, got {}", seq_len_);
  const std::int64_t size = source_->size();
  require(size > seq_len_,
          "{} has {} tokens, but a row needs model.seq_len + 1 = {}; use more data or a "
          "smaller model.seq_len",
          name, size, seq_len_ + 1);
  // Shuffled: counts the windows that fit after the largest offset, so that each epoch has as many.
  const std::int64_t usable = order_ == DataOrder::Shuffled ? size - seq_len_ : size - 1;
  windows_ = std::max<std::int64_t>(1, usable / seq_len_);
}

std::int64_t Sampler::first_token(std::int64_t sample) const {
  require(sample >= 0, "a sample number must not be negative, got {}", sample);
  const std::int64_t row = sample % windows_;
  if (order_ == DataOrder::Sequential) return row * seq_len_;
  const auto key =
      RngKey::make(seed_, RngPurpose::DataOrder, static_cast<std::uint64_t>(sample / windows_));
  const std::int64_t offsets = std::min(seq_len_, source_->size() - windows_ * seq_len_);
  // Random counter 2^63 is for the offset; the permutation uses lower ones.
  const std::int64_t offset = key.words(std::uint64_t{1} << 63)[0] % offsets;
  return offset + shuffled_row(sample, windows_, seed_) * seq_len_;
}

void Sampler::prefetch(std::int64_t sample) const {
  source_->prefetch(first_token(sample), seq_len_ + 1);
}

void Sampler::fill_batch(std::int64_t first_sample, std::int64_t rows, std::int32_t* inputs,
                         std::int32_t* targets) const {
  if (order_ == DataOrder::Shuffled) {
    for (std::int64_t i = 0; i < rows; ++i) prefetch(first_sample + i);
  }
  std::vector<std::int32_t> row(static_cast<std::size_t>(seq_len_) + 1);
  for (std::int64_t i = 0; i < rows; ++i) {
    source_->read(first_token(first_sample + i), seq_len_ + 1, row.data());
    std::copy(row.begin(), row.end() - 1, inputs + i * seq_len_);
    std::copy(row.begin() + 1, row.end(), targets + i * seq_len_);
  }
}

}  // namespace tessera::io
