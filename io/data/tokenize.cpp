#include "io/data/tokenize.h"

#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/data/encode_corpus.h"
#include "io/data/token_file.h"

namespace tessera::io {
namespace {

constexpr int kListedBad = 10;  // warnings

/// Gets a file to commit, the number of documents that begin in it, and the position behind it if there may
/// be more.
using OnFile = std::function<void(TokenFileWriter&, std::int64_t documents,
                                  const std::optional<TokenPosition>&)>;

/// Cuts tokens into files, and counts.
class ShardCutter {
 public:
  /// @param limit    tokens of a file
  /// @param from     its tokens, of the document at it, are left out: perhaps of several units, since
  ///   where a document is cut depends on what was read before
  /// @param path_of  path of the next file
  ShardCutter(const TokenizeOptions& options, std::int64_t limit, const TokenPosition& from,
              std::function<fs::path()> path_of, OnFile on_file)
      : options_(options),
        wide_(needs_wide_tokens(options.tokenizer->vocab_size())),
        limit_(limit),
        from_(from.tokens),
        skipped_(from.skipped),
        path_of_(std::move(path_of)),
        on_file_(std::move(on_file)) {}

  void add(const EncodedBatch& batch) {
    const std::size_t width = wide_ ? 4 : 2;
    std::string_view ids = batch.ids;
    bool is_first = std::exchange(is_first_, false);
    for (const EncodedBatch::Unit& unit : batch.units) {
      const bool continued = from_ > 0;
      require_same_input(!continued || is_first || unit.at.inside, unit.at.file);
      is_first = false;
      std::int64_t done = std::min(from_, unit.tokens);
      from_ -= done;
      if (!unit.error.empty() && !continued && ++skipped_ <= kListedBad && options_.warn)
        options_.warn(
            fmt::format("skipped: {}{}", unit.error,
                        skipped_ == kListedBad ? " (further ones are only counted)" : ""));
      ids.remove_prefix(static_cast<std::size_t>(done) * width);
      if (!continued && unit.is_document) ++documents_;
      while (done < unit.tokens) {
        if (!file_) file_ = std::make_unique<TokenFileWriter>(path_of_(), wide_);
        const std::int64_t n = std::min(unit.tokens - done, limit_ - file_->tokens());
        const auto bytes = static_cast<std::size_t>(n) * width;
        file_->append(ids.substr(0, bytes));
        ids.remove_prefix(bytes);
        done += n;
        tokens_ += n;
        if (file_->tokens() == limit_) flush(TokenPosition{unit.at, done, skipped_});
      }
    }
    text_bytes_ += batch.text_bytes;
  }
  /// The last file.
  void finish() {
    require_same_input(from_ == 0, static_cast<std::int64_t>(options_.sources.size()) - 1);
    if (file_) flush(std::nullopt);
  }

  std::int64_t tokens() const { return tokens_; }
  std::int64_t text_bytes() const { return text_bytes_; }
  std::int64_t skipped() const { return skipped_; }

 private:
  void require_same_input(bool same, std::int64_t file) const {
    require<IoError>(same,
                     "{} has fewer tokens than an earlier process wrote of it; begin anew with "
                     "another --out",
                     options_.sources[static_cast<std::size_t>(file)].path);
  }
  void flush(const std::optional<TokenPosition>& next) {
    on_file_(*file_, std::exchange(documents_, 0), next);
    file_.reset();
  }

  const TokenizeOptions& options_;
  const bool wide_;
  const std::int64_t limit_;
  std::int64_t from_, skipped_;
  bool is_first_ = true;
  std::function<fs::path()> path_of_;
  OnFile on_file_;
  std::unique_ptr<TokenFileWriter> file_;
  std::int64_t tokens_ = 0, documents_ = 0, text_bytes_ = 0;  // of this process
};

/// Calls `attempt` with whether a file's document may be cut, again and again while a cut is refused.
void with_cuts(const Tokenizer& tokenizer,
               const std::function<void(const std::function<bool(std::int64_t)>&)>& attempt) {
  std::set<std::int64_t> whole;
  for (;;) {
    try {
      return attempt(
          [&](std::int64_t file) { return tokenizer.can_cut() && !whole.contains(file); });
    } catch (const CutInToken& refused) {
      whole.insert(refused.file);
    }
  }
}

/// Encodes a range into a cutter and reports progress.
void run(const TokenizeOptions& options, const FileRange& range, const CorpusPosition& from,
         const std::function<bool(std::int64_t)>& cut, ShardCutter& cutter) {
  TokenizeProgress progress;
  for (std::size_t i = range.begin; i < range.end; ++i) progress.total += options.sources[i].bytes;
  const bool resumed =
      from.offset > 0 || from.line > 0 || from.file > static_cast<std::int64_t>(range.begin);
  encode_corpus(options, range, from, cut, [&](const EncodedBatch& batch) {
    cutter.add(batch);
    if (resumed && progress.done == 0) progress.found = batch.consumed;
    progress.done = batch.consumed;
    progress.tokens = cutter.tokens();
    if (options.progress && !options.progress(progress)) throw TokenizeStopped("stopped");
  });
  cutter.finish();
}

OrderedJson command_of(const TokenizeOptions& options) {
  const Tokenizer& tokenizer = *options.tokenizer;
  const std::string description = tokenizer.to_json();
  OrderedJson sources = OrderedJson::array();
  for (const CorpusFile& file : options.sources)
    sources.push_back({{"path", file.path}, {"bytes", file.bytes}, {"modified", file.modified}});
  const OrderedJson command{
      {"tokenizer",
       {{"kind", tokenizer.kind()},
        {"vocab_size", tokenizer.vocab_size()},
        {"checksum", format_checksum(crc64(description.data(), description.size()))}}},
      {"special_tokens", options.special_tokens},
      {"end_token", options.end_token},
      {"field", options.field},
      {"skip_bad", options.skip_bad},
      {"shard_tokens", options.shard_tokens},
      {"parts", options.parts},
      {"part", options.part},
      {"sources", std::move(sources)}};
  // As the index has it: paths may be no UTF-8.
  return OrderedJson::parse(command.dump(-1, ' ', false, OrderedJson::error_handler_t::replace));
}

/// Holds the lock of a part. File systems without locks hold none.
File lock_part(const fs::path& path) {
  File file;
  try {
    file = File::create(path);
  } catch (const IoError&) {
    file = File::open_for_update(path);
  }
  require(::flock(file.descriptor(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK,
          "another process writes this part of {}", path.parent_path().string());
  return file;
}

void require_same(const fs::path& index, const OrderedJson& before, const OrderedJson& now) {
  const std::string difference = command_difference(before, now);
  require(difference.empty(), "{} is of another command: {}; name another --out, or remove it",
          index.string(), difference);
}

/// Removes a directory's index and shards, and those of an unfinished attempt.
void remove_shards(const fs::path& dir) {
  std::error_code ignored;
  fs::remove(dir / kTokenIndexName, ignored);
  for (const fs::path& part : part_indexes(dir)) fs::remove(part, ignored);
  for (const fs::path& path : list_directory(dir)) {
    const std::string name = path.filename().string();
    if (name.starts_with("shard-") && (name.ends_with(".bin") || name.ends_with(".bin.tmp")))
      fs::remove(path, ignored);
  }
}

/// Index of a part: that of an earlier process, or a new one.
TokenIndex take_up(const TokenizeOptions& options, const fs::path& dir, const fs::path& own,
                   std::size_t first_file) {
  TokenIndex index;
  if (is_there(own)) {
    index = read_token_index(own);
    require_same(own, index.command, command_of(options));
    for (const TokenShard& shard : index.shards)
      require<IoError>(is_there(dir / shard.file), "{} is missing; begin anew with another --out",
                       (dir / shard.file).string());
    return index;
  }
  OrderedJson command = command_of(options);
  command.erase("part");
  for (const fs::path& other : part_indexes(dir)) {
    OrderedJson before = read_token_index(other).command;
    before.erase("part");
    require_same(other, before, command);
  }
  const fs::path first = dir / token_shard_name(options.part, options.parts, 0);
  require<IoError>(!is_there(first), "{} exists; name another --out{}", first.string(),
                   options.parts == 1 ? ", or replace it with --overwrite" : "");
  index.command = command_of(options);
  index.next = TokenPosition{{.file = static_cast<std::int64_t>(first_file)}, 0, 0};
  // Renamed, because other parts may write it, too.
  const fs::path tokenizer = dir / fmt::format("tokenizer-{}.json", options.part);
  write_file_atomically(tokenizer, options.tokenizer->to_json());
  rename_path(tokenizer, dir / kTokenizerName);
  write_token_index(own, index);
  return index;
}

}  // namespace

TokenizeReport tokenize_to_file(const TokenizeOptions& options, const fs::path& out) {
  TokenizeReport report;
  with_cuts(*options.tokenizer, [&](const std::function<bool(std::int64_t)>& cut) {
    const FileRange all{0, options.sources.size()};
    ShardCutter cutter(
        options, TokenFileWriter::kMaxTokens + 1, {}, [&] { return out; },
        [&](TokenFileWriter& file, std::int64_t documents, const std::optional<TokenPosition>&) {
          report.tokens = file.tokens();
          report.documents = documents;
          file.commit();
        });
    run(options, all, {}, cut, cutter);
    report.text_bytes = cutter.text_bytes();
    report.skipped = cutter.skipped();
  });
  require<IoError>(report.tokens > 0, "no document has any text");
  return report;
}

TokenizeReport tokenize_to_directory(const TokenizeOptions& options, const fs::path& dir) {
  make_directories_durably(dir);
  const fs::path own = dir / part_index_name(options.part, options.parts);
  const fs::path lock_path = dir / fmt::format(".{}.lock", own.stem().string());
  const File lock = lock_part(lock_path);
  if (options.overwrite) remove_shards(dir);
  TokenizeReport report;
  TokenIndex index;
  if (is_there(dir / kTokenIndexName)) {
    OrderedJson command = command_of(options);
    command.erase("part");
    index = read_token_index(dir / kTokenIndexName);
    require_same(dir / kTokenIndexName, index.command, command);
    report.was_done = true;
    std::error_code left;  // by a process that was killed after it wrote the index
    for (const fs::path& part : part_indexes(dir)) fs::remove(part, left);
  } else {
    const FileRange range = corpus_part(options.sources, options.part, options.parts);
    index = take_up(options, dir, own, range.begin);
    report.was_done = !index.next;
    if (index.next) {
      with_cuts(*options.tokenizer, [&](const std::function<bool(std::int64_t)>& cut) {
        const TokenPosition from = *index.next;
        ShardCutter cutter(
            options, options.shard_tokens, from,
            [&] {
              return dir / token_shard_name(options.part, options.parts, index.shards.size());
            },
            [&](TokenFileWriter& file, std::int64_t documents,
                const std::optional<TokenPosition>& next) {
              const std::string name =
                  token_shard_name(options.part, options.parts, index.shards.size());
              const std::int64_t tokens = file.tokens();
              index.shards.push_back({name, tokens, documents, file.commit()});
              if (!next) return;  // written below
              index.next = next;
              index.skipped = next->skipped;
              write_token_index(own, index);
            });
        run(options, range, from.at, cut, cutter);
        report.text_bytes = cutter.text_bytes();
        index.skipped = cutter.skipped();
      });
      index.next.reset();
      write_token_index(own, index);
    }
    if (options.parts == 1) index = commit_token_parts(dir);
  }
  std::error_code ignored;
  fs::remove(lock_path, ignored);
  report.tokens = index.tokens();
  report.documents = index.documents();
  report.skipped = index.skipped;
  report.shards = std::move(index.shards);
  return report;
}

}  // namespace tessera::io
