#include "io/gguf/vocabulary.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "core/base/error.h"

namespace tessera::io {
namespace {

constexpr const char* kTokenizerJson = "tokenizer.json";
constexpr const char* kTokenizerConfigJson = "tokenizer_config.json";
constexpr std::string_view kSpace = "\xe2\x96\x81";  // U+2581, a space in SentencePiece's tokens
constexpr float kNoScore = -1000;                    // of tokens that merges do not make

// A tokenizer that readers of GGUF would not apply as it is.
class Unfit : public Error {
 public:
  using Error::Error;
};

/// Splits of text before merges, by the pattern of a tokenizer.json, under the names of llama.cpp
/// (src/llama-vocab.cpp).
struct TextSplit {
  std::string_view pattern, name, name_ignoring_merges;  ///< an empty name: no such reader
};
constexpr TextSplit kSplits[] = {
    {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     "dbrx", "llama-bpe"},
    {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     "qwen2", ""},
    {R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     "", "tekken"},
    {R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     "gpt-4o", ""},
};

std::string type_of(const Json& step) {
  return step.is_object() && step.contains("type") && step["type"].is_string()
             ? step["type"].get<std::string>()
             : "";
}

bool flag_at(const Json& object, const char* key, bool missing = false) {
  const auto found = object.find(key);
  return found != object.end() && found->is_boolean() ? found->get<bool>() : missing;
}

std::string string_at(const Json& object, const char* key) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

// Steps of a normalizer or pre-tokenizer, without Sequences.
std::vector<Json> steps_of(const Json& root, const char* key, const char* list) {
  std::vector<Json> steps;
  const auto found = root.find(key);
  if (found == root.end() || found->is_null()) return steps;
  if (type_of(*found) != "Sequence") return {*found};
  const auto inner = found->find(list);
  if (inner != found->end() && inner->is_array())
    for (const Json& step : *inner) steps.push_back(step);
  return steps;
}

// tokenizer.ggml.pre of a byte-level BPE.
std::string_view split_name(const std::vector<Json>& steps, bool has_merges, bool ignores_merges) {
  const auto refuse = [] { throw Unfit("its pre-tokenizer is none that readers of GGUF have"); };
  if (steps.empty() || type_of(steps.back()) != "ByteLevel") refuse();
  if (flag_at(steps.back(), "add_prefix_space"))
    throw Unfit("it puts a space before the text (add_prefix_space)");
  if (!has_merges) return "gpt-2";
  const bool uses_regex = flag_at(steps.back(), "use_regex", true);
  if (uses_regex && !ignores_merges) {
    if (steps.size() == 1) return "gpt-2";
    if (steps.size() == 2 && type_of(steps[0]) == "Digits" &&
        flag_at(steps[0], "individual_digits"))
      return "smollm";
  }
  if (!uses_regex && steps.size() == 2 && type_of(steps[0]) == "Split") {
    const Json& split = steps[0];
    const bool inverted = flag_at(split, "invert");
    const std::string pattern =
        split.contains("pattern") ? string_at(split["pattern"], "Regex") : std::string();
    const bool keeps_all = string_at(split, "behavior") == (inverted ? "Removed" : "Isolated");
    for (const TextSplit& known : kSplits) {
      const std::string_view name = ignores_merges ? known.name_ignoring_merges : known.name;
      if (keeps_all && known.pattern == pattern && !name.empty()) return name;
    }
  }
  refuse();
  return {};
}

// Whether a space is put before the text by a BPE in the manner of SentencePiece.
bool adds_space(const Json& root) {
  const std::vector<Json> normalizers = steps_of(root, "normalizer", "normalizers");
  const std::vector<Json> splits = steps_of(root, "pre_tokenizer", "pretokenizers");
  const auto is_replace = [](const Json& step) {
    return type_of(step) == "Replace" && step.contains("pattern") &&
           string_at(step["pattern"], "String") == " " && string_at(step, "content") == kSpace;
  };
  if (normalizers.empty() && splits.size() == 1 && type_of(splits[0]) == "Metaspace" &&
      string_at(splits[0], "replacement") == kSpace && !flag_at(splits[0], "split", true))
    return string_at(splits[0], "prepend_scheme") != "never";
  // Tokens of such a vocabulary have spaces only at their begin, so that this split is none.
  const bool no_split =
      splits.empty() || (splits.size() == 1 && type_of(splits[0]) == "Split" &&
                         string_at(splits[0], "behavior") == "MergedWithPrevious");
  if (no_split && normalizers.size() == 2 && type_of(normalizers[0]) == "Prepend" &&
      string_at(normalizers[0], "prepend") == kSpace && is_replace(normalizers[1]))
    return true;
  if (no_split && normalizers.size() == 1 && is_replace(normalizers[0])) return false;
  throw Unfit("its normalizer is none that readers of GGUF have");
}

bool is_byte_token(std::string_view token) {
  return token.size() == 6 && token.starts_with("<0x") && token.ends_with(">");
}

class Vocabulary {
 public:
  Vocabulary(const Json& root, std::int64_t size) {
    const JsonReader model = JsonReader(root, kTokenizerJson).at("model");
    if (string_at(model.value(), "type") != "BPE")
      throw Unfit(fmt::format("its model is {}, not BPE", string_at(model.value(), "type")));
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (!string_at(model.value(), key).empty())
        throw Unfit(fmt::format("its model has a {}", key));
    tokens_.resize(static_cast<std::size_t>(size));
    types_.assign(tokens_.size(), static_cast<std::int32_t>(GgufToken::Unused));
    for (const auto& item : model.at("vocab").object().items())
      set(model.at("vocab").at(item.key()).integer(), item.key(), GgufToken::Normal);
    for (std::size_t i = 0; i < tokens_.size(); ++i)
      if (types_[i] == static_cast<std::int32_t>(GgufToken::Unused))
        tokens_[i] = fmt::format("[PAD{}]", i);
    const JsonReader merges = model.at("merges");
    for (std::size_t i = 0; i < merges.array_size(); ++i) {
      const JsonReader merge = merges.at(i);
      if (merge.value().is_array()) {
        merges_.emplace_back(merge.at(std::size_t{0}).string(), merge.at(1).string());
        continue;
      }
      const std::string& text = merge.string();
      const std::size_t space = text.find(' ');
      require<CorruptCheckpoint>(space != std::string::npos, "{}: a merge has two tokens",
                                 merge.where());
      merges_.emplace_back(text.substr(0, space), text.substr(space + 1));
    }
  }

  void set(std::int64_t id, const std::string& token, GgufToken type) {
    if (id >= static_cast<std::int64_t>(tokens_.size()))
      throw Unfit(fmt::format("its token {} has id {}, but the model has {} tokens", token, id,
                              tokens_.size()));
    if (token.find('\0') != std::string::npos)
      throw Unfit(fmt::format("its token {} contains a NUL", id));
    ids_[token] = id;
    tokens_[static_cast<std::size_t>(id)] = token;
    types_[static_cast<std::size_t>(id)] = static_cast<std::int32_t>(type);
  }
  std::optional<std::int64_t> find(const std::string& token) const {
    const auto found = ids_.find(token);
    return found == ids_.end() ? std::nullopt : std::optional(found->second);
  }

  void add_tokens(const Json& root, bool spaces) {
    const JsonReader reader(root, kTokenizerJson);
    if (!reader.has("added_tokens")) return;
    for (std::size_t i = 0; i < reader.at("added_tokens").array_size(); ++i) {
      const JsonReader token = reader.at("added_tokens").at(i);
      const bool special = flag_at(token.value(), "special");
      const std::int64_t id = token.at("id").integer();
      const std::string& content = token.at("content").string();
      set(id, content, special ? GgufToken::Control : GgufToken::UserDefined);
      if (special || !spaces) continue;
      std::string& text = tokens_[static_cast<std::size_t>(id)];
      for (std::size_t at = 0; (at = text.find(kSpace, at)) != std::string::npos;)
        text.replace(at, kSpace.size(), " ");
    }
  }

  // Pieces that merges make have scores in their order, as in a SentencePiece model.
  std::vector<float> scores(const std::string& unknown) {
    std::vector<float> scores(tokens_.size(), kNoScore);
    std::vector<bool> made(tokens_.size(), false);
    std::int64_t last = -1;
    float score = 0;
    for (const auto& [left, right] : merges_) {
      const std::optional<std::int64_t> id = find(left + right);
      if (!id) throw Unfit(fmt::format("it merges {} and {}, which is no token", left, right));
      const auto at = static_cast<std::size_t>(*id);
      if (*id != last && made[at])
        throw Unfit(fmt::format("its merges of {} are not next to each other", left + right));
      if (*id != last) score -= 1;
      scores[at] = score;
      made[at] = true;
      last = *id;
    }
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      std::int32_t& type = types_[i];
      if (tokens_[i] == unknown) type = static_cast<std::int32_t>(GgufToken::Unknown);
      if (type != static_cast<std::int32_t>(GgufToken::Normal)) continue;
      if (is_byte_token(tokens_[i])) {
        type = static_cast<std::int32_t>(GgufToken::Byte);
        continue;
      }
      const auto characters = std::ranges::count_if(
          tokens_[i], [](char c) { return (static_cast<unsigned char>(c) & 0xc0U) != 0x80U; });
      if (characters > 1 && !made[i])
        throw Unfit(fmt::format("no merge makes its token {}", tokens_[i]));
    }
    return scores;
  }

  std::vector<std::string> merges() const {
    std::vector<std::string> lines;
    lines.reserve(merges_.size());
    for (const auto& [left, right] : merges_) lines.push_back(left + ' ' + right);
    return lines;
  }
  const std::vector<std::string>& tokens() const { return tokens_; }
  const std::vector<std::int32_t>& types() const { return types_; }

 private:
  std::vector<std::string> tokens_;
  std::vector<std::int32_t> types_;
  std::unordered_map<std::string, std::int64_t> ids_;
  std::vector<std::pair<std::string, std::string>> merges_;
};

// "bos_token" of a tokenizer_config.json: a string, or an object with "content".
std::string special_token(const Json& config, const std::string& key) {
  const std::string text = string_at(config, key.c_str());
  return text.empty() && config.is_object() && config.contains(key)
             ? string_at(config[key], "content")
             : text;
}

// Whether a post-processor puts this token at the begin (or end) of a text.
bool adds_token(const Json& root, bool at_begin, std::string_view token) {
  for (const Json& step : steps_of(root, "post_processor", "processors")) {
    const auto single = step.find("single");
    if (type_of(step) != "TemplateProcessing" || single == step.end() || !single->is_array() ||
        single->size() < 2)
      continue;
    const Json& place = at_begin ? single->front() : single->back();
    if (place.is_object() && place.contains("SpecialToken"))
      return string_at(place["SpecialToken"], "id") == token;
  }
  return false;
}

void add_special_tokens(GgufKeys& keys, const Vocabulary& vocabulary, const Json& root,
                        const Json& tokenizer_config, const Json& config) {
  struct Special {
    const char *key, *hf;
  };
  const auto is_id = [&](const Json& id) {
    return id.is_number_integer() && id >= 0 && id < vocabulary.tokens().size();
  };
  for (const Special& special :
       {Special{"bos", "bos"}, Special{"eos", "eos"}, Special{"unknown", "unk"},
        Special{"seperator", "sep"}, Special{"padding", "pad"}, Special{"mask", "mask"}}) {
    const std::string name = special.hf;
    const std::string token = special_token(tokenizer_config, name + "_token");
    std::optional<std::int64_t> id = token.empty() ? std::nullopt : vocabulary.find(token);
    if (const auto given = config.find(name + "_token_id"); !id && given != config.end()) {
      const Json& first = given->is_array() && !given->empty() ? given->front() : *given;
      if (is_id(first)) id = first.get<std::int64_t>();
    }
    if (id)
      keys.add(fmt::format("tokenizer.ggml.{}_token_id", special.key),
               static_cast<std::uint32_t>(*id));
    if (name != "bos" && name != "eos") continue;
    const std::string text = id ? vocabulary.tokens()[static_cast<std::size_t>(*id)] : "";
    keys.add(fmt::format("tokenizer.ggml.add_{}_token", name),
             flag_at(tokenizer_config, ("add_" + name + "_token").c_str(),
                     id.has_value() && adds_token(root, name == "bos", text)));
  }
}

void add_chat_template(GgufKeys& keys, const std::map<std::string, std::string>& files,
                       const Json& tokenizer_config) {
  constexpr const char* kKey = "tokenizer.chat_template";
  const auto given = tokenizer_config.find("chat_template");
  if (given != tokenizer_config.end() && given->is_string()) {
    keys.add(kKey, given->get_ref<const std::string&>());
  } else if (given != tokenizer_config.end() && given->is_array()) {
    std::vector<std::string> names;
    for (const Json& one : *given) {
      const std::string name = string_at(one, "name"), text = string_at(one, "template");
      if (name == "default") {
        keys.add(kKey, text);
      } else if (!name.empty()) {
        keys.add(fmt::format("{}.{}", kKey, name), text);
        names.push_back(name);
      }
    }
    if (!names.empty()) keys.add("tokenizer.chat_templates", names);
  } else if (const auto file = files.find("chat_template.jinja"); file != files.end()) {
    keys.add(kKey, file->second);
  }
}

// @throws Unfit before the first key is added
void put_tokenizer(GgufKeys& keys, const std::map<std::string, std::string>& files,
                   const Json& config) {
  if (!files.contains(kTokenizerJson)) throw Unfit("there is no tokenizer.json");
  const Json root = parse_json(files.at(kTokenizerJson), kTokenizerJson);
  require<CorruptCheckpoint>(root.is_object(), "{}: expected an object", kTokenizerJson);
  const Json tokenizer_config =
      files.contains(kTokenizerConfigJson)
          ? parse_json(files.at(kTokenizerConfigJson), kTokenizerConfigJson)
          : Json::object();
  require<CorruptCheckpoint>(tokenizer_config.is_object(), "{}: expected an object",
                             kTokenizerConfigJson);
  Vocabulary vocabulary(root, config.at("vocab_size").get<std::int64_t>());
  const Json& model = root.at("model");
  if (flag_at(model, "byte_fallback")) {
    const bool space = adds_space(root);
    vocabulary.add_tokens(root, true);
    const std::vector<float> scores = vocabulary.scores(string_at(model, "unk_token"));
    keys.add("tokenizer.ggml.model", "llama");
    keys.add("tokenizer.ggml.pre", "default");
    keys.add("tokenizer.ggml.tokens", vocabulary.tokens());
    keys.add("tokenizer.ggml.scores", scores);
    keys.add("tokenizer.ggml.add_space_prefix", space);
  } else {
    for (const Json& step : steps_of(root, "normalizer", "normalizers"))
      if (type_of(step) != "NFC") throw Unfit(fmt::format("it has a normalizer {}", type_of(step)));
    const std::vector<std::string> merges = vocabulary.merges();
    const std::string_view pre = split_name(steps_of(root, "pre_tokenizer", "pretokenizers"),
                                            !merges.empty(), flag_at(model, "ignore_merges"));
    vocabulary.add_tokens(root, false);
    keys.add("tokenizer.ggml.model", "gpt2");
    keys.add("tokenizer.ggml.pre", pre);
    keys.add("tokenizer.ggml.tokens", vocabulary.tokens());
    keys.add("tokenizer.ggml.merges", merges);
  }
  keys.add("tokenizer.ggml.token_type", vocabulary.types());
  add_special_tokens(keys, vocabulary, root, tokenizer_config, config);
  add_chat_template(keys, files, tokenizer_config);
}

}  // namespace

std::pair<std::string_view, bool> gguf_split(std::string_view pre) {
  for (const TextSplit& split : kSplits) {
    if (!split.name.empty() && split.name == pre) return {split.pattern, false};
    if (!split.name_ignoring_merges.empty() && split.name_ignoring_merges == pre)
      return {split.pattern, true};
  }
  return {};
}

void add_gguf_vocabulary(GgufKeys& keys, const std::map<std::string, std::string>& files,
                         const Json& config, std::vector<std::string>& warnings) {
  try {
    put_tokenizer(keys, files, config);
  } catch (const Unfit& reason) {
    keys.add("tokenizer.ggml.model", "none");
    warnings.push_back(fmt::format("the GGUF file has no tokenizer: {}", reason.what()));
  }
}

}  // namespace tessera::io
