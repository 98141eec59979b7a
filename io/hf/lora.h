#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/hf/model_source.h"
#include "io/source/sharded_source.h"

namespace tessera::io {

/// A layer that LoRA can adapt: outputs [first, first + count) of a linear layer of a block. It is a
/// module of its own at Hugging Face.
struct LoraLayer {
  std::string layer;     ///< of tessera: "layers.0.attention.qkv"
  std::string name;      ///< of its adapter: "lora_q_proj"
  std::string hf_layer;  ///< "model.layers.0.self_attn.q_proj"
  std::int64_t first = 0, count = 0, in = 0;
  bool in_out = false;  ///< the weight is [in, out], else [out, in]

  std::string weight() const { return layer + ".weight"; }
  std::string a() const { return layer + "." + name + ".A"; }
  std::string b() const { return layer + "." + name + ".B"; }
  /// Name in PEFT's files. @param which  'A' or 'B'
  std::string peft_name(char which) const;
};

/// The layers of a "model" section that targets choose.
/// @param targets  each the end of a module's path at Hugging Face from a dot on ("q_proj"), a
///   pattern of a whole path ("model.layers.1?.mlp.*"), or "all-linear"
/// @throws InvalidArgument if a target matches no layer, with the names that there are
std::vector<LoraLayer> lora_layers(const Json& model, const std::vector<std::string>& targets);

/// The layers of the adapters in a "model" section with "lora". @throws CorruptCheckpoint
std::vector<LoraLayer> lora_layers(const Json& model);
/// Their tensors, under tessera's names.
std::vector<TensorInfo> lora_tensors(const Json& model);

/// Whether a directory holds an adapter in PEFT's format.
bool is_peft(const fs::path& dir);

/// The tensors of an adapter in PEFT's format, under its names. @throws as open_sharded
std::unique_ptr<ShardedSource> open_peft_tensors(const fs::path& dir);

/// The tensors and the configuration of an adapter of PEFT.
struct PeftTensors {
  fs::path config_file;  ///< adapter_config.json
  std::shared_ptr<const Json> config;
  std::shared_ptr<const ShardedSource> source;
  std::map<std::string, TensorInfo> tensors;  ///< by name in PEFT's files; as in `source`
};
/// Reads a directory in PEFT's format. @throws as open_sharded
PeftTensors read_peft(const fs::path& dir);

/// An adapter in PEFT's format.
struct PeftAdapter {
  std::int64_t rank = 0;                 ///< 0: not the same in all layers
  double alpha = 0;                      ///< of that rank; 0: not the same in all layers
  std::unique_ptr<TensorSource> source;  ///< tensors A and B under tessera's names
  std::vector<LoraLayer> layers;         ///< that have tensors
  std::vector<double> scales;            ///< of the layers' terms
  std::vector<std::string> targets;      ///< for the "lora" section
};
/// @param model  "model" section of the base
/// @throws Unsupported naming a setting or tensor that tessera lacks; CorruptCheckpoint,
///         InvalidArgument on a layer that the model has not
PeftAdapter open_peft(const PeftTensors& tensors, const Json& model);
PeftAdapter open_peft(const fs::path& dir, const Json& model);

/// adapter_config.json of a "model" section with "lora".
Json peft_config(const Json& model);

/// The model of an adapter's base with the adapter merged into it.
/// @param base  MODEL of the base; empty: the adapter's own source if it has the base's weights and
///              a config.json, else the model that the configuration names
/// @throws as open_model and open_peft
std::unique_ptr<ModelSource> open_merged(const PeftTensors& adapter, const fs::path& base);

/// A model whose weights are those of `base` plus those of adapters, as they are read.
/// @param adapters  tensors A and B of the layers; read here
/// @param reader    checkpoint of the adapters; null: none
std::unique_ptr<ModelSource> merge_lora(std::unique_ptr<ModelSource> base,
                                        const TensorSource& adapters,
                                        const std::vector<LoraLayer>& layers,
                                        const std::vector<double>& scales,
                                        const CheckpointReader* reader);

}  // namespace tessera::io
