#include "core/nn/lora.h"

#include <cmath>
#include <unordered_map>

#include "core/ops/elementwise.h"

namespace tessera::nn {
namespace {

// Standard deviation of a uniform distribution on [-1 / sqrt(in), 1 / sqrt(in)].
float kaiming_std(std::int64_t in) {
  return static_cast<float>(1.0 / std::sqrt(3.0 * static_cast<double>(in)));
}

void add_layers(Module& module, std::unordered_map<std::string, Linear*>& layers) {
  if (auto* const layer = dynamic_cast<Linear*>(&module)) layers.emplace(layer->path(), layer);
  for (Module* child : module.children()) add_layers(*child, layers);
}

}  // namespace

LoraAdapter::LoraAdapter(Linear& layer, std::string_view name, std::int64_t first_output,
                         std::int64_t count, const LoraOptions& options)
    : Module(layer, name),
      first(first_output),
      scale(options.scale),
      dropout(*this, "dropout", options.dropout),
      a(*this, "A", {options.rank, layer.inputs()},
        {Initialization::Kind::Uniform, kaiming_std(layer.inputs())}),
      b(*this, "B", {count, options.rank}, {Initialization::Kind::Zeros}) {}

ops::LowRankTerm LoraAdapter::term(const Tensor& x) const {
  return {ops::mul(ops::linear(dropout(x), a, {}), scale), b, first};
}

void add_lora(Module& model, const std::vector<LoraPlace>& places, const LoraOptions& options) {
  require(!places.empty(), "no layer gets a LoRA adapter");
  for (Parameter* p : model.parameters()) p->tensor.set_requires_grad(false);
  std::unordered_map<std::string, Linear*> layers;
  add_layers(model, layers);
  for (const LoraPlace& place : places) {
    const auto found = layers.find(place.layer);
    require(found != layers.end(), "a LoRA adapter is for '{}', which is no linear layer",
            place.layer);
    found->second->add_adapter(place.name, place.first, place.count, options);
  }
}

}  // namespace tessera::nn
