#include "io/data/input_stream.h"

#include <isa-l/igzip_lib.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "io/base/file.h"
#include "io/base/zstd.h"

namespace tessera::io {
namespace {

constexpr std::size_t kGzipInput = std::size_t{128} << 10;  // bytes read at once
constexpr int kDataWindowLog = 27;                          // 128 MiB, as the zstd program

class PlainInput final : public InputStream {
 public:
  explicit PlainInput(File file) : file_(std::move(file)), size_(file_.size()) {}
  std::size_t read(char* out, std::size_t bytes) override {
    const auto n = static_cast<std::size_t>(
        std::min<std::int64_t>(size_ - at_, static_cast<std::int64_t>(bytes)));
    file_.read(at_, out, n);
    at_ += static_cast<std::int64_t>(n);
    return n;
  }
  std::int64_t consumed() const override { return at_; }

 private:
  File file_;
  std::int64_t size_, at_ = 0;
};

class ZstdInput final : public InputStream {
 public:
  explicit ZstdInput(File file)
      : size_(file.size()), decoder_(share(std::move(file)), {0, size_}, kDataWindowLog) {}
  std::size_t read(char* out, std::size_t bytes) override { return decoder_.read(out, bytes); }
  std::int64_t consumed() const override { return decoder_.consumed(); }

 private:
  static std::shared_ptr<const File> share(File file) {
    return std::make_shared<const File>(std::move(file));
  }
  std::int64_t size_;
  ZstdDecoder decoder_;
};

/// Members of gzip, one after the other.
class GzipInput final : public InputStream {
 public:
  explicit GzipInput(File file)
      : path_(file.path().string()), input_(std::move(file)), buffer_(kGzipInput) {
    isal_inflate_init(&state_);
    begin_member();
  }

  std::size_t read(char* out, std::size_t bytes) override {
    std::size_t done = 0;
    while (done < bytes) {
      if (state_.avail_in == 0) refill();
      if (between_members_) {
        if (state_.avail_in == 0) break;
        begin_member();
      }
      const auto room =
          static_cast<std::uint32_t>(std::min<std::size_t>(bytes - done, std::size_t{1} << 30));
      state_.next_out = reinterpret_cast<std::uint8_t*>(out + done);
      state_.avail_out = room;
      const bool at_end = state_.avail_in == 0;
      const int code = isal_inflate(&state_);
      const std::size_t got = room - state_.avail_out;
      done += got;
      decoded_ += static_cast<std::int64_t>(got);
      require<CorruptCheckpoint>(
          code >= 0, "{}: gzip data is damaged near byte {}, after {} decoded bytes: {}", path_,
          input_.consumed() - state_.avail_in, decoded_, describe(code));
      between_members_ = state_.block_state == ISAL_BLOCK_FINISH;
      require<CorruptCheckpoint>(between_members_ || got > 0 || !at_end,
                                 "{}: it ends inside a gzip member, after {} decoded bytes: it was "
                                 "truncated",
                                 path_, decoded_);
    }
    return done;
  }
  std::int64_t consumed() const override { return input_.consumed(); }

 private:
  void refill() {
    state_.avail_in = static_cast<std::uint32_t>(input_.read(buffer_.data(), buffer_.size()));
    state_.next_in = reinterpret_cast<std::uint8_t*>(buffer_.data());
  }
  void begin_member() {
    isal_inflate_reset(&state_);
    state_.crc_flag = ISAL_GZIP;
    between_members_ = false;
  }
  static const char* describe(int code) {
    if (code == ISAL_INCORRECT_CHECKSUM) return "wrong checksum";
    if (code == ISAL_INVALID_WRAPPER) return "no gzip header";
    return code == ISAL_UNSUPPORTED_METHOD ? "unknown compression method" : "invalid block";
  }

  std::string path_;
  PlainInput input_;
  std::vector<char> buffer_;
  inflate_state state_{};
  std::int64_t decoded_ = 0;
  bool between_members_ = false;
};

bool is_gzip_name(const std::string& path) { return path.ends_with(".gz"); }
bool is_zstd_name(const std::string& path) {
  return path.ends_with(".zst") || path.ends_with(".zstd");
}

}  // namespace

std::unique_ptr<InputStream> open_input(const std::string& path) {
  File file = File::open(path);
  if (is_gzip_name(path)) return std::make_unique<GzipInput>(std::move(file));
  if (is_zstd_name(path)) return std::make_unique<ZstdInput>(std::move(file));
  return std::make_unique<PlainInput>(std::move(file));
}

std::string without_compression(const std::string& path) {
  return is_gzip_name(path) || is_zstd_name(path) ? path.substr(0, path.rfind('.')) : path;
}

}  // namespace tessera::io
