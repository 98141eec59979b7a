#pragma once

#include <cstdint>
#include <string_view>

#include "io/data/token_source.h"

namespace tessera::io {

enum class DataOrder : std::uint8_t { Shuffled, Sequential };
/// "shuffled" or "sequential". @throws InvalidArgument
DataOrder parse_data_order(std::string_view name);

/// Row of a sample, where each epoch visits every row once, in the order of a keyed permutation.
/// @param sample  0 or more
std::int64_t shuffled_row(std::int64_t sample, std::int64_t rows, std::uint64_t seed);

/// Target of a position without loss: kernels::kIgnoreTarget.
inline constexpr std::int32_t kNoTarget = -1;

/// Rows of tokens, each a function of its global sample number, so that the number of the next
/// sample is the whole data state of a run, at any world size.
class Samples {
 public:
  virtual ~Samples() = default;
  /// Tokens per row.
  virtual std::int64_t seq_len() const = 0;
  virtual std::int64_t samples_per_epoch() const = 0;
  /// Writes samples [first, first + rows) as inputs and targets, [rows, seq_len] each. Called on
  /// any thread, by one at a time.
  virtual void fill_batch(std::int64_t first, std::int64_t rows, std::int32_t* inputs,
                          std::int32_t* targets) const = 0;

  /// Starts to read a sample, without waiting.
  virtual void prefetch(std::int64_t /*sample*/) const {}
  /// Whether rows hold several documents: fill_documents() is to be called as well.
  virtual bool is_packed() const { return false; }
  /// Writes the ids of documents, ascending within a row, and positions, which start at 0 in each
  /// document: [rows, seq_len] each.
  virtual void fill_documents(std::int64_t first, std::int64_t rows, std::int32_t* documents,
                              std::int32_t* positions) const;
  /// Targets of samples [first, first + rows) other than kNoTarget. Any rank asks for any sample.
  virtual std::int64_t count_targets(std::int64_t /*first*/, std::int64_t rows) const {
    return rows * seq_len();
  }
};

/// Maps a global sample number to a row of seq_len + 1 tokens. Depends only on seed and sample.
///
/// An epoch has samples_per_epoch() rows; sample s belongs to epoch s / samples_per_epoch().
///   Sequential  row i starts at token i * seq_len; an incomplete last row is dropped.
///   Shuffled    each epoch shifts the windows by an offset in [0, seq_len) and visits every window
///               once, in the order of a keyed permutation.
class Sampler final : public Samples {
 public:
  /// @param name  of the source in messages
  /// @throws InvalidArgument unless seq_len >= 1 and the source has seq_len + 1 tokens or more
  Sampler(TokenSourcePtr source, std::int64_t seq_len, DataOrder order, std::uint64_t seed,
          std::string_view name = "the data");

  std::int64_t seq_len() const override { return seq_len_; }
  std::int64_t samples_per_epoch() const override { return windows_; }
  /// Position of the first token of a sample's row. @throws InvalidArgument if sample < 0
  std::int64_t first_token(std::int64_t sample) const;
  void prefetch(std::int64_t sample) const override;
  /// Inputs are tokens 0 .. seq_len - 1 of each row, targets tokens 1 .. seq_len.
  /// @throws IoError from the source
  void fill_batch(std::int64_t first_sample, std::int64_t rows, std::int32_t* inputs,
                  std::int32_t* targets) const override;

 private:
  TokenSourcePtr source_;
  std::int64_t seq_len_;
  DataOrder order_;
  std::uint64_t seed_;
  std::int64_t windows_ = 0;
};

}  // namespace tessera::io
