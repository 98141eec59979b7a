#include "io/data/token_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <utility>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/base/file.h"

namespace tessera::io {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

constexpr std::int64_t kHeaderBytes = 256 * sizeof(std::int32_t);
constexpr std::int32_t kMagic16 = 20240520;
constexpr std::int32_t kMagic32 = 20240801;
constexpr std::int32_t kMagicEvaluation = 20240522;

/// Tokens of type T from `offset` to the end of a file.
template <typename T>
class FileTokens final : public TokenSource {
 public:
  FileTokens(File file, std::int64_t offset, std::int64_t size, std::int64_t vocab_size)
      : file_(std::move(file)),
        file_size_(file_.size()),
        offset_(offset),
        size_(size),
        limit_(vocab_size) {}

  std::int64_t size() const override { return size_; }
  void prefetch(std::int64_t begin, std::int64_t count) const override {
    check_token_range(begin, count, size_);
    file_.prefetch(offset_ + begin * kTokenBytes, count * kTokenBytes);
  }
  void read(std::int64_t begin, std::int64_t count, std::int32_t* dst) const override {
    check_token_range(begin, count, size_);
    std::array<T, 4096> block;
    while (count > 0) {
      const auto part = std::min(count, static_cast<std::int64_t>(block.size()));
      try {
        file_.read(offset_ + begin * kTokenBytes, block.data(),
                   static_cast<std::size_t>(part) * sizeof(T));
      } catch (const CorruptCheckpoint&) {
        check_file_size();
        throw;
      }
      for (std::int64_t i = 0; i < part; ++i) {
        const T id = block[static_cast<std::size_t>(i)];
        if (id >= limit_) [[unlikely]] {
          throw IoError(
              "{}: token {} has id {}, but the vocabulary has {} entries; set model.vocab_size or "
              "use the tokenizer that made this file",
              file_.path().string(), begin + i, id, limit_);
        }
        dst[i] = static_cast<std::int32_t>(id);
      }
      begin += part;
      dst += part;
      count -= part;
    }
    check_file_size();  // a page cut during the copy reads as zeros
  }

 private:
  static constexpr std::int64_t kTokenBytes = sizeof(T);
  void check_file_size() const {
    const std::int64_t now = file_.size();
    require<IoError>(
        now >= file_size_,
        "{} has {} bytes, but had {} when it was opened: it was truncated while in use; restore "
        "the file and resume from the newest checkpoint",
        file_.path().string(), now, file_size_);
  }
  File file_;
  std::int64_t file_size_;  // size when the file was opened
  std::int64_t offset_;
  std::int64_t size_;
  std::int64_t limit_;
};

template <typename T>
TokenSourcePtr open_with_header(File file, std::int32_t version, std::int64_t vocab_size) {
  const std::string path = file.path().string();
  const std::int64_t size = file.size();
  require<IoError>(size >= kHeaderBytes,
                   "{}: {} bytes, but the header of a token file has {}: it was truncated", path,
                   size, kHeaderBytes);
  std::array<std::int32_t, 3> header{};
  file.read(0, header.data(), sizeof(header));
  require<IoError>(header[1] == version, "{}: token file version {}, expected {} for magic {}",
                   path, header[1], version, header[0]);
  const std::int64_t count = header[2];
  require<IoError>(count >= 0,
                   "{}: its header counts {} tokens; counts over 2^31 - 1 don't fit that field: "
                   "write several files and give them all",
                   path, count);
  const std::int64_t expected = kHeaderBytes + count * static_cast<std::int64_t>(sizeof(T));
  require<IoError>(size == expected,
                   "{}: its header counts {} tokens, a size of {} bytes, but the file has {}", path,
                   count, expected, size);
  require<IoError>(count > 0, "{}: a token file without tokens", path);
  return std::make_shared<FileTokens<T>>(std::move(file), kHeaderBytes, count, vocab_size);
}

}  // namespace

TokenSourcePtr open_token_file(const std::string& path, std::int64_t vocab_size) {
  if (vocab_size == 0) vocab_size = std::int64_t{1} << 31;  // ids are int32
  File file = File::open(path);
  const std::int64_t size = file.size();
  require<IoError>(size > 0, "{}: the file is empty, expected tokens", path);
  std::int32_t magic = 0;
  if (size >= std::int64_t{sizeof(magic)}) file.read(0, &magic, sizeof(magic));
  if (magic == kMagic16) return open_with_header<std::uint16_t>(std::move(file), 1, vocab_size);
  if (magic == kMagic32) return open_with_header<std::uint32_t>(std::move(file), 7, vocab_size);
  require<IoError>(magic != kMagicEvaluation,
                   "{}: an evaluation file of llm.c (magic {}), expected a file of tokens", path,
                   magic);
  require<IoError>(magic < 20240000 || magic > 20249999,
                   "{}: unknown magic {}, expected {} (16-bit tokens) or {} (32-bit tokens)", path,
                   magic, kMagic16, kMagic32);
  require<IoError>(size % 2 == 0,
                   "{}: {} bytes, an odd size, and no header: not a file of uint16 tokens "
                   "(text must not be named .bin)",
                   path, size);
  const std::int64_t count = size / 2;
  return std::make_shared<FileTokens<std::uint16_t>>(std::move(file), 0, count, vocab_size);
}

bool is_wide_token_file(const std::string& path) {
  const File file = File::open(path);
  std::int32_t magic = 0;
  if (file.size() >= std::int64_t{sizeof(magic)}) file.read(0, &magic, sizeof(magic));
  return magic == kMagic32;
}

TokenFileWriter::TokenFileWriter(fs::path path, bool wide) : path_(std::move(path)), wide_(wide) {
  temporary_ = path_;
  temporary_ += ".tmp";
  std::error_code ignored;
  fs::remove(temporary_, ignored);
  file_ = File::create(temporary_);
  const std::array<char, kHeaderBytes> header{};
  file_.write(header.data(), header.size());
}

TokenFileWriter::~TokenFileWriter() {
  std::error_code ignored;
  if (!temporary_.empty()) fs::remove(temporary_, ignored);
}

void TokenFileWriter::append(std::string_view ids) {
  constexpr std::int64_t kWriteback = std::int64_t{8} << 20;  // bytes
  file_.write(ids.data(), ids.size());
  crc_ = crc64(ids.data(), ids.size(), crc_);
  tokens_ += std::ssize(ids) / (wide_ ? 4 : 2);
  const std::int64_t written = tokens_ * (wide_ ? 4 : 2);
  if (written - synced_ < kWriteback) return;
  file_.start_writeback(kHeaderBytes + synced_, written - synced_);
  synced_ = written;
}

std::uint64_t TokenFileWriter::commit() {
  require<IoError>(tokens_ <= kMaxTokens,
                   "{}: {} tokens are too many for one token file; name a directory, which gets "
                   "several",
                   path_.string(), tokens_);
  std::array<std::int32_t, kHeaderBytes / sizeof(std::int32_t)> header{};
  header[0] = wide_ ? kMagic32 : kMagic16;
  header[1] = wide_ ? 7 : 1;
  header[2] = static_cast<std::int32_t>(tokens_);
  file_.write_at(0, header.data(), sizeof(header));
  file_.finish();
  rename_path(temporary_, path_);
  temporary_.clear();
  sync_directory(path_.parent_path());
  return crc64_combine(crc64(header.data(), sizeof(header)), crc_,
                       static_cast<std::uint64_t>(tokens_ * (wide_ ? 4 : 2)));
}

TokenSourcePtr open_byte_file(const std::string& path) {
  File file = File::open(path);
  const std::int64_t size = file.size();
  require<IoError>(size > 0, "{}: the file is empty, expected text", path);
  return std::make_shared<FileTokens<std::uint8_t>>(std::move(file), 0, size, 256);
}

}  // namespace tessera::io
