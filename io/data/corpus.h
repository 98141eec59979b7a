#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/data/input_stream.h"
#include "io/parquet/text_column.h"

namespace tessera::io {

/// A file with documents: one per row if its name ends in .parquet; one per line if its name, without that
/// of a compression, ends in .jsonl, .ndjson or .json; else it is one document.
struct CorpusFile {
  std::string path;
  std::int64_t bytes = 0;
  std::int64_t modified = 0;  ///< nanoseconds since 1970

  bool has_rows() const;
  bool has_lines() const;
  friend bool operator==(const CorpusFile&, const CorpusFile&) = default;
};

/// Files, matches of globs, and files in directories and below them, except those whose names begin with
/// a dot. @throws IoError
std::vector<CorpusFile> list_corpus(const std::vector<std::string>& patterns);

/// Range of a corpus.
struct FileRange {
  std::size_t begin = 0, end = 0;
};
/// Files of part `number` of `parts`, from 1: consecutive files of about as many bytes in each part.
FileRange corpus_part(const std::vector<CorpusFile>& files, int number, int parts);

/// Begin of a unit of text: a document, a line or row with one, or a part of a document.
struct CorpusPosition {
  std::int64_t file = 0;
  std::int64_t offset = 0;  ///< decoded bytes; 0 in a file with rows
  std::int64_t line = 0;    ///< lines or rows before it
  bool inside = false;      ///< continues a document
};

/// Texts to be encoded together.
struct CorpusBatch {
  struct Unit {
    CorpusPosition at;
    std::size_t begin = 0, end = 0;  ///< of `text`
    std::size_t context = 0;         ///< end of the text that follows in the document, from `end`
    bool last = true;                ///< ends its document
    /// Why there is no text: a null in a row, or damage, after which the rest of the file is skipped.
    std::string missing = {};
  };
  std::string text;
  std::vector<Unit> units;
  std::int64_t consumed = 0;  ///< bytes read of the files, compressed if they are
};

struct CorpusOptions {
  /// Whether the document of a file may be cut into units of about kBatchBytes; empty: never.
  std::function<bool(std::int64_t file)> cut = {};
  std::string column = {};   ///< of the texts in files with rows
  bool skip_damage = false;  ///< skip the rest of a damaged file; false: throw
  std::function<void(const std::string&)> warn = {};  ///< suspicious content of a text file
};

/// Reads batches of about kBatchBytes, or of one larger unit. Empty documents are left out.
class CorpusReader {
 public:
  static constexpr std::size_t kBatchBytes = std::size_t{512} << 10;

  /// @param files  outlive this
  CorpusReader(const std::vector<CorpusFile>& files, const FileRange& range,
               const CorpusPosition& from, CorpusOptions options);
  /// @return false at the end
  /// @throws as open_input(), InputStream::read(), open_text_column() and TextColumn::next()
  bool next(CorpusBatch& batch);

 private:
  bool open();
  bool fill(std::size_t bytes);
  std::int64_t consumed() const;
  std::size_t available() const { return buffer_.size() - begin_; }
  void close();
  void put(CorpusBatch& batch, std::size_t size, std::size_t context, bool last);
  void put_missing(CorpusBatch& batch, std::string why);
  bool put_row(CorpusBatch& batch);
  bool put_line(CorpusBatch& batch);
  bool put_text(CorpusBatch& batch);
  std::size_t find_cut(std::size_t least) const;

  const std::vector<CorpusFile>& files_;
  const FileRange range_;
  const CorpusOptions options_;
  CorpusPosition at_;        // of the first byte that is not in a batch
  std::int64_t closed_ = 0;  // bytes of the files before the open one
  std::unique_ptr<InputStream> input_;
  std::unique_ptr<TextColumn> rows_;  // in place of input_, in a file with rows
  std::string buffer_;
  std::size_t begin_ = 0;  // of the bytes in buffer_ that are not in a batch
  std::string damage_;     // found in the open file
  bool at_end_ = false;    // of the open file
};

/// The string of a key in a line of JSON. @throws CorruptCheckpoint without a place
std::string json_text(std::string_view line, const std::string& key);

}  // namespace tessera::io
