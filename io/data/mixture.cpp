#include "io/data/mixture.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "core/base/error.h"
#include "io/base/file.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kBlock = 4096;
constexpr std::size_t kMostParts = 32;  // kBlock >= kMostParts^2, see count_until()

}  // namespace

std::vector<WeightedSource> parse_shares(const std::vector<std::string>& entries) {
  std::vector<WeightedSource> sources;
  for (const std::string& entry : entries) {
    if (is_there(entry)) continue;  // such as "web/year=2024"
    const std::size_t at = entry.rfind('=');
    double share = 0;
    const char* const end = entry.data() + entry.size();
    const bool has_share =
        at != std::string::npos && at > 0 &&
        std::from_chars(entry.data() + at + 1, end, share) == std::from_chars_result{end, {}};
    if (!has_share) continue;
    require(std::isfinite(share) && share > 0, "data.train {}: a share must be above 0", entry);
    sources.push_back({entry.substr(0, at), share});
  }
  require(sources.empty() || sources.size() == entries.size(),
          "data.train has {} entries, of which {} have a share (PATTERN=SHARE): give all of them "
          "one, or none",
          entries.size(), sources.size());
  return sources;
}

Mixture::Mixture(std::vector<Part> parts, std::uint64_t seed)
    : parts_(std::move(parts)), seed_(seed) {
  require(!parts_.empty() && parts_.size() <= kMostParts,
          "a mixture has 1 to {} sources, and not {}", kMostParts, parts_.size());
  double sum = 0;
  for (const Part& part : parts_) {
    require(std::isfinite(part.share) && part.share > 0, "a share must be above 0, got {}",
            part.share);
    require(!part.samples->is_packed(), "a mixture can't have packed rows");
    require(part.samples->seq_len() == seq_len(), "rows of {} and {} tokens in one mixture",
            seq_len(), part.samples->seq_len());
    sum += part.share;
  }
  for (Part& part : parts_) part.share /= sum;
  largest_ =
      static_cast<std::size_t>(std::ranges::max_element(parts_, {}, &Part::share) - parts_.begin());
}

// Rows of a part in the blocks before `block`. The largest part has what the others leave: in each
// block at least kBlock / parts - (parts - 1) rows, so never less than none.
std::int64_t Mixture::count_until(std::size_t part, std::int64_t block) const {
  const std::int64_t rows = block * kBlock;
  if (part != largest_)
    return static_cast<std::int64_t>(std::floor(static_cast<double>(rows) * parts_[part].share));
  std::int64_t rest = rows;
  for (std::size_t i = 0; i < parts_.size(); ++i)
    if (i != largest_) rest -= count_until(i, block);
  return rest;
}

std::pair<std::size_t, std::int64_t> Mixture::place(std::int64_t sample) const {
  require(sample >= 0, "a sample number must not be negative, got {}", sample);
  if (sample / kBlock != block_) order_block(sample / kBlock);
  return places_[static_cast<std::size_t>(sample % kBlock)];
}

// Within a block, sources take turns at random, and each source's rows stay in order.
void Mixture::order_block(std::int64_t block) const {
  std::vector<std::size_t> parts;
  std::vector<std::int64_t> next;
  for (std::size_t part = 0; part < parts_.size(); ++part) {
    next.push_back(count_until(part, block));
    parts.insert(parts.end(), static_cast<std::size_t>(count_until(part, block + 1) - next.back()),
                 part);
  }
  places_.clear();
  for (std::int64_t i = 0; i < kBlock; ++i) {
    const std::int64_t at = shuffled_row(block * kBlock + i, kBlock, seed_);
    const std::size_t part = parts[static_cast<std::size_t>(at)];
    places_.emplace_back(part, next[part]++);
  }
  block_ = block;
}

std::int64_t Mixture::seq_len() const { return parts_.front().samples->seq_len(); }

std::int64_t Mixture::samples_per_epoch() const {
  std::int64_t sum = 0;
  for (const Part& part : parts_) sum += part.samples->samples_per_epoch();
  return sum;
}

void Mixture::fill_batch(std::int64_t first, std::int64_t rows, std::int32_t* inputs,
                         std::int32_t* targets) const {
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto [part, sample] = place(first + i);
    parts_[part].samples->prefetch(sample);
  }
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto [part, sample] = place(first + i);
    parts_[part].samples->fill_batch(sample, 1, inputs + i * seq_len(), targets + i * seq_len());
  }
}

}  // namespace tessera::io
