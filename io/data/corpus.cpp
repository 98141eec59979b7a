#include "io/data/corpus.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <utility>

#include "core/base/error.h"
#include "io/base/file.h"
#include "io/data/dataset.h"
#include "io/data/recognize.h"
#include "io/data/tokenizer.h"

namespace tessera::io {
namespace {

constexpr std::size_t kReadBytes = std::size_t{256} << 10;

void list_files(const fs::path& path, std::vector<CorpusFile>& files) {
  struct stat status {};
  const bool found = ::stat(path.c_str(), &status) == 0;
  require<IoError>(found, "cannot examine {}: {}", path.string(), std::strerror(errno));
  if (!S_ISDIR(status.st_mode)) {
    files.push_back({path.string(), status.st_size,
                     status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec});
    return;
  }
  for (const fs::path& entry : list_directory(path))
    if (!entry.filename().string().starts_with('.')) list_files(entry, files);
}

/// Letters of ASCII and all characters beyond it.
bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
         (static_cast<unsigned char>(c) & 0x80U) != 0;
}

/// Keeps the string of one key of an object and skips everything else.
class TextFinder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit TextFinder(const std::string& key) : key_(key) {}

  bool null() override { return other("null"); }
  bool boolean(bool) override { return other("a boolean"); }
  bool number_integer(number_integer_t) override { return other("a number"); }
  bool number_unsigned(number_unsigned_t) override { return other("a number"); }
  bool number_float(number_float_t, const string_t&) override { return other("a number"); }
  bool binary(binary_t&) override { return true; }
  bool string(string_t& value) override {
    if (!std::exchange(wanted_, false)) return other("a string");
    text = std::move(value);
    found = true;
    return true;
  }
  bool start_object(std::size_t) override {
    if (depth_ > 0) other("an object");
    ++depth_;
    return true;
  }
  bool start_array(std::size_t) override {
    other("an array");
    ++depth_;
    return true;
  }
  bool key(string_t& name) override {
    wanted_ = depth_ == 1 && name == key_;
    return true;
  }
  bool end_object() override { return --depth_ >= 0; }
  bool end_array() override { return --depth_ >= 0; }
  bool parse_error(std::size_t at, const std::string&, const nlohmann::json::exception&) override {
    throw CorruptCheckpoint("no valid JSON at byte {} of the line", at);
  }

  std::string text;
  bool found = false;

 private:
  bool other(const char* kind) {
    require<CorruptCheckpoint>(depth_ > 0, "expected an object with \"{}\", found {}", key_, kind);
    require<CorruptCheckpoint>(!std::exchange(wanted_, false), "\"{}\" is {}, expected a string",
                               key_, kind);
    return true;
  }

  const std::string& key_;
  int depth_ = 0;
  bool wanted_ = false;  // the next value is the key's
};

}  // namespace

bool CorpusFile::has_rows() const { return is_parquet_name(path); }

bool CorpusFile::has_lines() const {
  const std::string name = without_compression(path);
  return name.ends_with(".jsonl") || name.ends_with(".ndjson") || name.ends_with(".json");
}

std::vector<CorpusFile> list_corpus(const std::vector<std::string>& patterns) {
  std::vector<CorpusFile> files;
  for (const std::string& path : expand_globs(patterns)) {
    const std::size_t before = files.size();
    list_files(path, files);
    require<IoError>(files.size() > before, "{} is a directory without files", path);
  }
  return files;
}

FileRange corpus_part(const std::vector<CorpusFile>& files, int number, int parts) {
  const std::int64_t total =
      std::accumulate(files.begin(), files.end(), std::int64_t{0},
                      [](std::int64_t sum, const CorpusFile& file) { return sum + file.bytes; });
  // A file belongs to the part in which its middle lies.
  FileRange range{files.size(), files.size()};
  double before = 0;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const auto bytes = static_cast<double>(files[i].bytes);
    const double middle = total > 0 ? (before + bytes / 2) / static_cast<double>(total) : 0;
    const int part = std::min(static_cast<int>(middle * parts), parts - 1) + 1;
    if (part >= number) range.begin = std::min(range.begin, i);
    if (part > number) {
      range.end = i;
      break;
    }
    before += bytes;
  }
  return range;
}

CorpusReader::CorpusReader(const std::vector<CorpusFile>& files, const FileRange& range,
                           const CorpusPosition& from, CorpusOptions options)
    : files_(files), range_(range), options_(std::move(options)), at_(from) {
  for (std::size_t i = range.begin; i < static_cast<std::size_t>(at_.file); ++i)
    closed_ += files[i].bytes;
}

bool CorpusReader::open() {
  if (at_.file >= static_cast<std::int64_t>(range_.end)) return false;
  const CorpusFile& file = files_[static_cast<std::size_t>(at_.file)];
  if (file.has_rows()) return true;  // put_row() opens it
  input_ = open_input(file.path);
  buffer_.clear();
  begin_ = 0;
  at_end_ = false;
  if (!file.has_lines()) {
    fill(kInspectedBytes);
    const std::string warning =
        inspect_data(without_compression(file.path),
                     std::string_view(buffer_).substr(0, kInspectedBytes), false);
    if (!warning.empty() && options_.warn) options_.warn(warning);
  }
  // Continues at an offset.
  for (auto left = static_cast<std::size_t>(at_.offset); left > 0 && fill(1);) {
    const std::size_t n = std::min(left, available());
    begin_ += n;
    left -= n;
  }
  return true;
}

/// Reads until `bytes` are in the buffer, or to the end. Always by kReadBytes, so that as much is read
/// before damage after a resume. @return whether there are any
bool CorpusReader::fill(std::size_t bytes) {
  if (available() < bytes) {
    buffer_.erase(0, begin_);
    begin_ = 0;
  }
  while (!at_end_ && available() < bytes) {
    const std::size_t before = buffer_.size();
    buffer_.resize(before + kReadBytes);
    std::size_t got = 0;
    try {
      got = input_->read(buffer_.data() + before, kReadBytes);
    } catch (const CorruptCheckpoint& error) {
      if (!options_.skip_damage) throw;
      damage_ = error.what();
    }
    buffer_.resize(before + got);
    at_end_ = got < kReadBytes;
  }
  return available() > 0;
}

void CorpusReader::close() {
  closed_ += files_[static_cast<std::size_t>(at_.file)].bytes;
  at_ = {at_.file + 1, 0, 0, false};
  input_.reset();
  rows_.reset();
  buffer_.clear();
  begin_ = 0;
}

bool CorpusReader::next(CorpusBatch& batch) {
  batch.text.clear();
  batch.units.clear();
  while (batch.text.size() < kBatchBytes) {
    if (!input_ && !rows_ && !open()) break;
    const CorpusFile& file = files_[static_cast<std::size_t>(at_.file)];
    if (file.has_rows() ? put_row(batch) : file.has_lines() ? put_line(batch) : put_text(batch))
      continue;
    if (!damage_.empty()) put_missing(batch, std::exchange(damage_, {}));
    close();
  }
  batch.consumed = closed_ + consumed();
  return !batch.units.empty();
}

/// Bytes read of the open file; those of a file with rows in proportion to its rows.
std::int64_t CorpusReader::consumed() const {
  if (!rows_) return input_ ? input_->consumed() : 0;
  const auto rows = static_cast<double>(std::max(rows_->rows(), std::int64_t{1}));
  const double share = std::min(static_cast<double>(at_.line) / rows, 1.0);
  return static_cast<std::int64_t>(
      share * static_cast<double>(files_[static_cast<std::size_t>(at_.file)].bytes));
}

void CorpusReader::put_missing(CorpusBatch& batch, std::string why) {
  const std::size_t end = batch.text.size();
  batch.units.push_back({at_, end, end, end, true, std::move(why)});
}

/// @return false at the end of the file
bool CorpusReader::put_row(CorpusBatch& batch) {
  const std::string& path = files_[static_cast<std::size_t>(at_.file)].path;
  std::optional<std::string_view> text;
  try {
    if (!rows_) rows_ = open_text_column(path, options_.column, at_.line);
    if (!rows_->next(text)) return false;
  } catch (const CorruptCheckpoint& error) {
    if (!options_.skip_damage) throw;
    damage_ = error.what();
    return false;
  }
  if (text) {
    const std::size_t begin = batch.text.size();
    batch.text.append(*text);
    batch.units.push_back({at_, begin, batch.text.size(), batch.text.size(), true, {}});
  } else {
    put_missing(batch,
                fmt::format("{}: row {}: \"{}\" is null", path, at_.line + 1, options_.column));
  }
  ++at_.line;
  return true;
}

/// Moves a unit from the buffer to a batch.
void CorpusReader::put(CorpusBatch& batch, std::size_t size, std::size_t context, bool last) {
  const std::size_t at = batch.text.size();
  batch.text.append(buffer_, begin_, size + context);
  batch.units.push_back({at_, at, at + size, at + size + context, last, {}});
  begin_ += size;
  at_.offset += static_cast<std::int64_t>(size);
  at_.inside = !last;
}

/// @return false at the end of the file
bool CorpusReader::put_line(CorpusBatch& batch) {
  if (!fill(1)) return false;
  std::size_t size = 0;
  for (;;) {
    const std::size_t end = buffer_.find('\n', begin_ + size);
    size = std::min(end, buffer_.size()) - begin_;
    if (end == buffer_.npos && at_end_ && !damage_.empty()) return false;  // half a line
    if (end != buffer_.npos || at_end_) break;
    fill(size + 1);
  }
  const bool blank = std::string_view(buffer_).substr(begin_, size).find_first_not_of(" \t\r") ==
                     std::string_view::npos;
  if (!blank) put(batch, size, 0, true);
  const std::size_t rest =
      (blank ? size : 0) + (begin_ + (blank ? size : 0) < buffer_.size() ? 1 : 0);
  begin_ += rest;
  at_.offset += static_cast<std::int64_t>(rest);
  ++at_.line;
  return true;
}

/// @return false at the end of the file
bool CorpusReader::put_text(CorpusBatch& batch) {
  const bool cuts = options_.cut && options_.cut(at_.file);
  fill(kBatchBytes + Encoder::kCutContext);
  for (std::size_t searched = 0; !at_end_; fill(2 * available())) {
    if (!cuts) continue;
    if (const std::size_t size = find_cut(searched); size > 0) {
      put(batch, size, Encoder::kCutContext, false);
      return true;
    }
    searched = available() - Encoder::kCutContext;
  }
  if (available() > 0) put(batch, available(), 0, true);
  return false;
}

/// Largest size above `least` before which words of most tokenizers begin, with kCutContext behind it; 0:
/// none.
std::size_t CorpusReader::find_cut(std::size_t least) const {
  const std::string_view text = std::string_view(buffer_).substr(begin_);
  for (std::size_t i = text.size() - Encoder::kCutContext; i > std::max<std::size_t>(least, 1);
       --i) {
    const bool at_space = text[i] == ' ' && is_letter(text[i - 1]) && is_letter(text[i + 1]);
    const bool in_line = text[i - 1] == '\n' && is_letter(text[i]);
    if (at_space || in_line) return i;
  }
  return 0;
}

std::string json_text(std::string_view line, const std::string& key) {
  TextFinder finder(key);
  nlohmann::json::sax_parse(line, &finder);
  require<CorruptCheckpoint>(finder.found, "no key \"{}\"; --field names another", key);
  return std::move(finder.text);
}

}  // namespace tessera::io
