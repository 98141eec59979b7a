// SentencePiece models, by libsentencepiece. Where possible, text is encoded by our own BPE, which gives the
// same ids 10 to 20 times faster.

#include <sentencepiece_processor.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/error.h"
#include "io/tokenizer/sentence_piece_model.h"
#include "io/tokenizer/unicode.h"

namespace tessera::io {
namespace {

class SentencePieceTokenizer final : public Tokenizer {
 public:
  explicit SentencePieceTokenizer(TokenizerFiles files) : files_(std::move(files)) {
    const auto status = model_.LoadFromSerializedProto(files_.content.at(kSentencePieceModel));
    require<CorruptCheckpoint>(status.ok(), "{}: not a SentencePiece model: {}",
                               files_.path(kSentencePieceModel), status.ToString());
    if (const auto model = parse_sentence_piece_model(files_.content.at(kSentencePieceModel))) {
      if (auto parts = sentence_piece_pipeline(*model))
        bpe_ = make_pipeline_tokenizer(*std::move(parts));
    }
    bos_id_ = model_.bos_id();
    eos_id_ = model_.eos_id();
    // As Hugging Face's tokenizers of such models do.
    if (bos_id_ >= 0) prefix_ = {bos_id_};
    const auto id_of = [&](const std::string& text) {
      const int id = model_.PieceToId(text);
      return model_.IsUnknown(id) ? -1 : id;
    };
    read_special_ids(files_, id_of, bos_id_, eos_id_);
  }

  std::string_view kind() const override { return "sentencepiece"; }
  std::int64_t vocab_size() const override { return model_.GetPieceSize(); }
  std::vector<std::int32_t> prefix() const override { return prefix_; }
  std::int32_t bos_id() const override { return bos_id_; }
  std::int32_t eos_id() const override { return eos_id_; }
  const TokenizerFiles* files() const override { return &files_; }
  std::string to_json() const override { return tokenizer_files_to_json(files_); }

  std::vector<SpecialToken> special_tokens() const override {
    std::vector<SpecialToken> tokens;
    for (int id = 0; id < model_.GetPieceSize(); ++id)
      if (model_.IsControl(id)) tokens.push_back({id, model_.IdToPiece(id)});
    return tokens;
  }
  std::vector<std::int32_t> encode(std::string_view text, std::string_view name) const override {
    if (bpe_ && find_malformed_utf8(text) == text.npos) return bpe_->encode(text, name);
    std::vector<int> ids;
    const auto status = model_.Encode({text.data(), text.size()}, &ids);
    require(status.ok(), "{}: {}", name, status.ToString());
    return ids;
  }
  std::string decode(std::span<const std::int32_t> ids) const override {
    for (const std::int32_t id : ids)
      require(id >= 0 && id < vocab_size(), "token id {} is outside the vocabulary of {} entries",
              id, vocab_size());
    std::string text;
    const auto status = model_.Decode(std::vector<int>(ids.begin(), ids.end()), &text);
    require<InternalError>(status.ok(), "sentencepiece: {}", status.ToString());
    return text;
  }

 private:
  TokenizerFiles files_;
  sentencepiece::SentencePieceProcessor model_;
  TokenizerPtr bpe_;  // null if it would not give the same ids
  std::vector<std::int32_t> prefix_;
  std::int32_t bos_id_ = -1, eos_id_ = -1;
};

}  // namespace

TokenizerPtr make_sentencepiece_tokenizer(TokenizerFiles files) {
  return std::make_shared<SentencePieceTokenizer>(std::move(files));
}

}  // namespace tessera::io
