#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "core/base/error.h"
#include "io/gguf/source.h"
#include "io/gguf/vocabulary.h"

namespace tessera::io {
namespace {

// A tokenizer that has no equal tokenizer.json.
class Unknown : public Error {
 public:
  using Error::Error;
};

Json byte_level_step(bool regex) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", false},
          {"trim_offsets", true},
          {"use_regex", regex}};
}

struct TokenList {
  std::vector<std::string> texts;
  std::vector<std::int32_t> types;

  explicit TokenList(const JsonReader& keys) {
    const JsonReader tokens = keys.at("tokenizer.ggml.tokens");
    const std::size_t count = tokens.array_size();
    for (std::size_t i = 0; i < count; ++i) texts.push_back(tokens.at(i).string());
    types.assign(count, static_cast<std::int32_t>(GgufToken::Normal));
    if (!keys.has("tokenizer.ggml.token_type")) return;
    const JsonReader given = keys.at("tokenizer.ggml.token_type");
    require<CorruptCheckpoint>(given.array_size() == count, "{}: {} values of {} tokens",
                               given.where(), given.array_size(), count);
    for (std::size_t i = 0; i < count; ++i)
      types[i] = static_cast<std::int32_t>(given.at(i).integer(0, 100));
  }
  bool is(std::size_t i, GgufToken type) const {
    return types[i] == static_cast<std::int32_t>(type);
  }
};

Json byte_level_model(const JsonReader& keys, Json& root) {
  const std::string pre =
      keys.has("tokenizer.ggml.pre") ? keys.at("tokenizer.ggml.pre").string() : "default";
  Json steps = Json::array();
  bool ignores_merges = false;
  if (pre == "smollm" || pre == "starcoder") {
    steps.push_back({{"type", "Digits"}, {"individual_digits", true}});
    steps.push_back(byte_level_step(true));
  } else if (pre == "gpt-2") {
    steps.push_back(byte_level_step(true));
  } else {
    const auto [pattern, ignores] = gguf_split(pre);
    if (pattern.empty()) throw Unknown(fmt::format("its pre-tokenizer is \"{}\"", pre));
    ignores_merges = ignores;
    steps.push_back({{"type", "Split"},
                     {"pattern", {{"Regex", pattern}}},
                     {"behavior", "Isolated"},
                     {"invert", false}});
    steps.push_back(byte_level_step(false));
  }
  if (pre == "qwen2") root["normalizer"] = {{"type", "NFC"}};
  root["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", steps}};
  root["decoder"] = byte_level_step(true);
  Json merges = Json::array();
  const JsonReader given = keys.at("tokenizer.ggml.merges");
  for (std::size_t i = 0; i < given.array_size(); ++i) {
    const std::string& text = given.at(i).string();
    const std::size_t space = text.find(' ', 1);
    require<CorruptCheckpoint>(space != std::string::npos, "{}: a merge has two tokens",
                               given.at(i).where());
    merges.push_back({text.substr(0, space), text.substr(space + 1)});
  }
  return {{"type", "BPE"},     {"dropout", nullptr},     {"unk_token", nullptr},
          {"fuse_unk", false}, {"byte_fallback", false}, {"ignore_merges", ignores_merges},
          {"merges", merges}};
}

// Merges whose order follows from the scores of the pieces that they make.
Json merges_of(const JsonReader& keys, const TokenList& tokens) {
  const JsonReader scores = keys.at("tokenizer.ggml.scores");
  require<CorruptCheckpoint>(scores.array_size() == tokens.texts.size(),
                             "{}: {} values of {} tokens", scores.where(), scores.array_size(),
                             tokens.texts.size());
  std::unordered_map<std::string_view, std::size_t> ids;
  for (std::size_t i = 0; i < tokens.texts.size(); ++i) ids[tokens.texts[i]] = i;
  std::vector<std::tuple<double, std::size_t, std::size_t>> merges;
  constexpr std::size_t kMaxPiece = 1024;  // bytes
  for (std::size_t i = 0; i < tokens.texts.size(); ++i) {
    if (!tokens.is(i, GgufToken::Normal)) continue;
    const std::string_view text = tokens.texts[i];
    const Json& score = scores.at(i).value();
    require<CorruptCheckpoint>(score.is_number(), "{}: expected a number", scores.at(i).where());
    if (text.size() > kMaxPiece) throw Unknown("it has a token of over 1024 bytes");
    for (std::size_t cut = 1; cut < text.size(); ++cut) {
      const auto left = ids.find(text.substr(0, cut)), right = ids.find(text.substr(cut));
      if (left != ids.end() && right != ids.end())
        merges.emplace_back(-score.get<double>(), left->second, right->second);
    }
  }
  std::ranges::sort(merges);
  Json list = Json::array();
  for (const auto& merge : merges)
    list.push_back({tokens.texts[std::get<1>(merge)], tokens.texts[std::get<2>(merge)]});
  return list;
}

Json sentence_piece_model(const JsonReader& keys, const TokenList& tokens, Json& root) {
  constexpr const char* kSpaceSign = "\xe2\x96\x81";
  const bool prefix = !keys.has("tokenizer.ggml.add_space_prefix") ||
                      keys.at("tokenizer.ggml.add_space_prefix").value() == true;
  const Json replace{{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", kSpaceSign}};
  root["normalizer"] =
      prefix ? Json{{"type", "Sequence"},
                    {"normalizers", {{{"type", "Prepend"}, {"prepend", kSpaceSign}}, replace}}}
             : replace;
  Json decoders = {{{"type", "Replace"}, {"pattern", {{"String", kSpaceSign}}}, {"content", " "}},
                   {{"type", "ByteFallback"}},
                   {{"type", "Fuse"}}};
  if (prefix) decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  root["decoder"] = {{"type", "Sequence"}, {"decoders", decoders}};
  Json unknown = nullptr;
  for (std::size_t i = 0; i < tokens.texts.size() && unknown.is_null(); ++i)
    if (tokens.is(i, GgufToken::Unknown)) unknown = tokens.texts[i];
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", unknown},
          {"fuse_unk", true},
          {"byte_fallback", true},
          {"ignore_merges", false},
          {"merges", merges_of(keys, tokens)}};
}

}  // namespace

std::map<std::string, std::string> gguf_tokenizer(const GgufHeader& header, const std::string& path,
                                                  std::vector<std::string>& warnings) {
  const Json all(header.keys);
  const JsonReader keys(all, path);
  const std::string model =
      keys.has("tokenizer.ggml.model") ? keys.at("tokenizer.ggml.model").string() : "none";
  try {
    if (model != "gpt2" && model != "llama")
      throw Unknown(fmt::format("its kind is \"{}\"", model));
    const TokenList tokens(keys);
    Json root{{"version", "1.0"},
              {"truncation", nullptr},
              {"padding", nullptr},
              {"normalizer", nullptr},
              {"pre_tokenizer", nullptr},
              {"post_processor", nullptr},
              {"added_tokens", Json::array()}};
    root["model"] =
        model == "gpt2" ? byte_level_model(keys, root) : sentence_piece_model(keys, tokens, root);
    Json vocabulary = Json::object();
    for (std::size_t i = 0; i < tokens.texts.size(); ++i) {
      if (tokens.is(i, GgufToken::Unused)) continue;
      vocabulary[tokens.texts[i]] = i;
      const bool special = tokens.is(i, GgufToken::Control) || tokens.is(i, GgufToken::Unknown);
      if (!special && !tokens.is(i, GgufToken::UserDefined)) continue;
      root["added_tokens"].push_back({{"id", i},
                                      {"content", tokens.texts[i]},
                                      {"single_word", false},
                                      {"lstrip", false},
                                      {"rstrip", false},
                                      {"normalized", false},
                                      {"special", special}});
    }
    root["model"]["vocab"] = std::move(vocabulary);

    Json config{{"tokenizer_class", "PreTrainedTokenizerFast"},
                {"clean_up_tokenization_spaces", false}};
    for (const auto& [theirs, ours] : {std::pair("bos", "bos"), std::pair("eos", "eos"),
                                       std::pair("unknown", "unk"), std::pair("padding", "pad")}) {
      const std::string key = fmt::format("tokenizer.ggml.{}_token_id", theirs);
      if (!keys.has(key)) continue;
      const auto id = static_cast<std::size_t>(
          keys.at(key).integer(0, static_cast<std::int64_t>(tokens.texts.size()) - 1));
      config[fmt::format("{}_token", ours)] = tokens.texts[id];
    }
    const auto adds = [&](const char* key, bool missing) {
      return keys.has(key) ? keys.at(key).value() == true : missing;
    };
    Json single = Json::array(), pair = Json::array(), special = Json::object();
    const auto add_special = [&](Json& steps, const char* name, int type) {
      const std::string token = config[name];
      steps.push_back({{"SpecialToken", {{"id", token}, {"type_id", type}}}});
      special[token] = {
          {"id", token}, {"ids", {root["model"]["vocab"][token]}}, {"tokens", {token}}};
    };
    const bool bos =
        adds("tokenizer.ggml.add_bos_token", model == "llama") && config.contains("bos_token");
    const bool eos = adds("tokenizer.ggml.add_eos_token", false) && config.contains("eos_token");
    const auto add_text = [&](Json& steps, const char* sequence, int type) {
      if (bos) add_special(steps, "bos_token", type);
      steps.push_back({{"Sequence", {{"id", sequence}, {"type_id", type}}}});
      if (eos) add_special(steps, "eos_token", type);
    };
    add_text(single, "A", 0);
    add_text(pair, "A", 0);
    add_text(pair, "B", 1);
    if (bos || eos)
      root["post_processor"] = {{"type", "TemplateProcessing"},
                                {"single", single},
                                {"pair", pair},
                                {"special_tokens", special}};
    std::map<std::string, std::string> files{{"tokenizer.json", root.dump(2) + "\n"}};
    if (keys.has("tokenizer.chat_template"))
      files["chat_template.jinja"] = keys.at("tokenizer.chat_template").string();
    files["tokenizer_config.json"] = config.dump(2) + "\n";
    return files;
  } catch (const Unknown& reason) {
    warnings.push_back(fmt::format("{}: no tokenizer is written: {}", path, reason.what()));
  } catch (const Json::exception&) {
    throw CorruptCheckpoint("{}: a token is not UTF-8", path);
  }
  return {};
}

}  // namespace tessera::io
