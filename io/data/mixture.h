#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/data/sampler.h"

namespace tessera::io {

/// A training source and its share of the rows.
struct WeightedSource {
  std::string pattern;  ///< file or glob
  double share = 0;
};
/// "PATTERN=SHARE" each; a path that exists has no share. @return nothing if no entry has a share
/// @throws InvalidArgument if some have none, or on a share that is not above 0
std::vector<WeightedSource> parse_shares(const std::vector<std::string>& entries);

/// Rows of several sources, each as often as its share says: after every 4096 rows, the count of each
/// source differs from its share of them by less than one row (that of the largest by less than one row
/// per source). A source's own rows come in its own order, so that none comes twice in its epoch. Which
/// row a sample is, depends only on seed and sample number.
class Mixture final : public Samples {
 public:
  struct Part {
    std::unique_ptr<Samples> samples;
    double share = 0;  ///< of the sum of all shares
  };
  /// @throws InvalidArgument without parts, with more than 32, on packed rows, different lengths, or a
  ///   share that is not above 0
  Mixture(std::vector<Part> parts, std::uint64_t seed);

  /// Number of the part, and of its sample. Called by one thread at a time.
  std::pair<std::size_t, std::int64_t> place(std::int64_t sample) const;

  std::int64_t seq_len() const override;
  /// Rows of an epoch of all parts.
  std::int64_t samples_per_epoch() const override;
  void fill_batch(std::int64_t first, std::int64_t rows, std::int32_t* inputs,
                  std::int32_t* targets) const override;

 private:
  std::int64_t count_until(std::size_t part, std::int64_t block) const;
  void order_block(std::int64_t block) const;

  std::vector<Part> parts_;
  std::size_t largest_ = 0;
  std::uint64_t seed_;
  // Places of the samples of the block that was asked for last.
  mutable std::int64_t block_ = -1;
  mutable std::vector<std::pair<std::size_t, std::int64_t>> places_;
};

}  // namespace tessera::io
