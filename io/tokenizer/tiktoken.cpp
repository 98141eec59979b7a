// tiktoken's rank files, one token a line: its bytes in base64, a space, its rank. The file has no pattern
// and no special tokens: both come from a table of known vocabularies.

#include <algorithm>
#include <charconv>

#include "core/base/error.h"
#include "io/base/base64.h"
#include "io/tokenizer/ranks.h"

namespace tessera::io {
namespace {

constexpr const char* kCl100k =
    R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s)";
constexpr const char* kO200k =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kQwen =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

struct Special {
  std::int32_t id;
  std::string text;
};
/// A vocabulary that is known by its number of ranks.
struct Known {
  std::string name;
  std::size_t ranks;
  const char* pattern;
  std::size_t vocab_size;
  std::vector<Special> special;
};

std::vector<Special> consecutive(std::int32_t id, std::initializer_list<const char*> texts) {
  std::vector<Special> all;
  for (const char* text : texts) all.push_back({id++, text});
  return all;
}

// Source: llama-models, models/llama3/tokenizer.py.
std::vector<Special> llama3_special() {
  auto all =
      consecutive(128000, {"<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>",
                           "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>",
                           "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
                           "<|eot_id|>", "<|python_tag|>", "<|image|>"});
  for (std::int32_t id = 128012; id < 128256; ++id)
    all.push_back({id, fmt::format("<|reserved_special_token_{}|>", id - 128010)});
  return all;
}

// Source: dashscope, tokenizers/qwen_tokenizer.py.
std::vector<Special> qwen_special() {
  auto all = consecutive(151643, {"<|endoftext|>", "<|im_start|>", "<|im_end|>"});
  for (std::int32_t id = 151646; id < 151851; ++id)
    all.push_back({id, fmt::format("<|extra_{}|>", id - 151646)});
  return all;
}

const std::vector<Known>& known() {
  static const std::vector<Known> all = {
      {"r50k_base", 50256, kGpt2Pattern, 50257, {{50256, "<|endoftext|>"}}},
      {"p50k_base", 50280, kGpt2Pattern, 50281, {{50256, "<|endoftext|>"}}},
      {"cl100k_base",
       100256,
       kCl100k,
       100277,
       {{100257, "<|endoftext|>"},
        {100258, "<|fim_prefix|>"},
        {100259, "<|fim_middle|>"},
        {100260, "<|fim_suffix|>"},
        {100276, "<|endofprompt|>"}}},
      {"o200k_base",
       199998,
       kO200k,
       200019,
       {{199999, "<|endoftext|>"}, {200018, "<|endofprompt|>"}}},
      {"llama3", 128000, kLlama3, 128256, llama3_special()},
      {"llama4", 200000, kO200k, 202048,
       consecutive(200000, {"<|begin_of_text|>", "<|end_of_text|>", "<|fim_prefix|>",
                            "<|fim_middle|>", "<|fim_suffix|>", "<|header_start|>",
                            "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>"})},
      {"qwen", 151643, kQwen, 151851, qwen_special()}};
  return all;
}

Ranks parse_ranks(const std::string& text, const std::string& path) {
  Ranks ranks;
  std::int64_t line = 0;
  std::string bytes;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view content = std::string_view(text).substr(begin, end - begin);
    begin = end + 1;
    ++line;
    if (content.ends_with('\r')) content.remove_suffix(1);
    if (content.empty()) continue;
    const auto where = [&] { return fmt::format("{}: line {}", path, line); };
    const std::size_t space = content.find(' ');
    std::int64_t rank = -1;
    if (space != content.npos) {
      const char* last = content.data() + content.size();
      const auto [stop, error] = std::from_chars(content.data() + space + 1, last, rank);
      if (error != std::errc() || stop != last) rank = -1;
    }
    require<CorruptCheckpoint>(rank >= 0 && decode_base64(content.substr(0, space), bytes),
                               "{}: expected a token in base64, a space and its rank, found \"{}\"",
                               where(), content.substr(0, 80));
    ranks.add(bytes, rank, where);
  }
  return ranks;
}

}  // namespace

TokenizerPtr make_tiktoken_tokenizer(TokenizerFiles files) {
  const std::string path = files.path(kTiktokenModel);
  Ranks ranks = parse_ranks(files.content.at(kTiktokenModel), path);
  auto found = std::ranges::find(known(), files.pattern, &Known::name);
  if (found == known().end()) found = std::ranges::find(known(), ranks.size(), &Known::ranks);
  const bool is_pattern = files.pattern.find_first_of("\\[(|") != std::string::npos;
  require<Unsupported>(
      is_pattern || found != known().end(),
      "{}: {} ranks are of no vocabulary that this build knows; name the file after one of "
      "r50k_base, p50k_base, cl100k_base, o200k_base, llama3, llama4, qwen, whose pattern is then "
      "used",
      path, ranks.size());
  Pipeline parts = ranks.finish(is_pattern ? files.pattern : found->pattern, path);
  if (!is_pattern) {
    files.pattern = found->name;
    parts.pieces.resize(std::max(parts.pieces.size(), found->vocab_size));
    for (const auto& [id, text] : found->special) {
      std::string& piece = parts.pieces[static_cast<std::size_t>(id)];
      require<CorruptCheckpoint>(piece.empty(), "{}: rank {} is the id of {}", path, id, text);
      piece = text;
      parts.added.push_back({.id = id, .text = text, .special = true});
    }
  }
  const auto id_of = [&](const std::string& text) {
    const auto token = std::ranges::find(parts.added, text, &AddedToken::text);
    return token == parts.added.end() ? -1 : token->id;
  };
  parts.bos_id = id_of("<|begin_of_text|>");
  parts.eos_id = std::max(id_of("<|endoftext|>"), id_of("<|end_of_text|>"));
  if (parts.bos_id >= 0) parts.prefix = {parts.bos_id};
  parts.files = std::move(files);
  read_special_ids(parts.files, id_of, parts.bos_id, parts.eos_id);
  return make_pipeline_tokenizer(std::move(parts));
}

}  // namespace tessera::io
