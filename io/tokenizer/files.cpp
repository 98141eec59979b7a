#include "io/tokenizer/files.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/base/error.h"
#include "io/base/base64.h"
#include "io/base/file.h"
#include "io/base/json.h"
#include "io/hf/tokenizer.h"
#include "io/tokenizer/unicode.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kMaxFile = 128 << 20;  // bytes

/// Files that go with a tokenizer.
constexpr std::array kCompanions = {kTokenizerConfigJson, kSpecialTokensMapJson,
                                    "added_tokens.json", kChatTemplateJinja};

bool is_ranks_line(std::string_view text) {
  const std::string_view line = text.substr(0, text.find('\n'));
  const std::size_t space = line.find(' ');
  std::string bytes;
  return space != line.npos && decode_base64(line.substr(0, space), bytes) &&
         line.find_first_not_of("0123456789\r", space + 1) == line.npos;
}

/// Whether a JSON text looks like an object that maps texts to numbers.
bool is_vocabulary(const std::string& text) {
  const std::size_t colon = text.find("\":");
  if (colon == text.npos) return false;
  const std::size_t value = text.find_first_not_of(" \t\r\n", colon + 2);
  return value != text.npos && text[value] >= '0' && text[value] <= '9';
}

/// The name under which other programs expect this content; empty if it is no tokenizer.
std::string canonical_name(const std::string& text, const std::string& name) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first != text.npos && text[first] == '{') {
    if (is_vocabulary(text)) return kVocabJson;
    const bool is_tekken = text.find("\"token_bytes\"") != text.npos;
    return is_tekken ? kTekkenJson : kTokenizerJson;
  }
  if (text.starts_with("#version")) return kMergesTxt;
  if (is_ranks_line(text)) return kTiktokenModel;
  if (text.starts_with('\n') && find_malformed_utf8(text.substr(0, 4)) == text.npos)
    return kSentencePieceModel;  // a protocol buffer whose first field is a message
  if (name == kMergesTxt || name.ends_with(".bpe")) return kMergesTxt;
  return {};
}

class Reader {
 public:
  explicit Reader(fs::path dir) : dir_(std::move(dir)) {}

  bool add(const std::string& as, const fs::path& path) {
    if (!is_there(path)) return false;
    files.content[as] = read_file(path, kMaxFile);
    files.paths[as] = path.string();
    return true;
  }
  bool add(const std::string& name) { return add(name, dir_ / name); }
  void add_companions() {
    for (const char* name : kCompanions) add(name);
  }
  /// The other file of a pair.
  void add_partner(const std::string& as, std::initializer_list<const char*> names,
                   const std::string& have) {
    for (const char* name : names)
      if (add(as, dir_ / name)) return;
    throw InvalidArgument("{} needs {} in the same directory, which is not there", have,
                          *names.begin());
  }

  TokenizerFiles files;

 private:
  fs::path dir_;
};

std::string stem_of(const std::string& path) {
  std::string name = fs::path(path).filename().string();
  return name.substr(0, name.find('.'));
}

TokenizerFiles read_file_and_partners(const std::string& path) {
  const fs::path file(path);
  const std::string text = read_file(file, kMaxFile);
  const std::string name = canonical_name(text, file.filename().string());
  require(!name.empty(),
          "{}: expected a tokenizer: JSON, merges, tiktoken's ranks, or a SentencePiece model",
          path);
  Reader reader(file.parent_path());
  reader.files.content[name] = text;
  reader.files.paths[name] = path;
  if (name == kVocabJson) reader.add_partner(kMergesTxt, {kMergesTxt, "vocab.bpe"}, path);
  if (name == kMergesTxt) reader.add_partner(kVocabJson, {kVocabJson, "encoder.json"}, path);
  if (name == kTiktokenModel) reader.files.pattern = stem_of(path);
  reader.add_companions();
  return std::move(reader.files);
}

}  // namespace

TokenizerFiles read_tokenizer_files(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return read_file_and_partners(path);
  const fs::path dir(path);
  for (const char* name : {kTokenizerJson, kVocabJson, "encoder.json", kTekkenJson,
                           kSentencePieceModel, kTiktokenModel}) {
    if (is_there(dir / name)) return read_file_and_partners((dir / name).string());
  }
  for (const fs::path& file : list_directory(dir)) {
    const std::string name = file.filename().string();
    if (name.ends_with(".tiktoken") || (name.starts_with("tekken") && name.ends_with(".json")))
      return read_file_and_partners(file.string());
  }
  throw InvalidArgument(
      "{} holds no tokenizer; looked for tokenizer.json, vocab.json with merges.txt, tekken.json, "
      "tokenizer.model, and *.tiktoken",
      path);
}

TokenizerPtr make_tokenizer(TokenizerFiles files) {
  for (const auto& [name, text] : files.content) {
    if (name == kSentencePieceModel) continue;
    const std::size_t bad = find_malformed_utf8(text);
    require(bad == text.npos, "{}: byte {} is not valid UTF-8", files.path(name), bad);
  }
  try {
    if (files.has(kTokenizerJson)) return make_hugging_face_tokenizer(std::move(files));
    if (files.has(kVocabJson) && files.has(kMergesTxt))
      return make_vocab_merges_tokenizer(std::move(files));
    if (files.has(kTekkenJson)) return make_tekken_tokenizer(std::move(files));
    if (files.has(kTiktokenModel)) return make_tiktoken_tokenizer(std::move(files));
    if (files.has(kSentencePieceModel)) return make_sentencepiece_tokenizer(std::move(files));
  } catch (const CorruptCheckpoint& error) {
    throw InvalidArgument("expected a tokenizer file: {}", error.what());
  }
  throw InvalidArgument("the description of a tokenizer names none of its files");
}

std::string tokenizer_files_to_json(const TokenizerFiles& files) {
  Json json{{"type", "files"}, {"files", Json::object()}};
  for (const auto& [name, text] : files.content) {
    if (find_malformed_utf8(text) == text.npos) {
      json["files"][name] = text;
    } else {
      json["binary"][name] = encode_base64(text);
    }
  }
  if (!files.pattern.empty()) json["pattern"] = files.pattern;
  return json.dump();
}

TokenizerFiles tokenizer_files_from_json(const Json& json, const std::string& source) {
  TokenizerFiles files;
  for (auto& [name, text] : tokenizer_files(json, source)) files.content[name] = std::move(text);
  const JsonReader root(json, source);
  if (root.has("pattern")) files.pattern = root.at("pattern").string();
  return files;
}

}  // namespace tessera::io
