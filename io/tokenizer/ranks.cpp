#include "io/tokenizer/ranks.h"

#include "core/base/error.h"

namespace tessera::io {

void Ranks::add(std::string bytes, std::int64_t rank, const std::function<std::string()>& where) {
  require<CorruptCheckpoint>(!bytes.empty(), "{}: an empty token", bytes.empty() ? where() : "");
  const bool fits = rank >= 0 && rank <= kMaxTokenId;
  require<CorruptCheckpoint>(fits, "{}: rank {} is not from 0 to {}", fits ? "" : where(), rank,
                             kMaxTokenId);
  const std::size_t id = static_cast<std::size_t>(rank) + offset_;
  if (id >= tokens_.size()) tokens_.resize(id + 1);
  const bool is_new = tokens_[id].empty();
  require<CorruptCheckpoint>(is_new, "{}: rank {} occurs twice", is_new ? "" : where(), rank);
  tokens_[id] = std::move(bytes);
  ++size_;
}

std::vector<Merge> Ranks::find_merges() const {
  std::vector<Merge> merges;
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    const std::string_view token = tokens_[i];
    for (std::size_t cut = 1; cut < token.size(); ++cut) {
      const auto left = ids_.find(token.substr(0, cut));
      if (left == ids_.end()) continue;
      const auto right = ids_.find(token.substr(cut));
      if (right != ids_.end())
        merges.push_back({left->second, right->second, static_cast<std::int32_t>(i),
                          static_cast<std::uint32_t>(i)});
    }
  }
  return merges;
}

Pipeline Ranks::finish(const std::string& pattern, const std::string& path) {
  ids_.reserve(tokens_.size());
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    if (tokens_[i].empty()) continue;
    const auto [first, is_new] = ids_.emplace(tokens_[i], static_cast<std::int32_t>(i));
    require<CorruptCheckpoint>(is_new, "{}: ranks {} and {} are the same token", path,
                               static_cast<std::size_t>(first->second) - offset_, i - offset_);
  }
  for (int byte = 0; byte < 256; ++byte)
    require<CorruptCheckpoint>(ids_.contains(std::string(1, static_cast<char>(byte))),
                               "{}: there is no token for the byte 0x{:02x}", path, byte);
  const std::vector<Merge> merges = find_merges();
  std::vector<PreTokenizerStep> steps{
      Split{std::make_shared<const Regex>(pattern, RegexSyntax::Rust, path)}};
  return {.kind = "tiktoken",
          .pre_tokenizer = PreTokenizer(std::move(steps)),
          .model = Bpe(tokens_, merges, {.byte_level = true, .ignore_merges = true}),
          .byte_level = true,
          .byte_level_decoder = true,
          .pieces = tokens_};
}

}  // namespace tessera::io
