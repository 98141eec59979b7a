#include "io/gguf/source.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/gguf/family.h"

namespace tessera::io {
namespace {

TensorInfo info_of(const GgufEntry& entry) {
  if (entry.elements->encoding == Encoding::Q8_0)
    return {entry.name, {entry.end - entry.begin}, DType::U8};
  return {entry.name, entry.shape, *entry.elements->dtype};
}

// The shortest decimal that is this float, as in a config.json: 1e-05 for the nearest float.
double shortest(double value) {
  return std::strtod(fmt::format("{}", static_cast<float>(value)).c_str(), nullptr);
}

}  // namespace

GgufSource::GgufSource(const fs::path& file)
    : dir_(fs::absolute(file).parent_path()),
      file_(file.filename().string()),
      header_(read_gguf_header(File::open(file))) {
  for (const GgufEntry& entry : header_.tensors) {
    require<Unsupported>(entry.elements->dtype.has_value(),
                         "{}: tensor {} is quantized as {}; F32, F16, BF16 and Q8_0 are read",
                         file.string(), entry.name, entry.elements->name);
    entries_[entry.name] = &entry;
    tensors_.push_back(info_of(entry));
  }
}

const GgufEntry* GgufSource::find(const std::string& name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : found->second;
}

std::shared_ptr<const TensorRecord> GgufSource::record(const std::string& name) const {
  const GgufEntry* const entry = find(name);
  require(entry != nullptr, "{} holds no tensor {}", (dir_ / file_).string(), name);
  const TensorInfo info = info_of(*entry);
  Chunk chunk;
  chunk.file = file_;
  chunk.byte_begin = entry->begin;
  chunk.byte_end = entry->end;
  chunk.end = numel(info.shape);
  chunk.checksum = Checksum::None;
  return std::make_shared<const TensorRecord>(TensorRecord{info.dtype, info.shape, {chunk}});
}

Json gguf_config(const GgufSource& source) {
  const std::string where = source.path().string();
  const JsonReader root(source.header().keys, where + ": GGUF keys");
  const std::string arch = root.at("general.architecture").string();
  require<Unsupported>(arch == "llama" || arch == "qwen2" || arch == "qwen3",
                       "{} has the architecture {}, whose config.json does not follow from GGUF; "
                       "give it with --config",
                       where, arch);
  const auto refuse = [&](const std::string& what) {
    throw Unsupported(
        "{}: {} does not follow from GGUF; give the model's config.json with --config", where,
        what);
  };
  const auto has = [&](const char* key) { return root.has(fmt::format("{}.{}", arch, key)); };
  const auto integer = [&](const char* key) {
    return root.at(fmt::format("{}.{}", arch, key)).integer(1, INT32_MAX);
  };
  const auto number = [&](const char* key) {
    const JsonReader value = root.at(fmt::format("{}.{}", arch, key));
    require<CorruptCheckpoint>(value.value().is_number(), "{}: expected a number", value.where());
    return shortest(value.value().get<double>());
  };
  if (source.find("rope_freqs.weight") != nullptr) refuse("the scaling of rotary positions");
  if (has("expert_count") && integer("expert_count") > 0) refuse("a mixture of experts");
  const std::int64_t heads = integer("attention.head_count");
  const std::int64_t width = integer("embedding_length");
  const std::int64_t head_dim =
      has("attention.key_length") ? integer("attention.key_length") : width / heads;
  Json rope{{"rope_type", "default"},
            {"rope_theta", has("rope.freq_base") ? number("rope.freq_base") : 10'000.0}};
  // Without a type, scaling is linear; rope.scale_linear is the older key; 0 is no scaling.
  // Source: llama.cpp, src/llama-model.cpp.
  const std::string type = has("rope.scaling.type")
                               ? root.at(fmt::format("{}.rope.scaling.type", arch)).string()
                               : "linear";
  if (type != "none" && type != "linear") refuse("rotary scaling " + type);
  const char* const factor_key =
      has("rope.scaling.factor") ? "rope.scaling.factor" : "rope.scale_linear";
  const double factor = type == "linear" && has(factor_key) ? number(factor_key) : 0;
  require<CorruptCheckpoint>(factor >= 0 && std::isfinite(factor),
                             "{}: {}.{} is {}, not a positive number", where, arch, factor_key,
                             factor);
  if (factor != 0 && factor != 1) {
    rope["rope_type"] = type;
    rope["factor"] = factor;
  }
  if (has("rope.dimension_count") && integer("rope.dimension_count") != head_dim)
    refuse("rotary positions on a part of each head");
  const GgufEntry* const embedding = source.find("token_embd.weight");
  require<CorruptCheckpoint>(embedding != nullptr && embedding->shape.size() == 2,
                             "{} has no matrix token_embd.weight", where);
  Json config{{"model_type", arch},
              {"vocab_size", embedding->shape[0]},
              {"hidden_size", width},
              {"intermediate_size", integer("feed_forward_length")},
              {"num_hidden_layers", integer("block_count")},
              {"num_attention_heads", heads},
              {"num_key_value_heads",
               has("attention.head_count_kv") ? integer("attention.head_count_kv") : heads},
              {"head_dim", head_dim},
              {"hidden_act", "silu"},
              {"max_position_embeddings", integer("context_length")},
              {"rms_norm_eps", number("attention.layer_norm_rms_epsilon")},
              {"rope_theta", rope.at("rope_theta")},
              {"rope_parameters", rope},
              {"tie_word_embeddings", source.find("output.weight") == nullptr}};
  if (rope.at("rope_type") != "default") config["rope_scaling"] = rope;
  if (arch != "qwen2") config["attention_bias"] = source.find("blk.0.attn_q.bias") != nullptr;
  if (arch == "llama") config["mlp_bias"] = source.find("blk.0.ffn_up.bias") != nullptr;
  for (const auto& [theirs, ours] :
       {std::pair("bos", "bos"), std::pair("eos", "eos"), std::pair("padding", "pad")}) {
    const std::string key = fmt::format("tokenizer.ggml.{}_token_id", theirs);
    config[fmt::format("{}_token_id", ours)] =
        root.has(key) ? Json(root.at(key).integer()) : Json(nullptr);
  }
  return config;
}

}  // namespace tessera::io
