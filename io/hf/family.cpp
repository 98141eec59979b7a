#include "io/hf/family.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/hf/decoder_config.h"
#include "io/hf/decoder_family.h"
#include "io/hf/gpt2_config.h"
#include "io/hf/lora.h"

namespace tessera::io {

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
