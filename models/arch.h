#pragma once

#include <cstdint>
#include <string>

namespace tessera::models {

/// Shape of a language model of a family. Defaults: GPT-2 124M.
struct Arch {
  std::string family = "gpt2";
  std::int64_t n_layer = 12;
  std::int64_t n_head = 12;
  std::int64_t n_embd = 768;        ///< C; a multiple of n_head
  std::int64_t vocab_size = 50257;  ///< V
  std::int64_t seq_len = 1024;      ///< P: positions, in tokens
  double layer_norm_eps = 1e-5;
  float dropout = 0.0F;  ///< on the embedding and on both residual branches; in [0, 1)

  std::int64_t head_dim() const { return n_embd / n_head; }
  /// @throws InvalidArgument naming the value that does not fit
  void validate() const;
};

/// JSON object of an Arch: {"arch": family, "n_layer": ...}.
std::string to_json(const Arch& arch);
/// Inverse of to_json(). @param source  named in errors
/// @throws CorruptCheckpoint naming source and field; Unsupported on a family not in this build
Arch parse_arch(const std::string& json, const std::string& source);

}  // namespace tessera::models
