#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/nn/layers.h"
#include "models/arch.h"

namespace tessera::models {

/// Rows that hold several documents. Undefined tensors: each row is one document.
struct Packing {
  Tensor documents{};         ///< [B, T] i32: id of each token's document, ascending within a row
  Tensor positions{};         ///< [B, T] i32: positions within the documents
  std::int64_t targets = -1;  ///< targets that are not ignored; -1: all
};

/// A decoder of tokens: what training, evaluation and sampling need of a model.
class LanguageModel : public nn::Module {
 public:
  const Arch& arch() const { return arch_; }

  /// scale * sum of cross-entropies in nats. While operations are recorded, experts add their
  /// auxiliary loss (Arch::Experts::aux_loss) of these B T tokens, times scale and the number of
  /// targets: with a scale of 1 / (targets of the whole step), micro-batches on all ranks add up to
  /// their weighted mean.
  /// @param tokens   [B, T] i32, T <= seq_len
  /// @param targets  [B, T] i32, -1: ignored
  /// @param scale    e.g. 1 / (targets of the whole step)
  /// @param packing  attention does not cross documents, and learned positions are those given;
  ///   rotary embeddings depend on differences of positions alone
  /// @return         [1], f32. The root of backward; see ops::linear_cross_entropy.
  virtual Tensor loss(const Tensor& tokens, const Tensor& targets, double scale,
                      const Packing& packing = {}) = 0;

  /// @param tokens  [B, T] i32
  /// @return        [B, T, V], dtype of the parameters (all logits: for small models and tests)
  virtual Tensor logits(const Tensor& tokens) = 0;

  /// The logits in two parts, so that those of some positions need no memory for the others.
  /// @param tokens  [B, T] i32, T <= seq_len
  /// @return        [B, T, C], dtype of the parameters
  virtual Tensor features(const Tensor& tokens) = 0;
  /// @param features  [N, C], of any positions
  /// @return          [N, V], accumulator dtype. Not differentiable.
  virtual Tensor logits_of(const Tensor& features) = 0;

  /// Decoding: appends T new tokens to the cache and returns the logits of the last one.
  /// @param tokens  [B, T] i32; cache.past + T <= cache.capacity() <= seq_len
  /// @return        [B, V], accumulator dtype. Not differentiable.
  virtual Tensor decode(const Tensor& tokens, nn::KvCache& cache) = 0;

  /// Whether decode() of `count` more tokens would need other keys than those of `past` tokens in a
  /// cache, because a scaled rotary embedding changes at this length: decode the whole text again.
  virtual bool outgrows(std::int64_t past, std::int64_t count) const = 0;

 protected:
  /// @throws InvalidArgument on a shape that does not fit
  explicit LanguageModel(const Arch& arch) : arch_(arch) { arch_.validate(); }

 private:
  Arch arch_;
};

/// Names of the families in this build.
std::vector<std::string_view> families();
/// @param what  named in the error: "model.arch"
/// @throws Unsupported if this build has no such family
void require_family(const std::string& family, const std::string& what);

/// A model without memory for its parameters. With LoRA it has adapters, and the other weights are
/// frozen. @throws Unsupported, InvalidArgument
std::unique_ptr<LanguageModel> make_model(const Arch& arch);

}  // namespace tessera::models
