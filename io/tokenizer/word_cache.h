#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::io {

/// Ids of recently encoded words: a direct-mapped table, for one thread. Encoding natural text, 95% of
/// the words are found in it.
class WordCache {
 public:
  static constexpr std::size_t kMaxWord = 48;  ///< bytes; longer words are not kept

  /// @param text_bytes  of the text to encode, from which the table's size follows
  explicit WordCache(std::size_t text_bytes)
      : slots_(std::bit_ceil(std::clamp<std::size_t>(text_bytes / 8, 16, kMaxSlots))) {}

  static std::uint64_t hash(std::string_view word) {
    constexpr std::uint64_t kMultiplier = 0x9E3779B97F4A7C15U;
    std::uint64_t h = word.size() * kMultiplier;
    const char* p = word.data();
    std::size_t n = word.size();
    for (; n > 8; n -= 8, p += 8) h = mix(h ^ load<std::uint64_t>(p), kMultiplier);
    std::uint64_t last = 0;
    if (n >= 4) {
      last = load<std::uint32_t>(p) | std::uint64_t{load<std::uint32_t>(p + n - 4)} << 32;
    } else if (n > 0) {
      last = static_cast<unsigned char>(p[0]) | static_cast<unsigned char>(p[n / 2]) << 8 |
             static_cast<unsigned char>(p[n - 1]) << 16;
    }
    return mix(h ^ last, 0xD6E8FEB86659FD93U);
  }

  /// @return whether the word is kept; then appends its ids
  bool find(std::string_view word, std::uint64_t hash, std::vector<std::int32_t>& out) const {
    const Slot& slot = slots_[hash & (slots_.size() - 1)];
    if (slot.size != word.size() || slot.check != static_cast<std::uint32_t>(hash >> 32) ||
        std::memcmp(words_.data() + slot.word, word.data(), word.size()) != 0) {
      return false;
    }
    if (slot.count == 1) {
      out.push_back(ids_[slot.ids]);
    } else {
      out.insert(out.end(), ids_.begin() + slot.ids, ids_.begin() + slot.ids + slot.count);
    }
    return true;
  }

  void keep(std::string_view word, std::uint64_t hash, std::span<const std::int32_t> ids) {
    if (words_.size() + ids_.size() * sizeof(std::int32_t) > kMaxKept) {
      std::fill(slots_.begin(), slots_.end(), Slot());
      words_.clear();
      ids_.clear();
    }
    slots_[hash & (slots_.size() - 1)] = {
        static_cast<std::uint32_t>(hash >> 32), static_cast<std::uint32_t>(words_.size()),
        static_cast<std::uint32_t>(ids_.size()), static_cast<std::uint16_t>(word.size()),
        static_cast<std::uint16_t>(ids.size())};
    words_ += word;
    ids_.insert(ids_.end(), ids.begin(), ids.end());
  }

 private:
  static constexpr std::size_t kMaxSlots = 1 << 16;
  static constexpr std::size_t kMaxKept = 8
                                          << 20;  // bytes of words and ids, replaced ones included

  struct Slot {
    std::uint32_t check = 0, word = 0, ids = 0;
    std::uint16_t size = 0, count = 0;
  };
  template <typename T>
  static T load(const char* p) {
    T value;
    std::memcpy(&value, p, sizeof(T));
    return value;
  }
  static std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
    a *= b;
    return a ^ (a >> 32);
  }

  std::vector<Slot> slots_;
  std::string words_;
  std::vector<std::int32_t> ids_;
};

}  // namespace tessera::io
