#include "models/gpt2_config.h"

#include "core/base/error.h"

namespace tessera::models {

void Gpt2Config::validate() const {
  constexpr std::int64_t kMax = std::int64_t{1} << 31;
  const auto positive = [](const char* name, std::int64_t value) {
    require(value > 0 && value < kMax, "model.{} must be in 1..2^31-1, got {}", name, value);
  };
  positive("n_layer", n_layer);
  positive("n_head", n_head);
  positive("n_embd", n_embd);
  positive("vocab_size", vocab_size);
  positive("seq_len", seq_len);
  require(n_embd % n_head == 0, "model.n_embd {} is not divisible by model.n_head {}", n_embd,
          n_head);
  require(layer_norm_eps > 0, "model.layer_norm_eps must be above 0, got {}", layer_norm_eps);
  require(dropout >= 0.0F && dropout < 1.0F, "model.dropout must be in [0, 1), got {}", dropout);
}

std::int64_t Gpt2Config::parameter_count() const {
  const std::int64_t c = n_embd;
  return (vocab_size + seq_len) * c + n_layer * (12 * c * c + 13 * c) + 2 * c;
}

}  // namespace tessera::models
