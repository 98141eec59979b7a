#include "io/pump/verify.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <span>
#include <utility>

#include "core/base/error.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kVerifyBuffer = std::int64_t{1} << 20;  // bytes per thread
constexpr std::int64_t kVerifyBatch = std::int64_t{16} << 20;  // bytes per unit of work

// Index of the first element whose exponent bits are all ones (infinity or NaN), or -1.
template <typename Bits>
std::int64_t find_non_finite(const void* data, std::int64_t n, Bits exponent) {
  const auto* at = static_cast<const char*>(data);
  for (std::int64_t i = 0; i < n; ++i, at += sizeof(Bits)) {
    Bits bits;
    std::memcpy(&bits, at, sizeof(Bits));
    if ((bits & exponent) == exponent) return i;
  }
  return -1;
}

std::int64_t find_non_finite(DType dtype, const void* data, std::int64_t n) {
  if (dtype == DType::F64) return find_non_finite<std::uint64_t>(data, n, 0x7ff0000000000000ULL);
  if (dtype == DType::F32) return find_non_finite<std::uint32_t>(data, n, 0x7f800000U);
  if (dtype == DType::BF16) return find_non_finite<std::uint16_t>(data, n, 0x7f80U);
  return dtype == DType::F16 ? find_non_finite<std::uint16_t>(data, n, 0x7c00U) : -1;
}

bool is_io_error(const Error& error) { return dynamic_cast<const IoError*>(&error) != nullptr; }

}  // namespace

std::string VerifyProblem::str() const {
  if (tensor.empty()) return fmt::format("{}: {}", file, what);
  if (byte_begin == byte_end) return fmt::format("{}: tensor {}: {}", file, tensor, what);
  return fmt::format("{}: tensor {}, elements {} to {} (bytes {} to {}): {}", file, tensor, begin,
                     end, byte_begin, byte_end, what);
}

void TensorVerification::add(const TensorSource& source, const std::string& name) {
  ++report.tensors;
  PumpTensor& tensor = *tensors_.emplace_back(std::make_unique<PumpTensor>(source, name));
  const std::size_t first = chunks_.size();
  for (std::size_t i = 0; i < tensor.record->chunks.size(); ++i) {
    const Chunk& chunk = tensor.record->chunks[i];
    if (chunk.begin == chunk.end || (options_.files && !options_.files->contains(chunk.file)))
      continue;
    by_file_[chunk.file].push_back(chunks_.size());
    chunks_.push_back({&tensor, i, source.title(name)});
  }
  // Searches from `first`, because the chunks of this tensor follow in ascending order.
  tensor.on_wrong = [this, first](std::size_t number) {
    auto at = chunks_.begin() + static_cast<std::ptrdiff_t>(first);
    while (at->number != number) ++at;
    at->wrong = true;
  };
}

std::vector<const TensorVerification::NamedChunk*> TensorVerification::chunks_in(
    const std::string& file) const {
  std::vector<const NamedChunk*> found;
  const auto indices = by_file_.find(file);
  if (indices == by_file_.end()) return found;
  for (const std::size_t i : indices->second) found.push_back(&chunks_[i]);
  return found;
}

void TensorVerification::read(const std::set<std::string>& absent) {
  std::vector<Slice> slices;  // one per chunk; empty if the file is absent
  for (const NamedChunk& named : chunks_) {
    const Chunk& chunk = named.chunk();
    const bool is_absent = absent.contains(chunk.file);
    slices.push_back(
        {named.tensor, named.number, chunk.begin, is_absent ? chunk.begin : chunk.end});
    report.bytes += slices.back().bytes();
    if (chunk.checksum == Checksum::None) report.unverifiable += slices.back().bytes();
  }
  const std::vector<std::vector<SlicePiece>> batches = cut_batches(slices, kVerifyBatch);
  std::int64_t done = 0;
  std::mutex mutex;  // guards done and the results in chunks_
  // Uses the page cache, because it still has the data of a save that is read back.
  Pump pump({.threads = options_.threads, .block = kVerifyBuffer, .direct_io = false});
  pump.run(batches.size(), [&](std::size_t b, Pump::Lane& lane) {
    const std::vector<SlicePiece>& batch = batches[b];
    std::vector<std::pair<std::size_t, std::int64_t>> non_finite;  // chunk and element
    const auto read = [&](std::span<const SlicePiece> pieces) {
      lane.read(pieces, [&](const SlicePiece& piece, const Slice& part, const char* data) {
        if (!options_.check_finite) return;
        const std::int64_t found =
            find_non_finite(part.tensor->record->dtype, data, part.to - part.from);
        if (found >= 0) non_finite.emplace_back(piece.of, part.from + found);
      });
    };
    try {
      read(batch);
    } catch (const Error& first) {
      // Reads the pieces one by one to find the failing chunks.
      bool found = false;
      const auto blame = [&](const SlicePiece& piece, const Error& error) {
        const bool unread = is_io_error(error);
        const std::lock_guard lock(mutex);
        NamedChunk& chunk = chunks_[piece.of];
        if (chunk.error.empty() || (chunk.unread && !unread)) {
          chunk.error = error.what();
          chunk.unread = unread;
        }
        found = true;
      };
      for (const SlicePiece& piece : batch) {
        try {
          read(std::span(&piece, 1));
        } catch (const Error& error) {
          blame(piece, error);
        }
      }
      if (!found) blame(batch[0], first);  // an I/O error that did not recur
    }
    const std::lock_guard lock(mutex);
    for (const auto& [chunk, element] : non_finite) {
      chunks_[chunk].non_finite = std::min(chunks_[chunk].non_finite, element);
    }
    for (const SlicePiece& piece : batch) {
      done += piece.slice.bytes();
      if (options_.progress) options_.progress(done, report.bytes);
    }
  });
  for (const NamedChunk& chunk : chunks_) judge(chunk);
}

void TensorVerification::judge(const NamedChunk& named) {
  const Chunk& chunk = named.chunk();
  const auto add = [&](std::int64_t begin, std::int64_t end, const std::string& what) {
    const std::int64_t width = named.tensor->record->width();
    const auto [first, last] = chunk.zstd
                                   ? chunk.file_bytes()
                                   : std::pair(chunk.byte_begin + (begin - chunk.begin) * width,
                                               chunk.byte_begin + (end - chunk.begin) * width);
    report.problems.push_back(
        {chunk.file, named.name, begin, end, what, first, last, named.unread});
  };
  if (!named.error.empty()) {
    add(chunk.begin, chunk.end, named.error);
  } else if (named.wrong) {
    add(chunk.begin, chunk.end, "the checksum is wrong");
  } else if (named.non_finite != kNone) {
    add(named.non_finite, named.non_finite + 1, "the value is not finite");
  }
}

VerifyReport verify_tensors(const TensorSource& source, const std::vector<std::string>& names,
                            const VerifyOptions& options) {
  TensorVerification verification(options);
  for (const std::string& name : names) {
    try {
      verification.add(source, name);
    } catch (const CorruptCheckpoint& error) {
      verification.report.problems.push_back({source.path().string(), "", 0, 0, error.what()});
    }
  }
  verification.read();
  return std::move(verification.report);
}

}  // namespace tessera::io
