// Counts words, then merges them as sequences of ids. Entries of the queue may be outdated: a pair that became
// rarer is put back with its new count when it is taken, one that became more frequent is queued again.

#include "io/tokenizer/train_bpe.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <queue>
#include <unordered_map>
#include <unordered_set>

#include "core/base/error.h"
#include "io/tokenizer/added_tokens.h"
#include "io/tokenizer/pipeline.h"
#include "io/tokenizer/pre_tokenizer.h"
#include "io/tokenizer/unicode.h"

namespace tessera::io {
namespace {

using Id = std::int32_t;

std::uint64_t key_of(Id left, Id right) {
  return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}

struct Word {
  std::vector<Id> ids;
  std::int64_t count = 0;
};
struct Entry {
  std::int64_t count;
  std::uint64_t pair;
  // The most frequent pair is at the top, of several the smallest.
  bool operator<(const Entry& other) const {
    return count != other.count ? count < other.count : pair > other.pair;
  }
};
struct PairState {
  std::int64_t count = 0;
  std::vector<std::uint32_t> words;  // that held it once; ascending, or with repeats
};

class Merger {
 public:
  explicit Merger(std::vector<Word> words) : words_(std::move(words)) {
    for (std::size_t w = 0; w < words_.size(); ++w) {
      const std::vector<Id>& ids = words_[w].ids;
      for (std::size_t i = 0; i + 1 < ids.size(); ++i) change(ids[i], ids[i + 1], w, 1);
    }
    for (const auto& [pair, state] : pairs_) queue_.push({state.count, pair});
    changed_.clear();
  }

  /// The most frequent pair, with its count; count 0: there is none.
  Entry top() {
    while (!queue_.empty()) {
      const Entry entry = queue_.top();
      queue_.pop();
      const auto found = pairs_.find(entry.pair);
      const std::int64_t count = found == pairs_.end() ? 0 : found->second.count;
      if (count == entry.count) return entry;
      if (count > 0) queue_.push({count, entry.pair});
    }
    return {0, 0};
  }

  void merge(std::uint64_t pair, Id result) {
    const Id left = static_cast<Id>(pair >> 32), right = static_cast<Id>(pair & 0xFFFFFFFFU);
    const std::vector<std::uint32_t> holders = std::move(pairs_[pair].words);
    std::uint32_t previous = ~0U;
    for (const std::uint32_t w : holders) {
      if (w == previous) continue;
      previous = w;
      std::vector<Id>& ids = words_[w].ids;
      std::size_t kept = 0;
      for (std::size_t i = 0; i < ids.size(); ++i, ++kept) {
        if (ids[i] != left || i + 1 == ids.size() || ids[i + 1] != right) {
          ids[kept] = ids[i];
          continue;
        }
        if (kept > 0) {
          change(ids[kept - 1], left, w, -1);
          change(ids[kept - 1], result, w, 1);
        }
        if (i + 2 < ids.size()) {
          change(right, ids[i + 2], w, -1);
          change(result, ids[i + 2], w, 1);
        }
        ids[kept] = result;
        ++i;
      }
      ids.resize(kept);
    }
    pairs_.erase(pair);
    for (const std::uint64_t added : changed_) {
      const auto found = pairs_.find(added);
      if (found != pairs_.end() && found->second.count > 0)
        queue_.push({found->second.count, added});
    }
    changed_.clear();
  }

 private:
  void change(Id left, Id right, std::size_t word, int sign) {
    const std::uint64_t pair = key_of(left, right);
    PairState& state = pairs_[pair];
    state.count += sign * words_[word].count;
    if (sign < 0) return;
    if (state.words.empty() || state.words.back() != word)
      state.words.push_back(static_cast<std::uint32_t>(word));
    if (changed_.empty() || changed_.back() != pair) changed_.push_back(pair);
  }

  std::vector<Word> words_;
  std::unordered_map<std::uint64_t, PairState> pairs_;
  std::priority_queue<Entry> queue_;
  std::vector<std::uint64_t> changed_;  // pairs that became more frequent
};

nlohmann::ordered_json added_token(std::size_t id, const std::string& text) {
  return {{"id", id},        {"content", text},     {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", true}};
}

}  // namespace

struct BpeTrainer::State {
  TrainBpeOptions options;
  PreTokenizer pre_tokenizer;
  TokenFinder special;
  std::unordered_map<std::string, std::int64_t> counts;
};

BpeTrainer::BpeTrainer(TrainBpeOptions options) : state_(std::make_unique<State>()) {
  std::vector<AddedToken> special;
  for (const std::string& text : options.special_tokens) {
    require(!text.empty() && find_malformed_utf8(text) == text.npos,
            "a special token must be UTF-8 and not empty");
    require(std::ranges::count(options.special_tokens, text) == 1,
            "the special token {} is given twice", text);
    require(std::ranges::count(byte_characters(), text) == 0,
            "the special token {} is the character of a byte, which is a token already", text);
    special.push_back({.text = text, .special = true});
  }
  const auto least = 256 + std::ssize(options.special_tokens);
  require(options.vocab_size >= least && options.vocab_size <= kMaxTokenId,
          "the vocabulary must have from {} ids (256 bytes and {} special tokens) to {}, got {}",
          least, options.special_tokens.size(), kMaxTokenId, options.vocab_size);
  if (options.pattern.empty()) options.pattern = kGpt2Pattern;
  std::vector<PreTokenizerStep> steps{
      Split{std::make_shared<const Regex>(options.pattern, RegexSyntax::Oniguruma, "--pattern")}};
  state_->pre_tokenizer = PreTokenizer(std::move(steps));
  state_->special = TokenFinder(std::move(special));
  state_->options = std::move(options);
}

BpeTrainer::~BpeTrainer() = default;

void BpeTrainer::add(std::string_view text) {
  std::string valid;
  if (find_malformed_utf8(text) != text.npos) text = valid = replace_malformed_utf8(text);
  std::string masked, word;
  PreTokenizer::Run run(state_->pre_tokenizer, [&](std::string_view piece) {
    word = piece;
    ++state_->counts[word];
  });
  state_->special.split(
      text,
      [&](std::string_view part) {
        run.split(part, mask_for_regex(part, masked) ? masked : part, true);
      },
      [](std::int32_t) {});
}

std::string BpeTrainer::finish() {
  const TrainBpeOptions& options = state_->options;
  require(!state_->counts.empty(), "there is no text to train a tokenizer on");
  // Ids: special tokens, then bytes by their characters' code points, then merges.
  std::vector<std::string> tokens = options.special_tokens;
  const auto first_byte = static_cast<Id>(tokens.size());
  std::vector<std::string> alphabet = byte_characters();
  std::ranges::sort(alphabet, {}, [](const std::string& c) { return code_point_at(c, 0); });
  std::vector<Id> id_of_byte(256);
  for (std::size_t i = 0; i < alphabet.size(); ++i) {
    std::string byte;
    bytes_of_characters(alphabet[i], byte);
    id_of_byte[static_cast<unsigned char>(byte[0])] = first_byte + static_cast<Id>(i);
    tokens.push_back(alphabet[i]);
  }
  std::vector<Word> words;
  words.reserve(state_->counts.size());
  for (const auto& [text, count] : state_->counts) {
    Word word{.ids = {}, .count = count};
    for (const char c : text) word.ids.push_back(id_of_byte[static_cast<unsigned char>(c)]);
    words.push_back(std::move(word));
  }
  state_->counts.clear();

  Merger merger(std::move(words));
  nlohmann::ordered_json merges = nlohmann::ordered_json::array();
  std::unordered_map<std::string, Id> ids;
  for (std::size_t i = 0; i < tokens.size(); ++i) ids.emplace(tokens[i], static_cast<Id>(i));
  while (std::ssize(tokens) < options.vocab_size) {
    const Entry best = merger.top();
    if (best.count < std::max<std::int64_t>(options.min_count, 1)) break;
    const std::string& left = tokens[best.pair >> 32];
    const std::string& right = tokens[best.pair & 0xFFFFFFFFU];
    merges.push_back(left + " " + right);  // read by all versions
    const auto [entry, is_new] = ids.emplace(left + right, static_cast<Id>(tokens.size()));
    if (is_new) tokens.push_back(entry->first);
    merger.merge(best.pair, entry->second);
    if (options.progress && tokens.size() % 256 == 0) options.progress(std::ssize(tokens));
  }

  nlohmann::ordered_json added = nlohmann::ordered_json::array();
  for (std::size_t i = 0; i < options.special_tokens.size(); ++i)
    added.push_back(added_token(i, options.special_tokens[i]));
  nlohmann::ordered_json vocabulary = nlohmann::ordered_json::object();
  auto& entries = vocabulary.get_ref<nlohmann::ordered_json::object_t&>();
  // Not by operator[], which searches all entries.
  for (std::size_t i = 0; i < tokens.size(); ++i) entries.emplace_back(tokens[i], i);
  const nlohmann::ordered_json byte_level{{"type", "ByteLevel"},
                                          {"add_prefix_space", false},
                                          {"trim_offsets", true},
                                          {"use_regex", false}};
  const nlohmann::ordered_json split{{"type", "Split"},
                                     {"pattern", {{"Regex", options.pattern}}},
                                     {"behavior", "Isolated"},
                                     {"invert", false}};
  const nlohmann::ordered_json json{
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens", added},
      {"normalizer", nullptr},
      {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {split, byte_level}}}},
      {"post_processor", nullptr},
      {"decoder", byte_level},
      {"model",
       {{"type", "BPE"},
        {"dropout", nullptr},
        {"unk_token", nullptr},
        {"continuing_subword_prefix", nullptr},
        {"end_of_word_suffix", nullptr},
        {"fuse_unk", false},
        {"byte_fallback", false},
        {"ignore_merges", false},
        {"vocab", std::move(vocabulary)},
        {"merges", std::move(merges)}}}};
  return json.dump(1) + "\n";
}

}  // namespace tessera::io
