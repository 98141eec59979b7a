#include "io/data/tokenizer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "core/base/error.h"
#include "io/base/file.h"
#include "io/base/json.h"
#include "io/data/text.h"
#include "io/tokenizer/files.h"

namespace tessera::io {
namespace {

void check_id(std::int32_t id, std::int64_t vocab_size) {
  require(id >= 0 && id < vocab_size, "token id {} is outside the vocabulary of {} entries", id,
          vocab_size);
}

class PlainEncoder final : public Encoder {
 public:
  explicit PlainEncoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  void encode(std::string_view text, std::string_view name,
              std::vector<std::int32_t>& out) override {
    const std::vector<std::int32_t> ids = tokenizer_.encode(text, name);
    out.insert(out.end(), ids.begin(), ids.end());
  }
  // For tokens that are characters, because documents are cut between characters.
  bool encode_part(std::string_view text, std::size_t end, std::string_view name,
                   std::vector<std::int32_t>& out) override {
    encode(text.substr(0, end), name, out);
    return true;
  }

 private:
  const Tokenizer& tokenizer_;
};

class ByteTokenizer final : public Tokenizer {
 public:
  std::string_view kind() const override { return "bytes"; }
  std::int64_t vocab_size() const override { return 256; }
  bool can_cut() const override { return true; }
  std::vector<std::int32_t> encode(std::string_view text, std::string_view) const override {
    std::vector<std::int32_t> ids(text.size());
    std::transform(text.begin(), text.end(), ids.begin(),
                   [](char c) { return static_cast<unsigned char>(c); });
    return ids;
  }
  std::string decode(std::span<const std::int32_t> ids) const override {
    std::string text;
    for (const std::int32_t id : ids) {
      check_id(id, vocab_size());
      text.push_back(static_cast<char>(id));
    }
    return text;
  }
  std::string to_json() const override { return R"({"type":"bytes"})"; }
};

class CharTokenizer final : public Tokenizer {
 public:
  explicit CharTokenizer(std::u32string vocabulary) : vocabulary_(std::move(vocabulary)) {
    for (std::size_t i = 0; i < vocabulary_.size(); ++i) {
      ids_.emplace(vocabulary_[i], static_cast<std::int32_t>(i));
    }
  }
  std::string_view kind() const override { return "chars"; }
  std::int64_t vocab_size() const override { return static_cast<std::int64_t>(vocabulary_.size()); }
  bool can_cut() const override { return true; }
  std::vector<std::int32_t> encode(std::string_view text, std::string_view name) const override {
    const std::u32string points = decode_utf8(text, name);
    std::vector<std::int32_t> ids(points.size());
    for (std::size_t i = 0; i < points.size(); ++i) {
      const auto found = ids_.find(points[i]);
      require(found != ids_.end(),
              "{}: character {} at position {} is not in the vocabulary of {} characters", name,
              describe_character(points[i]), i, vocabulary_.size());
      ids[i] = found->second;
    }
    return ids;
  }
  std::string decode(std::span<const std::int32_t> ids) const override {
    std::string text;
    for (const std::int32_t id : ids) {
      check_id(id, vocab_size());
      append_utf8(vocabulary_[static_cast<std::size_t>(id)], text);
    }
    return text;
  }
  std::string to_json() const override {
    std::string text;
    for (const char32_t point : vocabulary_) append_utf8(point, text);
    return Json{{"type", "chars"}, {"vocabulary", text}}.dump();
  }

 private:
  std::u32string vocabulary_;
  std::unordered_map<char32_t, std::int32_t> ids_;
};

constexpr std::int64_t kMaxDescription = 512 << 20;  // bytes

/// Whether a file holds the JSON of to_json(), or nothing that another kind of file begins with.
bool is_own_description(const std::string& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) return false;
  const File file = File::open(path);
  std::string head(static_cast<std::size_t>(std::min<std::int64_t>(file.size(), 256)), '\0');
  file.read(0, head.data(), head.size());
  const std::size_t first = head.find_first_not_of(" \t\r\n");
  if (first == head.npos || head[first] == '[' || head.starts_with("\xEF\xBB\xBF")) return true;
  if (head[first] != '{') return false;
  const std::size_t key = head.find_first_not_of(" \t\r\n", first + 1);
  if (key == head.npos || head[key] != '"') return true;
  const std::string_view name = std::string_view(head).substr(key + 1);
  return name.starts_with("type\"") || name.starts_with("files\"") || name.starts_with("binary\"");
}

}  // namespace

TokenizerPtr make_byte_tokenizer() { return std::make_shared<ByteTokenizer>(); }

TokenizerPtr make_char_tokenizer(std::u32string vocabulary) {
  require(!vocabulary.empty(), "a character vocabulary needs at least one character, got none");
  require(vocabulary.size() <= 65536,
          "the text has {} different characters, at most 65536 are supported; use "
          "data.tokenizer=bytes",
          vocabulary.size());
  const auto unsorted =
      std::adjacent_find(vocabulary.begin(), vocabulary.end(), std::greater_equal<>());
  require(unsorted == vocabulary.end(),
          "a character vocabulary must be sorted and without repeats, but entry {} is {}",
          unsorted - vocabulary.begin() + 1,
          unsorted == vocabulary.end() ? std::string() : describe_character(*(unsorted + 1)));
  return std::make_shared<CharTokenizer>(std::move(vocabulary));
}

std::unique_ptr<Encoder> Tokenizer::make_encoder() const {
  return std::make_unique<PlainEncoder>(*this);
}

std::vector<std::int32_t> Tokenizer::encode_document(std::string_view text,
                                                     std::string_view name) const {
  std::vector<std::int32_t> ids = encode(text, name);
  const auto before = prefix(), after = suffix();
  ids.insert(ids.begin(), before.begin(), before.end());
  ids.insert(ids.end(), after.begin(), after.end());
  return ids;
}

TokenizerPtr tokenizer_from_json(std::string_view text, const std::string& source) {
  const Json json = parse_json(text, source);
  require(json.is_object(), "a tokenizer must be a JSON object, found {}", json.type_name());
  const auto type = json.find("type");
  require(type != json.end() && type->is_string(),
          "a tokenizer needs a string \"type\" (bytes, chars or files), found {}",
          type == json.end() ? "none" : type->type_name());
  const auto& kind = type->get_ref<const std::string&>();
  if (kind == "bytes") return make_byte_tokenizer();
  if (kind == "files") return make_tokenizer(tokenizer_files_from_json(json, source));
  if (kind != "chars") {
    throw Unsupported(
        "tokenizer type \"{}\" is not known to this build; it has bytes, chars and files", kind);
  }
  const auto vocabulary = json.find("vocabulary");
  require(vocabulary != json.end() && vocabulary->is_string(),
          "a chars tokenizer needs a string \"vocabulary\", found {}",
          vocabulary == json.end() ? "none" : vocabulary->type_name());
  return make_char_tokenizer(
      decode_utf8(vocabulary->get_ref<const std::string&>(), "tokenizer vocabulary"));
}

TokenizerPtr load_tokenizer(const std::string& path) {
  if (!is_own_description(path)) return make_tokenizer(read_tokenizer_files(path));
  try {
    return tokenizer_from_json(read_file(path, kMaxDescription), path);
  } catch (const CorruptCheckpoint& error) {
    throw InvalidArgument("expected a tokenizer file: {}", error.what());
  } catch (const InvalidArgument& error) {
    throw InvalidArgument("{}: {}", path, error.what());
  } catch (const Unsupported& error) {
    throw Unsupported("{}: {}", path, error.what());
  }
}

}  // namespace tessera::io
