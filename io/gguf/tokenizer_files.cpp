#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

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

// Keys of a file, and its arrays.
struct Keys {
  const File& file;
  const GgufHeader& header;
  JsonReader scalars{header.keys, file.path().string()};

  bool has(const std::string& key) const { return scalars.has(key); }
  JsonReader at(const std::string& key) const { return scalars.at(key); }
};

constexpr std::string_view kSpaceSign = "\xe2\x96\x81";
constexpr const char* kHelp =
    "; with --config, the tokenizer's files beside that config.json are copied instead";
constexpr std::uint64_t kMaxTokens = std::uint64_t{1} << 20;

struct TokenList {
  std::vector<std::string> texts;
  std::vector<std::int32_t> types;
  std::unordered_map<std::string_view, std::size_t> ids;  // without unused tokens

  TokenList(const Keys& keys, bool spaces) {
    constexpr const char *kTokens = "tokenizer.ggml.tokens", *kTypes = "tokenizer.ggml.token_type";
    const std::string path = keys.file.path().string();
    const auto array = keys.header.arrays.find(kTokens);
    const std::uint64_t count = array == keys.header.arrays.end() ? 0 : array->second.count;
    for (const GgufEntry& entry : keys.header.tensors)
      require<CorruptCheckpoint>(entry.name != "token_embd.weight" || entry.shape.size() != 2 ||
                                     count <= static_cast<std::uint64_t>(entry.shape[0]),
                                 "{}: {} has {} tokens, but {} has {} rows{}", path, kTokens, count,
                                 entry.name, entry.shape.size() == 0 ? 0 : entry.shape[0], kHelp);
    if (count > kMaxTokens) throw Unknown(fmt::format("it has over {} tokens", kMaxTokens));
    texts.reserve(count);
    visit_gguf_strings(keys.file, keys.header, kTokens,
                       [&](std::string_view text) { texts.emplace_back(text); });
    types.assign(count, static_cast<std::int32_t>(GgufToken::Normal));
    if (keys.has(kTypes)) {
      const std::vector<double> given = read_gguf_numbers(keys.file, keys.header, kTypes, count);
      for (std::size_t i = 0; i < count; ++i) {
        require<CorruptCheckpoint>(given[i] >= 0 && given[i] <= 100,
                                   "{}: {} has the value {}, no type of a token", path, kTypes,
                                   given[i]);
        types[i] = static_cast<std::int32_t>(given[i]);
      }
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (is(i, GgufToken::Unused)) continue;
      const auto [found, added] = ids.emplace(texts[i], i);
      require<CorruptCheckpoint>(added, "{}: {}: tokens {} and {} are the same{}", path, kTokens,
                                 found->second, i, kHelp);
    }
    if (spaces) restore_spaces();
  }
  bool is(std::size_t i, GgufToken type) const {
    return types[i] == static_cast<std::int32_t>(type);
  }

 private:
  // User-defined tokens of spaces alone have the sign of spaces in Hugging Face's vocabularies, whose
  // merges make and use them.
  void restore_spaces() {
    for (std::size_t i = 0; i < texts.size(); ++i) {
      if (!is(i, GgufToken::UserDefined) || texts[i].find_first_not_of(' ') != std::string::npos)
        continue;
      std::string text;
      for (std::size_t k = 0; k < texts[i].size(); ++k) text += kSpaceSign;
      if (ids.contains(text)) continue;
      ids.erase(texts[i]);
      texts[i] = std::move(text);
      ids.emplace(texts[i], i);
    }
  }
};

// Large lists are made as text: it needs less memory than Json, and none to be destroyed.
void add_item(std::string& list, const std::string& item) {
  list += list.empty() ? "\n      " : ",\n      ";
  list += item;
}

std::string quote(std::string_view text) { return Json(text).dump(); }

void add_merge(std::string& list, std::string_view left, std::string_view right) {
  add_item(list, fmt::format("[{}, {}]", quote(left), quote(right)));
}

// @param empty  key and empty list. No string holds it, as quotes are escaped there.
void fill(std::string& json, std::string_view empty, const std::string& items) {
  json.insert(json.find(empty) + empty.size() - 1, items);
}

Json byte_level_model(const Keys& keys, Json& root, std::string& merges) {
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
  constexpr const char* kMerges = "tokenizer.ggml.merges";
  visit_gguf_strings(keys.file, keys.header, kMerges, [&](std::string_view text) {
    const std::size_t space = text.find(' ', 1);
    require<CorruptCheckpoint>(space != std::string_view::npos, "{}: {}: a merge has two tokens",
                               keys.file.path().string(), kMerges);
    add_merge(merges, text.substr(0, space), text.substr(space + 1));
  });
  return {{"type", "BPE"},          {"dropout", nullptr},     {"unk_token", nullptr},
          {"fuse_unk", false},      {"byte_fallback", false}, {"ignore_merges", ignores_merges},
          {"merges", Json::array()}};
}

// Merges whose order follows from the scores of the pieces that they make.
std::string merges_of(const Keys& keys, const TokenList& tokens) {
  const std::vector<double> scores =
      read_gguf_numbers(keys.file, keys.header, "tokenizer.ggml.scores", tokens.texts.size());
  std::vector<std::tuple<double, std::size_t, std::size_t>> merges;
  constexpr std::size_t kMaxPiece = 1024;                   // bytes
  constexpr std::size_t kMaxBytes = std::size_t{64} << 20;  // of all merges
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < tokens.texts.size(); ++i) {
    if (!tokens.is(i, GgufToken::Normal) && !tokens.is(i, GgufToken::UserDefined)) continue;
    const std::string_view text = tokens.texts[i];
    if (text.size() > kMaxPiece) throw Unknown("it has a token of over 1024 bytes");
    require<CorruptCheckpoint>(!std::isnan(scores[i]), "{}: the score of token {} is no number",
                               keys.file.path().string(), i);
    for (std::size_t cut = 1; cut < text.size(); ++cut) {
      const auto left = tokens.ids.find(text.substr(0, cut));
      const auto right = left == tokens.ids.end() ? left : tokens.ids.find(text.substr(cut));
      if (right == tokens.ids.end()) continue;
      merges.emplace_back(-scores[i], left->second, right->second);
      bytes += text.size() + sizeof(merges.front());
      if (bytes > kMaxBytes) throw Unknown("its scores allow over 64 MiB of merges");
    }
  }
  std::ranges::sort(merges);
  std::string list;
  for (const auto& [score, left, right] : merges)
    add_merge(list, tokens.texts[left], tokens.texts[right]);
  return list;
}

Json sentence_piece_model(const Keys& keys, const TokenList& tokens, Json& root,
                          std::string& merges) {
  merges = merges_of(keys, tokens);
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
  return {{"type", "BPE"},          {"dropout", nullptr},    {"unk_token", unknown},
          {"fuse_unk", true},       {"byte_fallback", true}, {"ignore_merges", false},
          {"merges", Json::array()}};
}

}  // namespace

std::map<std::string, std::string> gguf_tokenizer(const File& file, const GgufHeader& header,
                                                  std::vector<std::string>& warnings) {
  const Keys keys{file, header};
  const std::string path = file.path().string();
  const std::string model =
      keys.has("tokenizer.ggml.model") ? keys.at("tokenizer.ggml.model").string() : "none";
  try {
    if (model != "gpt2" && model != "llama")
      throw Unknown(fmt::format("its kind is \"{}\"", model));
    const bool is_byte_level = model == "gpt2";
    const TokenList tokens(keys, !is_byte_level);
    Json root{{"version", "1.0"},
              {"truncation", nullptr},
              {"padding", nullptr},
              {"normalizer", nullptr},
              {"pre_tokenizer", nullptr},
              {"post_processor", nullptr},
              {"added_tokens", Json::array()}};
    std::string merges, vocabulary, added;
    root["model"] = is_byte_level ? byte_level_model(keys, root, merges)
                                  : sentence_piece_model(keys, tokens, root, merges);
    root["model"]["vocab"] = Json::object();
    for (std::size_t i = 0; i < tokens.texts.size(); ++i) {
      if (tokens.is(i, GgufToken::Unused)) continue;
      add_item(vocabulary, fmt::format("{}: {}", quote(tokens.texts[i]), i));
      const bool special = tokens.is(i, GgufToken::Control) || tokens.is(i, GgufToken::Unknown);
      if (!special && !tokens.is(i, GgufToken::UserDefined)) continue;
      add_item(added, Json{{"id", i},
                           {"content", tokens.texts[i]},
                           {"single_word", false},
                           {"lstrip", false},
                           {"rstrip", false},
                           {"normalized", false},
                           {"special", special}}
                          .dump());
    }

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
      const auto id = tokens.ids.find(token);
      require<CorruptCheckpoint>(id != tokens.ids.end(), "{}: {} is no used token", path, name);
      special[token] = {{"id", token}, {"ids", {id->second}}, {"tokens", {token}}};
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
    std::string text = root.dump(2) + "\n";
    fill(text, R"("added_tokens": [])", added);
    fill(text, R"("merges": [])", merges);
    fill(text, R"("vocab": {})", vocabulary);
    std::map<std::string, std::string> files{{"tokenizer.json", std::move(text)}};
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
