#include "io/consolidate/side_files.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <system_error>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/hf/config.h"
#include "io/hf/lora.h"
#include "io/hf/tokenizer.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kMaxCopied = std::int64_t{64} << 20;  // bytes of a copied file
constexpr std::size_t kMaxParsed = std::size_t{1} << 20;  // bytes of a file searched for auto_map
constexpr const char* kOwnConfig = "tessera.json";
constexpr const char* kAdapterConfig = "adapter_config.json";
constexpr const char* kOwnTokenizer = "tokenizer_tessera.json";
constexpr const char* kTokenizer = "tokenizer.json";
constexpr const char* kTokenizerConfig = "tokenizer_config.json";
/// Files copied unchanged, all from one directory: those that save_pretrained of tokenizers and
/// processors writes, and tokenizers in their publishers' own formats.
constexpr std::array kCopied = {kTokenizer,
                                kTokenizerConfig,
                                "special_tokens_map.json",
                                "added_tokens.json",
                                "chat_template.jinja",
                                "chat_template.json",
                                "vocab.json",
                                "merges.txt",
                                "vocab.txt",
                                "tokenizer.model",
                                "spiece.model",
                                "spm.model",
                                "sentencepiece.bpe.model",
                                "source.spm",
                                "target.spm",
                                "bpe.codes",
                                "dict.txt",
                                "tiktoken.model",
                                "tekken.json",
                                "normalizer.json",
                                "preprocessor_config.json",
                                "processor_config.json",
                                "video_preprocessor_config.json",
                                "audio_tokenizer_config.json",
                                kOwnTokenizer};
/// Directory of further chat templates; exports have no subdirectories.
constexpr const char* kMoreTemplates = "additional_chat_templates";
/// Settings of a Hugging Face config.json without a counterpart in tessera's "model" section.
/// Absent ones stay absent, so that Hugging Face's defaults apply.
constexpr std::array kKeptSettings = {"bos_token_id", "eos_token_id", "pad_token_id",
                                      "resid_pdrop",  "embd_pdrop",   "attn_pdrop"};

void add_json(std::vector<SideFile>& files, const char* name, const Json& json) {
  files.push_back({name, json.dump(2) + "\n"});
}

/// The floating-point dtype that takes most bytes of the weights; empty if there is none.
std::optional<DType> main_dtype(const std::vector<ExportTensor>& weights) {
  std::map<DType, std::int64_t> bytes;
  for (const ExportTensor& tensor : weights) {
    if (is_floating(tensor.written)) bytes[tensor.written] += tensor.bytes();
  }
  const auto most = std::max_element(
      bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == bytes.end() ? std::nullopt : std::optional(most->first);
}

Json export_config(const ConsolidateSource& source) {
  const DType dtype =
      main_dtype(source.weights)
          .value_or(source.weights.empty() ? DType::F32 : source.weights.front().written);
  Json config = source.family->config_to_hf(*source.config, dtype);
  if (!source.hf_config) return config;
  for (const char* key : kKeptSettings) {
    const auto found = source.hf_config->find(key);
    if (found != source.hf_config->end()) {
      config[key] = *found;
    } else {
      config.erase(key);
    }
  }
  return config;
}

void add_tokenizer(std::vector<SideFile>& files, const CheckpointReader& reader,
                   const Json& config) {
  if (!reader.index().trainer) return;
  const std::string source = (reader.path() / reader.index().trainer->file).string();
  const Json trainer = parse_json(reader.trainer_json(), source);
  const auto tokenizer = trainer.find("tokenizer");
  if (tokenizer == trainer.end() || !tokenizer->is_object()) return;
  const char* const positions =
      config.contains("n_positions") ? "n_positions" : "max_position_embeddings";
  const Json tokenizer_config = tokenizer_config_to_hf(config.at(positions));
  std::map<std::string, std::string> original = tokenizer_files(*tokenizer, source);
  if (!original.empty()) {
    if (!original.contains(kTokenizerConfig) && original.contains(kTokenizer))
      add_json(files, kTokenizerConfig, tokenizer_config);
    for (auto& [name, content] : original)
      if (is_side_file(name)) files.push_back({name, std::move(content)});
    return;
  }
  add_json(files, kOwnTokenizer, *tokenizer);
  if (const auto hf = tokenizer_to_hf(*tokenizer)) {
    add_json(files, kTokenizer, *hf);
    add_json(files, kTokenizerConfig, tokenizer_config);
  }
}

void add_copy(std::vector<SideFile>& files, const fs::path& dir, const char* name) {
  if (is_there(dir / name)) files.push_back({name, read_file(dir / name, kMaxCopied)});
}

/// Adds the kCopied files of the source's directory or, if it has none, of the one of --config.
void add_copies(std::vector<SideFile>& files, const ConsolidateSource& source,
                std::vector<std::string>& warnings) {
  const fs::path named = source.hf_config_file.parent_path();
  add_copy(files, is_there(source.path / kGenerationFile) ? source.path : named, kGenerationFile);
  // Takes all from one directory, because a mixture of two tokenizers might load and be wrong.
  const bool own =
      std::ranges::any_of(kCopied, [&](const char* name) { return is_there(source.path / name); });
  const fs::path& dir = own ? source.path : named;
  for (const char* name : kCopied) add_copy(files, dir, name);
  if (is_there(dir / kMoreTemplates)) {
    warnings.push_back(fmt::format("{} is not copied: exports have no subdirectories",
                                   (dir / kMoreTemplates).string()));
  }
}

/// Python files that a copied file needs, from its auto_map; empty if it is not JSON or too large.
std::set<std::string> find_modules(const SideFile& file) {
  if (file.content.size() > kMaxParsed || file.content.find("auto_map") == std::string::npos) {
    return {};
  }
  try {
    return auto_map_files(parse_json(file.content, file.name));
  } catch (const CorruptCheckpoint&) {
    return {};
  }
}

/// For a model unknown to tessera, adds config.json and the files copied with it.
void add_other_model(std::vector<SideFile>& files, const ConsolidateSource& source,
                     std::vector<std::string>& warnings) {
  Json config = *source.hf_config;
  if (const auto dtype = main_dtype(source.weights)) set_torch_dtype(config, *dtype);
  std::set<std::string> modules = auto_map_files(config);
  files.push_back({kConfigFile, dump_hf_config(config) + "\n"});
  add_copies(files, source, warnings);
  for (const SideFile& file : files) {
    if (file.name.ends_with("_config.json")) modules.merge(find_modules(file));
  }
  if (!modules.empty()) {
    warnings.push_back(fmt::format(
        "this model needs Python files, which are programs and therefore not copied: {}; if you "
        "trust them, copy them and their imports next to the new config.json",
        fmt::join(modules, ", ")));
  }
}

}  // namespace

std::vector<SideFile> compose_side_files(const ConsolidateSource& source,
                                         const ConsolidateOptions& options,
                                         std::vector<std::string>& warnings) {
  std::vector<SideFile> files;
  const bool has_config = source.config ? source.family != nullptr : source.hf_config != nullptr;
  if (options.format == ExportFormat::Safetensors || !has_config) {
    Json own{{"model", source.config ? *source.config : Json()}};
    if (source.checkpoint) own["step"] = source.checkpoint->index().step;
    add_json(files, kOwnConfig, own);
    return files;
  }
  if (!source.config && source.is_adapter) {
    files.push_back({kAdapterConfig, dump_hf_config(*source.hf_config) + "\n"});
    add_copies(files, source, warnings);
    return files;
  }
  if (!source.config) {
    add_other_model(files, source, warnings);
    return files;
  }
  const Json config = export_config(source);
  if (source.is_adapter)
    add_json(files, kAdapterConfig, peft_config(*source.config));
  else
    add_json(files, kConfigFile, config);
  // A run has kept files of the model that it started from.
  const fs::path kept = source.path / "../../tokenizer";
  const fs::path config_dir = source.hf_config_file.parent_path();
  std::vector<fs::path> dirs{source.checkpoint ? kept : source.path};
  if (!config_dir.empty()) dirs.push_back(config_dir);
  const auto copied = std::ranges::find_if(
      dirs, [](const fs::path& dir) { return is_there(dir / kGenerationFile); });
  if (copied == dirs.end() && !source.is_adapter) {
    Json generation{{"_from_model_config", true}};
    for (const char* key : {"bos_token_id", "eos_token_id"}) {
      if (config.contains(key) && !config[key].is_null()) generation[key] = config[key];
    }
    add_json(files, kGenerationFile, generation);
  } else if (source.checkpoint && !source.is_adapter) {
    add_copy(files, *copied, kGenerationFile);
  }
  if (source.checkpoint) {
    add_tokenizer(files, *source.checkpoint, config);
    const bool has_own = std::ranges::find(files, kOwnTokenizer, &SideFile::name) != files.end();
    for (const char* name : kCopied) {
      if (!has_own) add_copy(files, kept, name);
    }
    return files;
  }
  for (const auto& [name, content] : source.tokenizer_files) files.push_back({name, content});
  if (source.tokenizer_files.empty()) add_copies(files, source, warnings);
  return files;
}

bool is_config_file(std::string_view name) {
  return name == kConfigFile || name == kOwnConfig || name == kAdapterConfig;
}

bool is_side_file(std::string_view name) {
  return is_config_file(name) || name == kGenerationFile ||
         std::ranges::find(kCopied, name) != kCopied.end();
}

}  // namespace tessera::io
