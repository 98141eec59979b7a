// Mistral's tekken.json: {"config":{"pattern","default_vocab_size","default_num_special_tokens"},
// "vocab":[{"rank","token_bytes"}],"special_tokens":[{"rank","token_str"}]}. Ids are ranks after the special
// tokens, which encode() does not find in text. Source: mistral-common, tokens/tokenizers/tekken.py.

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/base/base64.h"
#include "io/base/json.h"
#include "io/tokenizer/ranks.h"

namespace tessera::io {
namespace {

/// Special tokens of the versions whose files have no list.
constexpr const char* kSpecial[] = {"<unk>",
                                    "<s>",
                                    "</s>",
                                    "[INST]",
                                    "[/INST]",
                                    "[AVAILABLE_TOOLS]",
                                    "[/AVAILABLE_TOOLS]",
                                    "[TOOL_RESULTS]",
                                    "[/TOOL_RESULTS]",
                                    "[TOOL_CALLS]",
                                    "[IMG]",
                                    "<pad>",
                                    "[IMG_BREAK]",
                                    "[IMG_END]",
                                    "[PREFIX]",
                                    "[MIDDLE]",
                                    "[SUFFIX]",
                                    "[SYSTEM_PROMPT]",
                                    "[/SYSTEM_PROMPT]",
                                    "[TOOL_CONTENT]"};

std::vector<std::string> read_special_tokens(const JsonReader& root, std::int64_t count) {
  std::vector<std::string> texts(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < texts.size(); ++i)
    texts[i] = i < std::size(kSpecial) ? kSpecial[i] : fmt::format("<SPECIAL_{}>", i);
  if (!root.has("special_tokens") || root.at("special_tokens").value().is_null()) return texts;
  const JsonReader list = root.at("special_tokens");
  for (std::size_t i = 0; i < list.array_size(); ++i) {
    const JsonReader token = list.at(i);
    const std::int64_t rank = token.at("rank").integer(0, count - 1);
    texts[static_cast<std::size_t>(rank)] = token.at("token_str").string();
  }
  return texts;
}

}  // namespace

TokenizerPtr make_tekken_tokenizer(TokenizerFiles files) {
  const std::string path = files.path(kTekkenJson);
  const Json json = parse_json(files.content.at(kTekkenJson), path);
  const JsonReader root(json, path);
  const JsonReader config = root.at("config");
  const std::int64_t special = config.at("default_num_special_tokens").integer(0, kMaxTokenId);
  const std::int64_t size = config.at("default_vocab_size").integer(special, kMaxTokenId);
  const JsonReader vocab = root.at("vocab");
  Ranks ranks(static_cast<std::int32_t>(special));
  std::string bytes;
  for (std::size_t i = 0; i < vocab.array_size(); ++i) {
    const JsonReader token = vocab.at(i);
    const std::int64_t rank = token.at("rank").integer();
    if (rank >= size - special) continue;
    const JsonReader text = token.at("token_bytes");
    require<CorruptCheckpoint>(decode_base64(text.string(), bytes), "{}: expected base64, found {}",
                               text.where(), text.value().dump().substr(0, 80));
    ranks.add(bytes, rank, [&] { return token.where(); });
  }
  Pipeline parts = ranks.finish(config.at("pattern").string(), path + ": config.pattern");
  const std::vector<std::string> texts = read_special_tokens(root, special);
  parts.pieces.resize(static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < texts.size(); ++i) {
    parts.pieces[i] = texts[i];
    if (texts[i] == "<s>") parts.bos_id = static_cast<std::int32_t>(i);
    if (texts[i] == "</s>") parts.eos_id = static_cast<std::int32_t>(i);
  }
  if (parts.bos_id >= 0) parts.prefix = {parts.bos_id};
  parts.files = std::move(files);
  return make_pipeline_tokenizer(std::move(parts));
}

}  // namespace tessera::io
