#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::io {

struct TrainBpeOptions {
  /// Ids, the special tokens and the 256 bytes included.
  std::int64_t vocab_size = 32768;
  /// Pattern that splits text into words, in Oniguruma's syntax; empty: GPT-2's.
  std::string pattern = {};
  std::vector<std::string> special_tokens = {"<|endoftext|>"};
  /// Pairs that occur less often are not merged.
  std::int64_t min_count = 2;
  /// Called now and then with the number of ids so far; may be empty.
  std::function<void(std::int64_t)> progress = {};
};

/// Learns a byte-level BPE vocabulary. Depends on nothing but the text and the options: merges the most
/// frequent pair, of several the one with the smallest ids, as Hugging Face's BpeTrainer does.
class BpeTrainer {
 public:
  /// @throws InvalidArgument, Unsupported on options that do not fit
  explicit BpeTrainer(TrainBpeOptions options);
  ~BpeTrainer();
  BpeTrainer(const BpeTrainer&) = delete;
  BpeTrainer& operator=(const BpeTrainer&) = delete;

  /// Counts the words of a text. Special tokens in it are left out.
  void add(std::string_view text);
  /// A tokenizer.json for Hugging Face's tokenizers. Its vocabulary is smaller than asked for if no pair
  /// occurs often enough. @throws InvalidArgument if there was no text
  std::string finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::io
