#include "io/base/zstd.h"

#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "core/base/error.h"

namespace tessera::io {
namespace {

constexpr std::size_t kInput = std::size_t{128} << 10;     // bytes read at once
constexpr std::int64_t kMaxIdle = std::int64_t{64} << 20;  // bytes of a pool's idle decoders
constexpr std::size_t kMaxIdleCount = 64;                  // each may have a file open
constexpr std::uint32_t kFrame = 0xFD2FB528U;              // magic numbers
constexpr std::uint32_t kSkippable = 0x184D2A50U, kSkippableMask = 0xFFFFFFF0U;

}  // namespace

void ZstdDecoder::Free::operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }

ZstdDecoder::ZstdDecoder(std::shared_ptr<const File> file, const ZstdRange& range, int window_log)
    : file_(std::move(file)),
      range_(range),
      window_log_(window_log),
      name_(fmt::format("{}, zstd stream in bytes {} to {}", file_->path().string(), range.offset,
                        range.offset + range.length)),
      context_(ZSTD_createDCtx()),
      input_(kInput) {
  if (!context_) throw std::bad_alloc();
  ZSTD_DCtx_setParameter(context_.get(), ZSTD_d_windowLogMax, window_log_);
}

ZstdDecoder::~ZstdDecoder() = default;

std::int64_t ZstdDecoder::memory() const {
  return static_cast<std::int64_t>(ZSTD_sizeof_DCtx(context_.get()) + input_.size());
}

void ZstdDecoder::reset() {
  ZSTD_DCtx_reset(context_.get(), ZSTD_reset_session_only);
  input_at_ = input_end_ = 0;
  read_ = position_ = 0;
  between_frames_ = true;
}

void ZstdDecoder::refill() {
  std::copy(input_.begin() + static_cast<std::ptrdiff_t>(input_at_),
            input_.begin() + static_cast<std::ptrdiff_t>(input_end_), input_.begin());
  input_end_ -= input_at_;
  input_at_ = 0;
  const auto n = static_cast<std::size_t>(std::min<std::int64_t>(
      range_.length - read_, static_cast<std::int64_t>(input_.size() - input_end_)));
  file_->read(range_.offset + read_, input_.data() + input_end_, n);
  input_end_ += n;
  read_ += static_cast<std::int64_t>(n);
}

std::size_t ZstdDecoder::read(char* out, std::size_t bytes) {
  failed_ = true;  // unless this returns
  ZSTD_outBuffer output{out, bytes, 0};
  while (output.pos < bytes) {
    // libzstd would also decode the frames of its first versions, with windows of any size.
    if (between_frames_) {
      std::uint32_t magic = 0;
      if (input_end_ - input_at_ < sizeof(magic)) refill();
      if (input_end_ == input_at_) break;
      std::memcpy(&magic, input_.data() + input_at_,
                  std::min(sizeof(magic), input_end_ - input_at_));
      require<CorruptCheckpoint>(magic == kFrame || (magic & kSkippableMask) == kSkippable,
                                 "{}: after {} decoded bytes it goes on with {:08x}, which begins "
                                 "no frame of zstd: the data was damaged or replaced",
                                 name_, position_ + static_cast<std::int64_t>(output.pos), magic);
    }
    if (input_at_ == input_end_) refill();
    ZSTD_inBuffer input{input_.data(), input_end_, input_at_};
    const std::size_t before = output.pos;
    const std::size_t left = ZSTD_decompressStream(context_.get(), &output, &input);
    if (ZSTD_isError(left) != 0) {
      const ZSTD_ErrorCode code = ZSTD_getErrorCode(left);
      require<Unsupported>(code != ZSTD_error_frameParameter_windowTooLarge,
                           "{}: compressed with a window of more than {} MiB; compress it with a "
                           "smaller one (level 19 or less, without --long)",
                           name_, (1 << window_log_) >> 20);
      require<Unsupported>(code != ZSTD_error_dictionary_wrong,
                           "{}: compressed with a dictionary; save it without one", name_);
      if (code == ZSTD_error_memory_allocation) throw std::bad_alloc();
      throw CorruptCheckpoint("{}: after {} decoded bytes: {}: the data was damaged after the save",
                              name_, position_ + static_cast<std::int64_t>(output.pos),
                              ZSTD_getErrorName(left));
    }
    require<CorruptCheckpoint>(input.pos != input_at_ || output.pos != before,
                               "{}: it ends inside a frame, after {} decoded bytes: it was "
                               "truncated",
                               name_, position_ + static_cast<std::int64_t>(output.pos));
    input_at_ = input.pos;
    between_frames_ = left == 0;
  }
  position_ += static_cast<std::int64_t>(output.pos);
  failed_ = false;
  return output.pos;
}

void ZstdDecoder::read_at(std::int64_t position, char* out, std::size_t bytes) {
  if (position < position_) reset();
  std::vector<char> skipped(static_cast<std::size_t>(
      std::min<std::int64_t>(position - position_, static_cast<std::int64_t>(kInput))));
  const auto take = [&](char* to, std::size_t n) {
    const std::size_t got = read(to, n);
    failed_ = got < n;
    require<CorruptCheckpoint>(got == n, "{}: decodes to {} bytes, but holds data at {}", name_,
                               position_, position);
  };
  while (position_ < position) {
    take(skipped.data(), std::min(skipped.size(), static_cast<std::size_t>(position - position_)));
  }
  take(out, bytes);
}

ZstdEnds read_zstd_ends(ZstdDecoder& decoder, std::int64_t most) {
  ZstdEnds ends;
  std::string buffer(16 * ZstdEnds::kKept, '\0');
  for (;;) {
    const std::size_t n = decoder.read(buffer.data(), buffer.size());
    ends.head.append(buffer, 0, std::min(n, ZstdEnds::kKept - ends.head.size()));
    ends.tail.append(buffer, n - std::min(n, ZstdEnds::kKept), std::min(n, ZstdEnds::kKept));
    if (ends.tail.size() > ZstdEnds::kKept) ends.tail.erase(0, ends.tail.size() - ZstdEnds::kKept);
    require<CorruptCheckpoint>(decoder.position() <= most,
                               "{}: decodes to more than {} bytes, which its tensor does not have",
                               decoder.name(), most);
    if (n < buffer.size()) break;
  }
  ends.size = decoder.position();
  return ends;
}

ZstdPool::Lease::Lease(ZstdPool& pool, std::shared_ptr<const File> file, const ZstdRange& range,
                       std::int64_t begin, std::int64_t end)
    : pool_(pool), path_(file->path().string()), range_(range), end_(end) {
  std::unique_lock lock(pool.mutex_);
  const auto place = pool.waiting_.emplace(path_, range, begin);
  for (;;) {
    auto best = pool.idle_.end();
    for (auto each = pool.idle_.begin(); each != pool.idle_.end(); ++each) {
      if (each->is_of(path_, range) && each->position() <= begin &&
          (best == pool.idle_.end() || each->position() > best->position())) {
        best = each;
      }
    }
    if (best != pool.idle_.end()) {
      // The reader that is next in the range takes it.
      const auto next = pool.waiting_.lower_bound({path_, range, best->position()});
      if (std::get<std::int64_t>(*next) == begin) {
        decoder_.splice(decoder_.begin(), pool.idle_, best);
        break;
      }
    } else if (std::ranges::none_of(pool.active_, [&](const Lease* other) {
                 return other->path_ == path_ && other->range_ == range && other->end_ <= begin;
               })) {
      break;
    }
    pool.released_.wait(lock);
  }
  pool.waiting_.erase(place);
  pool.active_.insert(this);
  lock.unlock();
  try {
    if (decoder_.empty()) decoder_.emplace_back(std::move(file), range);
  } catch (...) {
    release();
    throw;
  }
}

ZstdPool::Lease::~Lease() { release(); }

void ZstdPool::Lease::release() noexcept {
  const std::lock_guard lock(pool_.mutex_);
  pool_.active_.erase(this);
  if (!decoder_.empty() && !decoder_.front().failed())
    pool_.idle_.splice(pool_.idle_.begin(), decoder_);
  std::int64_t bytes = 0;
  for (const ZstdDecoder& each : pool_.idle_) bytes += each.memory();
  for (; bytes > kMaxIdle || pool_.idle_.size() > kMaxIdleCount; pool_.idle_.pop_back())
    bytes -= pool_.idle_.back().memory();
  pool_.released_.notify_all();
}

}  // namespace tessera::io
