#include "io/hf/model_source.h"

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/checkpoint/find.h"
#include "io/gguf/header.h"
#include "io/hf/config.h"
#include "io/hf/family_source.h"
#include "io/hf/lora.h"
#include "io/hf/peft_state.h"
#include "io/source/find_sharded.h"
#include "io/source/open_sharded.h"
#include "io/source/other_formats.h"
#include "io/torch/rank_files.h"

namespace tessera::io {
namespace {

class CheckpointSource final : public ModelSource {
 public:
  CheckpointSource(const CheckpointReader& reader, LoadPolicy policy)
      : reader_(reader),
        weights_(reader_.source(kModelSection)),
        config_(Json::parse(reader_.index().model_config)) {
    if (policy == LoadPolicy::Exact)
      match_tensors(model_tensors(config_), tensors(), path().string());
  }
  const Json& config() const override { return config_; }
  const CheckpointReader* checkpoint() const override { return &reader_; }

  const fs::path& path() const override { return weights_.path(); }
  const std::vector<TensorInfo>& tensors() const override { return weights_.tensors(); }
  std::shared_ptr<const TensorRecord> record(const std::string& name) const override {
    return weights_.record(name);
  }
  File open_file(const std::string& name) const override { return weights_.open_file(name); }
  std::string title(const std::string& name) const override { return weights_.title(name); }

 private:
  CheckpointReader reader_;
  const TensorSource& weights_;
  const Json config_;
};

}  // namespace

bool has_lora(const CheckpointReader& reader) {
  const Json config = Json::parse(reader.index().model_config);
  return config.is_object() && config.contains("lora");
}

std::unique_ptr<ModelSource> open_checkpoint_model(const CheckpointReader& reader,
                                                   LoadPolicy policy) {
  return std::make_unique<CheckpointSource>(reader, policy);
}

Json read_hf_config(const fs::path& file) {
  constexpr std::int64_t kMaxJson = std::int64_t{64} << 20;
  const Json config = parse_json(read_file(file, kMaxJson), file.string());
  const std::string& type = JsonReader(config, file.string()).at("model_type").string();
  const HfFamily* const family = hf_family_of(config);
  if (family == nullptr) {
    std::string known;
    for (const HfFamily& one : hf_families())
      known += fmt::format("{}{}", known.empty() ? "" : ", ", one.model_type);
    throw Unsupported("{}: model_type \"{}\" cannot be imported; known are {}", file.string(), type,
                      known);
  }
  return family->config_from_hf(config, file.string());
}

void require_model_directory(const fs::path& path) {
  std::error_code error;
  require<IoError>(is_there(path), "{} does not exist", path.string());
  require(!is_gguf(path),
          "{} is a GGUF file; write it as a Hugging Face directory first: `tessera consolidate {} "
          "DIR`",
          path.string(), path.string());
  const bool is_model = fs::is_directory(path, error) || is_saved_file(path);
  if (!is_model) refuse_other_format(path);
  require(
      is_model,
      "{} is a file; give a checkpoint, a run, a file of torch.save (.ckpt, .pt, .pth, .bin), or "
      "the directory of a Hugging Face model or of PyTorch's shards",
      path.string());
}

namespace {

// Adapters whose base is an adapter, and so on.
constexpr int kMostLevels = 8;

std::unique_ptr<ModelSource> open_at(const fs::path& path, std::optional<std::int64_t> step,
                                     LoadPolicy policy, const fs::path& base, WeightKind weights,
                                     int level);

// @param config  config.json with which the base's weights beside the adapters would be read
std::unique_ptr<ModelSource> open_base(const std::string& adapters, const std::string& named,
                                       const fs::path& given, LoadPolicy policy, int level,
                                       const fs::path& config = {}) {
  std::error_code error;
  require(
      !given.empty() || fs::is_directory(named, error),
      "{} holds LoRA adapters of the model '{}', which is no directory here; name its directory "
      "with --base, or to train with --model.init_from BASE --lora.init_from {}{}",
      adapters, named, adapters,
      config.empty() ? ""
                     : "; or, as the base's weights are there, too, copy the model's config.json "
                       "to " +
                           config.string());
  require(level < kMostLevels, "{} is the base of its own adapters", adapters);
  return open_at(given.empty() ? fs::path(named) : given, {}, policy, {}, WeightKind::Trained,
                 level + 1);
}

std::unique_ptr<ModelSource> merge_checkpoint(const CheckpointReader& reader, const fs::path& base,
                                              LoadPolicy policy, int level) {
  const Json config = Json::parse(reader.index().model_config);
  const std::string where = reader.path().string();
  const JsonReader lora = JsonReader(config, where + ": the model section").at("lora");
  const auto adapters = open_checkpoint_model(reader);
  const std::vector<LoraLayer> layers = lora_layers(config);
  const double scale =
      lora.at("alpha").value().get<double>() / static_cast<double>(lora.at("rank").integer(1));
  auto model = open_base(where, lora.at("base").string(), base, policy, level);
  check_base(*model, lora.has("base_digest") ? lora.at("base_digest").string() : "", where);
  return merge_lora(std::move(model), *adapters, layers, std::vector<double>(layers.size(), scale),
                    &reader);
}

std::unique_ptr<ModelSource> merge_peft(const PeftTensors& adapters, const fs::path& base,
                                        LoadPolicy policy, int level) {
  const ShardedSource& source = *adapters.source;
  const fs::path own = source.config_dir() / "config.json";
  std::vector<TensorName> names;
  if (base.empty()) names = names_of_base(adapters);
  const bool has_base = !names.empty();
  std::unique_ptr<ModelSource> model;
  if (has_base && is_there(own)) {
    model = std::make_unique<FamilySource>(read_foreign_model(own), adapters.source, names, policy);
  } else {
    const auto named = adapters.config->is_object()
                           ? adapters.config->find("base_model_name_or_path")
                           : adapters.config->end();
    const bool has_name = named != adapters.config->end() && named->is_string();
    model = open_base(source.where(), has_name ? named->get<std::string>() : "", base, policy,
                      level, has_base ? own : fs::path());
  }
  const PeftAdapter adapter = open_peft(adapters, model->config());
  return merge_lora(std::move(model), *adapter.source, adapter.layers, adapter.scales, nullptr);
}

std::unique_ptr<ModelSource> open_at(const fs::path& path, std::optional<std::int64_t> step,
                                     LoadPolicy policy, const fs::path& base, WeightKind weights,
                                     int level) {
  require_model_directory(path);
  if (is_adapter_directory(path)) {
    require_trained(weights, path);
    require(!step, "{} is an adapter in PEFT's format and has no step {}", path.string(),
            step.value_or(0));
    return merge_peft(read_peft(path), base, policy, level);
  }
  // Recognizes the kind of a directory by its weights, because a run has a config.json too.
  std::unique_ptr<ShardedSource> source = open_sharded(path, {}, false);
  if (!source) {
    const CheckpointReader reader = open_checkpoint(path, step).with(weights);
    if (has_lora(reader)) return merge_checkpoint(reader, base, policy, level);
    require(base.empty(), "{} holds whole weights, not LoRA adapters; omit --base", path.string());
    return open_checkpoint_model(reader, policy);
  }
  require_trained(weights, path);
  require(!step, "{} is a {} and has no step {}", path.string(), source->kind(), step.value_or(0));
  if (has_peft_names(*source))
    return merge_peft(peft_of_state(std::move(source), {}, {}), base, policy, level);
  require(base.empty(), "{} holds whole weights, not LoRA adapters; omit --base", path.string());
  const fs::path config = source->config_dir() / "config.json";
  require(is_there(config),
          "{} is a {} without config.json, so its model is unknown; copy the config.json of the "
          "Hugging Face model to {}, or `tessera consolidate` it with --config",
          path.string(), source->kind(), config.string());
  ForeignModel model = read_foreign_model(config);
  use_names_of(model, *source);
  const std::vector<TensorName> names = name_all(*source, {});
  return std::make_unique<FamilySource>(model, std::move(source), names, policy);
}

}  // namespace

void require_trained(WeightKind weights, const fs::path& path) {
  require(weights == WeightKind::Trained,
          "{} is no checkpoint of tessera, and holds no moving average; omit --weights ema",
          path.string());
}

void check_base(const ModelSource& base, const std::string& digest, const std::string& adapters) {
  if (digest.empty()) return;
  const CheckpointReader* const checkpoint = base.checkpoint();
  require(
      checkpoint != nullptr && checkpoint->digest() == digest,
      "the adapters in {} belong to a checkpoint with other weights ({}) than {}; name that one "
      "with --base, or to train with --model.init_from",
      adapters, digest, base.path().string());
}

std::unique_ptr<ModelSource> open_merged(const PeftTensors& adapter, const fs::path& base) {
  return merge_peft(adapter, base, LoadPolicy::Exact, 0);
}

std::unique_ptr<ModelSource> open_model(const fs::path& path, std::optional<std::int64_t> step,
                                        LoadPolicy policy, const fs::path& base,
                                        WeightKind weights) {
  return open_at(path, step, policy, base, weights, 0);
}

}  // namespace tessera::io
