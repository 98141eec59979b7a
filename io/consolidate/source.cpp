#include "io/consolidate/source.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <unordered_set>

#include "core/base/error.h"
#include "io/base/convert.h"
#include "io/base/json.h"
#include "io/checkpoint/find.h"
#include "io/consolidate/side_files.h"
#include "io/gguf/family.h"
#include "io/gguf/offset_source.h"
#include "io/gguf/source.h"
#include "io/hf/config.h"
#include "io/hf/family_source.h"
#include "io/hf/lora.h"
#include "io/hf/model_source.h"
#include "io/source/open_sharded.h"

namespace tessera::io {
namespace {

constexpr const char* kStateSkipped = "optimizer state, written with --what all";
constexpr std::int64_t kMaxConfig = std::int64_t{64} << 20;  // bytes

bool wants_weights(const ConsolidateOptions& options) {
  return options.what != ExportWhat::Optimizer;
}
bool wants_optimizer(const ConsolidateOptions& options) {
  return options.what != ExportWhat::Model;
}

std::string exported_name(const ConsolidateSource& source, const std::string& name,
                          const ConsolidateOptions& options) {
  const bool converts = source.family != nullptr && options.format != ExportFormat::Safetensors;
  return converts ? std::string(source.family->prefix) + name : name;
}

void add_weight(ConsolidateSource& result, const TensorSource& source, const TensorInfo& info,
                const std::string& name, const ConsolidateOptions& options) {
  // Converts floating-point weights only, because integers and booleans are indices and masks.
  const bool converts = options.dtype && is_floating(info.dtype);
  result.weights.push_back(
      {name, info.shape, info.dtype, converts ? *options.dtype : info.dtype, &source, info.name});
}

// Throws if --dtype might convert scales of quantized weights.
// @param prefix  path of the object in config.json: "", "text_config."
void check_scales(const ConsolidateSource& source, const Json& object, const std::string& prefix) {
  for (const char* key : {"quantization_config", "compression_config"}) {
    const auto quantization = object.find(key);
    if (quantization == object.end() || quantization->is_null()) continue;
    for (const ExportTensor& tensor : source.weights) {
      require(
          tensor.stored == tensor.written,
          "{} has a \"{}\", so {} may be scales of quantized weights, which --dtype would convert; "
          "omit --dtype, or, if the weights are not quantized, give a config.json without that key "
          "with --config",
          source.hf_config_file.string(), prefix + key, tensor.source_name);
    }
  }
}

// Detects optimizer state that was classified as weights because its usual key is missing.
void check_no_state(const ConsolidateSource& source) {
  for (const ExportTensor& tensor : source.weights) {
    for (const std::string_view kind : {".exp_avg", ".exp_avg_sq", ".momentum_buffer"}) {
      require(!tensor.name.ends_with(kind),
              "{}: tensor {} is optimizer state by its name, not a weight of a Hugging Face model; "
              "select the weights with --format safetensors --tensors PATTERN, and their names "
              "with --strip",
              source.path.string(), tensor.source_name);
    }
  }
}

// "layers.12.attention.wq.weight"
bool is_torchtitan_query(std::string_view name) {
  constexpr std::string_view kBefore = "layers.", kAfter = ".attention.wq.weight";
  if (!name.starts_with(kBefore) || !name.ends_with(kAfter)) return false;
  name.remove_prefix(kBefore.size());
  return name.find_first_not_of("0123456789") == name.size() - kAfter.size();
}

// Throws on torchtitan's names. Rows of its wq and wk are in another order than those of q_proj and
// k_proj, so that a renamed model would load and be wrong.
void check_no_torchtitan(const ConsolidateSource& source) {
  const auto is_embedding = [](const std::string& name) { return name == "tok_embeddings.weight"; };
  const auto query = std::ranges::find_if(source.weights, is_torchtitan_query, &ExportTensor::name);
  require<Unsupported>(
      query == source.weights.end() ||
          std::ranges::none_of(source.weights, is_embedding, &ExportTensor::name),
      "{} has tok_embeddings.weight and {}, in torchtitan's names and row order, which Hugging "
      "Face programs do not read; convert them with torchtitan's own script "
      "(scripts/checkpoint_conversion/convert_to_hf.py), or write them unchanged with --format "
      "safetensors",
      source.path.string(), query == source.weights.end() ? "" : query->source_name);
}

// Checks a model unknown to tessera that is exported for Hugging Face programs.
void check_other_model(ConsolidateSource& source) {
  check_no_state(source);
  check_no_torchtitan(source);
  check_scales(source, *source.hf_config, "");
  for (const auto& [key, value] : source.hf_config->items()) {
    if (value.is_object()) check_scales(source, value, key + ".");
  }
  source.warnings.push_back(fmt::format(
      "{} has model_type {}, which tessera does not know, so names, shapes and number of the "
      "tensors are not checked; --dry-run shows the names",
      source.hf_config_file.string(), source.hf_config->at("model_type").dump()));
}

// The "arch" of a "model" section, empty if there is none.
std::string arch_of(const Json& model) {
  const auto arch = model.is_object() ? model.find("arch") : model.end();
  return arch != model.end() && arch->is_string() ? arch->get<std::string>() : "";
}

// Reads the config.json of a checkpoint's model that tessera does not know.
void read_other_config(ConsolidateSource& result, const std::string& arch,
                       const ConsolidateOptions& options) {
  if (options.format == ExportFormat::Safetensors) return;
  require(options.config_file.has_value(),
          "{} has a model of arch \"{}\", which this export does not know; give its Hugging Face "
          "config.json with --config, or write its tensors with --format safetensors",
          result.path.string(), arch);
  result.hf_config_file = *options.config_file;
  Json config =
      parse_hf_config(read_file(result.hf_config_file, kMaxConfig), result.hf_config_file.string());
  require<CorruptCheckpoint>(
      config.is_object() && config.contains("model_type") && config["model_type"].is_string(),
      "{} is not an object with a \"model_type\", which a Hugging Face model needs; give another "
      "one with --config, or write the tensors alone with --format safetensors",
      result.hf_config_file.string());
  result.hf_config = std::make_shared<const Json>(std::move(config));
}

// Adds all weights of a model that tessera knows.
void add_model(ConsolidateSource& result, std::unique_ptr<ModelSource> model,
               const ConsolidateOptions& options) {
  std::unique_ptr<TensorSource> parts;
  if (result.family != nullptr && options.format != ExportFormat::Safetensors)
    parts = std::make_unique<HfPartsSource>(*result.family, *model);
  const TensorSource& weights = parts ? *parts : *model;
  for (const TensorInfo& info : weights.tensors())
    add_weight(result, weights, info, info.name, options);
  result.sources.push_back(std::move(model));
  if (parts) result.sources.push_back(std::move(parts));
}

// Weights of a base with adapters, which are in a checkpoint or in PEFT's format.
void add_merged(ConsolidateSource& result, const ConsolidateOptions& options) {
  require(!options.config_file,
          "{} holds LoRA adapters, whose base has the configuration; omit --config",
          result.path.string());
  require(options.what == ExportWhat::Model,
          "merged weights have no optimizer state; leave out --what or --merge-lora");
  auto model = open_model(result.path, {}, LoadPolicy::Exact, options.base);
  result.config = std::make_shared<const Json>(model->config());
  result.family = find_hf_family(arch_of(*result.config));
  const fs::path base = model->path();
  if (is_there(base / kConfigFile) && !is_there(base / "index.json")) {
    result.hf_config_file = base / kConfigFile;
    result.hf_config = std::make_shared<const Json>(
        parse_json(read_file(result.hf_config_file, kMaxConfig), result.hf_config_file.string()));
  }
  if (!result.checkpoint && model->checkpoint() != nullptr)
    result.checkpoint = *model->checkpoint();
  add_model(result, std::move(model), options);
}

// LoRA adapters of a checkpoint, under the names of their format.
void add_adapters(ConsolidateSource& result, const CheckpointReader& reader,
                  const ConsolidateOptions& options) {
  require(options.format != ExportFormat::GGUF,
          "{} holds LoRA adapters; write the weights of their base with them by --merge-lora",
          reader.path().string());
  auto model = open_checkpoint_model(reader);
  result.is_adapter = options.format == ExportFormat::HF;
  std::map<std::string, std::string> names;
  for (const LoraLayer& layer : lora_layers(*result.config)) {
    names[layer.a()] = layer.peft_name('A');
    names[layer.b()] = layer.peft_name('B');
  }
  for (const TensorInfo& info : model->tensors())
    add_weight(result, *model, info, result.is_adapter ? names.at(info.name) : info.name, options);
  result.sources.push_back(std::move(model));
}

void add_checkpoint(ConsolidateSource& result, const CheckpointReader& reader,
                    const ConsolidateOptions& options) {
  result.kind = "tessera checkpoint";
  result.checkpoint = reader;
  const auto section =
      std::make_shared<const Json>(parse_json(reader.index().model_config, "model"));
  const std::string arch = arch_of(*section);
  result.family = find_hf_family(arch);
  const bool known = result.family != nullptr;
  require<Unsupported>(known || options.format != ExportFormat::GGUF,
                       "{} has a model of arch \"{}\", which is not written as GGUF",
                       reader.path().string(), arch);
  require(!known || !options.config_file,
          "{} is a checkpoint of tessera, which records its {}; omit --config",
          reader.path().string(), arch);
  if (!known) read_other_config(result, arch, options);
  if (known || options.format == ExportFormat::Safetensors) result.config = section;
  if (wants_weights(options)) {
    if (known && has_lora(reader))
      add_adapters(result, reader, options);
    else
      add_model(result,
                open_checkpoint_model(reader, known ? LoadPolicy::Exact : LoadPolicy::Partial),
                options);
  }
  if (!known && options.format == ExportFormat::HF) check_other_model(result);
  if (!wants_optimizer(options)) return;
  for (const Section& state : reader.states()) {
    const TensorSource& source = reader.source(state);
    for (const TensorInfo& info : source.tensors()) {
      result.optimizer.push_back(
          {state.state + "/" + info.name, info.shape, info.dtype, info.dtype, &source, info.name});
    }
  }
}

// Whether the prefixes to remove follow from the config.json of a model unknown to tessera.
bool strips_by_model(const ConsolidateSource& source, const NameRules& rules) {
  return source.hf_config && !source.config && rules.strip_wrappers && rules.prefixes.empty();
}

/// Reads the configuration of another program's source, unless the export needs none.
void find_config(ConsolidateSource& result, const ShardedSource& source,
                 const ConsolidateOptions& options, const NameRules& rules) {
  const fs::path file = options.config_file.value_or(source.config_dir() / kConfigFile);
  if (!options.config_file && !is_there(file)) {
    require(options.format == ExportFormat::Safetensors,
            "{} is a {} without config.json, so its model is unknown; give a config.json with "
            "--config, or write its tensors unchanged with --format safetensors",
            source.path().string(), source.kind());
    return;
  }
  const std::string text = read_file(file, kMaxConfig);
  Json config = parse_hf_config(text, file.string());
  const HfFamily* family = hf_family_of(config);
  if (family && !family->same_tensors && options.format != ExportFormat::GGUF) family = nullptr;
  if (family) config = parse_json(text, file.string());  // large integers stay numbers
  const bool may_do_without = !options.config_file && options.format == ExportFormat::Safetensors;
  if (!family) {
    const auto type = config.is_object() ? config.find("model_type") : config.end();
    const bool has_type = type != config.end() && type->is_string();
    require<Unsupported>(options.format != ExportFormat::GGUF,
                         "{} has model_type {}, which tessera does not know and does not write as "
                         "GGUF",
                         file.string(), has_type ? type->dump() : "null");
    require<CorruptCheckpoint>(
        has_type || may_do_without,
        "{} is not an object with a \"model_type\", which a Hugging Face model needs; give another "
        "one with --config, or write the tensors alone with --format safetensors",
        file.string());
    if (has_type) {
      result.hf_config_file = file;
      result.hf_config = std::make_shared<const Json>(std::move(config));
    }
    if (options.format == ExportFormat::Safetensors) {
      result.skipped.push_back(
          {kConfigFile, strips_by_model(result, rules)
                            ? "of a model unknown to tessera: used for names only"
                            : "of a model unknown to tessera: tensors are written unchanged"});
    }
    return;
  }
  try {
    result.config = std::make_shared<const Json>(family->config_from_hf(config, file.string()));
    result.family = family;
    result.hf_config = std::make_shared<const Json>(std::move(config));
    result.hf_config_file = file;
  } catch (const Unsupported& unsupported) {
    if (!may_do_without) throw;
    result.skipped.push_back(
        {kConfigFile, fmt::format("{}: tensors are written unchanged", unsupported.what())});
  }
}

// Name that --tensors matches; for moments, the name of their weight.
std::string chosen_by(const std::string& name, TensorRole role) {
  return role == TensorRole::OptimizerState ? name.substr(name.find('/') + 1) : name;
}

// Turns "exp_avg/transformer.h.0.ln_1.weight" into "exp_avg/h.0.ln_1.weight".
std::string our_state_name(const HfFamily& family, const std::string& name) {
  const std::size_t slash = name.find('/');
  if (slash == std::string::npos) return name;
  return name.substr(0, slash + 1) + family.strip(name.substr(slash + 1));
}

/// Adds the tensors of unreadable() that can be copied unchanged.
/// @param names  names of the readable tensors
void add_unreadable(ConsolidateSource& result, const ShardedSource& source,
                    const ConsolidateOptions& options, const NameRules& rules,
                    std::vector<TensorName> names) {
  std::string refused;
  const std::vector<TensorName> ours = classify_unreadable(source, rules);
  for (std::size_t i = 0; i < ours.size(); ++i) {
    const ShardedSource::Unreadable& tensor = source.unreadable()[i];
    const TensorRole role = ours[i].role;
    const bool is_state = role == TensorRole::OptimizerState;
    const bool is_buffer = result.family && HfFamily::is_buffer(result.family->strip(ours[i].name));
    const bool wanted = (role == TensorRole::Weight && wants_weights(options) && !is_buffer) ||
                        (is_state && wants_optimizer(options));
    if (!wanted || !is_chosen(options.tensors, chosen_by(ours[i].name, role))) {
      result.skipped.push_back({tensor.name, fmt::format("not selected ({})", tensor.dtype)});
    } else if (!tensor.carrier || (result.family && !is_state)) {  // known models must be readable
      refused += fmt::format("\n  {} {}", tensor.name, tensor.dtype);
    } else {
      names.push_back(ours[i]);
      (is_state ? result.optimizer : result.weights)
          .push_back({result.family ? our_state_name(*result.family, ours[i].name) : ours[i].name,
                      tensor.shape, *tensor.carrier, *tensor.carrier, &source, tensor.name,
                      tensor.safetensors_dtype});
    }
  }
  require<Unsupported>(refused.empty(), "{} has tensors that tessera does not read:{}",
                       source.path().string(), refused);
  check_distinct(names, source.path().string());
}

// Throws if the tensors have over 2^63 bytes, so that later sums of bytes cannot overflow.
void check_size(const ConsolidateSource& source) {
  std::int64_t total = 0;
  for (const auto* tensors : {&source.weights, &source.optimizer}) {
    for (const ExportTensor& tensor : *tensors) {
      std::int64_t bytes = 0;
      require<CorruptCheckpoint>(
          !__builtin_mul_overflow(numel(tensor.shape),
                                  static_cast<std::int64_t>(dtype_size(tensor.written)), &bytes) &&
              !__builtin_add_overflow(total, bytes, &total),
          "{}: tensor {} of shape {} and those before it have more than 2^63 bytes",
          source.path.string(), tensor.source_name, tensor.shape);
    }
  }
}

// Naming rules for a Hugging Face model unknown to tessera.
NameRules other_model_rules(const ShardedSource& source, const Json& config) {
  NameRules rules;
  rules.model_levels = NameRules::ModelLevels{};
  std::vector<TensorName> names = classify_tensors(source, rules);
  for (TensorName& name : classify_unreadable(source, rules)) names.push_back(std::move(name));
  rules.model_levels = count_model_levels(names, is_headless(config));
  return rules;
}

void add_unused_prefixes(ConsolidateSource& source, const std::vector<TensorName>& names,
                         const NameRules& rules) {
  std::vector<std::string_view> weights;
  for (const TensorName& name : names)
    if (name.role == TensorRole::Weight) weights.push_back(name.source);
  // No warning if a prefix is in names of optimizer state, because they contain names of weights.
  const auto is_of_state = [&](const std::string& prefix) {
    return std::ranges::any_of(names, [&](const TensorName& name) {
      return name.role == TensorRole::OptimizerState &&
             name.source.find("." + prefix) != std::string::npos;
    });
  };
  for (const std::string& prefix : unused_prefixes(weights, rules)) {
    if (is_of_state(prefix)) continue;
    source.warnings.push_back(fmt::format(
        "--strip {} removes nothing: no weight has this prefix{}", prefix,
        weights.empty() ? "" : fmt::format("; the first weight is {}", weights.front())));
  }
}

void add_sharded(ConsolidateSource& result, std::unique_ptr<ShardedSource> owned,
                 const ConsolidateOptions& options) {
  const bool hugging_face = owned->kind() == "Hugging Face model";
  NameRules rules = options.names;
  if (hugging_face && rules.prefixes.empty()) rules.strip_wrappers = false;
  result.kind = owned->kind();
  find_config(result, *owned, options, rules);
  if (strips_by_model(result, rules)) rules = other_model_rules(*owned, *result.hf_config);
  const std::vector<TensorName> names = classify_tensors(*owned, rules);
  add_unreadable(result, *owned, options, rules, names);
  for (const std::string& name : owned->objects()) result.skipped.push_back({name, "not a tensor"});
  for (const std::string& name : owned->left_out()) result.skipped.push_back({name, kStateSkipped});
  const ShardedSource* const source = owned.get();
  result.warnings = owned->warnings();
  // With a configuration, missing weights are detected below from the expected shapes.
  if (!result.config || wants_optimizer(options)) {
    result.warnings.insert(result.warnings.end(), owned->loss_warnings().begin(),
                           owned->loss_warnings().end());
  }

  if (source->unreadable().empty()) add_unused_prefixes(result, names, rules);

  std::unique_ptr<ModelSource> model;
  std::unordered_set<std::string> written;  // names at the source; for GGUF, without prefix
  if (result.family) {
    model = std::make_unique<FamilySource>(*result.family, std::move(owned), *result.config, rules);
    if (options.format == ExportFormat::GGUF) {
      add_model(result, std::move(model), options);
      for (const ExportTensor& weight : result.weights)
        written.insert(result.family->strip(weight.name));
    } else if (wants_weights(options)) {
      for (const TensorInfo& info : model->tensors()) {
        const std::string theirs = model->title(info.name);
        add_weight(result, *source, {theirs, info.shape, info.dtype},
                   exported_name(result, info.name, options), options);
        written.insert(theirs);
      }
    }
  }
  for (std::size_t i = 0; i < names.size(); ++i) {
    const TensorName& name = names[i];
    const TensorInfo& info = source->tensors()[i];
    if (name.role == TensorRole::Other) {
      result.skipped.push_back({name.source, "not part of the model"});
    } else if (name.role == TensorRole::OptimizerState) {
      if (wants_optimizer(options)) {
        result.optimizer.push_back(
            {result.family ? our_state_name(*result.family, name.name) : name.name, info.shape,
             info.dtype, info.dtype, source, name.source});
      } else {
        result.skipped.push_back({name.source, kStateSkipped});
      }
    } else if (!wants_weights(options)) {
      result.skipped.push_back({name.source, "a weight, written with --what all"});
    } else if (!result.family) {
      add_weight(result, *source, info, name.name, options);
    } else if (!written.contains(options.format == ExportFormat::GGUF
                                     ? result.family->strip(name.name)
                                     : name.source)) {
      result.skipped.push_back({name.source, "a buffer or a tied head"});
    }
  }
  if (model) result.sources.push_back(std::move(model));
  if (owned) result.sources.push_back(std::move(owned));
  require(!wants_optimizer(options) || !result.optimizer.empty(),
          "{} is a {} and holds no optimizer state under names of weights", result.path.string(),
          result.kind);
  require(!wants_weights(options) || !result.weights.empty(), "{} is a {} and holds no weights",
          result.path.string(), result.kind);
  if (options.format == ExportFormat::HF && !result.config) check_other_model(result);
}

void choose_tensors(ConsolidateSource& source, const std::vector<std::string>& patterns) {
  if (patterns.empty()) return;
  std::vector<std::string> names;
  const auto choose = [&](std::vector<ExportTensor>& tensors, TensorRole role) {
    std::erase_if(tensors, [&](const ExportTensor& tensor) {
      names.push_back(chosen_by(tensor.name, role));
      if (is_chosen(patterns, names.back())) return false;
      source.skipped.push_back({tensor.source_name, "not selected by --tensors"});
      return true;
    });
  };
  choose(source.weights, TensorRole::Weight);
  choose(source.optimizer, TensorRole::OptimizerState);
  check_patterns(patterns, names, "--tensors", source.path.string());
}

// config.json of a GGUF file: of --config, or from its keys.
Json config_of_gguf(ConsolidateSource& result, const GgufSource& source, const GgufFamily& family,
                    const ConsolidateOptions& options) {
  if (!options.config_file) return gguf_config(source);
  result.hf_config_file = *options.config_file;
  const std::string name = result.hf_config_file.string();
  Json config = parse_json(read_file(result.hf_config_file, kMaxConfig), name);
  const HfFamily* const known = hf_family_of(config);
  require(known != nullptr && gguf_family(known->model_type).arch == family.arch,
          "{} is no config.json of a model of GGUF's architecture {}", name, family.arch);
  return config;
}

// All weights of a GGUF file, under Hugging Face's names.
void add_gguf(ConsolidateSource& result, const ConsolidateOptions& options) {
  const std::string where = result.path.string();
  require(options.format == ExportFormat::HF && options.what == ExportWhat::Model,
          "{} is a GGUF file, which is written as a Hugging Face directory only", where);
  require(!options.merge_lora && !options.step && !options.shards && options.base.empty(),
          "{} is a GGUF file: it has no steps, shards or adapters", where);
  auto owned = std::make_unique<GgufSource>(result.path);
  const GgufSource& source = *owned;
  auto offsets = std::make_unique<OffsetSource>(owned.get());
  const Json keys(source.header().keys);
  const std::string& arch =
      JsonReader(keys, where + ": GGUF keys").at("general.architecture").string();
  const GgufFamily* const family = find_gguf_arch(arch);
  require<Unsupported>(family != nullptr, "{} has the architecture {}, which tessera does not know",
                       where, arch);
  const Json given = config_of_gguf(result, source, *family, options);
  result.kind = "GGUF file";
  result.family = hf_family_of(given);
  result.config = std::make_shared<const Json>(result.family->config_from_hf(given, where));
  result.hf_config = std::make_shared<const Json>(given);
  const Json config = result.family->config_to_hf(*result.config, DType::F32);

  std::vector<TensorInfo> expected, found;
  for (const HfTensor& tensor : result.family->tensors(*result.config)) {
    for (const HfTensor::Part& part : tensor.parts) {
      const GgufTensor form = gguf_tensor(*family, config, part.name, tensor.shape_of(part));
      expected.push_back({form.name, form.shape, DType::F32});
      const GgufEntry* const entry = source.find(form.name);
      if (entry == nullptr) continue;
      if (form.offset != 0) offsets->add(form.name, -form.offset);
      const DType stored = *entry->elements->dtype;
      ExportTensor& weight = result.weights.emplace_back(ExportTensor{
          part.name, tensor.shape_of(part), stored, options.dtype.value_or(stored),
          form.offset != 0 ? static_cast<const TensorSource*>(offsets.get()) : owned.get(),
          form.name});
      weight.stored_encoding = entry->elements->encoding;
      if (form.swap) weight.swap = Swap{form.swap->columns, form.swap->rows, form.swap->inner};
    }
  }
  for (const GgufEntry& entry : source.header().tensors) {
    if (entry.name.starts_with("rope_f"))
      result.skipped.push_back({entry.name, "follows from the configuration"});
    else
      found.push_back({entry.name, entry.shape, DType::F32});
  }
  match_tensors(expected, found, where);
  if (result.hf_config_file.empty())
    result.tokenizer_files = gguf_tokenizer(source.header(), where, result.warnings);
  result.sources.push_back(std::move(owned));
  result.sources.push_back(std::move(offsets));
}

}  // namespace

ConsolidateSource open_consolidate_source(const fs::path& path, const ConsolidateOptions& options) {
  ConsolidateSource result;
  result.path = path;
  if (is_gguf(path)) {
    add_gguf(result, options);
    return result;
  }
  require_model_directory(path);
  const bool peft = is_peft(path);
  require(peft || options.merge_lora || options.base.empty(),
          "--base names the base of LoRA adapters, for --merge-lora");
  if (peft) {
    require(options.merge_lora,
            "{} holds LoRA adapters in PEFT's format; write the weights of their base with them by "
            "--merge-lora",
            path.string());
    require(!options.step && !options.shards, "{} has no steps or shards", path.string());
    result.kind = "adapter in PEFT's format";
    add_merged(result, options);
    choose_tensors(result, options.tensors);
    return result;
  }
  if (std::unique_ptr<ShardedSource> sharded =
          open_sharded(path, options.shards, wants_optimizer(options))) {
    require(!options.merge_lora, "{} holds no LoRA adapters; omit --merge-lora", path.string());
    require(!options.step, "{} is a {} and has no step {}", path.string(), sharded->kind(),
            options.step.value_or(0));
    add_sharded(result, std::move(sharded), options);
    choose_tensors(result, options.tensors);
    check_size(result);
    return result;
  }
  const CheckpointReader reader = open_checkpoint(path, options.step);
  require(!options.shards,
          "{} is a checkpoint of tessera, which records its number of shards; omit --shards",
          reader.path().string());
  result.path = reader.path();
  if (options.merge_lora) {
    require(has_lora(reader), "{} holds no LoRA adapters; omit --merge-lora",
            reader.path().string());
    result.kind = "tessera checkpoint";
    result.checkpoint = reader;
    add_merged(result, options);
  } else {
    add_checkpoint(result, reader, options);
  }
  choose_tensors(result, options.tensors);
  return result;
}

}  // namespace tessera::io
