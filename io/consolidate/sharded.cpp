#include "io/consolidate/sharded.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/base/error.h"
#include "io/base/convert.h"
#include "io/base/json.h"
#include "io/consolidate/side_files.h"
#include "io/consolidate/sink.h"
#include "io/dcp/dcp_source.h"
#include "io/deepspeed/files.h"
#include "io/hf/config.h"
#include "io/hf/model_names.h"
#include "io/hf/peft_state.h"
#include "io/megatron/arguments.h"
#include "io/megatron/files.h"
#include "io/megatron/names.h"

namespace tessera::io {
namespace {

constexpr std::size_t kListed = 5;  // names in a message, of each kind
constexpr const char* kStateSkipped = "optimizer state, written with --what all";

// "layers.12.attention.wq.weight"
bool is_torchtitan_query(std::string_view name) {
  constexpr std::string_view kBefore = "layers.", kAfter = ".attention.wq.weight";
  if (!name.starts_with(kBefore) || !name.ends_with(kAfter)) return false;
  name.remove_prefix(kBefore.size());
  return name.find_first_not_of("0123456789") == name.size() - kAfter.size();
}

// Throws on names that are not of a Hugging Face model: torchtitan's, or optimizer state without
// its usual key. Rows of torchtitan's wq and wk are in another order than those of q_proj and
// k_proj, so that a renamed model would load and be wrong.
void check_no_foreign_names(const std::vector<TensorName>& names, const std::string& of) {
  const TensorName *embedding = nullptr, *query = nullptr;
  for (const TensorName& name : names) {
    if (name.role != TensorRole::Weight) continue;
    for (const std::string_view kind : {".exp_avg", ".exp_avg_sq", ".momentum_buffer"}) {
      require(!name.name.ends_with(kind),
              "{}: tensor {} is optimizer state by its name, not a weight of a Hugging Face model; "
              "leave it out with --exclude '*{}'",
              of, name.source, kind);
    }
    if (name.name == "tok_embeddings.weight") embedding = &name;
    if (query == nullptr && is_torchtitan_query(name.name)) query = &name;
  }
  require<Unsupported>(
      embedding == nullptr || query == nullptr,
      "{} has tok_embeddings.weight and {}, in torchtitan's names and row order, which Hugging "
      "Face programs do not read; convert them with torchtitan's own script "
      "(scripts/checkpoint_conversion/convert_to_hf.py), or write them unchanged with --format "
      "safetensors",
      of, query == nullptr ? "" : query->source);
}

// Reads the configuration, unless the export needs none. Empty: the names cannot be checked, or
// the user wants them as they are.
std::optional<ModelNames> find_model(ConsolidateSource& result, const ShardedSource& source,
                                     const ConsolidateOptions& options) {
  const bool is_gguf = options.format == ExportFormat::GGUF;
  const bool is_hf = sink_of(options.format).needs_config;
  std::optional<ModelNames> model;
  if (options.like) model = names_in_directory(*options.like);
  const fs::path file =
      options.config_file.value_or(options.like.value_or(source.config_dir()) / kConfigFile);
  if (!options.config_file && !is_there(file)) {
    require(!is_hf,
            "{} is a {} without config.json, so its model is unknown; give a config.json with "
            "--config, or write its tensors unchanged with --format safetensors",
            options.like ? options.like->string() : source.where(), source.kind());
    return model;
  }
  const std::string type = read_config(result, file);
  if (type.empty() && (is_hf || options.config_file)) throw no_model_type(file);
  if (model && !is_gguf) return model;

  std::string why = fmt::format("{} has {}, which tessera does not know", file.string(),
                                "model_type \"" + type + "\"");
  const HfFamily* const family = type.empty() ? nullptr : hf_family_of(*result.hf_config);
  const bool as_they_are = !is_hf && !options.names.is_auto();
  if (type.empty()) why = fmt::format("{} has no model_type", file.string());
  if (as_they_are && family != nullptr) why = "names are those of --strip";
  try {
    if (family != nullptr && !as_they_are) {
      const Json config = family->config_from_hf(*result.hf_config, file.string());
      if (is_gguf) {
        result.family = family;
        result.config = std::make_shared<const Json>(config);
      }
      ModelNames names = names_of_family(*family, config, *result.hf_config, file.string());
      std::vector<std::string> parameters;
      for (const ModelTensor& tensor : names.tensors) parameters.push_back(tensor.name);
      result.parameters = parameter_order(parameters);
      return names;
    }
  } catch (const Unsupported& error) {
    if (is_gguf) throw;
    why = error.what();
  } catch (const CorruptCheckpoint& error) {
    if (is_hf || options.config_file) throw;
    why = error.what();
  }
  require<Unsupported>(!is_gguf, "{}, so it cannot be written as GGUF", why);
  if (is_hf)
    result.warnings.push_back(unchecked_warning(why));
  else
    result.skipped.push_back({kConfigFile, why + ": tensors are written unchanged"});
  return {};
}

// A training checkpoint inside of a directory with a model, such as Trainer's global_step500.
std::string folder_with_state(const fs::path& dir) {
  std::error_code error;
  if (is_accelerate(dir) || is_megatron_run(dir)) return "";  // they are what was read
  for (const fs::path& path : list_directory(dir, error))
    if (fs::is_directory(path, error) && (is_deepspeed(path) || is_there(path / ".metadata")))
      return path.string();
  return "";
}

bool any_has(const std::vector<std::string>& names, std::string_view part) {
  return std::ranges::any_of(
      names, [&](const std::string& name) { return name.find(part) != std::string::npos; });
}

/// Adds tensors of a source to a ConsolidateSource.
class ShardedExport {
 public:
  ShardedExport(ConsolidateSource& result, const ShardedSource& source,
                const ConsolidateOptions& options, std::optional<ModelNames> model)
      : result_(result),
        source_(source),
        options_(options),
        model_(std::move(model)),
        rules_(options.names),
        parts_(std::make_unique<PartsSource>(source)) {
    // Names in a directory for Hugging Face programs stay, unless a model says what they must be.
    if (source.kind() == "Hugging Face model" && !model_ && rules_.prefixes.empty())
      rules_.strip_wrappers = false;
    rules_.keep_keys = options.format != ExportFormat::DCP;
    names_ = name_all(source, rules_);
  }

  void run() {
    const bool wants_weights = options_.what != ExportWhat::Optimizer;
    const bool wants_optimizer = options_.what != ExportWhat::Model;
    const std::string where = result_.path.string();
    skip_objects();
    const std::vector<SkippedEntry> skipped = result_.skipped;
    // With a model, missing weights are detected by their names and shapes.
    if (!model_ || wants_optimizer) warn(source_.loss_warnings());
    warn(source_.warnings());
    if (sink_of(options_.format).needs_config) check_no_foreign_names(names_, where);
    const bool has_weights =
        std::ranges::any_of(names_, [](const TensorName& name) { return is_weight(name); });
    if (model_ && (has_weights || wants_weights))
      add_model();
    else
      add_weights();
    if (!wants_weights) {  // their names are those of the state
      result_.weights.clear();
      result_.skipped = skipped;
      refused_.clear();
      unconverted_.clear();
      skip_all(TensorRole::Weight, "a weight, written with --what all");
    }
    if (!unconverted_.empty()) {
      warn({fmt::format("--dtype does not convert {} of the weights, such as {}",
                        unconverted_.size(), unconverted_.front())});
    }
    if (wants_optimizer) {
      add_state(has_weights);
      if (sink_of(options_.format).has_hf_names) add_groups();
    } else {
      skip_all(TensorRole::OptimizerState, kStateSkipped);
    }
    for (std::size_t i = 0; i < names_.size(); ++i)
      if (names_[i].role == TensorRole::Other) skip(i, names_[i].why);
    require<Unsupported>(refused_.empty(), "{} has tensors that tessera does not read:{}", where,
                         refused_);
    const std::string folder =
        wants_optimizer && result_.optimizer.empty() ? folder_with_state(result_.path) : "";
    require(!wants_optimizer || !result_.optimizer.empty(),
            "{} is a {} and holds no optimizer state under names of weights{}", where, result_.kind,
            folder.empty() ? "" : "; give its folder " + folder + ", which may have it");
    require(!wants_weights || !result_.weights.empty(), "{} is a {} and holds no weights", where,
            result_.kind);
    result_.sources.push_back(std::move(parts_));
  }

 private:
  static bool is_weight(const TensorName& name) { return name.role == TensorRole::Weight; }

  // A weight in the output.
  struct Exported {
    std::string name;
    const ModelTensor* tensor = nullptr;  // of the model, if it is known
  };
  struct Entry {
    TensorInfo info;
    std::string opaque, refused;  // dtypes that are copied unchanged, or not at all
  };
  Entry entry(std::size_t i) const {
    const std::vector<TensorInfo>& infos = source_.tensors();
    if (i < infos.size()) return {infos[i], "", ""};
    const ShardedSource::Unreadable& other = source_.unreadable()[i - infos.size()];
    return {{other.name, other.shape, other.carrier.value_or(DType::U8)},
            other.safetensors_dtype,
            other.carrier ? "" : other.dtype};
  }

  void warn(const std::vector<std::string>& warnings) {
    result_.warnings.insert(result_.warnings.begin(), warnings.begin(), warnings.end());
  }

  void skip(std::size_t i, const std::string& why) {
    const std::size_t readable = source_.tensors().size();
    result_.skipped.push_back(
        {names_[i].source,
         i < readable ? why
                      : fmt::format("{} ({})", why, source_.unreadable()[i - readable].dtype)});
  }

  void skip_objects() {
    for (const std::string& name : source_.objects())
      result_.skipped.push_back({name, "not a tensor"});
    for (const std::string& name : source_.left_out())
      result_.skipped.push_back({name, kStateSkipped});
  }

  void skip_all(TensorRole role, const char* why) {
    for (std::size_t i = 0; i < names_.size(); ++i)
      if (names_[i].role == role) skip(i, why);
  }

  // @param name  in the output
  // @param part  the part of the tensor to export; null: all
  void add(std::size_t i, const std::string& name, const ModelTensor* part = nullptr,
           const NameLayout& layout = {}) {
    Entry entry = this->entry(i);
    const bool is_state = names_[i].role == TensorRole::OptimizerState;
    const std::string& kind = names_[i].kind;
    if (!entry.refused.empty()) {
      if (options_.partial)
        skip(i, "of a dtype that tessera does not read");
      else if (is_chosen(options_.tensors, name.substr(kind.empty() ? 0 : kind.size() + 1)))
        refused_ += fmt::format("\n  {} {}", entry.info.name, entry.refused);
      else
        skip(i, "not selected");
      return;
    }
    TensorPlace place{&source_, entry.info};
    if (part != nullptr) place = place_of(*part, entry.info, layout, source_, *parts_);
    const DType stored = entry.info.dtype;
    if (!is_state && options_.dtype && !entry.opaque.empty())
      unconverted_.push_back(fmt::format("{} ({})", entry.info.name, entry.opaque));
    // Converts floating-point weights only, because integers and booleans are indices and masks.
    const bool converts = !is_state && options_.dtype && is_floating(stored);
    (is_state ? result_.optimizer : result_.weights)
        .push_back({name, place.info.shape, stored, converts ? *options_.dtype : stored,
                    place.source, place.info.name, entry.opaque});
    if (is_state) result_.optimizer.back().kind = kind;
  }

  void add_weights() {
    for (std::size_t i = 0; i < names_.size(); ++i)
      if (is_weight(names_[i])) add_weight(i, names_[i].name);
  }

  void add_weight(std::size_t i, const std::string& name, const ModelTensor* part = nullptr,
                  const NameLayout& layout = {}) {
    add(i, name, part, layout);
    exported_[i].push_back({name, part});
  }

  void add_model() {
    const ModelMatch match = match_model(*model_, source_, names_, rules_.is_auto());
    check_one_model(match.layout);
    if (!options_.partial) check_match(match);
    for (std::size_t t = 0; t < model_->tensors.size(); ++t)
      if (match.found[t])
        add_weight(*match.found[t], model_->tensors[t].name, &model_->tensors[t], match.layout);
    for (const std::size_t i : match.extra)
      add_weight(i, names_[i].name.substr(match.layout.prefix.size()));
    for (const auto& [i, why] : match.ignored) skip(i, why);
    is_held_ = match.layout.is_held;
    if (!options_.partial) return;
    std::set<std::size_t> ignored;
    for (const auto& [i, why] : match.ignored) ignored.insert(i);
    for (std::size_t i = 0; i < names_.size(); ++i)
      if (is_weight(names_[i]) && !ignored.contains(i) && !exported_.contains(i))
        add_weight(i, names_[i].name.substr(match.layout.prefix.size()));
  }

  // Pattern of the names at the source of weights that have a prefix.
  std::string pattern_of(const std::string& prefix) const {
    std::optional<std::string> common;
    for (const TensorName& name : names_) {
      if (name.role != TensorRole::Weight || !name.name.starts_with(prefix)) continue;
      if (!common) common = name.source;
      common->erase(
          std::mismatch(common->begin(), common->end(), name.source.begin(), name.source.end())
              .first,
          common->end());
    }
    return fmt::format("'{}*'", common->substr(0, common->rfind('.') + 1));
  }

  void check_one_model(const NameLayout& layout) const {
    if (layout.others.empty()) return;
    std::vector<std::string> choices;
    if (!layout.prefix.empty()) choices.push_back("--select " + pattern_of(layout.prefix));
    for (const std::string& prefix : layout.others) {
      if (!prefix.empty())
        choices.push_back((layout.prefix.empty() ? "--exclude " : "--select ") +
                          pattern_of(prefix));
      else
        choices.push_back("--exclude " + pattern_of(layout.prefix));
    }
    throw InvalidArgument("{} holds {} models with names of {}; choose one by {}",
                          result_.path.string(), layout.others.size() + 1, model_->of,
                          fmt::join(choices, layout.prefix.empty() ? " " : " or "));
  }

  // A weight outside of the prefix of the model whose name ends in that of a missing one.
  std::string outside_of_model(const ModelMatch& match) const {
    for (const auto& [i, why] : match.ignored)
      for (const std::string& name : match.comparison.missing)
        if (names_[i].name.ends_with(name.substr(0, name.find(' ')))) return names_[i].source;
    return "";
  }

  void check_match(const ModelMatch& match) const {
    const auto& [usable, missing, unexpected, shapes, dtypes] = match.comparison;
    if (match.comparison.allowed(LoadPolicy::Exact)) return;
    std::string advice;
    const auto advise = [&](bool applies, const std::string& text) {
      if (applies) advice += "\n  " + text;
    };
    advise(match.layout.found == 0,
           "No name is one of the model: change names with --rename 's/OLD/NEW/', or give the "
           "config.json of another model with --config.");
    advise(!rules_.is_auto(),
           "Names were compared as --strip left them; without it, the prefix is found.");
    const std::string outside = outside_of_model(match);
    advise(!outside.empty(),
           fmt::format("{} is outside of it: is it the missing one? Change names with --rename "
                       "'s/OLD/NEW/' or --strip.",
                       outside));
    const bool has_scales = any_has(unexpected, "_scale");
    advise(has_scales,
           "These are quantized weights with their scales: give the config.json with their "
           "\"quantization_config\".");
    const bool has_lora = any_has(unexpected, ".lora_A.");
    advise(has_lora,
           "These are weights with LoRA adapters: write the adapters with --format hf and their "
           "adapter_config.json, and merge those with --merge-lora.");
    const bool has_head = missing.empty() && any_has(unexpected, "lm_head.weight");
    advise(has_head,
           "lm_head.weight differs from the embedding to which the configuration ties it: correct "
           "\"tie_word_embeddings\" if it was trained by itself, else leave it out with --exclude "
           "'*lm_head.weight'.");
    advise(outside.empty() && any_has(missing, "lm_head.weight"),
           "The configuration has a head of its own: if it is tied to the embedding, set "
           "\"tie_word_embeddings\" to true.");
    const bool has_others = !unexpected.empty() && !has_lora && !has_head && !has_scales;
    advise(has_others && missing.empty(),
           "Tensors that are not of the model are left out with --exclude PATTERN.");
    advise(has_others && !missing.empty() && match.layout.found > 0,
           "If these are the same tensors, change their names with --rename 's/OLD/NEW/'.");
    advise(!shapes.empty(), "Is the config.json that of another size of the model?");
    advise(!sink_of(options_.format).needs_config, "--strip none writes the tensors as they are.");
    throw InvalidArgument(
        "the tensors of {}{} are not those of {}:{}{}", result_.path.string(),
        match.layout.prefix.empty() ? "" : fmt::format(" in {}", match.layout.prefix), model_->of,
        match.comparison.str(kListed), advice);
  }

  // Gives a tensor of state the names of its weight.
  void add_state_of(std::size_t i, const std::vector<Exported>& weights, const NameLayout& layout) {
    std::set<std::string>& outputs = outputs_[names_[i].link];
    for (const auto& [weight, tensor] : weights) outputs.insert(weight);
    for (const auto& [weight, tensor] : weights) {
      const bool is_part = layout.is_held && tensor != nullptr && tensor->expert >= 0;
      if (is_part && entry(i).info.shape != tensor->held_shape) {  // such as "step"
        add(i, names_[i].kind + "/" + tensor->held);
        return;
      }
      add(i, names_[i].kind + "/" + weight, is_part ? tensor : nullptr, layout);
    }
  }

  // State under its own name.
  void add_plain_state(std::size_t i) {
    const TensorName& name = names_[i];
    if (sink_of(options_.format).has_hf_names && HyperparametersReader::is_one(name.source)) {
      left_out_.push_back(name.source);
      return skip(i, "a hyperparameter that is a tensor");
    }
    if (!name.kind.empty()) outputs_[name.link].insert(name.name);
    add(i, name.str());
  }

  // Reads hyperparameters, with names in the output.
  void add_groups() {
    Hyperparameters found = source_.hyperparameters();
    for (const auto& [i, weights] : exported_)
      for (const Exported& weight : weights) outputs_[names_[i].link].insert(weight.name);
    for (ParamGroup& group : found.groups) {
      std::vector<std::string> weights;
      for (const std::string& name : group.weights) {
        const auto outputs = outputs_.find(without_wrappers(name));
        if (outputs == outputs_.end()) continue;  // not exported
        weights.insert(weights.end(), outputs->second.begin(), outputs->second.end());
      }
      group.weights = std::move(weights);
    }
    const std::optional<std::int64_t> step = found.take_step();
    const bool has_step = std::ranges::any_of(
        result_.optimizer, [](const ExportTensor& tensor) { return tensor.kind == "step"; });
    if (!has_step && step) result_.optimizer_step = step;
    result_.groups = std::move(found.groups);
    if (found.too_many)
      warn({fmt::format("{}: the optimizer's hyperparameters are too many to read, and left out",
                        result_.path.string())});
    left_out_.insert(left_out_.end(), found.left_out.begin(), found.left_out.end());
    if (left_out_.empty() || result_.groups.empty()) return;
    const std::size_t listed = std::min(left_out_.size(), kListed);
    warn(
        {fmt::format("{}: hyperparameters that are neither numbers, texts nor tuples of these are "
                     "left out, to be set in the program that resumes: {}{}",
                     result_.path.string(), fmt::join(std::span(left_out_).first(listed), ", "),
                     left_out_.size() > listed ? ", ..." : "")});
  }

  void add_state(bool has_weights) {
    // State whose names in the saved dict are those of its weights, whatever the rules make of them.
    std::map<std::string_view, std::size_t> weights;
    for (std::size_t i = 0; i < names_.size(); ++i)
      if (names_[i].role != TensorRole::OptimizerState) weights.emplace(names_[i].link, i);
    const bool is_linked = std::ranges::any_of(names_, [&](const TensorName& name) {
      return !name.kind.empty() && weights.contains(name.link);
    });
    if (!is_linked) return add_other_state(has_weights);
    NameLayout layout;
    layout.is_held = is_held_;
    for (std::size_t i = 0; i < names_.size(); ++i) {
      const TensorName& name = names_[i];
      if (name.role != TensorRole::OptimizerState) continue;
      if (name.kind.empty()) {
        add_plain_state(i);
        continue;
      }
      const auto weight = weights.find(name.link);
      const auto found = weight == weights.end() ? exported_.end() : exported_.find(weight->second);
      if (found == exported_.end())
        skip(i, "state of a tensor that is not exported");
      else
        add_state_of(i, found->second, layout);
    }
  }

  // State under other names than the weights, or without them.
  void add_other_state(bool has_weights) {
    const ModelNames model = model_ ? *model_ : names_of_weights(source_, names_);
    std::set<std::string> inner;
    for (const TensorName& name : names_)
      if (!name.kind.empty()) inner.insert(name.name);
    const NameLayout layout = find_layout(model, {inner.begin(), inner.end()}, rules_.is_auto());
    require(layout.others.empty(),
            "{} holds optimizer state of several models, in '{}' and '{}', none under names of "
            "weights",
            result_.path.string(), layout.prefix, fmt::join(layout.others, "', '"));
    std::map<std::string, std::vector<Exported>> by_name;
    for (const ModelTensor& tensor : model.tensors)
      by_name[layout.prefix + layout.name_of(model, tensor)].push_back({tensor.name, &tensor});
    const bool has_names = layout.found > 0;
    for (std::size_t i = 0; i < names_.size(); ++i) {
      const TensorName& name = names_[i];
      if (name.role != TensorRole::OptimizerState) continue;
      const auto found = by_name.find(name.name);
      if (name.kind.empty() || (!has_names && !has_weights && !model_))
        add_plain_state(i);
      else if (found == by_name.end())
        skip(i,
             has_names ? "state of a tensor that is not exported" : "state of an unknown tensor");
      else
        add_state_of(i, found->second, layout);
    }
  }

  ConsolidateSource& result_;
  const ShardedSource& source_;
  const ConsolidateOptions& options_;
  const std::optional<ModelNames> model_;
  NameRules rules_;
  std::vector<TensorName> names_;                          // of tensors(), then of unreadable()
  std::map<std::size_t, std::vector<Exported>> exported_;  // by position of the weight
  std::map<std::string, std::set<std::string>> outputs_;   // names of weights, by TensorName::link
  std::vector<std::string> left_out_;                      // hyperparameters
  bool is_held_ = false;                                   // see NameLayout
  std::unique_ptr<PartsSource> parts_;
  std::string refused_;
  std::vector<std::string> unconverted_;  // weights that --dtype leaves as they are
};

// @param prefix  path of the object in config.json: "", "text_config."
void check_scales_in(const ConsolidateSource& source, const Json& object,
                     const std::string& prefix) {
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

}  // namespace

void check_scales(const ConsolidateSource& source) {
  check_scales_in(source, *source.hf_config, "");
  for (const auto& [key, value] : source.hf_config->items())
    if (value.is_object()) check_scales_in(source, value, key + ".");
}

std::string unchecked_warning(const std::string& why) {
  return fmt::format(
      "{}, so names, shapes and number of the tensors are not checked; --dry-run shows the names, "
      "and --like DIR compares them with those of another Hugging Face directory",
      why);
}

std::string read_config(ConsolidateSource& result, const fs::path& file) {
  Json config = parse_hf_config(read_file(file, kMaxConfig), file.string());
  const auto type = config.is_object() ? config.find("model_type") : config.end();
  if (type == config.end() || !type->is_string()) return "";
  std::string text = type->get<std::string>();
  result.hf_config_file = file;
  result.hf_config = std::make_shared<const Json>(std::move(config));
  return text;
}

CorruptCheckpoint no_model_type(const fs::path& file) {
  return CorruptCheckpoint(
      "{} is not an object with a \"model_type\", which a Hugging Face model needs; give another "
      "one with --config, or write the tensors alone with --format safetensors",
      file.string());
}

namespace {

// Adds the LoRA adapters of PEFT's running model, in the format of PEFT's files.
void add_peft_adapters(ConsolidateSource& result, std::shared_ptr<const ShardedSource> source,
                       const ConsolidateOptions& options) {
  const PeftTensors adapter = peft_of_state(source, options.names, options.config_file);
  result.is_adapter = true;
  result.warnings = source->warnings();
  result.hf_config_file = adapter.config_file;
  result.hf_config = adapter.config;
  std::set<std::string_view> exported;
  for (const auto& [name, info] : adapter.tensors) {
    const bool converts = options.dtype && is_floating(info.dtype);
    result.weights.push_back({name, info.shape, info.dtype, converts ? *options.dtype : info.dtype,
                              source.get(), info.name});
    exported.insert(info.name);
  }
  for (const TensorInfo& info : source->tensors())
    if (!exported.contains(info.name)) result.skipped.push_back({info.name, "not of the adapters"});
  for (const ShardedSource::Unreadable& tensor : source->unreadable())
    result.skipped.push_back({tensor.name, "not of the adapters"});
  for (const std::string& name : source->objects())
    result.skipped.push_back({name, "not a tensor"});
  result.sources.push_back(std::move(source));
}

}  // namespace

void add_sharded(ConsolidateSource& result, std::unique_ptr<ShardedSource> source,
                 const ConsolidateOptions& options) {
  result.kind = source->kind();
  if (options.format == ExportFormat::HF && has_peft_names(*source, options.names))
    return add_peft_adapters(result, std::move(source), options);
  std::optional<ModelNames> model = find_model(result, *source, options);
  if (is_megatron(*source)) {
    require<Unsupported>(model || options.format == ExportFormat::Safetensors,
                         "{} has Megatron's names, and {} is of a model or has a setting that "
                         "tessera does not know, so it can't say which Hugging Face names they "
                         "are; give a Hugging Face directory of the model with --like, or write "
                         "the tensors unchanged with --format safetensors",
                         source->path().string(), result.hf_config_file.string());
    std::string flattened;
    if (model) {
      const Json config = result.hf_config ? *result.hf_config : Json();
      for (std::string& warning : check_megatron_arguments(source->path(), config))
        result.warnings.push_back(std::move(warning));
      flattened = use_hugging_face_names(*source, *model, config);
      source->set_hyperparameters(
          [dir = source->path()] { return read_megatron_hyperparameters(dir); });
    }
    require<Unsupported>(
        flattened.empty() || options.what == ExportWhat::Model,
        "{} holds {} flattened, as its ranks share it, which tessera does not "
        "take apart; leave out --what, or save with Megatron's --dist-ckpt-optim-fully-reshardable",
        source->path().string(), flattened);
  }
  result.optimizer_step = source->optimizer_step();
  ShardedExport(result, *source, options, std::move(model)).run();
  result.sources.push_back(std::move(source));
  const bool copies_config =
      options.format != ExportFormat::Safetensors && options.format != ExportFormat::GGUF;
  if (copies_config && result.hf_config != nullptr) check_scales(result);
}

}  // namespace tessera::io
