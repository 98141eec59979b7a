#include "models/presets.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/hf/family.h"

namespace tessera::models {
namespace {

constexpr Preset kPresets[] = {
    {"gpt2-124m", "openai-community/gpt2",
     R"({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
         "n_positions": 1024, "resid_pdrop": 0.0, "eos_token_id": 50256})"},
    {"gpt2-355m", "openai-community/gpt2-medium",
     R"({"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50257,
         "n_positions": 1024, "resid_pdrop": 0.0, "eos_token_id": 50256})"},
    {"gpt2-774m", "openai-community/gpt2-large",
     R"({"model_type": "gpt2", "n_embd": 1280, "n_layer": 36, "n_head": 20, "vocab_size": 50257,
         "n_positions": 1024, "resid_pdrop": 0.0, "eos_token_id": 50256})"},
    {"gpt2-xl", "openai-community/gpt2-xl",
     R"({"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257,
         "n_positions": 1024, "resid_pdrop": 0.0, "eos_token_id": 50256})"},
    {"llama2-7b", "meta-llama/Llama-2-7b-hf",
     R"({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
         "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000,
         "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "bos_token_id": 1,
         "eos_token_id": 2})"},
    {"llama-1b", "meta-llama/Llama-3.2-1B",
     R"({"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
         "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072,
         "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": true,
         "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
         "bos_token_id": 128000, "eos_token_id": 128001})"},
    {"llama-3b", "meta-llama/Llama-3.2-3B",
     R"({"model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192,
         "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
         "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
         "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": true,
         "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
         "bos_token_id": 128000, "eos_token_id": 128001})"},
    {"llama-8b", "meta-llama/Llama-3.1-8B",
     R"({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
         "rope_theta": 500000.0,
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
         "bos_token_id": 128000, "eos_token_id": 128001})"},
    {"llama-70b", "meta-llama/Llama-3.1-70B",
     R"({"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
         "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
         "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
         "rope_theta": 500000.0,
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
         "bos_token_id": 128000, "eos_token_id": 128001})"},
    {"smollm2-135m", "HuggingFaceTB/SmolLM2-135M",
     R"({"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
         "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
         "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-05,
         "rope_theta": 100000.0, "tie_word_embeddings": true, "bos_token_id": 0,
         "eos_token_id": 0})"},
    {"smollm2-360m", "HuggingFaceTB/SmolLM2-360M",
     R"({"model_type": "llama", "hidden_size": 960, "intermediate_size": 2560,
         "num_hidden_layers": 32, "num_attention_heads": 15, "num_key_value_heads": 5,
         "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-05,
         "rope_theta": 100000.0, "tie_word_embeddings": true, "bos_token_id": 0,
         "eos_token_id": 0})"},
    {"smollm3-3b", "HuggingFaceTB/SmolLM3-3B-Base",
     R"({"model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008,
         "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
         "vocab_size": 128256, "max_position_embeddings": 65536, "rms_norm_eps": 1e-06,
         "rope_theta": 5000000.0, "tie_word_embeddings": true, "eos_token_id": 128001})"},
    {"mistral-7b", "mistralai/Mistral-7B-v0.1",
     R"({"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "vocab_size": 32000, "max_position_embeddings": 32768, "rms_norm_eps": 1e-05,
         "rope_theta": 10000.0, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2})"},
    {"qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B",
     R"({"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
         "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
         "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
         "rope_theta": 1000000.0, "tie_word_embeddings": true, "eos_token_id": 151643})"},
    {"qwen2.5-7b", "Qwen/Qwen2.5-7B",
     R"({"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
         "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
         "vocab_size": 152064, "max_position_embeddings": 131072, "rms_norm_eps": 1e-06,
         "rope_theta": 1000000.0, "eos_token_id": 151643})"},
    {"qwen3-0.6b", "Qwen/Qwen3-0.6B-Base",
     R"({"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
         "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768,
         "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": true,
         "eos_token_id": 151643})"},
    {"qwen3-8b", "Qwen/Qwen3-8B-Base",
     R"({"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
         "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768,
         "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "eos_token_id": 151643})"},
    {"gemma-2b", "google/gemma-2b",
     R"({"model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384,
         "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1,
         "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192,
         "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0})"},
    {"gemma-7b", "google/gemma-7b",
     R"({"model_type": "gemma", "hidden_size": 3072, "intermediate_size": 24576,
         "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16,
         "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192,
         "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0})"},
    {"gemma2-2b", "google/gemma-2-2b",
     R"({"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216,
         "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
         "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192,
         "sliding_window": 4096, "query_pre_attn_scalar": 256, "bos_token_id": 2,
         "eos_token_id": 1, "pad_token_id": 0})"},
    {"gemma3-1b", "google/gemma-3-1b-pt",
     R"({"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912,
         "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
         "head_dim": 256, "vocab_size": 262144, "max_position_embeddings": 32768,
         "sliding_window": 512, "query_pre_attn_scalar": 256, "bos_token_id": 2,
         "eos_token_id": 1, "pad_token_id": 0})"},
    {"phi3-mini", "microsoft/Phi-3-mini-4k-instruct",
     R"({"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
         "vocab_size": 32064, "max_position_embeddings": 4096, "sliding_window": 2047,
         "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000})"},
    {"olmo2-7b", "allenai/OLMo-2-1124-7B",
     R"({"model_type": "olmo2", "hidden_size": 4096, "intermediate_size": 11008,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
         "vocab_size": 100352, "max_position_embeddings": 4096, "rms_norm_eps": 1e-06,
         "rope_theta": 500000.0, "eos_token_id": 100257, "pad_token_id": 100277})"},
};

}  // namespace

std::span<const Preset> presets() { return kPresets; }

Arch arch_of_preset(std::string_view name) {
  const auto* const found = std::ranges::find(kPresets, name, &Preset::name);
  if (found == std::end(kPresets)) {
    std::string names;
    for (const Preset& preset : kPresets)
      names += (names.empty() ? "" : ", ") + std::string(preset.name);
    throw InvalidArgument("model.preset '{}' is unknown; there are {}", name, names);
  }
  const std::string source(found->source);
  const io::Json config = io::parse_json(found->config, source);
  const io::Json section = io::hf_family_of(config)->config_from_hf(config, source);
  return parse_arch(section.dump(), source);
}

}  // namespace tessera::models
