#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::io {

struct PickleValue;

/// The memo of a pickle. Keeps only the values that a later opcode fetches.
class PickleMemo {
 public:
  /// Announces that an index is fetched; before the first put().
  void want(std::uint64_t index) {
    if (index / 64 >= words_.size()) words_.resize(index / 64 + 1);
    words_[index / 64].wanted |= bit(index);
  }
  void finish_wanting() {
    std::uint32_t before = 0;
    for (Word& word : words_) {
      word.before = before;
      before += static_cast<std::uint32_t>(std::popcount(word.wanted));
    }
    values_.resize(before);
  }
  bool is_wanted(std::uint64_t index) const {
    return index / 64 < words_.size() && (words_[index / 64].wanted & bit(index)) != 0;
  }

  /// Counts the index as used. @return the place of its value; null if it is never fetched
  const PickleValue** put(std::uint64_t index) {
    if (index / 64 >= used_.size()) used_.resize(index / 64 + 1);
    count_ += (used_[index / 64] & bit(index)) == 0;
    used_[index / 64] |= bit(index);
    return is_wanted(index) ? &values_[slot(index)] : nullptr;
  }
  /// Null if nothing was put there.
  const PickleValue* get(std::uint64_t index) const {
    return is_wanted(index) ? values_[slot(index)] : nullptr;
  }
  /// Number of used indices.
  std::uint64_t count() const { return count_; }

 private:
  struct Word {
    std::uint64_t wanted = 0;
    std::uint32_t before = 0;  // number of wanted indices in earlier words
  };
  static std::uint64_t bit(std::uint64_t index) { return std::uint64_t{1} << (index % 64); }
  std::size_t slot(std::uint64_t index) const {
    const Word& word = words_[index / 64];
    return word.before + static_cast<std::size_t>(std::popcount(word.wanted & (bit(index) - 1)));
  }

  std::vector<Word> words_;
  std::vector<std::uint64_t> used_;  // one bit per index
  std::vector<const PickleValue*> values_;
  std::uint64_t count_ = 0;
};

}  // namespace tessera::io
