#include "io/hf/tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/hf/decoder_family.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kMaxLayers = 10'000, kMaxSize = std::int64_t{1} << 31;

std::int64_t size_of(const Json& model, const char* key) {
  const auto found = model.find(key);
  require(found != model.end() && found->is_number_integer(),
          "the model section lacks {}, or it is not an integer", key);
  const auto value = found->get<std::int64_t>();
  require(value > 0 && value < kMaxSize, "the model section's {} must be in 1..2^31-1, got {}", key,
          value);
  return value;
}

std::int64_t layers_of(const Json& model) {
  const std::int64_t layers = size_of(model, "n_layer");
  require(layers <= kMaxLayers, "n_layer is {}; at most {} are accepted", layers, kMaxLayers);
  return layers;
}

std::string text_of(const Json& object, const char* key, const char* missing) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : missing;
}

bool flag_of(const Json& model, const char* key, bool missing) {
  const auto found = model.find(key);
  return found != model.end() && found->is_boolean() ? found->get<bool>() : missing;
}

// Experts of a "model" section: of each layer, or none.
struct Experts {
  std::int64_t count = 0, inner = 0;
  std::vector<std::int64_t> dense_layers;

  explicit Experts(const Json& model) {
    const auto found = model.find("experts");
    if (found == model.end() || !found->is_object()) return;
    count = size_of(*found, "count");
    require(count <= kMostExperts, "the model section has {} experts; at most {} are accepted",
            count, kMostExperts);
    inner = found->contains("inner") ? size_of(*found, "inner") : size_of(model, "n_inner");
    for (const Json& layer : found->value("dense_layers", Json::array())) {
      require(layer.is_number_integer(), "the model section's dense_layers must be numbers, got {}",
              layer.dump());
      dense_layers.push_back(layer.get<std::int64_t>());
    }
  }
  bool are_in(std::int64_t layer) const {
    return count > 0 && std::ranges::find(dense_layers, layer) == dense_layers.end();
  }
};

using Part = HfTensor::Part;

class Tensors {
 public:
  HfTensor& add(const std::string& name, Shape shape, std::vector<Part> parts) {
    return list_.emplace_back(HfTensor{{name, shape, DType::F32}, std::move(parts)});
  }
  HfTensor& add(const std::string& name, const Shape& shape, const std::string& theirs) {
    return add(name, shape, {{theirs, shape[0]}});
  }
  std::vector<HfTensor> take() { return std::move(list_); }

 private:
  std::vector<HfTensor> list_;
};

}  // namespace

std::vector<HfTensor> gpt2_tensors(const Json& model) {
  const std::int64_t width = size_of(model, "n_embd");
  Tensors tensors;
  const auto add = [&](const std::string& name, const Shape& shape) -> HfTensor& {
    return tensors.add(name, shape, "transformer." + name);
  };
  const auto add_layer = [&](const std::string& name, const Shape& weight, std::int64_t bias) {
    HfTensor& tensor = add(name + ".weight", weight);
    tensor.is_linear = tensor.in_out = weight.size() == 2;
    add(name + ".bias", {bias});
  };
  add("wte.weight", {size_of(model, "vocab_size"), width});
  add("wpe.weight", {size_of(model, "seq_len"), width});
  const std::int64_t layers = layers_of(model);
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    const std::string block = fmt::format("h.{}.", layer);
    add_layer(block + "ln_1", {width}, width);
    add_layer(block + "attn.c_attn", {width, 3 * width}, 3 * width);
    add_layer(block + "attn.c_proj", {width, width}, width);
    add_layer(block + "ln_2", {width}, width);
    add_layer(block + "mlp.c_fc", {width, 4 * width}, 4 * width);
    add_layer(block + "mlp.c_proj", {4 * width, width}, width);
  }
  add_layer("ln_f", {width}, width);
  return tensors.take();
}

std::vector<HfTensor> decoder_tensors(const Json& model) {
  const DecoderFamily* const family = find_decoder_family(text_of(model, "arch", ""));
  require(family != nullptr, "the model section has arch \"{}\", which has no known tensors",
          text_of(model, "arch", ""));
  const std::int64_t width = size_of(model, "n_embd"), heads = size_of(model, "n_head");
  const std::int64_t kv_heads = size_of(model, "n_kv_head"), dim = size_of(model, "head_dim");
  const std::int64_t hidden = size_of(model, "n_inner"), vocab = size_of(model, "vocab_size");
  const std::int64_t q = heads * dim, kv = kv_heads * dim;
  const bool qkv_bias = flag_of(model, "qkv_bias", true);
  const bool out_bias = flag_of(model, "out_bias", true);
  const bool mlp_bias = flag_of(model, "mlp_bias", true);
  const bool pre_norm = flag_of(model, "pre_norm", true);
  const bool post_norm = flag_of(model, "post_norm", false);
  const bool has_norms = text_of(model, "norm", "layer") != "plain_rms";
  const std::string mlp = text_of(model, "mlp", "gelu");
  const bool gated = mlp == "swiglu" || mlp == "geglu", fused = family->fused;

  const Experts experts(model);
  const DecoderExperts& expert_names = family->experts;
  // PEFT takes the layers of a dense MLP for experts, if the model has any.
  const bool adapts = experts.count == 0;

  // Names of the norm before the MLP: with norms after attention, its usual name is taken.
  const char* const mlp_norm = post_norm ? "pre_feedforward_layernorm" : "post_attention_layernorm";
  std::vector<std::int64_t> norm_widths;  // of queries and keys
  if (const auto norm = model.find("qk_norm");
      norm != model.end() && norm->is_object() && text_of(*norm, "kind", "rms") == "rms") {
    const bool all = text_of(*norm, "over", "none") == "all";
    norm_widths = {all ? q : dim, all ? kv : dim};
  }

  Tensors tensors;
  tensors.add("embed.weight", {vocab, width}, "model.embed_tokens.weight");
  const std::int64_t layers = layers_of(model);
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    const std::string ours = fmt::format("layers.{}.", layer);
    const std::string theirs = fmt::format("model.layers.{}.", layer);
    const auto add_norm = [&](bool is_there, const char* name, const char* hf_name) {
      if (is_there && has_norms)
        tensors.add(ours + name + ".weight", {width}, theirs + hf_name + ".weight");
    };
    // `parts` of a linear layer: names and rows.
    const auto add_linear = [&](const std::string& name, std::int64_t in, bool bias,
                                std::vector<Part> parts, bool is_adaptable = true) {
      std::int64_t out = 0;
      for (const Part& part : parts) out += part.rows;
      std::vector<Part> biases = parts;
      for (Part& part : parts) part.name = theirs + part.name + ".weight";
      for (Part& part : biases) part.name = theirs + part.name + ".bias";
      tensors.add(ours + name + ".weight", {out, in}, std::move(parts)).is_linear = is_adaptable;
      if (bias) tensors.add(ours + name + ".bias", {out}, std::move(biases));
    };

    add_norm(pre_norm, "attention_norm", "input_layernorm");
    if (fused)
      add_linear("attention.qkv", width, qkv_bias, {{"self_attn.qkv_proj", q + 2 * kv}});
    else
      add_linear("attention.qkv", width, qkv_bias,
                 {{"self_attn.q_proj", q}, {"self_attn.k_proj", kv}, {"self_attn.v_proj", kv}});
    add_linear("attention.out", q, out_bias, {{"self_attn.o_proj", width}});
    if (!norm_widths.empty()) {
      tensors.add(ours + "attention.q_norm.weight", {norm_widths[0]},
                  theirs + "self_attn.q_norm.weight");
      tensors.add(ours + "attention.k_norm.weight", {norm_widths[1]},
                  theirs + "self_attn.k_norm.weight");
    }
    add_norm(post_norm, "post_attention_norm", "post_attention_layernorm");
    add_norm(pre_norm, "mlp_norm", mlp_norm);
    if (experts.are_in(layer)) {
      const std::string module(expert_names.module);
      add_linear("mlp.router", width, false, {{module + ".gate", experts.count}}, false);
      for (std::int64_t i = 0; i < experts.count; ++i) {
        const std::string expert = fmt::format("mlp.experts.{}.", i);
        const auto part = [&](std::string_view name, std::int64_t rows) {
          return Part{fmt::format("{}.experts.{}.{}", module, i, name), rows};
        };
        add_linear(expert + "up", width, false,
                   {part(expert_names.gate, experts.inner), part(expert_names.up, experts.inner)},
                   false);
        add_linear(expert + "down", experts.inner, false, {part(expert_names.down, width)}, false);
      }
    } else if (!gated) {
      add_linear("mlp.up", width, mlp_bias, {{"mlp.fc1", hidden}}, adapts);
      add_linear("mlp.down", hidden, mlp_bias, {{"mlp.fc2", width}}, adapts);
    } else {
      if (fused)
        add_linear("mlp.up", width, mlp_bias, {{"mlp.gate_up_proj", 2 * hidden}}, adapts);
      else
        add_linear("mlp.up", width, mlp_bias, {{"mlp.gate_proj", hidden}, {"mlp.up_proj", hidden}},
                   adapts);
      add_linear("mlp.down", hidden, mlp_bias, {{"mlp.down_proj", width}}, adapts);
    }
    add_norm(post_norm, "post_mlp_norm", "post_feedforward_layernorm");
  }
  if (has_norms) tensors.add("norm.weight", {width}, "model.norm.weight");
  if (!flag_of(model, "tied", true)) tensors.add("head.weight", {vocab, width}, "lm_head.weight");
  return tensors.take();
}

}  // namespace tessera::io
