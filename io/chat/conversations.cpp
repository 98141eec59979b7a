#include "io/chat/conversations.h"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "core/base/error.h"

namespace tessera::io {

bool is_conversation_file(const std::string& path) {
  return path.ends_with(".jsonl") || path.ends_with(".ndjson");
}

void Conversations::add(const Conversation& conversation, const std::string& where) {
  if (!conversation.unlocated.empty())
    unlocated.emplace_back(count(), fmt::format("{}: {}", where, conversation.unlocated));
  tokens.insert(tokens.end(), conversation.tokens.begin(), conversation.tokens.end());
  has_loss.insert(has_loss.end(), conversation.has_loss.begin(), conversation.has_loss.end());
  ends.push_back(std::ssize(tokens));
}

Conversations Conversations::slice(std::int64_t first, std::int64_t last) const {
  const std::int64_t from = first < count() ? begin(first) : std::ssize(tokens);
  const std::int64_t to = last > first ? end(last - 1) : from;
  Conversations part{{tokens.begin() + from, tokens.begin() + to},
                     {has_loss.begin() + from, has_loss.begin() + to},
                     {ends.begin() + first, ends.begin() + last}};
  for (std::int64_t& end : part.ends) end -= from;
  for (const auto& [i, why] : unlocated)
    if (i >= first && i < last) part.unlocated.emplace_back(i - first, why);
  return part;
}

std::int64_t Conversations::positions(std::int64_t i, std::int64_t seq_len) const {
  return std::min(end(i) - begin(i) - 1, seq_len);
}

std::int64_t Conversations::targets(std::int64_t i, std::int64_t seq_len) const {
  const auto first = has_loss.begin() + begin(i) + 1;
  const std::int64_t most = positions(i, seq_len);
  return most < 1 ? 0 : std::int64_t{std::count(first, first + most, true)};
}

std::string PackingReport::str() const {
  std::string text = fmt::format(
      "{} conversations, {} tokens; {} rows with {} predictions that have loss, {} positions of "
      "padding",
      conversations, tokens, rows, targets, padding);
  if (truncated > 0)
    text += fmt::format("; {} conversations are truncated and lose {} tokens (raise model.seq_len)",
                        truncated, lost);
  if (dropped > unlocated)
    text += fmt::format("; {} are dropped: no token with loss is left", dropped - unlocated);
  if (unlocated > 0)
    text += fmt::format("; {} are dropped, the first is {}", unlocated, first_unlocated);
  return text;
}

ConversationSamples::ConversationSamples(std::shared_ptr<const Conversations> data,
                                         std::int64_t seq_len, DataOrder order, std::uint64_t seed,
                                         std::string_view name)
    : data_(std::move(data)), seq_len_(seq_len), order_(order), seed_(seed) {
  require(seq_len_ >= 1, "seq_len must be at least 1, got {}", seq_len_);
  const auto positions = [&](std::int64_t i) { return data_->positions(i, seq_len_); };
  const auto targets = [&](std::int64_t i) { return data_->targets(i, seq_len_); };
  report_.conversations = data_->count();
  report_.tokens = std::ssize(data_->tokens);
  report_.unlocated = std::ssize(data_->unlocated);
  if (!data_->unlocated.empty()) report_.first_unlocated = data_->unlocated.front().second;
  std::vector<std::int64_t> kept;
  for (std::int64_t i = 0; i < data_->count(); ++i) {
    if (targets(i) == 0) {
      ++report_.dropped;
      continue;
    }
    kept.push_back(i);
    report_.targets += targets(i);
    report_.padding -= positions(i);
    const std::int64_t lost = data_->end(i) - data_->begin(i) - 1 - positions(i);
    report_.lost += lost;
    if (lost > 0) ++report_.truncated;
  }
  require(!kept.empty(),
          "{} has {} conversations, and none has a token with loss within the first {}; raise "
          "model.seq_len, or see what has loss with tessera data render{}{}",
          name, data_->count(), seq_len_ + 1, report_.unlocated > 0 ? "; " : "",
          report_.first_unlocated);
  const bool shuffled = order_ == DataOrder::Shuffled;
  if (shuffled) std::ranges::stable_sort(kept, std::greater<>(), positions);

  std::vector<std::vector<std::int64_t>> rows;
  std::multimap<std::int64_t, std::size_t> open;  // free positions -> row
  for (const std::int64_t i : kept) {
    auto row = open.lower_bound(positions(i));
    if (row == open.end()) {
      if (!shuffled) open.clear();
      row = open.emplace(seq_len_, rows.size());
      rows.emplace_back();
    }
    rows[row->second].push_back(i);
    const std::pair left{row->first - positions(i), row->second};
    open.erase(row);
    if (left.first > 0) open.insert(left);
  }
  for (const auto& row : rows) {
    packed_.insert(packed_.end(), row.begin(), row.end());
    row_ends_.push_back(std::ssize(packed_));
    targets_.push_back(0);
    for (const std::int64_t i : row) targets_.back() += targets(i);
  }
  report_.rows = std::ssize(rows);
  report_.padding += report_.rows * seq_len_;
}

std::int64_t ConversationSamples::row_of(std::int64_t sample) const {
  require(sample >= 0, "a sample number must not be negative, got {}", sample);
  return order_ == DataOrder::Shuffled ? shuffled_row(sample, samples_per_epoch(), seed_)
                                       : sample % samples_per_epoch();
}

// Calls f(first token, first position, positions) for each document of a row.
template <typename F>
void ConversationSamples::for_each_document(std::int64_t row, F f) const {
  const auto at = static_cast<std::size_t>(row);
  std::int64_t position = 0;
  for (std::int64_t k = row == 0 ? 0 : row_ends_[at - 1]; k < row_ends_[at]; ++k) {
    const std::int64_t i = packed_[static_cast<std::size_t>(k)];
    const std::int64_t count = data_->positions(i, seq_len_);
    f(data_->begin(i), position, count);
    position += count;
  }
}

void ConversationSamples::fill_batch(std::int64_t first, std::int64_t rows, std::int32_t* inputs,
                                     std::int32_t* targets) const {
  std::fill(inputs, inputs + rows * seq_len_, 0);
  std::fill(targets, targets + rows * seq_len_, kNoTarget);
  for (std::int64_t r = 0; r < rows; ++r) {
    for_each_document(row_of(first + r),
                      [&](std::int64_t token, std::int64_t position, std::int64_t count) {
                        const std::int64_t to = r * seq_len_ + position;
                        for (std::int64_t i = 0; i < count; ++i) {
                          const auto from = static_cast<std::size_t>(token + i);
                          inputs[to + i] = data_->tokens[from];
                          if (data_->has_loss[from + 1]) targets[to + i] = data_->tokens[from + 1];
                        }
                      });
  }
}

void ConversationSamples::fill_documents(std::int64_t first, std::int64_t rows,
                                         std::int32_t* documents, std::int32_t* positions) const {
  for (std::int64_t r = 0; r < rows; ++r) {
    std::int32_t id = 0;
    std::int64_t filled = 0;
    const auto add = [&](std::int64_t count) {
      for (std::int64_t i = 0; i < count; ++i) {
        documents[r * seq_len_ + filled] = id;
        positions[r * seq_len_ + filled++] = static_cast<std::int32_t>(i);
      }
      ++id;
    };
    for_each_document(row_of(first + r),
                      [&](std::int64_t, std::int64_t, std::int64_t count) { add(count); });
    add(seq_len_ - filled);  // padding
  }
}

std::int64_t ConversationSamples::count_targets(std::int64_t first, std::int64_t rows) const {
  std::int64_t sum = 0;
  for (std::int64_t r = 0; r < rows; ++r)
    sum += targets_[static_cast<std::size_t>(row_of(first + r))];
  return sum;
}

}  // namespace tessera::io
