#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "core/nn/experts.h"
#include "core/nn/layers.h"
#include "models/language_model.h"

namespace tessera::models {

/// A block of a decoder, for training and decoding.
class DecoderBlock : public nn::Module {
 public:
  /// The layer's number is its place in the parent.
  DecoderBlock(nn::Module& parent, std::string_view name, const Arch& arch);
  /// @param x      [B, T, C]
  /// @param cache  for decoding; else null
  /// @param balance  return the use of experts
  /// @return       [B, T, C]; with `balance` and experts also their probabilities and counts, see
  ///   nn::Experts::Result, else undefined tensors
  std::array<Tensor, 3> operator()(const Tensor& x, nn::KvCache* cache, const Packing& packing,
                                   bool balance);

 private:
  std::optional<nn::Norm> attention_norm_;
  nn::Attention attention_;
  std::optional<nn::Norm> post_attention_norm_;
  nn::Dropout attention_dropout_;
  std::optional<nn::Norm> mlp_norm_;
  std::optional<nn::Mlp> mlp_;
  std::optional<nn::GatedMlp> gated_mlp_;
  std::optional<nn::Experts> experts_;
  std::optional<nn::Norm> post_mlp_norm_;
  nn::Dropout mlp_dropout_;
};

/// Every family of decoders: embedding, blocks, final norm, head.
///
/// Matrices of GPT-2's attention and MLP are stored [in, out], all others [out, in]. Queries, keys
/// and values are rows of one matrix, and so are gate and up.
class Decoder final : public LanguageModel {
 public:
  /// @throws InvalidArgument on a shape that does not fit
  explicit Decoder(const Arch& arch);

  Tensor loss(const Tensor& tokens, const Tensor& targets, double scale,
              const Packing& packing = {}) override;
  Tensor logits(const Tensor& tokens) override;
  Tensor features(const Tensor& tokens) override;
  Tensor logits_of(const Tensor& features) override;
  Tensor decode(const Tensor& tokens, nn::KvCache& cache) override;
  bool outgrows(std::int64_t past, std::int64_t count) const override;

 private:
  Tensor embedded(const Tensor& tokens, std::int64_t past, const Tensor& positions) const;
  /// Sums over layers with experts.
  struct Balance {
    Tensor probabilities, counts;
    std::int64_t layers = 0;
  };
  Tensor hidden(const Tensor& tokens, nn::KvCache* cache, const Packing& packing = {},
                Balance* balance = nullptr);
  Tensor balance_loss(const Balance& balance, std::int64_t tokens, double weight) const;
  nn::Module& head();
  const Tensor& head_weight() const;
  Tensor capped(const Tensor& logits) const;

  nn::Embedding embed_;
  std::optional<nn::Embedding> positions_;
  nn::Dropout dropout_;
  nn::List<DecoderBlock> blocks_;
  nn::Norm norm_;
  std::optional<nn::Linear> head_;
};

}  // namespace tessera::models
