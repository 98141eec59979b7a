#include "models/arch.h"

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/json.h"
#include "models/language_model.h"

namespace tessera::models {

void Arch::validate() const {
  constexpr std::int64_t kMax = std::int64_t{1} << 31;
  const auto positive = [](const char* name, std::int64_t value) {
    require(value > 0 && value < kMax, "model.{} must be in 1..2^31-1, got {}", name, value);
  };
  positive("n_layer", n_layer);
  require(n_layer <= 10'000, "model.n_layer is {}; at most 10000 are accepted", n_layer);
  positive("n_head", n_head);
  positive("n_embd", n_embd);
  positive("vocab_size", vocab_size);
  positive("seq_len", seq_len);
  require(n_embd % n_head == 0, "model.n_embd {} is not divisible by model.n_head {}", n_embd,
          n_head);
  require(layer_norm_eps > 0, "model.layer_norm_eps must be above 0, got {}", layer_norm_eps);
  require(dropout >= 0.0F && dropout < 1.0F, "model.dropout must be in [0, 1), got {}", dropout);
}

std::string to_json(const Arch& arch) {
  return io::Json{{"arch", arch.family},
                  {"n_layer", arch.n_layer},
                  {"n_head", arch.n_head},
                  {"n_embd", arch.n_embd},
                  {"vocab_size", arch.vocab_size},
                  {"seq_len", arch.seq_len},
                  {"layer_norm_eps", arch.layer_norm_eps},
                  {"dropout", arch.dropout}}
      .dump();
}

Arch parse_arch(const std::string& text, const std::string& source) {
  const io::Json json = io::parse_json(text, source);
  const io::JsonReader reader(json, source);
  Arch arch;
  arch.family = reader.at("arch").string();
  require_family(arch.family, source + ": model.arch");
  const auto number = [&](const char* key) {
    const io::Json& value = reader.at(key).value();
    require<CorruptCheckpoint>(value.is_number(), "{}: {} must be a number", source, key);
    return value.get<double>();
  };
  arch.n_layer = reader.at("n_layer").integer(1);
  arch.n_head = reader.at("n_head").integer(1);
  arch.n_embd = reader.at("n_embd").integer(1);
  arch.vocab_size = reader.at("vocab_size").integer(1);
  arch.seq_len = reader.at("seq_len").integer(1);
  arch.layer_norm_eps = number("layer_norm_eps");
  arch.dropout = static_cast<float>(number("dropout"));
  try {
    arch.validate();
  } catch (const InvalidArgument& error) {
    throw CorruptCheckpoint("{}: {}", source, error.what());
  }
  return arch;
}

}  // namespace tessera::models
