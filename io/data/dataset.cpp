#include "io/data/dataset.h"

#include <glob.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <utility>

#include "core/base/error.h"
#include "io/base/file.h"
#include "io/chat/conversation_reader.h"
#include "io/data/recognize.h"
#include "io/data/text.h"
#include "io/data/token_file.h"
#include "io/data/token_index.h"

namespace tessera::io {
namespace {

/// "text", "a token file (.bin)" or "a file of conversations (.jsonl)"
const char* kind_of(const std::string& file) {
  if (is_conversation_file(file)) return "a file of conversations (.jsonl)";
  return is_token_file(file) ? "a token file (.bin)" : "text";
}

/// @throws InvalidArgument on a mixture
void require_one_kind(const std::vector<std::string>& files) {
  for (const std::string& file : files)
    require(kind_of(file) == kind_of(files.front()),
            "{} is {}, but {} is {}; data.train and data.val must be of one kind", files.front(),
            kind_of(files.front()), file, kind_of(file));
}

struct DataFiles {
  std::vector<std::string> paths;
  std::int64_t vocab_size = 0;  ///< if all are shards of directories; else 0
  std::string tokenizer;        ///< file of the tokenizer that all were made by; empty: unknown
};

/// Files, matches of globs, and the shards of directories.
DataFiles list_data_files(const std::vector<std::string>& patterns) {
  DataFiles files;
  bool indexed = true, differ = false;
  OrderedJson made_by;
  for (const std::string& path : expand_globs(patterns)) {
    std::error_code error;
    if (!fs::is_directory(path, error)) {
      files.paths.push_back(path);
      indexed = false;
      continue;
    }
    const TokenIndex index = read_token_directory(path);
    files.vocab_size = std::max(files.vocab_size, index.vocab_size());
    const OrderedJson before = std::exchange(made_by, index.command.at("tokenizer"));
    differ = differ || (!before.is_null() && before != made_by);
    files.tokenizer = (fs::path(path) / kTokenizerName).string();
    for (const TokenShard& shard : index.shards)
      files.paths.push_back((fs::path(path) / shard.file).string());
  }
  if (!indexed) files.vocab_size = 0;
  if (!indexed || differ) files.tokenizer.clear();
  return files;
}

TokenSourcePtr open_token_files(const std::vector<std::string>& files, std::int64_t vocab_size) {
  std::vector<TokenSourcePtr> sources;
  for (const std::string& file : files) sources.push_back(open_token_file(file, vocab_size));
  return concatenate_tokens(std::move(sources));
}

std::string read_text(const std::string& path) {
  std::string text = read_file(path, std::numeric_limits<std::int64_t>::max());
  require<IoError>(!text.empty(), "{}: the file is empty, expected text", path);
  return text;
}

TokenSourcePtr open_text_files(const std::vector<std::string>& files, const Tokenizer& tokenizer) {
  std::vector<TokenSourcePtr> sources;
  for (const std::string& file : files) {
    if (tokenizer.kind() == "bytes") {
      sources.push_back(open_byte_file(file));
    } else {
      sources.push_back(token_ids_in_memory(tokenizer.encode_document(read_text(file), file)));
    }
  }
  return concatenate_tokens(std::move(sources));
}

std::vector<TokenSourcePtr> open_parts(
    const std::vector<std::string>& patterns,
    const std::function<TokenSourcePtr(const std::vector<std::string>&)>& open) {
  std::vector<TokenSourcePtr> parts;
  for (const std::string& pattern : patterns)
    parts.push_back(open(list_data_files({pattern}).paths));
  return parts;
}

TokenizerPtr choose_tokenizer(const DatasetOptions& options,
                              const std::vector<std::string>& files) {
  if (options.fixed_tokenizer) return options.fixed_tokenizer;
  if (options.tokenizer == "bytes") return make_byte_tokenizer();
  if (options.tokenizer != "chars") return load_tokenizer(options.tokenizer);
  require(!is_conversation_file(files.front()),
          "data.tokenizer chars takes its characters from text, and {} is {}; use bytes, or a "
          "tokenizer file",
          files.front(), kind_of(files.front()));
  std::set<char32_t> characters;
  for (const std::string& file : files) {
    const std::u32string text = decode_utf8(read_text(file), file);
    characters.insert(text.begin(), text.end());
  }
  return make_char_tokenizer({characters.begin(), characters.end()});
}

void open_conversations(Dataset& data, const DatasetOptions& options,
                        const std::vector<std::string>& train,
                        const std::vector<std::string>& val) {
  const ConversationReader reader(
      data.tokenizer,
      ChatFormat(*data.tokenizer, options.chat_template, parse_chat_date(options.chat_date),
                 "--data.chat_template in train, --chat-template in eval"));
  const auto open = [&](const std::vector<std::string>& files) {
    return std::make_shared<const Conversations>(read_conversations(files, reader));
  };
  data.conversations = open(train);
  if (!val.empty()) {
    data.val_conversations = open(val);
    return;
  }
  const std::int64_t count = data.conversations->count();
  const auto split = static_cast<std::int64_t>(
      std::floor(static_cast<double>(count) * (1.0 - options.val_fraction)));
  if (split == count || split == 0) return;
  data.val_conversations =
      std::make_shared<const Conversations>(data.conversations->slice(split, count));
  data.conversations = std::make_shared<const Conversations>(data.conversations->slice(0, split));
}

}  // namespace

std::vector<std::string> expand_globs(const std::vector<std::string>& patterns) {
  std::vector<std::string> files;
  for (const std::string& pattern : patterns) {
    if (pattern.find_first_of("*?[") == std::string::npos || is_there(pattern)) {
      files.push_back(pattern);
      continue;
    }
    glob_t matches{};
    const int status = ::glob(pattern.c_str(), 0, nullptr, &matches);
    for (std::size_t i = 0; i < matches.gl_pathc; ++i) files.emplace_back(matches.gl_pathv[i]);
    ::globfree(&matches);
    require<IoError>(status != GLOB_NOMATCH, "no file matches {}", pattern);
    require<IoError>(status == 0, "cannot list the files that match {}", pattern);
  }
  return files;
}

bool is_token_file(const std::string& path) { return path.ends_with(".bin"); }

Dataset open_dataset(const DatasetOptions& options) {
  const DataFiles train_files = list_data_files(options.train);
  const DataFiles val_files = list_data_files(options.val);
  const auto &train = train_files.paths, &val = val_files.paths;
  require(!train.empty(), "no training data; name a file with --data.train FILE");
  require(options.val_fraction >= 0 && options.val_fraction < 1,
          "data.val_fraction must be in [0, 1), got {}", options.val_fraction);
  std::vector<std::string> files = train;
  files.insert(files.end(), val.begin(), val.end());

  Dataset data;
  data.vocab_size = options.vocab_size;
  require_one_kind(files);
  for (const std::string& file : files) {
    if (is_conversation_file(file)) continue;  // the parser of JSON names what is wrong
    if (std::string odd = inspect_data_file(file, is_token_file(file)); !odd.empty())
      data.warnings.push_back(std::move(odd));
  }
  if (is_token_file(files.front())) {
    data.tokenizer_file = train_files.tokenizer;
    if (!train_files.tokenizer.empty())
      data.tokenizer =
          options.fixed_tokenizer ? options.fixed_tokenizer : load_tokenizer(train_files.tokenizer);
    data.train_parts = open_parts(options.train, [&](const std::vector<std::string>& part) {
      return open_token_files(part, options.vocab_size);
    });
    data.train = concatenate_tokens(data.train_parts);
    if (!val.empty()) data.val = open_token_files(val, options.vocab_size);
    if (data.vocab_size == 0 && train_files.vocab_size > 0 &&
        (val.empty() || val_files.vocab_size > 0))
      data.vocab_size = std::max(train_files.vocab_size, val_files.vocab_size);
    if (data.vocab_size == 0) {
      data.vocab_size = 1 + std::int64_t{std::max(max_token_id(*data.train),
                                                  data.val ? max_token_id(*data.val) : -1)};
    }
    return data;
  }

  require<Unsupported>(
      !options.refuse_text,
      "the model came without a tokenizer that this build reads{}, so text ({}) cannot be encoded; "
      "give token files (.bin), or its tokenizer (--data.tokenizer in train, --tokenizer in eval)",
      options.no_tokenizer.empty() ? "" : fmt::format(" ({})", options.no_tokenizer),
      files.front());
  data.tokenizer = choose_tokenizer(options, files);
  const bool chats = is_conversation_file(files.front());
  require(chats || options.chat_template.empty(),
          "a chat template is for conversations, and {} is {}; leave it out", files.front(),
          kind_of(files.front()));
  if (!options.chat_template.empty())
    data.tokenizer = with_chat_template(data.tokenizer, options.chat_template);
  if (data.vocab_size == 0) data.vocab_size = data.tokenizer->vocab_size();
  require(data.vocab_size >= data.tokenizer->vocab_size(),
          "model.vocab_size is {}, but the {} tokenizer has {} entries; set it to 0 to use those",
          data.vocab_size, data.tokenizer->kind(), data.tokenizer->vocab_size());
  if (chats) {
    open_conversations(data, options, train, val);
    return data;
  }
  data.train_parts = open_parts(options.train, [&](const std::vector<std::string>& part) {
    return open_text_files(part, *data.tokenizer);
  });
  data.train = concatenate_tokens(data.train_parts);
  if (!val.empty()) {
    data.val = open_text_files(val, *data.tokenizer);
  } else if (options.val_fraction > 0) {
    // nanoGPT's split: train is the first int(n * (1 - fraction)) tokens.
    const std::int64_t size = data.train->size();
    const auto split = static_cast<std::int64_t>(
        std::floor(static_cast<double>(size) * (1.0 - options.val_fraction)));
    data.val = slice_tokens(data.train, split, size);
    data.train = slice_tokens(data.train, 0, split);
    data.train_parts = {};
  }
  return data;
}

}  // namespace tessera::io
