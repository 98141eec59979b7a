#include "io/consolidate/side_files.h"

#include <algorithm>
#include <array>
#include <map>
#include <system_error>

#include "core/base/error.h"
#include "io/hf/gpt2.h"
#include "io/hf/tokenizer.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kMaxCopied = std::int64_t{64} << 20;  // bytes of a file that is copied
constexpr const char* kConfig = "config.json";
constexpr const char* kOwnConfig = "tessera.json";
constexpr const char* kGeneration = "generation_config.json";
constexpr const char* kOwnTokenizer = "tokenizer_tessera.json";
constexpr const char* kTokenizer = "tokenizer.json";
constexpr const char* kTokenizerConfig = "tokenizer_config.json";
/// What goes along as it is from a Hugging Face directory to another.
constexpr std::array kCopied = {kGeneration,  kTokenizer,   kTokenizerConfig,
                                "vocab.json", "merges.txt", "special_tokens_map.json",
                                kOwnTokenizer};
/// Of a Hugging Face config.json: what it says beyond our "model" section. What it leaves out has
/// Hugging Face's own default, which leaving it out keeps.
constexpr std::array kKeptSettings = {"bos_token_id", "eos_token_id", "pad_token_id",
                                      "resid_pdrop",  "embd_pdrop",   "attn_pdrop"};

void add_json(std::vector<SideFile>& files, const char* name, const Json& json) {
  files.push_back({name, json.dump(2) + "\n"});
}

/// The floating-point dtype that most bytes of the weights have.
DType main_dtype(const std::vector<ExportTensor>& weights) {
  std::map<DType, std::int64_t> bytes;
  for (const ExportTensor& tensor : weights) {
    if (is_floating(tensor.written)) bytes[tensor.written] += tensor.bytes();
  }
  const auto most = std::max_element(
      bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == bytes.end() ? weights.front().written : most->first;
}

Json export_config(const ConsolidateSource& source) {
  Json config = gpt2_config_to_hf(*source.config, main_dtype(source.weights));
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
  add_json(files, kOwnTokenizer, *tokenizer);
  if (const auto hf = tokenizer_to_hf(*tokenizer)) {
    add_json(files, kTokenizer, *hf);
    add_json(files, kTokenizerConfig, tokenizer_config_to_hf(config["n_positions"]));
  }
}

}  // namespace

std::vector<SideFile> compose_side_files(const ConsolidateSource& source,
                                         const ConsolidateOptions& options) {
  std::vector<SideFile> files;
  if (options.format == ExportFormat::Safetensors) {
    Json own{{"model", source.config.value_or(nullptr)}};
    if (source.checkpoint) own["step"] = source.checkpoint->index().step;
    add_json(files, kOwnConfig, own);
    return files;
  }
  const Json config = export_config(source);
  add_json(files, kConfig, config);
  std::error_code error;
  if (source.checkpoint || !fs::exists(source.path / kGeneration, error)) {
    Json generation{{"_from_model_config", true}};
    for (const char* key : {"bos_token_id", "eos_token_id"}) {
      if (config.contains(key) && !config[key].is_null()) generation[key] = config[key];
    }
    add_json(files, kGeneration, generation);
  }
  if (source.checkpoint) {
    add_tokenizer(files, *source.checkpoint, config);
    return files;
  }
  for (const char* name : kCopied) {
    const fs::path path = source.path / name;
    if (fs::exists(path, error)) files.push_back({name, read_file(path, kMaxCopied)});
  }
  return files;
}

bool is_config_file(std::string_view name) { return name == kConfig || name == kOwnConfig; }

bool is_side_file(std::string_view name) {
  return is_config_file(name) || std::find(kCopied.begin(), kCopied.end(), name) != kCopied.end();
}

}  // namespace tessera::io
