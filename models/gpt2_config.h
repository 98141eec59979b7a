#pragma once

#include <cstdint>

namespace tessera::models {

/// Shape of a GPT-2. Defaults: the 124M model.
struct Gpt2Config {
  std::int64_t n_layer = 12;
  std::int64_t n_head = 12;
  std::int64_t n_embd = 768;        ///< C; a multiple of n_head
  std::int64_t vocab_size = 50257;  ///< V
  std::int64_t seq_len = 1024;      ///< P: positions, in tokens
  double layer_norm_eps = 1e-5;
  float dropout = 0.0F;  ///< on the embedding and on both residual branches; in [0, 1)

  /// @throws InvalidArgument naming the value that does not fit
  void validate() const;
  /// Number of weights; the head shares the embedding's.
  std::int64_t parameter_count() const;
};

}  // namespace tessera::models
