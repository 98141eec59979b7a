#include "io/checkpoint/load.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "io/base/convert.h"
#include "io/base/crc64.h"
#include "io/base/parallel.h"
#include "io/checkpoint/box.h"

namespace tessera::io {
namespace {

// Bytes that are read, summed up and handed on while they are in the cache.
constexpr std::int64_t kBlock = std::int64_t{512} << 10;
constexpr std::int64_t kPiece = std::int64_t{8} << 20;  // bytes that a thread takes at once

/// Neighbouring elements of a chunk that go to one place.
struct Segment {
  std::int64_t in_chunk = 0, n = 0;
  std::int64_t in_tensor = 0;
  const LoadPart* part = nullptr;
};

/// A chunk of which something is wanted.
struct Wanted {
  const std::string* name;
  const TensorRecord* tensor;
  const Chunk* chunk;
  std::vector<Segment> segments;  ///< by in_chunk
  std::size_t first_piece = 0, pieces = 0;
};

/// Elements of a chunk, as it counts them.
struct Piece {
  std::size_t wanted;
  std::int64_t begin, end;
  std::uint64_t crc = 0;
};

/// Bytes of a file.
struct Extent {
  std::int64_t begin, end;
};

struct Buffers {
  std::vector<char> stored, converted;
};

class Load {
 public:
  Load(const CheckpointReader& reader, std::span<const LoadPart> parts) : reader_(reader) {
    std::map<std::pair<Section, std::string>, std::vector<const LoadPart*>> by_tensor;
    for (const LoadPart& part : parts) {
      check(part);
      by_tensor[{part.section, part.name}].push_back(&part);
    }
    for (auto& [key, list] : by_tensor) {
      std::sort(list.begin(), list.end(),
                [](const LoadPart* a, const LoadPart* b) { return a->begin < b->begin; });
      for (std::size_t i = 1; i < list.size(); ++i) {
        require(list[i - 1]->end <= list[i]->begin,
                "elements {} to {} and {} to {} of tensor {} overlap: they are to be read once",
                list[i - 1]->begin, list[i - 1]->end, list[i]->begin, list[i]->end, key.second);
      }
      want(key.second, reader_.tensor(key.first, key.second), list);
    }
    cut();
  }

  LoadReport run(int threads) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::atomic<std::size_t>> left(wanted_.size());
    for (std::size_t i = 0; i < left.size(); ++i) left[i] = wanted_[i].pieces;
    const std::vector<std::size_t> batches = batch();
    parallel_for_each(batches.size() - 1, threads, [&](std::size_t b) {
      const Piece &first = pieces_[batches[b]], &last = pieces_[batches[b + 1] - 1];
      const auto file = reader_.file(wanted_[first.wanted].chunk->file);
      const Extent all{extent(first).begin, extent(last).end};
      // Threads share the file's window of what is read ahead; this has one of its own.
      ::posix_fadvise(file->descriptor(), all.begin, all.end - all.begin, POSIX_FADV_WILLNEED);
      Buffers buffers;
      for (std::size_t i = batches[b]; i < batches[b + 1]; ++i) {
        Piece& piece = pieces_[i];
        read(*file, piece, buffers);
        // Who reads the last piece of a chunk sees the sums of all of them.
        if (left[piece.wanted].fetch_sub(1, std::memory_order_acq_rel) == 1) {
          check_sum(wanted_[piece.wanted]);
        }
      }
    });
    report_.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return report_;
  }

 private:
  void check(const LoadPart& part) const {
    const TensorRecord& tensor = reader_.tensor(part.section, part.name);
    require(part.begin >= 0 && part.begin <= part.end && part.end <= numel(tensor.shape),
            "elements {} to {} are outside tensor {} of shape {}", part.begin, part.end, part.name,
            tensor.shape);
    require(part.begin == part.end || part.data != nullptr || part.sink,
            "part of {}: neither memory nor a sink", part.name);
    require<Unsupported>(can_convert(tensor.dtype, part.dtype),
                         "tensor {} is stored as {}, which does not convert to {}", part.name,
                         tensor.dtype, part.dtype);
  }

  void want(const std::string& name, const TensorRecord& tensor,
            const std::vector<const LoadPart*>& parts) {
    const auto width = static_cast<std::int64_t>(dtype_size(tensor.dtype));
    for (const Chunk& chunk : tensor.chunks) {
      std::vector<Segment> segments;
      for (const LoadPart* part : parts) {
        if (!touches(chunk, tensor.shape, part->begin, part->end)) continue;
        for_each_run(chunk, tensor.shape, part->begin, part->end, [&](const ChunkRun& run) {
          segments.push_back({run.in_chunk, run.n, run.in_tensor, part});
          report_.wanted_bytes += run.n * width;
        });
      }
      if (segments.empty()) continue;
      std::sort(segments.begin(), segments.end(),
                [](const Segment& a, const Segment& b) { return a.in_chunk < b.in_chunk; });
      report_.read_bytes += chunk.byte_end - chunk.byte_begin;
      wanted_.push_back({&name_of(name), &tensor, &chunk, std::move(segments)});
    }
  }

  const std::string& name_of(const std::string& name) { return *names_.insert(name).first; }

  // In the order of the files, so that disks are read forwards.
  void cut() {
    std::sort(wanted_.begin(), wanted_.end(), [](const Wanted& a, const Wanted& b) {
      return std::tie(a.chunk->file, a.chunk->byte_begin) <
             std::tie(b.chunk->file, b.chunk->byte_begin);
    });
    for (std::size_t i = 0; i < wanted_.size(); ++i) {
      Wanted& wanted = wanted_[i];
      const std::int64_t step =
          kPiece / static_cast<std::int64_t>(dtype_size(wanted.tensor->dtype));
      wanted.first_piece = pieces_.size();
      for (std::int64_t at = wanted.chunk->begin; at < wanted.chunk->end; at += step) {
        pieces_.push_back({i, at, std::min(at + step, wanted.chunk->end)});
      }
      wanted.pieces = pieces_.size() - wanted.first_piece;
    }
  }

  Extent extent(const Piece& piece) const {
    const Wanted& wanted = wanted_[piece.wanted];
    const auto width = static_cast<std::int64_t>(dtype_size(wanted.tensor->dtype));
    const std::int64_t begin =
        wanted.chunk->byte_begin + (piece.begin - wanted.chunk->begin) * width;
    return {begin, begin + (piece.end - piece.begin) * width};
  }

  // What a thread takes at once: pieces that lie in one piece in a file.
  std::vector<std::size_t> batch() const {
    const auto joins = [&](std::size_t i) {
      const Piece &before = pieces_[i - 1], &piece = pieces_[i];
      return wanted_[before.wanted].chunk->file == wanted_[piece.wanted].chunk->file &&
             extent(before).end == extent(piece).begin;
    };
    const auto size = [&](std::size_t i) {
      return extent(pieces_[i]).end - extent(pieces_[i]).begin;
    };
    return cut_batches(pieces_.size(), kPiece, joins, size);
  }

  void read(const File& file, Piece& piece, Buffers& buffers) const {
    const Wanted& wanted = wanted_[piece.wanted];
    const Chunk& chunk = *wanted.chunk;
    const auto width = static_cast<std::int64_t>(dtype_size(wanted.tensor->dtype));
    auto segment =
        std::upper_bound(wanted.segments.begin(), wanted.segments.end(), piece.begin,
                         [](std::int64_t at, const Segment& s) { return at < s.in_chunk + s.n; });
    const std::int64_t step = kBlock / width;
    for (std::int64_t begin = piece.begin; begin < piece.end; begin += step) {
      const std::int64_t end = std::min(begin + step, piece.end);
      const auto bytes = static_cast<std::size_t>((end - begin) * width);
      while (segment != wanted.segments.end() && segment->in_chunk + segment->n <= begin) ++segment;
      char* const place =
          segment == wanted.segments.end() ? nullptr : in_place(*segment, wanted, begin, end);
      if (!place && buffers.stored.size() < bytes) buffers.stored.resize(bytes);
      char* const into = place ? place : buffers.stored.data();
      file.read(chunk.byte_begin + (begin - chunk.begin) * width, into, bytes);
      piece.crc = crc64(into, bytes, piece.crc);
      if (place) continue;
      for (auto s = segment; s != wanted.segments.end() && s->in_chunk < end; ++s) {
        const std::int64_t from = std::max(s->in_chunk, begin);
        const std::int64_t n = std::min(s->in_chunk + s->n, end) - from;
        hand_over(*s, wanted.tensor->dtype, into + (from - begin) * width, from, n, buffers);
      }
    }
  }

  // Where a block belongs, if it can be read straight to there.
  static char* in_place(const Segment& segment, const Wanted& wanted, std::int64_t begin,
                        std::int64_t end) {
    const LoadPart& part = *segment.part;
    const bool covers = segment.in_chunk <= begin && end <= segment.in_chunk + segment.n;
    if (!covers || !part.data || part.dtype != wanted.tensor->dtype) return nullptr;
    return address(part, segment.in_tensor + begin - segment.in_chunk);
  }

  static char* address(const LoadPart& part, std::int64_t element) {
    return static_cast<char*>(part.data) +
           (element - part.begin) * static_cast<std::int64_t>(dtype_size(part.dtype));
  }

  static void hand_over(const Segment& segment, DType stored, const char* values,
                        std::int64_t in_chunk, std::int64_t n, Buffers& buffers) {
    const LoadPart& part = *segment.part;
    const std::int64_t element = segment.in_tensor + in_chunk - segment.in_chunk;
    if (part.data) {
      convert_elements(stored, values, part.dtype, address(part, element), n);
    } else if (part.dtype == stored) {
      part.sink(element, values, n);
    } else {
      buffers.converted.resize(static_cast<std::size_t>(n) * dtype_size(part.dtype));
      convert_elements(stored, values, part.dtype, buffers.converted.data(), n);
      part.sink(element, buffers.converted.data(), n);
    }
  }

  void check_sum(const Wanted& wanted) const {
    const Chunk& chunk = *wanted.chunk;
    const auto width = static_cast<std::int64_t>(dtype_size(wanted.tensor->dtype));
    std::uint64_t crc = 0;
    for (std::size_t i = 0; i < wanted.pieces; ++i) {
      const Piece& piece = pieces_[wanted.first_piece + i];
      crc = crc64_combine(crc, piece.crc,
                          static_cast<std::uint64_t>((piece.end - piece.begin) * width));
    }
    if (crc != chunk.crc64) reader_.fail_checksum(*wanted.name, chunk);
  }

  const CheckpointReader& reader_;
  std::set<std::string> names_;  // that chunks point at
  std::vector<Wanted> wanted_;
  std::vector<Piece> pieces_;
  LoadReport report_;
};

}  // namespace

LoadReport load_parts(const CheckpointReader& reader, std::span<const LoadPart> parts,
                      int threads) {
  return Load(reader, parts).run(threads);
}

}  // namespace tessera::io
