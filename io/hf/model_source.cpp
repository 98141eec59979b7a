#include "io/hf/model_source.h"

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/checkpoint/find.h"
#include "io/hf/config.h"
#include "io/hf/family_source.h"
#include "io/hf/lora.h"
#include "io/source/open_sharded.h"

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
  require(fs::is_directory(path, error),
          "{} is a file; give a checkpoint, a run, or the directory of a Hugging Face model or of "
          "a PyTorch Distributed Checkpoint",
          path.string());
}

namespace {

std::unique_ptr<ModelSource> open_base(const fs::path& adapters, const std::string& named,
                                       const fs::path& given, LoadPolicy policy) {
  std::error_code error;
  require(
      !given.empty() || fs::is_directory(named, error),
      "{} holds LoRA adapters of the model '{}', which is no directory here; name its directory "
      "with --base",
      adapters.string(), named);
  return open_model(given.empty() ? fs::path(named) : given, {}, policy);
}

std::unique_ptr<ModelSource> merge_checkpoint(const CheckpointReader& reader, const fs::path& base,
                                              LoadPolicy policy) {
  const Json config = Json::parse(reader.index().model_config);
  const JsonReader lora =
      JsonReader(config, reader.path().string() + ": the model section").at("lora");
  const auto adapters = open_checkpoint_model(reader);
  const std::vector<LoraLayer> layers = lora_layers(config);
  const double scale =
      lora.at("alpha").value().get<double>() / static_cast<double>(lora.at("rank").integer(1));
  return merge_lora(open_base(reader.path(), lora.at("base").string(), base, policy), *adapters,
                    layers, std::vector<double>(layers.size(), scale), &reader);
}

std::unique_ptr<ModelSource> merge_peft(const fs::path& dir, const fs::path& base,
                                        LoadPolicy policy) {
  auto model = open_base(dir, peft_base(dir), base, policy);
  const PeftAdapter adapter = open_peft(dir, model->config());
  return merge_lora(std::move(model), *adapter.source, adapter.layers, adapter.scales, nullptr);
}

}  // namespace

std::unique_ptr<ModelSource> open_model(const fs::path& path, std::optional<std::int64_t> step,
                                        LoadPolicy policy, const fs::path& base) {
  require_model_directory(path);
  const bool peft = is_peft(path);
  // Recognizes the kind of a directory by its weights, because a run has a config.json too.
  std::unique_ptr<ShardedSource> source = peft ? nullptr : open_sharded(path);
  if (peft) {
    require(!step, "{} is an adapter in PEFT's format and has no step {}", path.string(),
            step.value_or(0));
    return merge_peft(path, base, policy);
  }
  if (!source) {
    const CheckpointReader reader = open_checkpoint(path, step);
    if (has_lora(reader)) return merge_checkpoint(reader, base, policy);
    require(base.empty(), "{} holds whole weights, not LoRA adapters; omit --base", path.string());
    return open_checkpoint_model(reader, policy);
  }
  require(base.empty(), "{} holds whole weights, not LoRA adapters; omit --base", path.string());
  require(!step, "{} is a {} and has no step {}", path.string(), source->kind(), step.value_or(0));
  const fs::path config = path / "config.json";
  require(is_there(config),
          "{} is a {} without config.json, so its model is unknown; copy the config.json of the "
          "Hugging Face model into it, or `tessera consolidate` it with --config",
          path.string(), source->kind());
  Json section = read_hf_config(config);
  const HfFamily& family = *find_hf_family(section.at("arch").get<std::string>());
  return std::make_unique<FamilySource>(family, std::move(source), std::move(section), NameRules{},
                                        policy);
}

}  // namespace tessera::io
