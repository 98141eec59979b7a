#include "io/checkpoint/load.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "io/base/convert.h"
#include "io/base/crc64.h"
#include "io/base/direct_file.h"
#include "io/base/parallel.h"
#include "io/checkpoint/box.h"

namespace tessera::io {
namespace {

// Bytes that are summed up and handed on while they are in the cache.
constexpr std::int64_t kBlock = std::int64_t{512} << 10;
constexpr std::int64_t kRead = std::int64_t{2} << 20;   // bytes of a read
constexpr std::int64_t kPiece = std::int64_t{8} << 20;  // bytes that a thread takes at once

/// Neighbouring elements of a chunk that go to one place.
struct Segment {
  std::int64_t in_chunk = 0, n = 0;
  std::int64_t in_tensor = 0;
  const LoadPart* part = nullptr;
};

/// A chunk of which something is wanted.
struct Wanted {
  Section section;
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

/// Elements of a piece that are summed up and handed on at once.
struct Block {
  Piece* piece;
  std::int64_t begin, end;
};

struct Buffers {
  AlignedBuffer scratch{static_cast<std::size_t>(kRead) + 2 * kDirectAlignment};
  std::vector<char> converted;
  std::vector<Block> blocks;
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
      want(key.first, key.second, list);
    }
    cut();
  }

  LoadReport run(int threads) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::atomic<std::size_t>> left(wanted_.size());
    for (std::size_t i = 0; i < left.size(); ++i) left[i] = wanted_[i].pieces;
    const std::vector<std::size_t> batches = batch();
    parallel_for_each(batches.size() - 1, threads, [&](std::size_t b) {
      const std::span<Piece> pieces(&pieces_[batches[b]], batches[b + 1] - batches[b]);
      read(pieces);
      for (const Piece& piece : pieces) {
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

  void want(Section section, const std::string& name, const std::vector<const LoadPart*>& parts) {
    const TensorRecord& tensor = reader_.tensor(section, name);
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
      wanted_.push_back({section, &name_of(name), &tensor, &chunk, std::move(segments)});
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

  std::int64_t width_of(const Piece& piece) const {
    return static_cast<std::int64_t>(dtype_size(wanted_[piece.wanted].tensor->dtype));
  }

  // In the file, of elements of a piece.
  Extent extent(const Piece& piece, std::int64_t begin, std::int64_t end) const {
    const Chunk& chunk = *wanted_[piece.wanted].chunk;
    const std::int64_t at = chunk.byte_begin + (begin - chunk.begin) * width_of(piece);
    return {at, at + (end - begin) * width_of(piece)};
  }
  Extent extent(const Piece& piece) const { return extent(piece, piece.begin, piece.end); }
  Extent extent(const Block& block) const { return extent(*block.piece, block.begin, block.end); }

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

  // Pieces that lie in one piece in a file.
  void read(std::span<Piece> pieces) {
    const std::string& name = wanted_[pieces.front().wanted].chunk->file;
    reader_.file(name);  // it is what the index says
    const DirectFile file(File::open(reader_.path() / name, Links::Refuse));
    std::unique_ptr<Buffers> buffers = take_buffers();
    for (Piece& piece : pieces) {
      const std::int64_t step = kBlock / width_of(piece);
      for (std::int64_t begin = piece.begin; begin < piece.end; begin += step) {
        const Block block{&piece, begin, std::min(begin + step, piece.end)};
        std::vector<Block>& blocks = buffers->blocks;
        if (!blocks.empty() && extent(block).end - extent(blocks.front()).begin > kRead)
          read(file, *buffers);
        blocks.push_back(block);
      }
    }
    read(file, *buffers);
    const std::lock_guard lock(mutex_);
    free_buffers_.push_back(std::move(buffers));
  }

  // Reads and hands on the blocks that have been gathered.
  void read(const DirectFile& file, Buffers& buffers) const {
    const Extent all{extent(buffers.blocks.front()).begin, extent(buffers.blocks.back()).end};
    // Aligned as in the file.
    char* const place =
        buffers.scratch.data() + all.begin % static_cast<std::int64_t>(kDirectAlignment);
    const char* data =
        file.read(all.begin, static_cast<std::size_t>(all.end - all.begin), buffers.scratch, place);
    for (const Block& block : buffers.blocks) {
      const auto bytes =
          static_cast<std::size_t>((block.end - block.begin) * width_of(*block.piece));
      block.piece->crc = crc64(data, bytes, block.piece->crc);
      hand_over(block, data, buffers);
      data += bytes;
    }
    buffers.blocks.clear();
  }

  void hand_over(const Block& block, const char* data, Buffers& buffers) const {
    const Wanted& wanted = wanted_[block.piece->wanted];
    const std::int64_t width = width_of(*block.piece);
    auto segment =
        std::upper_bound(wanted.segments.begin(), wanted.segments.end(), block.begin,
                         [](std::int64_t at, const Segment& s) { return at < s.in_chunk + s.n; });
    for (; segment != wanted.segments.end() && segment->in_chunk < block.end; ++segment) {
      const std::int64_t from = std::max(segment->in_chunk, block.begin);
      const std::int64_t n = std::min(segment->in_chunk + segment->n, block.end) - from;
      hand_over(*segment, wanted.tensor->dtype, data + (from - block.begin) * width, from, n,
                buffers);
    }
  }

  std::unique_ptr<Buffers> take_buffers() {
    const std::lock_guard lock(mutex_);
    if (free_buffers_.empty()) return std::make_unique<Buffers>();
    auto buffers = std::move(free_buffers_.back());
    free_buffers_.pop_back();
    return buffers;
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
    if (crc != chunk.crc64) reader_.fail_checksum(wanted.section, *wanted.name, chunk);
  }

  const CheckpointReader& reader_;
  std::set<std::string> names_;  // that chunks point at
  std::vector<Wanted> wanted_;
  std::vector<Piece> pieces_;
  LoadReport report_;

  std::mutex mutex_;
  std::vector<std::unique_ptr<Buffers>> free_buffers_;  // guarded by mutex
};

}  // namespace

LoadReport load_parts(const CheckpointReader& reader, std::span<const LoadPart> parts,
                      int threads) {
  return Load(reader, parts).run(threads);
}

}  // namespace tessera::io
