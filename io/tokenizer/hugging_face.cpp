// Hugging Face's tokenizer.json (the Rust crate tokenizers, version 0.23) with a model of type BPE, and
// its older form vocab.json and merges.txt. Padding and truncation are ignored.

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/tokenizer/files.h"
#include "io/tokenizer/hugging_face_steps.h"
#include "io/tokenizer/pipeline.h"

namespace tessera::io {
namespace {

using Vocabulary = std::unordered_map<std::string, std::int32_t>;

Vocabulary read_vocabulary(const JsonReader& at) {
  Vocabulary vocabulary;
  std::int32_t id = 0;
  std::unordered_map<std::int32_t, const std::string*> owners;
  for (const auto& [token, value] : at.object().items()) {
    require<CorruptCheckpoint>(value.is_number_integer() && value >= 0 && value <= kMaxTokenId,
                               "{}: the id of \"{}\" is {}, expected an integer from 0 to {}",
                               at.where(), token, value.dump(), kMaxTokenId);
    id = value.get<std::int32_t>();
    const auto added = vocabulary.emplace(token, id).first;
    const auto [owner, is_new] = owners.emplace(id, &added->first);
    require<CorruptCheckpoint>(is_new, "{}: \"{}\" and \"{}\" have the same id {}", at.where(),
                               *owner->second, token, id);
  }
  require<CorruptCheckpoint>(!vocabulary.empty(), "{}: it is empty", at.where());
  return vocabulary;
}

/// @param where  of the merge, called for errors
Merge make_merge(const Vocabulary& vocabulary, const std::string& left, const std::string& right,
                 const std::function<std::string()>& where) {
  const auto id = [&](const std::string& token) {
    const auto found = vocabulary.find(token);
    require<CorruptCheckpoint>(found != vocabulary.end(), "{}: \"{}\" is not in the vocabulary",
                               found == vocabulary.end() ? where() : "", token);
    return found->second;
  };
  return {id(left), id(right), id(left + right)};
}

/// "left right"
Merge parse_merge(const Vocabulary& vocabulary, const std::string& text,
                  const std::function<std::string()>& where) {
  const std::size_t space = text.find(' ');
  require<CorruptCheckpoint>(space != text.npos && text.find(' ', space + 1) == text.npos,
                             "{}: expected two tokens with a space between, found \"{}\"", where(),
                             text);
  return make_merge(vocabulary, text.substr(0, space), text.substr(space + 1), where);
}

std::vector<Merge> ranked(std::vector<Merge> merges) {
  for (std::size_t i = 0; i < merges.size(); ++i) merges[i].rank = static_cast<std::uint32_t>(i);
  return merges;
}

std::vector<Merge> read_merges(const JsonReader& at, const Vocabulary& vocabulary) {
  std::vector<Merge> merges;
  const std::size_t size = at.array_size();
  merges.reserve(size);
  for (std::size_t i = 0; i < size; ++i) {
    const JsonReader merge = at.at(i);
    const auto where = [&] { return merge.where(); };
    if (merge.value().is_string()) {
      if (i == 0 && merge.string().starts_with("#version")) continue;
      merges.push_back(parse_merge(vocabulary, merge.string(), where));
    } else {
      require<CorruptCheckpoint>(merge.array_size() == 2, "{}: expected two tokens, found {}",
                                 merge.where(), merge.array_size());
      merges.push_back(
          make_merge(vocabulary, merge.at(0UL).string(), merge.at(1UL).string(), where));
    }
  }
  return ranked(std::move(merges));
}

std::vector<Merge> parse_merges_file(const std::string& text, const std::string& path,
                                     const Vocabulary& vocabulary) {
  std::vector<Merge> merges;
  std::int64_t line = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string content = text.substr(begin, end - begin);
    begin = end + 1;
    ++line;
    if (content.ends_with('\r')) content.pop_back();
    if (content.empty() || content.starts_with("#version")) continue;
    merges.push_back(
        parse_merge(vocabulary, content, [&] { return fmt::format("{}: line {}", path, line); }));
  }
  return ranked(std::move(merges));
}

/// Tokens by id, as the model matches them.
std::vector<std::string> model_tokens(const Vocabulary& vocabulary, bool byte_level) {
  std::int32_t last = 0;
  for (const auto& [token, id] : vocabulary) last = std::max(last, id);
  std::vector<std::string> tokens(static_cast<std::size_t>(last) + 1);
  for (const auto& [token, id] : vocabulary) {
    std::string& text = tokens[static_cast<std::size_t>(id)];
    if (!byte_level) {
      text = token;
    } else if (!bytes_of_characters(token, text)) {
      text.clear();  // never matches
    }
  }
  return tokens;
}

/// Gives ids to added tokens as the reference does: of the vocabulary, or else the next free one.
std::vector<AddedToken> read_added_tokens(const JsonReader& at, const Vocabulary& vocabulary) {
  std::vector<AddedToken> special, other;
  std::unordered_map<std::string, std::int32_t> known;
  std::int64_t last = -1;
  const auto size = static_cast<std::int64_t>(vocabulary.size());
  for (std::size_t i = 0; i < at.array_size(); ++i) {
    const JsonReader token = at.at(i);
    check_fields(token,
                 {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    const bool is_special = read_flag(token, "special", false);
    AddedToken added{.text = token.at("content").string(),
                     .special = is_special,
                     .single_word = read_flag(token, "single_word", false),
                     .lstrip = read_flag(token, "lstrip", false),
                     .rstrip = read_flag(token, "rstrip", false),
                     .normalized = read_flag(token, "normalized", !is_special)};
    if (added.text.empty() || known.contains(added.text)) continue;
    const auto found = vocabulary.find(added.text);
    added.id = found != vocabulary.end() ? found->second
                                         : static_cast<std::int32_t>(std::max(last + 1, size));
    last = std::max<std::int64_t>(last, added.id);
    known.emplace(added.text, added.id);
    (is_special ? special : other).push_back(std::move(added));
  }
  special.insert(special.end(), other.begin(), other.end());
  return special;
}

/// Sets pieces, and the ids of tokenizer_config.json.
void finish(Pipeline& parts, const Vocabulary& vocabulary) {
  std::size_t size = parts.model.tokens().size();
  for (const AddedToken& token : parts.added)
    size = std::max(size, static_cast<std::size_t>(token.id) + 1);
  parts.pieces.assign(size, {});
  const auto put = [&](std::int32_t id, const std::string& token) {
    std::string& piece = parts.pieces[static_cast<std::size_t>(id)];
    if (!parts.byte_level_decoder || !bytes_of_characters(token, piece)) piece = token;
  };
  for (const auto& [token, id] : vocabulary) put(id, token);
  std::unordered_map<std::string, std::int32_t> added;
  for (AddedToken& token : parts.added) {
    if (token.normalized) token.pattern = parts.normalizer.apply(token.text);
    put(token.id, token.text);
    added.emplace(token.text, token.id);
  }
  const auto id_of = [&](const std::string& text) {
    if (const auto found = added.find(text); found != added.end()) return found->second;
    const auto found = vocabulary.find(text);
    return found == vocabulary.end() ? -1 : found->second;
  };
  for (const auto* ids : {&parts.prefix, &parts.suffix})
    for (const std::int32_t id : *ids)
      require<CorruptCheckpoint>(static_cast<std::size_t>(id) < size,
                                 "{}: post_processor: id {} is outside the vocabulary of {}",
                                 parts.files.path(kTokenizerJson), id, size);
  if (parts.prefix.size() == 1) parts.bos_id = parts.prefix[0];
  if (parts.suffix.size() == 1) parts.eos_id = parts.suffix[0];
  read_special_ids(parts.files, id_of, parts.bos_id, parts.eos_id);
}

void refuse_affix(const JsonReader& model, const char* key) {
  if (has_value(model, key) && !model.at(key).string().empty())
    refuse_field(model.at(key), "an affix");
}

}  // namespace

TokenizerPtr make_hugging_face_tokenizer(TokenizerFiles files) {
  const std::string path = files.path(kTokenizerJson);
  const Json json = parse_json(files.content.at(kTokenizerJson), path);
  const JsonReader root(json, path);
  check_fields(root, {"version", "truncation", "padding", "added_tokens", "normalizer",
                      "pre_tokenizer", "post_processor", "decoder", "model"});
  const JsonReader model = root.at("model");
  const std::string type = has_value(model, "type") ? model.at("type").string() : "BPE";
  if (type != "BPE")
    refuse_field(
        model.at("type"),
        fmt::format("the model {} (this build reads BPE; for a SentencePiece model, use its "
                    "tokenizer.model)",
                    type));
  check_fields(model,
               {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"});
  refuse_affix(model, "continuing_subword_prefix");
  refuse_affix(model, "end_of_word_suffix");
  if (has_value(model, "dropout") && model.at("dropout").value() != 0)
    refuse_field(model.at("dropout"), "dropout");

  std::vector<NormalizerStep> normalizer;
  PreTokenizerFields pre_tokenizer;
  DecoderFields decoder;
  SpecialIds special;
  if (has_value(root, "normalizer")) read_normalizer(root.at("normalizer"), normalizer);
  if (has_value(root, "pre_tokenizer")) read_pre_tokenizer(root.at("pre_tokenizer"), pre_tokenizer);
  if (has_value(root, "decoder")) read_decoder(root.at("decoder"), decoder);
  if (has_value(root, "post_processor")) read_post_processor(root.at("post_processor"), special);

  const Vocabulary vocabulary = read_vocabulary(model.at("vocab"));
  const std::vector<Merge> merges = read_merges(model.at("merges"), vocabulary);
  BpeOptions options{.byte_level = pre_tokenizer.byte_level,
                     .ignore_merges = read_flag(model, "ignore_merges", false),
                     .byte_fallback = read_flag(model, "byte_fallback", false),
                     .fuse_unk = read_flag(model, "fuse_unk", false)};
  if (has_value(model, "unk_token")) {
    const auto found = vocabulary.find(model.at("unk_token").string());
    if (found != vocabulary.end()) options.unk_id = found->second;
  }
  if (options.byte_level && options.byte_fallback)
    refuse_field(model.at("byte_fallback"), "byte_fallback with ByteLevel");

  Pipeline parts{
      .kind = "bpe",
      .normalizer = Normalizer(std::move(normalizer)),
      .pre_tokenizer = PreTokenizer(std::move(pre_tokenizer.steps)),
      .model = Bpe(model_tokens(vocabulary, options.byte_level), merges, options),
      .byte_level = options.byte_level,
      .byte_level_decoder = decoder.byte_level,
      .decoder = Decoder(std::move(decoder.steps), has_value(root, "decoder") ? "" : " "),
      .prefix = std::move(special.prefix),
      .suffix = std::move(special.suffix),
      .files = std::move(files)};
  if (root.has("added_tokens"))
    parts.added = read_added_tokens(root.at("added_tokens"), vocabulary);
  finish(parts, vocabulary);
  return make_pipeline_tokenizer(std::move(parts));
}

TokenizerPtr make_vocab_merges_tokenizer(TokenizerFiles files) {
  const std::string path = files.path(kVocabJson);
  const Json json = parse_json(files.content.at(kVocabJson), path);
  const Vocabulary vocabulary = read_vocabulary(JsonReader(json, path));
  const auto merges =
      parse_merges_file(files.content.at(kMergesTxt), files.path(kMergesTxt), vocabulary);
  std::vector<PreTokenizerStep> steps{
      Split{std::make_shared<const Regex>(kGpt2Pattern, RegexSyntax::Oniguruma, path)}};
  Pipeline parts{.kind = "bpe",
                 .pre_tokenizer = PreTokenizer(std::move(steps)),
                 .model = Bpe(model_tokens(vocabulary, true), merges, {.byte_level = true}),
                 .byte_level = true,
                 .byte_level_decoder = true,
                 .files = std::move(files)};
  // GPT-2's only special token; others are in added_tokens of a tokenizer.json.
  constexpr const char* kEndOfText = "<|endoftext|>";
  if (const auto found = vocabulary.find(kEndOfText); found != vocabulary.end()) {
    parts.added.push_back({.id = found->second, .text = kEndOfText, .special = true});
    parts.bos_id = parts.eos_id = found->second;
  }
  finish(parts, vocabulary);
  return make_pipeline_tokenizer(std::move(parts));
}

}  // namespace tessera::io
