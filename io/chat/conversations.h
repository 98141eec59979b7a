#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/data/sampler.h"

namespace tessera::io {

/// Whether the name ends in ".jsonl" or ".ndjson".
bool is_conversation_file(const std::string& path);

/// A conversation as a model sees it.
struct Conversation {
  std::vector<std::int32_t> tokens;
  std::vector<bool> has_loss;  ///< of each token: whether the model learns to predict it
  std::string unlocated = {};  ///< why no token has loss, if the assistant's turns were not found
};

/// Conversations in memory, in the order of their files.
struct Conversations {
  std::vector<std::int32_t> tokens = {};
  std::vector<bool> has_loss = {};
  std::vector<std::int64_t> ends = {};  ///< of each conversation, in `tokens`
  /// Conversations whose turns were not found, ascending, with file and line.
  std::vector<std::pair<std::int64_t, std::string>> unlocated = {};

  std::int64_t count() const { return std::ssize(ends); }
  std::int64_t begin(std::int64_t i) const {
    return i == 0 ? 0 : ends[static_cast<std::size_t>(i) - 1];
  }
  std::int64_t end(std::int64_t i) const { return ends[static_cast<std::size_t>(i)]; }
  /// @param where  file and line
  void add(const Conversation& conversation, const std::string& where = {});
  /// Positions of a row that a conversation takes, and how many of them have a target with loss.
  std::int64_t positions(std::int64_t i, std::int64_t seq_len) const;
  std::int64_t targets(std::int64_t i, std::int64_t seq_len) const;
  /// Conversations [first, last).
  Conversations slice(std::int64_t first, std::int64_t last) const;
};

/// Counts of packed, truncated and dropped conversations.
struct PackingReport {
  std::int64_t conversations = 0;    ///< in the data
  std::int64_t tokens = 0;           ///< in the data
  std::int64_t targets = 0;          ///< predictions with loss in an epoch
  std::int64_t rows = 0;             ///< in an epoch
  std::int64_t padding = 0;          ///< unused positions of rows
  std::int64_t truncated = 0;        ///< conversations that lost their end
  std::int64_t lost = 0;             ///< tokens of those ends
  std::int64_t dropped = 0;          ///< conversations left out: no token with loss is left
  std::int64_t unlocated = 0;        ///< of `dropped`: the assistant's turns were not found
  std::string first_unlocated = {};  ///< file and line of the first, and why

  std::string str() const;
};

/// Rows of whole conversations, each a document of its own: attention does not cross documents, and
/// positions restart in each. A conversation of n tokens takes n - 1 positions, since its last token
/// is only predicted. Its end is cut off if it has more than seq_len + 1 tokens.
///
/// Conversations are packed once. Shuffled: best fit, longest first, which leaves least padding; each
/// epoch visits every row once, in the order of a keyed permutation. Sequential: in their order.
class ConversationSamples final : public Samples {
 public:
  /// @param name  of the data in messages
  /// @throws InvalidArgument if no conversation has a token with loss
  ConversationSamples(std::shared_ptr<const Conversations> data, std::int64_t seq_len,
                      DataOrder order, std::uint64_t seed, std::string_view name = "the data");

  const PackingReport& report() const { return report_; }
  std::int64_t seq_len() const override { return seq_len_; }
  std::int64_t samples_per_epoch() const override { return std::ssize(row_ends_); }
  void fill_batch(std::int64_t first, std::int64_t rows, std::int32_t* inputs,
                  std::int32_t* targets) const override;
  bool is_packed() const override { return true; }
  void fill_documents(std::int64_t first, std::int64_t rows, std::int32_t* documents,
                      std::int32_t* positions) const override;
  std::int64_t count_targets(std::int64_t first, std::int64_t rows) const override;

 private:
  std::int64_t row_of(std::int64_t sample) const;
  template <typename F>
  void for_each_document(std::int64_t row, F f) const;

  std::shared_ptr<const Conversations> data_;
  std::int64_t seq_len_;
  DataOrder order_;
  std::uint64_t seed_;
  std::vector<std::int64_t> packed_;    // conversations, row by row
  std::vector<std::int64_t> row_ends_;  // of each row, in packed_
  std::vector<std::int64_t> targets_;   // of each row
  PackingReport report_;
};

}  // namespace tessera::io
