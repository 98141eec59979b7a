#include "io/hf/tokenizer.h"

#include <nlohmann/json.hpp>
#include <string>

#include "core/base/error.h"
#include "io/base/base64.h"
#include "io/base/json.h"

namespace tessera::io {
namespace {

/// Maps ByteLevel's characters to bytes. Printable Latin-1 characters mean their own bytes; U+0100,
/// U+0101, ... mean the other bytes in order (bytes_to_unicode() in GPT-2's encoder.py).
Json byte_vocabulary() {
  Json vocabulary = Json::object();
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);
    const int point = printable ? byte : next++;
    std::string character;
    if (point < 0x80) {
      character = static_cast<char>(point);
    } else {
      character = {static_cast<char>(0xC0 | point >> 6), static_cast<char>(0x80 | (point & 0x3F))};
    }
    vocabulary[character] = byte;
  }
  return vocabulary;
}

/// Maps each character of a UTF-8 text to its position.
Json char_vocabulary(const std::string& text) {
  Json vocabulary = Json::object();
  int id = 0;
  for (std::size_t begin = 0, end = 0; begin < text.size(); begin = end) {
    do {
      ++end;
    } while (end < text.size() && (text[end] & 0xC0) == 0x80);
    vocabulary[text.substr(begin, end - begin)] = id++;
  }
  return vocabulary;
}

Json tokenizer(const Json& model, const Json& pre_tokenizer, const Json& decoder) {
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", Json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", pre_tokenizer},
          {"post_processor", nullptr},
          {"decoder", decoder},
          {"model", model}};
}

}  // namespace

std::optional<Json> tokenizer_to_hf(const Json& description) {
  if (!description.is_object()) return std::nullopt;
  const auto type = description.find("type");
  if (type == description.end()) return std::nullopt;
  if (*type == "bytes") {
    const Json byte_level{{"type", "ByteLevel"},
                          {"add_prefix_space", false},
                          {"trim_offsets", true},
                          {"use_regex", false}};
    const Json model{{"type", "BPE"},
                     {"dropout", nullptr},
                     {"unk_token", nullptr},
                     {"continuing_subword_prefix", nullptr},
                     {"end_of_word_suffix", nullptr},
                     {"fuse_unk", false},
                     {"byte_fallback", false},
                     {"vocab", byte_vocabulary()},
                     {"merges", Json::array()}};
    return tokenizer(model, byte_level, byte_level);
  }
  const auto vocabulary = description.find("vocabulary");
  if (*type != "chars" || vocabulary == description.end() || !vocabulary->is_string()) {
    return std::nullopt;
  }
  const Json split{{"type", "Split"},
                   {"pattern", {{"Regex", "[\\s\\S]"}}},
                   {"behavior", "Isolated"},
                   {"invert", false}};
  // Uses WordLevel because BPE would drop unknown characters silently. With WordLevel they are an
  // error, since the vocabulary lacks the unk_token.
  const Json model{{"type", "WordLevel"},
                   {"vocab", char_vocabulary(vocabulary->get_ref<const std::string&>())},
                   {"unk_token", "<unk>"}};
  return tokenizer(model, split, {{"type", "Fuse"}});
}

std::map<std::string, std::string> tokenizer_files(const Json& description,
                                                   const std::string& source) {
  std::map<std::string, std::string> files;
  const JsonReader root(description, source + ": tokenizer");
  if (!root.has("type") || root.at("type").value() != "files") return files;
  for (const auto& item : root.at("files").object().items())
    files[item.key()] = root.at("files").at(item.key()).string();
  if (!root.has("binary")) return files;
  for (const auto& item : root.at("binary").object().items()) {
    const JsonReader text = root.at("binary").at(item.key());
    require<CorruptCheckpoint>(decode_base64(text.string(), files[item.key()]),
                               "{}: expected base64", text.where());
  }
  return files;
}

Json tokenizer_config_to_hf(std::int64_t seq_len) {
  // Turned off because the cleanup would remove spaces before punctuation.
  return {{"tokenizer_class", "PreTrainedTokenizerFast"},
          {"clean_up_tokenization_spaces", false},
          {"model_max_length", seq_len}};
}

}  // namespace tessera::io
