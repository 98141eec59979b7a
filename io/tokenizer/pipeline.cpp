#include "io/tokenizer/pipeline.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/error.h"
#include "io/base/json.h"
#include "io/data/text.h"
#include "io/tokenizer/unicode.h"

namespace tessera::io {
namespace {

class PipelineTokenizer final : public Tokenizer {
 public:
  explicit PipelineTokenizer(Pipeline parts)
      : parts_(std::move(parts)), keeps_bytes_(parts_.byte_level && parts_.normalizer.is_local()) {
    std::vector<AddedToken> raw, normalized;
    for (const AddedToken& token : parts_.added)
      (token.normalized ? normalized : raw).push_back(token);
    raw_tokens_ = TokenFinder(std::move(raw));
    normalized_tokens_ = TokenFinder(std::move(normalized));
    constexpr const char* kMark = "\xE2\x96\x81";
    if (!parts_.byte_level && parts_.model.cuts_before(kMark))
      parts_.pre_tokenizer.cut_before(kMark);
  }

  std::string_view kind() const override { return parts_.kind; }
  std::int64_t vocab_size() const override { return std::ssize(parts_.pieces); }
  std::vector<std::int32_t> prefix() const override { return parts_.prefix; }
  std::vector<std::int32_t> suffix() const override { return parts_.suffix; }
  std::int32_t bos_id() const override { return parts_.bos_id; }
  std::int32_t eos_id() const override { return parts_.eos_id; }
  std::vector<SpecialToken> special_tokens() const override {
    std::vector<SpecialToken> tokens;
    for (const AddedToken& token : parts_.added)
      if (token.special) tokens.push_back({token.id, token.text});
    return tokens;
  }
  const TokenizerFiles* files() const override { return &parts_.files; }
  std::string to_json() const override { return tokenizer_files_to_json(parts_.files); }

  std::vector<std::int32_t> encode(std::string_view text, std::string_view name) const override;
  std::unique_ptr<Encoder> make_encoder() const override;
  bool can_cut() const override {
    return keeps_bytes_ && parts_.normalizer.empty() && parts_.pre_tokenizer.can_cut() &&
           std::ranges::none_of(parts_.added, &AddedToken::single_word);
  }

  std::string decode(std::span<const std::int32_t> ids) const override {
    std::string text;
    std::vector<std::string> tokens;
    for (const std::int32_t id : ids) {
      require(id >= 0 && id < vocab_size(), "token id {} is outside the vocabulary of {} entries",
              id, vocab_size());
      const std::string& piece = parts_.pieces[static_cast<std::size_t>(id)];
      if (parts_.byte_level_decoder) {
        text += piece;
      } else if (!piece.empty()) {
        tokens.push_back(piece);
      }
    }
    return parts_.byte_level_decoder ? text : parts_.decoder.decode(std::move(tokens));
  }

 private:
  friend class PipelineEncoder;
  std::string normalize(std::string_view text) const {
    std::string out;
    if (parts_.normalizer.empty()) return out;
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = std::min(find_malformed_utf8(text, begin), text.size());
      out += parts_.normalizer.apply(text.substr(begin, end - begin));
      if (end < text.size()) out += text[end];
      begin = end + 1;
    }
    return out;
  }

  Pipeline parts_;
  bool keeps_bytes_;
  TokenFinder raw_tokens_, normalized_tokens_;
};

class PipelineEncoder final : public Encoder {
 public:
  /// @param text_bytes  of the texts to encode, from which the cache's size follows
  PipelineEncoder(const PipelineTokenizer& tokenizer, std::size_t text_bytes)
      : tokenizer_(tokenizer),
        scratch_(text_bytes),
        words_(tokenizer.parts_.pre_tokenizer, [this](std::string_view word) { put(word); }) {}

  void encode(std::string_view text, std::string_view name,
              std::vector<std::int32_t>& out) override {
    cut_ = nullptr;
    std::string replaced;
    if (!tokenizer_.keeps_bytes_ && find_malformed_utf8(text) != text.npos)
      text = replaced = replace_malformed_utf8(text);
    run(text, name, out);
  }

  bool encode_part(std::string_view text, std::size_t end, std::string_view name,
                   std::vector<std::int32_t>& out) override {
    cut_ = end < text.size() ? text.data() + end : nullptr;
    met_cut_ = passed_cut_ = false;
    run(text, name, out);
    return cut_ == nullptr || met_cut_;
  }

 private:
  void run(std::string_view text, std::string_view name, std::vector<std::int32_t>& out) {
    out_ = &out;
    out.reserve(out.size() + text.size() / 3);
    const auto on_token = [&](std::int32_t id) {
      if (cut_ == nullptr || !passed_cut_) out.push_back(id);
    };
    try {
      tokenizer_.raw_tokens_.split(
          text,
          [&](std::string_view part) {
            const bool first = part.data() == text.data();
            const std::string normal = tokenizer_.normalize(part);
            const std::string_view all =
                tokenizer_.parts_.normalizer.empty() ? part : std::string_view(normal);
            tokenizer_.normalized_tokens_.split(
                all,
                [&](std::string_view piece) {
                  words_.split(piece, mask_for_regex(piece, masked_) ? masked_ : piece,
                               first && piece.data() == all.data());
                },
                on_token);
          },
          on_token);
    } catch (const Unsupported& error) {
      throw Unsupported("{}: {}", name, error.what());
    }
  }

  void put(std::string_view word) {
    if (cut_ != nullptr && word.data() + word.size() > cut_) {
      if (!passed_cut_) met_cut_ = word.data() == cut_;
      passed_cut_ = true;
      return;
    }
    tokenizer_.parts_.model.encode(word, scratch_, *out_);
  }

  const PipelineTokenizer& tokenizer_;
  Bpe::Scratch scratch_;
  PreTokenizer::Run words_;
  std::string masked_;
  std::vector<std::int32_t>* out_ = nullptr;
  const char* cut_ = nullptr;  // null: the end of the text
  bool met_cut_ = false, passed_cut_ = false;
};

std::vector<std::int32_t> PipelineTokenizer::encode(std::string_view text,
                                                    std::string_view name) const {
  std::vector<std::int32_t> ids;
  PipelineEncoder(*this, text.size()).encode(text, name, ids);
  return ids;
}

std::unique_ptr<Encoder> PipelineTokenizer::make_encoder() const {
  return std::make_unique<PipelineEncoder>(*this, std::size_t{1} << 20);
}

}  // namespace

TokenizerPtr make_pipeline_tokenizer(Pipeline parts) {
  return std::make_shared<PipelineTokenizer>(std::move(parts));
}

void read_special_ids(const TokenizerFiles& files,
                      const std::function<std::int32_t(const std::string&)>& id_of,
                      std::int32_t& bos_id, std::int32_t& eos_id) {
  const auto file = files.content.find(kTokenizerConfigJson);
  if (file == files.content.end()) return;
  const std::string path = files.path(kTokenizerConfigJson);
  const Json config = parse_json(file->second, path);
  const auto read = [&](const char* key, std::int32_t& id) {
    const auto found = config.is_object() ? config.find(key) : config.end();
    if (found == config.end() || found->is_null()) return;
    const bool is_object = found->is_object() && found->contains("content");
    const Json& text = is_object ? found->at("content") : *found;
    require(text.is_string(), "{}: {}: expected a token, found {}", path, key, found->dump());
    id = id_of(text.get<std::string>());
  };
  read("bos_token", bos_id);
  read("eos_token", eos_id);
}

// Printable Latin-1 characters mean their own bytes; U+0100, U+0101, ... mean the other bytes in
// order (bytes_to_unicode() in GPT-2's encoder.py).
const std::vector<std::string>& byte_characters() {
  static const std::vector<std::string> characters = [] {
    std::vector<std::string> all(256);
    char32_t next = 256;
    for (unsigned byte = 0; byte < 256; ++byte) {
      const bool printable = (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);
      append_utf8(printable ? byte : next++, all[byte]);
    }
    return all;
  }();
  return characters;
}

bool bytes_of_characters(std::string_view text, std::string& bytes) {
  static const std::array<int, 512> byte_of = [] {
    std::array<int, 512> all{};
    all.fill(-1);
    for (std::size_t byte = 0; byte < 256; ++byte)
      all[code_point_at(byte_characters()[byte], 0)] = static_cast<int>(byte);
    return all;
  }();
  bytes.clear();
  for (std::size_t i = 0; i < text.size(); i += utf8_length(text[i])) {
    const char32_t point = code_point_at(text, i);
    if (point >= byte_of.size() || byte_of[point] < 0) return false;
    bytes += static_cast<char>(byte_of[point]);
  }
  return true;
}

}  // namespace tessera::io
