#include "io/data/token_source.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"

namespace tessera::io {

void check_token_range(std::int64_t begin, std::int64_t count, std::int64_t size) {
  require(begin >= 0 && count >= 0 && begin <= size && count <= size - begin,
          "tokens [{}, {} + {}) were requested, but the source has {}", begin, begin, count, size);
}

namespace {

class Slice final : public TokenSource {
 public:
  Slice(TokenSourcePtr source, std::int64_t begin, std::int64_t end)
      : source_(std::move(source)), begin_(begin), size_(end - begin) {}
  std::int64_t size() const override { return size_; }
  void read(std::int64_t begin, std::int64_t count, std::int32_t* dst) const override {
    check_token_range(begin, count, size_);
    source_->read(begin_ + begin, count, dst);
  }
  void prefetch(std::int64_t begin, std::int64_t count) const override {
    check_token_range(begin, count, size_);
    source_->prefetch(begin_ + begin, count);
  }

 private:
  TokenSourcePtr source_;
  std::int64_t begin_;
  std::int64_t size_;
};

class Concatenation final : public TokenSource {
 public:
  explicit Concatenation(std::vector<TokenSourcePtr> sources) : sources_(std::move(sources)) {
    for (const TokenSourcePtr& source : sources_) ends_.push_back(size() + source->size());
  }
  std::int64_t size() const override { return ends_.empty() ? 0 : ends_.back(); }
  void read(std::int64_t begin, std::int64_t count, std::int32_t* dst) const override {
    for_each_part(begin, count, [&](const TokenSource& source, std::int64_t at, std::int64_t part) {
      source.read(at, part, dst);
      dst += part;
    });
  }
  void prefetch(std::int64_t begin, std::int64_t count) const override {
    for_each_part(begin, count, [](const TokenSource& source, std::int64_t at, std::int64_t part) {
      source.prefetch(at, part);
    });
  }

 private:
  template <typename Visit>
  void for_each_part(std::int64_t begin, std::int64_t count, Visit visit) const {
    check_token_range(begin, count, size());
    auto i = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) -
                                      ends_.begin());
    for (; count > 0; ++i) {
      const std::int64_t part = std::min(count, ends_[i] - begin);
      visit(*sources_[i], begin - (ends_[i] - sources_[i]->size()), part);
      begin += part;
      count -= part;
    }
  }

  std::vector<TokenSourcePtr> sources_;
  std::vector<std::int64_t> ends_;
};

template <typename T>
class InMemory final : public TokenSource {
 public:
  explicit InMemory(std::vector<T> tokens) : tokens_(std::move(tokens)) {}
  std::int64_t size() const override { return static_cast<std::int64_t>(tokens_.size()); }
  void read(std::int64_t begin, std::int64_t count, std::int32_t* dst) const override {
    check_token_range(begin, count, size());
    std::copy_n(tokens_.begin() + begin, count, dst);
  }

 private:
  std::vector<T> tokens_;
};

}  // namespace

TokenSourcePtr slice_tokens(TokenSourcePtr source, std::int64_t begin, std::int64_t end) {
  check_token_range(begin, end - begin, source->size());
  return std::make_shared<Slice>(std::move(source), begin, end);
}

TokenSourcePtr concatenate_tokens(std::vector<TokenSourcePtr> sources) {
  require(!sources.empty(), "expected at least one source of tokens, got none");
  if (sources.size() == 1) return std::move(sources.front());
  return std::make_shared<Concatenation>(std::move(sources));
}

TokenSourcePtr tokens_in_memory(std::vector<std::uint16_t> tokens) {
  return std::make_shared<InMemory<std::uint16_t>>(std::move(tokens));
}

TokenSourcePtr token_ids_in_memory(const std::vector<std::int32_t>& ids) {
  const bool is_small = std::ranges::all_of(ids, [](std::int32_t id) { return id <= 0xFFFF; });
  if (is_small) return tokens_in_memory(std::vector<std::uint16_t>(ids.begin(), ids.end()));
  return std::make_shared<InMemory<std::int32_t>>(ids);
}

std::int32_t max_token_id(const TokenSource& source) {
  std::vector<std::int32_t> block(1 << 16);
  std::int32_t largest = -1;
  for (std::int64_t begin = 0; begin < source.size();) {
    const auto count = std::min(source.size() - begin, static_cast<std::int64_t>(block.size()));
    source.read(begin, count, block.data());
    largest = std::max(largest, *std::max_element(block.begin(), block.begin() + count));
    begin += count;
  }
  return largest;
}

}  // namespace tessera::io
