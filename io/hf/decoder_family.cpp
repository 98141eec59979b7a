#include "io/hf/decoder_family.h"

#include <algorithm>

namespace tessera::io {
namespace {

using Layers = DecoderWindows::Layers;

constexpr DecoderFamily kGemma{.name = "gemma",
                               .model_type = "gemma",
                               .architecture = "GemmaForCausalLM",
                               .head_dim = 256,
                               .tied = true,
                               .norm_offset = 1.0,
                               .scales_embedding = true,
                               .mlp = "geglu",
                               .activation = "gelu_pytorch_tanh",
                               .activation_alias = "gelu",  // in the first configurations
                               .second_activation_key = "hidden_activation"};

constexpr DecoderFamily gemma2() {
  DecoderFamily family = kGemma;
  family.name = family.model_type = "gemma2";
  family.architecture = "Gemma2ForCausalLM";
  family.kv_heads = 4;
  family.post_norm = true;
  family.activation_alias = "";
  family.activation_key = "hidden_activation";
  family.second_activation_key = nullptr;
  family.query_scalar = 256;
  family.attention_softcap = 50;
  family.logits_softcap = 30;
  family.windows = {
      .layers = Layers::AllButEvery, .size = 4096, .full_every = 2, .needs_size = true};
  return family;
}

constexpr DecoderFamily gemma3() {
  DecoderFamily family = gemma2();
  family.name = "gemma3";
  family.model_type = "gemma3_text";
  family.architecture = "Gemma3ForCausalLM";
  family.qk_norm = "head";
  family.attention_softcap = {};  // the class ignores the setting
  family.logits_softcap = 0;
  family.windows.full_every = 6;
  family.windows.full_every_key = "sliding_window_pattern";
  family.rope_theta = 1e6;
  family.has_two_ropes = true;
  family.local_theta = 10'000;
  return family;
}

constexpr DecoderFamily kQwen3{.name = "qwen3",
                               .model_type = "qwen3",
                               .architecture = "Qwen3ForCausalLM",
                               .head_dim = 128,
                               .qk_norm = "head",
                               .windows = {.layers = Layers::Last, .size = 4096, .has_flag = true}};

constexpr DecoderFamily kOlmo2{.name = "olmo2",
                               .model_type = "olmo2",
                               .architecture = "Olmo2ForCausalLM",
                               .eps = 1e-5,
                               .pre_norm = false,
                               .post_norm = true,
                               .qk_norm = "all"};

constexpr DecoderFamily olmo3() {
  DecoderFamily family = kOlmo2;
  family.name = family.model_type = "olmo3";
  family.architecture = "Olmo3ForCausalLM";
  family.windows = {
      .layers = Layers::AllButEvery, .size = 4096, .full_every = 4, .needs_size = true};
  family.rope_theta = 500'000;
  family.has_two_ropes = true;
  return family;
}

constexpr DecoderFamily kDecoders[] = {
    {.name = "llama",
     .model_type = "llama",
     .architecture = "LlamaForCausalLM",
     .writes_mlp_bias = true},
    {.name = "mistral",
     .model_type = "mistral",
     .architecture = "MistralForCausalLM",
     .kv_heads = 8,
     .windows = {.layers = Layers::All, .size = 4096}},
    {.name = "qwen2",
     .model_type = "qwen2",
     .architecture = "Qwen2ForCausalLM",
     .always_qkv_bias = true,
     .windows = kQwen3.windows},
    kQwen3,
    kGemma,
    gemma2(),
    gemma3(),
    {.name = "phi3",
     .model_type = "phi3",
     .architecture = "Phi3ForCausalLM",
     .eps = 1e-5,
     .fused = true,
     .windows = {.layers = Layers::All, .has_list = false},
     .original_positions = 4096},
    kOlmo2,
    olmo3(),
    {.name = "smollm3",
     .model_type = "smollm3",
     .architecture = "SmolLM3ForCausalLM",
     .kv_heads = 4,
     .tied = true,
     .writes_mlp_bias = true,
     .windows = {.layers = Layers::Rotary, .has_flag = true},
     .rope_theta = 2e6,
     .skips_rotary = true},
    {.name = "mixtral",
     .model_type = "mixtral",
     .architecture = "MixtralForCausalLM",
     .kv_heads = 8,
     .eps = 1e-5,
     .experts = {.module = "block_sparse_moe",
                 .gate = "w1",
                 .up = "w3",
                 .down = "w2",
                 .count_key = "num_local_experts",
                 .count = 8,
                 .per_token = 2,
                 .renormalizes = true,
                 .aux_loss = 0.001},
     .windows = {.layers = Layers::All, .has_list = false},
     .rope_theta = 1e6},
    {.name = "qwen3_moe",
     .model_type = "qwen3_moe",
     .architecture = "Qwen3MoeForCausalLM",
     .kv_heads = 4,
     .qk_norm = "head",
     .experts =
         {.count = 128, .per_token = 8, .inner = 768, .has_dense_layers = true, .aux_loss = 0.001},
     .windows = {.layers = Layers::All, .size = 4096, .has_flag = true, .has_list = false}},
    {.name = "olmoe",
     .model_type = "olmoe",
     .architecture = "OlmoeForCausalLM",
     .eps = 1e-5,
     .qk_norm = "all",
     .experts = {.count = 64, .per_token = 8, .aux_loss = 0.01}},
    {.name = "nanochat",
     .model_type = "nanochat",
     .architecture = "NanoChatForCausalLM",
     .norm = "plain_rms",
     .qk_norm = "head",
     .qk_norm_after_rotary = true,
     .embedding_norm = true,
     .mlp = "relu_squared",
     .activation = "relu2",
     .logits_softcap = 15,
     .reverse_rotary = true}};

const DecoderFamily* find(std::string_view key, std::string_view DecoderFamily::*field) {
  const auto* const found = std::ranges::find(kDecoders, key, field);
  return found == std::end(kDecoders) ? nullptr : found;
}

}  // namespace

std::span<const DecoderFamily> decoder_families() { return kDecoders; }

const DecoderFamily* find_decoder_family(std::string_view name) {
  return find(name, &DecoderFamily::name);
}

const DecoderFamily* decoder_family_of_type(std::string_view model_type) {
  return find(model_type, &DecoderFamily::model_type);
}

}  // namespace tessera::io
