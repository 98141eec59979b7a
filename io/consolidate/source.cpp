#include "io/consolidate/source.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/error.h"
#include "io/base/convert.h"
#include "io/base/json.h"
#include "io/checkpoint/find.h"
#include "io/consolidate/sharded.h"
#include "io/consolidate/side_files.h"
#include "io/consolidate/sink.h"
#include "io/gguf/family.h"
#include "io/gguf/offset_source.h"
#include "io/gguf/source.h"
#include "io/hf/config.h"
#include "io/hf/lora.h"
#include "io/hf/model_source.h"
#include "io/hf/parts_source.h"
#include "io/hf/peft_state.h"
#include "io/megatron/files.h"
#include "io/source/find_sharded.h"
#include "io/source/open_sharded.h"

namespace tessera::io {
namespace {

bool wants_weights(const ConsolidateOptions& options) {
  return options.what != ExportWhat::Optimizer;
}
bool wants_optimizer(const ConsolidateOptions& options) {
  return options.what != ExportWhat::Model;
}

void add_weight(ConsolidateSource& result, const TensorSource& source, const TensorInfo& info,
                const std::string& name, const ConsolidateOptions& options) {
  // Converts floating-point weights only, because integers and booleans are indices and masks.
  const bool converts = options.dtype && is_floating(info.dtype);
  result.weights.push_back(
      {name, info.shape, info.dtype, converts ? *options.dtype : info.dtype, &source, info.name});
}

void check_no_name_rules(const ConsolidateOptions& options, const fs::path& path) {
  const NameRules& rules = options.names;
  require(!options.like && rules.is_auto() && rules.renames.empty() && rules.select.empty() &&
              rules.exclude.empty(),
          "the names of {} are known; omit --like, --strip, --rename, --select and --exclude",
          path.string());
}

// The "arch" of a "model" section, empty if there is none.
std::string arch_of(const Json& model) {
  const auto arch = model.is_object() ? model.find("arch") : model.end();
  return arch != model.end() && arch->is_string() ? arch->get<std::string>() : "";
}

// Reads the config.json of a checkpoint's model that tessera does not know.
void read_other_config(ConsolidateSource& result, const std::string& arch,
                       const ConsolidateOptions& options) {
  const bool needed = sink_of(options.format).needs_config;
  if (options.format == ExportFormat::Safetensors || (!needed && !options.config_file)) return;
  require(options.config_file.has_value(),
          "{} has a model of arch \"{}\", which this export does not know; give its Hugging Face "
          "config.json with --config, or write its tensors with --format safetensors",
          result.path.string(), arch);
  if (read_config(result, *options.config_file).empty()) throw no_model_type(*options.config_file);
}

// Adds all weights of a model that tessera knows.
void add_model(ConsolidateSource& result, std::unique_ptr<ModelSource> model,
               const ConsolidateOptions& options) {
  std::unique_ptr<TensorSource> parts;
  if (result.family != nullptr && sink_of(options.format).has_hf_names)
    parts = split_model(*result.family, model->config(), *model);
  const TensorSource& weights = parts ? *parts : *model;
  for (const TensorInfo& info : weights.tensors())
    add_weight(result, weights, info, info.name, options);
  result.sources.push_back(std::move(model));
  if (parts) result.sources.push_back(std::move(parts));
}

// Weights of a base with adapters: those of a state of PEFT's running model, or else of the
// checkpoint or directory in PEFT's format at result.path.
void add_merged(ConsolidateSource& result, const ConsolidateOptions& options,
                std::shared_ptr<const ShardedSource> state = nullptr) {
  require(state || !options.config_file,
          "{} holds LoRA adapters, whose base has the configuration; omit --config",
          result.path.string());
  require(options.what == ExportWhat::Model,
          "merged weights have no optimizer state; leave out --what or --merge-lora");
  std::unique_ptr<ModelSource> model;
  if (state) {
    const PeftTensors adapters =
        peft_of_state(std::move(state), options.names, options.config_file);
    const fs::path& dir = adapters.source->config_dir();
    model = open_merged(adapters, options.base);
    if (options.base.empty() && !is_there(dir / kConfigFile) && !names_of_base(adapters).empty())
      result.warnings.push_back(fmt::format(
          "{} holds weights of the base, too, which are not used, as {} is missing: the adapters "
          "are merged with {}, which {} names; copy the model's config.json there to use them",
          result.path.string(), (dir / kConfigFile).string(), model->path().string(),
          adapters.config_file.string()));
  } else {
    model = open_model(result.path, {}, LoadPolicy::Exact, options.base, options.weights);
  }
  result.bases = model->origins();
  const fs::path own = result.bases.back();
  std::erase(result.bases, own);
  result.config = std::make_shared<const Json>(model->config());
  result.family = find_hf_family(arch_of(*result.config));
  if (result.family != nullptr) result.parameters = parameters_of(*result.family, *result.config);
  const fs::path base = model->config_dir();
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
  require(sink_of(options.format).takes_adapters,
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

// Hyperparameters of a run of tessera, from its configuration; none if the checkpoint has none.
std::vector<ParamGroup> read_groups(ConsolidateSource& result, const CheckpointReader& reader) {
  if (!reader.index().trainer) return {};
  const std::string where = (reader.path() / reader.index().trainer->file).string();
  const Json trainer = parse_json(reader.trainer_json(), where);
  const Json::json_pointer place("/config/optim");
  const Json optim = trainer.contains(place) ? trainer.at(place) : Json();
  if (optim.is_object() && optim.value("name", "adamw") != "adamw") return {};
  std::map<std::string, double> found;
  for (const char* key : {"lr", "beta1", "beta2", "eps", "weight_decay"}) {
    if (!optim.is_object() || !optim.contains(key) || !optim[key].is_number()) return {};
    found[key] = optim[key].get<double>();
  }
  if (optim.contains("lr_scale") && !optim["lr_scale"].empty()) {
    result.warnings.push_back(
        fmt::format("{} scaled the learning rate of some weights (optim.lr_scale); exported "
                    "hyperparameters have the base rate for all",
                    reader.path().string()));
  }
  // All that torch.optim.AdamW of PyTorch 2.4 to 2.15 keeps in a group.
  Json settings{{"lr", found["lr"]},
                {"initial_lr", found["lr"]},  // for torch.optim.lr_scheduler
                {"betas", Json::array({found["beta1"], found["beta2"]})},
                {"eps", found["eps"]},
                {"weight_decay", found["weight_decay"]},
                {"amsgrad", false},
                {"maximize", false},
                {"foreach", nullptr},
                {"capturable", false},
                {"differentiable", false},
                {"fused", nullptr},
                {"decoupled_weight_decay", true}};
  using Of = ParamGroup::Of;
  const bool decays = found["weight_decay"] != 0;
  std::vector<ParamGroup> groups{
      {std::make_shared<const Json>(settings), decays ? Of::Matrices : Of::All}};
  settings["weight_decay"] = 0.0;
  if (decays) groups.push_back({std::make_shared<const Json>(std::move(settings)), Of::Others});
  return groups;
}

// Optimizer state of a checkpoint, under the names of its weights in the output.
void add_moments(ConsolidateSource& result, const CheckpointReader& reader,
                 const ConsolidateOptions& options) {
  const bool splits = result.family != nullptr && sink_of(options.format).has_hf_names;
  require(!splits || !has_lora(reader),
          "{} holds LoRA adapters; write their optimizer state with --format safetensors",
          reader.path().string());
  for (const Section& state : reader.states()) {
    if (state == kAverageSection && sink_of(options.format).has_hf_names) {
      for (const auto& [name, record] : reader.tensors(state))
        result.skipped.emplace_back(state.state + "/" + name,
                                    "moving average, written with --weights ema");
      continue;
    }
    const TensorSource* source = &reader.source(state);
    if (splits) {
      result.sources.push_back(
          split_model(*result.family, *result.config, *source, LoadPolicy::Partial));
      source = result.sources.back().get();
    }
    for (const TensorInfo& info : source->tensors()) {
      require(!splits || is_floating(info.dtype),
              "the optimizer state of {} has 8 bits; write it with --format safetensors",
              reader.path().string());
      result.optimizer.push_back(
          {state.state + "/" + info.name, info.shape, info.dtype, info.dtype, source, info.name});
      result.optimizer.back().kind = state.state;
    }
  }
  if (!sink_of(options.format).has_hf_names) return;
  result.optimizer_step = reader.index().optimizer->step;
  result.groups = read_groups(result, reader);
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
  if (known || result.hf_config == nullptr) result.config = section;
  if (known && !has_lora(reader)) result.parameters = parameters_of(*result.family, *section);
  if (wants_weights(options)) {
    if (known && has_lora(reader))
      add_adapters(result, reader, options);
    else
      add_model(result,
                open_checkpoint_model(reader, known ? LoadPolicy::Exact : LoadPolicy::Partial),
                options);
  }
  if (result.hf_config != nullptr) {
    check_scales(result);
    result.warnings.push_back(unchecked_warning(
        fmt::format("{} has a model of arch \"{}\", which this export does not know",
                    result.path.string(), arch)));
  }
  if (wants_optimizer(options)) add_moments(result, reader, options);
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

void choose_tensors(ConsolidateSource& source, const std::vector<std::string>& patterns) {
  if (patterns.empty()) return;
  std::vector<std::string> names;
  const auto choose = [&](std::vector<ExportTensor>& tensors) {
    std::erase_if(tensors, [&](const ExportTensor& tensor) {
      names.push_back(tensor.weight());
      if (is_chosen(patterns, names.back())) return false;
      source.skipped.push_back({tensor.source_name, "not selected by --tensors"});
      return true;
    });
  };
  choose(source.weights);
  choose(source.optimizer);
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
  require_trained(options.weights, result.path);
  require(!options.merge_lora && !options.step && !options.shards && options.base.empty(),
          "{} is a GGUF file: it has no steps, shards or adapters", where);
  check_no_name_rules(options, result.path);
  auto owned = std::make_unique<GgufSource>(result.path);
  const GgufSource& source = *owned;
  auto offsets = std::make_unique<OffsetSource>(owned.get());
  const std::string& arch =
      JsonReader(source.header().keys, where + ": GGUF keys").at("general.architecture").string();
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
    result.tokenizer_files =
        gguf_tokenizer(File::open(result.path), source.header(), result.warnings);
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
  // Without the files of adapters, it is the configuration of those in shards.
  const bool peft = is_adapter_directory(path);
  require(peft || options.merge_lora || options.base.empty(),
          "--base names the base of LoRA adapters, for --merge-lora");
  if (peft) {
    require(options.merge_lora,
            "{} holds LoRA adapters in PEFT's format; write the weights of their base with them by "
            "--merge-lora",
            path.string());
    require(!options.step && !options.shards, "{} has no steps or shards", path.string());
    check_no_name_rules(options, path);
    result.kind = "adapter in PEFT's format";
    add_merged(result, options);
    choose_tensors(result, options.tensors);
    return result;
  }
  const bool has_steps = options.step && is_megatron_run(path);
  if (std::unique_ptr<ShardedSource> sharded =
          has_steps ? open_megatron(path, options.step)
                    : open_sharded(path, options.shards, wants_optimizer(options))) {
    require_trained(options.weights, path);
    require(!options.step || has_steps, "{} is a {} and has no step {}", path.string(),
            sharded->kind(), options.step.value_or(0));
    if (options.merge_lora) {
      require(!options.like, "{} is merged with its base, whose names are known; omit --like",
              path.string());
      result.kind = sharded->kind();
      result.warnings = sharded->warnings();
      add_merged(result, options, std::move(sharded));
    } else {
      add_sharded(result, std::move(sharded), options);
    }
    choose_tensors(result, options.tensors);
    check_size(result);
    return result;
  }
  const CheckpointReader reader = open_checkpoint(path, options.step).with(options.weights);
  check_no_name_rules(options, reader.path());
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
