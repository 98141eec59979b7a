#include "io/hf/family.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/error.h"
#include "io/hf/decoder_config.h"
#include "io/hf/decoder_family.h"
#include "io/hf/gpt2_config.h"
#include "io/hf/lora.h"

namespace tessera::io {
namespace {

// Layers of a decoder's block, in the order in which the classes of transformers define them.
constexpr std::array<std::string_view, 17> kBlockOrder = {"self_attn.q_proj",
                                                          "self_attn.k_proj",
                                                          "self_attn.v_proj",
                                                          "self_attn.o_proj",
                                                          "self_attn.qkv_proj",
                                                          "self_attn.q_norm",
                                                          "self_attn.k_norm",
                                                          "mlp.gate_proj",
                                                          "mlp.up_proj",
                                                          "mlp.gate_up_proj",
                                                          "mlp.fc1",
                                                          "mlp.fc2",
                                                          "mlp.down_proj",
                                                          "input_layernorm",
                                                          "post_attention_layernorm",
                                                          "pre_feedforward_layernorm",
                                                          "post_feedforward_layernorm"};

// Place of a name among those of its block; kBlockOrder.size() if it has none.
std::size_t place_in_block(std::string_view layer) {
  const std::string_view module = layer.substr(0, layer.rfind('.'));
  return static_cast<std::size_t>(std::ranges::find(kBlockOrder, module) - kBlockOrder.begin());
}

}  // namespace

bool HfFamily::is_buffer(std::string_view tensor) {
  return tensor.ends_with(".attn.bias") || tensor.ends_with(".attn.masked_bias") ||
         tensor.ends_with("rotary_emb.inv_freq");
}

const std::vector<HfFamily>& hf_families() {
  static const std::vector<HfFamily> kFamilies = [] {
    std::vector<HfFamily> list = {
        {"gpt2", "gpt2", "transformer.", gpt2_config_from_hf, gpt2_config_to_hf, gpt2_tensors}};
    for (const DecoderFamily& family : decoder_families())
      list.push_back({family.name, family.model_type, "model.", decoder_config_from_hf,
                      decoder_config_to_hf, decoder_tensors});
    return list;
  }();
  return kFamilies;
}

std::vector<TensorInfo> model_tensors(const Json& model) {
  const std::string arch = model.is_object() ? model.value("arch", std::string()) : "";
  const HfFamily* const family = find_hf_family(arch);
  require<Unsupported>(family != nullptr, "tessera has no models of arch \"{}\"", arch);
  if (model.contains("lora")) return lora_tensors(model);
  std::vector<TensorInfo> tensors;
  for (HfTensor& tensor : family->tensors(model)) tensors.push_back(std::move(tensor.info));
  return tensors;
}

std::vector<std::string> parameter_order(const std::vector<std::string>& names) {
  constexpr std::string_view kLayers = "layers.";
  std::vector<std::string> ordered;
  std::vector<std::pair<std::size_t, std::string>> block;  // place, name
  std::string_view number;                                 // of the block
  const auto end_block = [&] {
    std::ranges::stable_sort(block, {}, [](const auto& each) { return each.first; });
    for (auto& each : block) ordered.push_back(std::move(each.second));
    block.clear();
  };
  for (const std::string& name : names) {
    const std::size_t at = name.find(kLayers);
    if (at == std::string::npos) {
      end_block();
      ordered.push_back(name);
      continue;
    }
    const std::size_t begin = at + kLayers.size(), end = name.find('.', begin);
    const std::string_view found = std::string_view(name).substr(begin, end - begin);
    const std::size_t place = place_in_block(std::string_view(name).substr(end + 1));
    if (place == kBlockOrder.size()) return {};
    if (found != number) end_block();
    number = found;
    block.emplace_back(place, name);
  }
  end_block();
  return ordered;
}

std::vector<std::string> parameters_of(const HfFamily& family, const Json& model) {
  std::vector<std::string> names;
  for (const HfTensor& tensor : family.tensors(model))
    for (const HfTensor::Part& part : tensor.parts) names.push_back(part.name);
  return parameter_order(names);
}

const HfFamily* find_hf_family(std::string_view name) {
  const auto found = std::ranges::find(hf_families(), name, &HfFamily::name);
  return found == hf_families().end() ? nullptr : &*found;
}

const HfFamily* hf_family_of(const Json& config) {
  if (!config.is_object()) return nullptr;
  const auto type = config.find("model_type");
  if (type == config.end() || !type->is_string()) return nullptr;
  const auto found =
      std::ranges::find(hf_families(), type->get_ref<const std::string&>(), &HfFamily::model_type);
  return found == hf_families().end() ? nullptr : &*found;
}

}  // namespace tessera::io
