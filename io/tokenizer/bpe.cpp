#include "io/tokenizer/bpe.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <utility>

#include "core/base/error.h"
#include "io/tokenizer/unicode.h"

namespace tessera::io {
namespace {

constexpr std::uint32_t kNoMerge = std::numeric_limits<std::uint32_t>::max();
// Words of more symbols use a priority queue. At 64 symbols, scanning takes about as long.
constexpr std::size_t kLong = 64;

std::uint64_t pair_of(std::int32_t left, std::int32_t right) {
  return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}
std::size_t slot_of(std::uint64_t pair, int shift) {
  return static_cast<std::size_t>((pair * 0x9E3779B97F4A7C15U) >> shift);
}

}  // namespace

Bpe::Bpe(std::vector<std::string> tokens, const std::vector<Merge>& merges,
         const BpeOptions& options)
    : tokens_(std::move(tokens)), options_(options) {
  ids_.reserve(tokens_.size());
  byte_ids_.fill(-1);
  if (!options_.byte_level) character_ids_.assign(0x10000, -1);
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    const std::string& token = tokens_[i];
    const auto id = static_cast<std::int32_t>(i);
    if (token.empty()) continue;
    ids_.emplace(token, id);
    if (options_.byte_level) {
      if (token.size() == 1) byte_ids_[static_cast<unsigned char>(token[0])] = id;
    } else if (token.size() == utf8_length(token[0])) {
      const char32_t point = code_point_at(token, 0);
      (point < 0x10000 ? character_ids_[point] : rare_ids_[point]) = id;
    }
  }
  if (options_.byte_fallback) {
    for (std::size_t byte = 0; byte < 256; ++byte)
      byte_ids_[byte] = find(fmt::format("<0x{:02X}>", byte));
  }
  const std::size_t capacity = std::bit_ceil(std::max<std::size_t>(2 * merges.size(), 2));
  shift_ = 64 - std::countr_zero(capacity);
  merges_.resize(capacity);
  for (const Merge& merge : merges) {
    const std::uint64_t pair = pair_of(merge.left, merge.right);
    std::size_t i = slot_of(pair, shift_);
    while (merges_[i].pair != pair && merges_[i].pair != Slot().pair) i = (i + 1) % capacity;
    merges_[i] = {pair, merge.rank, merge.result};
  }
}

std::int32_t Bpe::find(std::string_view token) const {
  const auto found = ids_.find(token);
  return found == ids_.end() ? -1 : found->second;
}

bool Bpe::cuts_before(std::string_view mark) const {
  return std::ranges::none_of(merges_, [&](const Slot& slot) {
    if (slot.pair == Slot().pair) return false;
    const std::string& token = tokens_[static_cast<std::size_t>(slot.result)];
    for (std::size_t i = token.find(mark); i != token.npos; i = token.find(mark, i + mark.size())) {
      if (i > 0 && (i < mark.size() || token.compare(i - mark.size(), mark.size(), mark) != 0))
        return true;
    }
    return false;
  });
}

inline const Bpe::Slot* Bpe::find_merge(std::int32_t left, std::int32_t right) const {
  const std::uint64_t pair = pair_of(left, right);
  for (std::size_t i = slot_of(pair, shift_);; i = (i + 1) & (merges_.size() - 1)) {
    if (merges_[i].pair == pair) return &merges_[i];
    if (merges_[i].pair == Slot().pair) return nullptr;
  }
}

inline std::uint32_t Bpe::rank_of(std::int32_t left, std::int32_t right) const {
  const Slot* merge = find_merge(left, right);
  return merge == nullptr ? kNoMerge : merge->rank;
}

void Bpe::split(std::string_view word, std::vector<std::int32_t>& ids) const {
  ids.clear();
  // The reference places unknown characters after the bytes of characters that follow them.
  bool pending = false;
  const auto flush = [&] {
    if (pending) ids.push_back(options_.unk_id);
    pending = false;
  };
  for (std::size_t i = 0; i < word.size();) {
    const std::size_t length = options_.byte_level ? 1 : utf8_length(word[i]);
    std::int32_t id = -1;
    if (options_.byte_level) {
      id = byte_ids_[static_cast<unsigned char>(word[i])];
    } else if (const char32_t point = code_point_at(word, i); point < 0x10000) {
      id = character_ids_[point];
    } else if (const auto found = rare_ids_.find(point); found != rare_ids_.end()) {
      id = found->second;
    }
    const std::string_view character = word.substr(i, length);
    i += length;
    if (id >= 0) {
      flush();
      ids.push_back(id);
      continue;
    }
    const auto byte_id = [&](char c) { return byte_ids_[static_cast<unsigned char>(c)]; };
    if (options_.byte_fallback &&
        std::ranges::all_of(character, [&](char c) { return byte_id(c) >= 0; })) {
      for (const char c : character) ids.push_back(byte_id(c));
    } else if (options_.unk_id >= 0) {
      if (!options_.fuse_unk) flush();
      pending = true;
    }
  }
  flush();
}

void Bpe::merge_short(Scratch& scratch) const {
  std::vector<std::int32_t>& ids = scratch.ids;
  std::vector<std::uint32_t>& ranks = scratch.ranks;
  std::size_t size = ids.size();
  if (size < 2) return;
  ranks.resize(size);
  for (std::size_t i = 0; i + 1 < size; ++i) ranks[i] = rank_of(ids[i], ids[i + 1]);
  while (size > 1) {
    const auto last = ranks.begin() + static_cast<std::ptrdiff_t>(size - 1);
    const auto least = std::min_element(ranks.begin(), last);
    if (*least == kNoMerge) break;
    const auto i = static_cast<std::size_t>(least - ranks.begin());
    ids[i] = find_merge(ids[i], ids[i + 1])->result;
    --size;
    std::copy(ids.begin() + static_cast<std::ptrdiff_t>(i + 2),
              ids.begin() + static_cast<std::ptrdiff_t>(size + 1),
              ids.begin() + static_cast<std::ptrdiff_t>(i + 1));
    std::copy(least + 1, last, least);
    if (i + 1 < size) ranks[i] = rank_of(ids[i], ids[i + 1]);
    if (i > 0) ranks[i - 1] = rank_of(ids[i - 1], ids[i]);
  }
  ids.resize(size);
}

void Bpe::merge_long(Scratch& scratch) const {
  std::vector<std::int32_t>&ids = scratch.ids, &next = scratch.next, &previous = scratch.previous;
  std::vector<std::uint32_t>& ranks = scratch.ranks;
  std::vector<std::uint64_t>& queue = scratch.queue;
  const std::size_t size = ids.size();
  require<Unsupported>(size < std::size_t{1} << 31,
                       "a text of {} characters without a place to split it is too long", size);
  ranks.assign(size, kNoMerge);
  next.resize(size);
  previous.resize(size);
  queue.clear();
  for (std::size_t i = 0; i < size; ++i) {
    next[i] = static_cast<std::int32_t>(i + 1);
    previous[i] = static_cast<std::int32_t>(i) - 1;
    if (i + 1 < size) ranks[i] = rank_of(ids[i], ids[i + 1]);
    if (ranks[i] != kNoMerge) queue.push_back(std::uint64_t{ranks[i]} << 32 | i);
  }
  std::make_heap(queue.begin(), queue.end(), std::greater<>());
  const auto update = [&](std::size_t i) {
    const auto right = static_cast<std::size_t>(next[i]);
    ranks[i] = right < size ? rank_of(ids[i], ids[right]) : kNoMerge;
    if (ranks[i] == kNoMerge) return;
    queue.push_back(std::uint64_t{ranks[i]} << 32 | i);
    std::push_heap(queue.begin(), queue.end(), std::greater<>());
  };
  while (!queue.empty()) {
    std::pop_heap(queue.begin(), queue.end(), std::greater<>());
    const std::uint64_t top = queue.back();
    queue.pop_back();
    const auto i = static_cast<std::size_t>(top & 0xFFFFFFFFU);
    if (ranks[i] != top >> 32) continue;  // outdated
    const auto right = static_cast<std::size_t>(next[i]);
    ids[i] = find_merge(ids[i], ids[right])->result;
    ids[right] = -1;
    ranks[right] = kNoMerge;
    next[i] = next[right];
    if (static_cast<std::size_t>(next[i]) < size)
      previous[static_cast<std::size_t>(next[i])] = static_cast<std::int32_t>(i);
    update(i);
    if (previous[i] >= 0) update(static_cast<std::size_t>(previous[i]));
  }
  std::erase(ids, -1);
}

void Bpe::encode(std::string_view word, Scratch& scratch, std::vector<std::int32_t>& out) const {
  const bool cached = word.size() <= WordCache::kMaxWord;
  const std::uint64_t hash = cached ? WordCache::hash(word) : 0;
  if (cached && scratch.cache.find(word, hash, out)) return;
  if (const std::int32_t id = options_.ignore_merges ? find(word) : -1; id >= 0) {
    out.push_back(id);
    if (cached) scratch.cache.keep(word, hash, {&id, 1});
    return;
  }
  split(word, scratch.ids);
  if (scratch.ids.size() <= kLong) {
    merge_short(scratch);
  } else {
    merge_long(scratch);
  }
  if (cached) scratch.cache.keep(word, hash, scratch.ids);
  out.insert(out.end(), scratch.ids.begin(), scratch.ids.end());
}

}  // namespace tessera::io
