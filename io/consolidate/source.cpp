#include "io/consolidate/source.h"

#include <algorithm>

#include "core/base/error.h"
#include "io/base/convert.h"
#include "io/checkpoint/find.h"
#include "io/hf/gpt2_source.h"
#include "io/source/checkpoint_tensors.h"
#include "io/source/open_sharded.h"

namespace tessera::io {
namespace {

constexpr const char* kConfig = "config.json";

bool wants_weights(const ConsolidateOptions& options) {
  return options.what != ExportWhat::Optimizer;
}
bool wants_optimizer(const ConsolidateOptions& options) {
  return options.what != ExportWhat::Model;
}

// Only floating-point weights are converted: integers and truth values are indices and masks, which
// another dtype would make wrong or useless.
DType written_dtype(const TensorInfo& info, const ConsolidateOptions& options) {
  return options.dtype && is_floating(info.dtype) ? *options.dtype : info.dtype;
}

void add_weight(ConsolidateSource& result, const TensorSource& source, const TensorInfo& info,
                const std::string& name, const ConsolidateOptions& options) {
  result.weights.push_back(
      {name, info.shape, info.dtype, written_dtype(info, options), &source, info.name});
}

void add_checkpoint(ConsolidateSource& result, const CheckpointReader& reader,
                    const ConsolidateOptions& options) {
  result.kind = "tessera checkpoint";
  result.checkpoint = reader;
  if (wants_weights(options)) {
    auto model = open_checkpoint_model(reader);
    for (const TensorInfo& info : model->tensors()) {
      const bool hf = options.format == ExportFormat::HF;
      add_weight(result, *model, info, hf ? gpt2_name_to_hf(info.name) : info.name, options);
    }
    result.sources.push_back(std::move(model));
  }
  result.config = reader.index().model_config;
  if (!wants_optimizer(options)) return;
  for (const Section section : {Section::ExpAvg, Section::ExpAvgSq}) {
    const char* const prefix = section == Section::ExpAvg ? "exp_avg/" : "exp_avg_sq/";
    result.sources.push_back(std::make_unique<CheckpointTensors>(reader, section));
    for (const TensorInfo& info : result.sources.back()->tensors()) {
      result.optimizer.push_back({prefix + info.name, info.shape, info.dtype, info.dtype,
                                  result.sources.back().get(), info.name});
    }
  }
}

/// Our "model" section for a source that is not ours; empty if it is exported without.
std::optional<Json> find_config(const ShardedSource& source, const ConsolidateOptions& options) {
  const fs::path beside = source.path() / kConfig;
  std::error_code error;
  const bool is_beside = fs::exists(beside, error);
  if (options.config_file) return read_hf_config(*options.config_file);
  if (options.format == ExportFormat::HF) {
    require(is_beside,
            "{} is a {} without config.json, so which model it holds is unknown; name the "
            "config.json with --config, or write its tensors as they are with --format safetensors",
            source.path().string(), source.kind());
    return read_hf_config(beside);
  }
  if (!is_beside) return std::nullopt;
  try {
    return read_hf_config(beside);
  } catch (const Unsupported&) {
    return std::nullopt;  // of another model, whose tensors can be written all the same
  }
}

// "exp_avg/transformer.h.0.ln_1.weight" by our name of the weight.
std::string our_state_name(const std::string& name) {
  const std::size_t slash = name.find('/');
  if (slash == std::string::npos) return name;
  return name.substr(0, slash + 1) + gpt2_name_from_hf(name.substr(slash + 1));
}

void refuse_unreadable(const ShardedSource& source, const ConsolidateOptions& options,
                       const NameRules& rules, ConsolidateSource& result) {
  std::string refused;
  for (const ShardedSource::Unreadable& tensor : source.unreadable()) {
    const TensorRole role = classify(tensor.name, "", false, rules).role;
    const bool wanted = (role == TensorRole::Weight && wants_weights(options)) ||
                        (role == TensorRole::OptimizerState && wants_optimizer(options));
    if (wanted) {
      refused += fmt::format("\n  {} {}", tensor.name, tensor.dtype);
    } else {
      result.skipped.push_back({tensor.name, fmt::format("not asked for ({})", tensor.dtype)});
    }
  }
  require<Unsupported>(refused.empty(), "{} holds tensors of dtypes that tessera does not read:{}",
                       source.path().string(), refused);
}

void add_sharded(ConsolidateSource& result, std::unique_ptr<ShardedSource> owned,
                 const ConsolidateOptions& options) {
  const bool hugging_face = owned->kind() == "Hugging Face model";
  NameRules rules = options.names;
  if (hugging_face && rules.prefixes.empty()) rules.strip_wrappers = false;
  result.kind = owned->kind();
  result.config = find_config(*owned, options);
  refuse_unreadable(*owned, options, rules, result);
  for (const std::string& name : owned->objects()) result.skipped.push_back({name, "no tensor"});
  const std::vector<TensorName> names = classify_tensors(*owned, rules);
  const ShardedSource* const source = owned.get();

  std::unique_ptr<Gpt2Source> model;
  if (result.config) {
    model = std::make_unique<Gpt2Source>(std::move(owned), *result.config, rules);
    if (wants_weights(options)) {
      for (const TensorInfo& info : model->tensors()) {
        const bool hf = options.format == ExportFormat::HF;
        result.weights.push_back({hf ? gpt2_name_to_hf(info.name) : info.name, info.shape,
                                  info.dtype, written_dtype(info, options), source,
                                  model->source_name(info.name)});
      }
    }
  }
  for (std::size_t i = 0; i < names.size(); ++i) {
    const TensorName& name = names[i];
    const TensorInfo& info = source->tensors()[i];
    if (name.role == TensorRole::Other) {
      result.skipped.push_back({name.source, "no part of the model"});
    } else if (name.role == TensorRole::OptimizerState) {
      if (wants_optimizer(options)) {
        result.optimizer.push_back({model ? our_state_name(name.name) : name.name, info.shape,
                                    info.dtype, info.dtype, source, name.source});
      } else {
        result.skipped.push_back({name.source, "optimizer state, written with --what all"});
      }
    } else if (!wants_weights(options)) {
      result.skipped.push_back({name.source, "a weight, written with --what all"});
    } else if (!model) {
      add_weight(result, *source, info, name.name, options);
    } else if (std::none_of(result.weights.begin(), result.weights.end(), [&](const auto& weight) {
                 return weight.source_name == name.source;
               })) {
      result.skipped.push_back({name.source, "a buffer, or a head that is tied"});
    }
  }
  if (model) {
    result.sources.push_back(std::move(model));
  } else {
    result.sources.push_back(std::move(owned));
  }
  require(!wants_optimizer(options) || !result.optimizer.empty(),
          "{} is a {} and holds no optimizer state", result.path.string(), result.kind);
  require(!wants_weights(options) || !result.weights.empty(), "{} is a {} and holds no weights",
          result.path.string(), result.kind);
}

}  // namespace

ConsolidateSource open_consolidate_source(const fs::path& path, const ConsolidateOptions& options) {
  require_model_directory(path);
  ConsolidateSource result;
  result.path = path;
  if (std::unique_ptr<ShardedSource> sharded = open_sharded(path)) {
    require(!options.step, "{} is a {} and has no step {}", path.string(), sharded->kind(),
            options.step.value_or(0));
    add_sharded(result, std::move(sharded), options);
    return result;
  }
  const CheckpointReader reader = open_checkpoint(path, options.step);
  require(!options.config_file,
          "{} is a checkpoint of tessera, which knows its model; leave "
          "--config out",
          reader.path().string());
  result.path = reader.path();
  add_checkpoint(result, reader, options);
  return result;
}

}  // namespace tessera::io
