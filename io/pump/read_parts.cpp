#include "io/pump/read_parts.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "io/base/convert.h"
#include "io/pump/box.h"
#include "io/pump/pump.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kBatch = std::int64_t{8} << 20;  // bytes per unit of work
// Unwanted bytes between two wanted ones that are read rather than skipped by another system call.
constexpr std::int64_t kBridgedBytes = std::int64_t{32} << 10;
// Rows of a box that are read at once.
constexpr std::int64_t kRowsAtOnce = 4096;

/// Elements to pass on that are contiguous in their chunk and at their destination.
struct Segment {
  std::int64_t in_chunk = 0, n = 0;
  std::int64_t in_tensor = 0;
  const ReadPart* part = nullptr;
};

/// The read of one chunk, in whole or in part.
struct ChunkRead {
  Slice slice;
  std::vector<Segment> segments;  ///< sorted by in_chunk
};

class Read {
 public:
  Read(std::span<const ReadPart> parts, const ReadOptions& options) : options_(options) {
    std::map<std::pair<const TensorSource*, std::string>, std::vector<const ReadPart*>> by_tensor;
    for (const ReadPart& part : parts) by_tensor[{part.source, part.name}].push_back(&part);
    for (auto& [key, list] : by_tensor) {
      PumpTensor& tensor = tensors_.emplace_back(*key.first, key.second);
      std::ranges::sort(list, {}, &ReadPart::begin);
      for (std::size_t i = 0; i < list.size(); ++i) {
        check(tensor, *list[i]);
        require(i == 0 || list[i - 1]->end <= list[i]->begin,
                "elements {} to {} and {} to {} of tensor {} overlap; read them once",
                list[i == 0 ? 0 : i - 1]->begin, list[i == 0 ? 0 : i - 1]->end, list[i]->begin,
                list[i]->end, key.second);
      }
      add_reads(tensor, list);
    }
  }

  ReadReport run() {
    const auto start = std::chrono::steady_clock::now();
    std::vector<Slice> slices;
    for (const ChunkRead& chunk_read : reads_) slices.push_back(chunk_read.slice);
    const std::vector<std::vector<SlicePiece>> batches = cut_batches(slices, kBatch);
    PumpOptions pump_options{.threads = options_.threads, .direct_io = options_.direct_io};
    pump_options.block = std::clamp(report_.read_bytes, std::int64_t{64} << 10, pump_options.block);
    Pump pump(pump_options);
    pump.run(batches.size(), [&](std::size_t b, Pump::Lane& lane) {
      std::vector<char> converted;
      lane.read(batches[b], [&](const SlicePiece& piece, const Slice& part, const char* data) {
        hand_over(reads_[piece.of], part, data, converted);
      });
    });
    if (options_.set_verified) {
      for (const ChunkRead& chunk_read : reads_) {
        if (chunk_read.slice.place().checksum == Checksum::None) continue;
        options_.set_verified(chunk_read.slice.tensor->name, chunk_read.slice.chunk);
      }
    }
    report_.seconds = seconds_since(start);
    return report_;
  }

 private:
  static void check(const PumpTensor& tensor, const ReadPart& part) {
    const TensorRecord& record = *tensor.record;
    require(part.begin >= 0 && part.begin <= part.end && part.end <= numel(record.shape),
            "elements {} to {} are outside tensor {} of shape {}", part.begin, part.end, part.name,
            record.shape);
    require(part.begin == part.end || part.data != nullptr || part.sink,
            "part of {}: neither memory nor a sink", part.name);
    require<Unsupported>(can_convert(record.dtype, part.dtype),
                         "tensor {} is stored as {}, which does not convert to {}", part.name,
                         record.dtype, part.dtype);
  }

  void add_reads(PumpTensor& tensor, const std::vector<const ReadPart*>& parts) {
    const TensorRecord& record = *tensor.record;
    for (std::size_t c = 0; c < record.chunks.size(); ++c) {
      const Chunk& chunk = record.chunks[c];
      std::vector<Segment> segments;
      const auto end_of = [](const ReadPart* part) { return part->end; };
      auto next = std::ranges::upper_bound(parts, first_of(chunk, record.shape), {}, end_of);
      for (; next != parts.end(); ++next) {
        const ReadPart* const part = *next;
        if (!touches(chunk, record.shape, part->begin, part->end)) {
          if (part->begin == part->end) continue;
          break;  // parts are sorted and this one ends behind the chunk's first element
        }
        Chunk piece = chunk;
        piece.begin = std::max(chunk.begin, elements_before(chunk, record.shape, part->begin));
        piece.end = std::min(chunk.end, elements_before(chunk, record.shape, part->end));
        for_each_run(piece, record.shape, part->begin, part->end, [&](const ChunkRun& run) {
          segments.push_back({run.in_chunk, run.n, run.in_tensor, part});
          report_.wanted_bytes += run.n * record.width();
        });
      }
      if (segments.empty()) continue;
      std::ranges::sort(segments, {}, &Segment::in_chunk);
      const bool verified = options_.is_verified && options_.is_verified(tensor.name, c);
      // A partial read cannot be verified, because the checksum covers the whole chunk.
      if (verified) tensor.skip_sum(c);
      if (!verified && !chunk.storage && chunk.checksum != Checksum::None) {
        add_read({&tensor, c, chunk.begin, chunk.end}, std::move(segments));
        continue;
      }
      const std::int64_t gap = kBridgedBytes / record.width();
      for (std::size_t i = 0, n; i < segments.size(); i += n) {
        std::int64_t to = segments[i].in_chunk + segments[i].n;
        for (n = 1; i + n < segments.size() && segments[i + n].in_chunk - to <= gap; ++n)
          to = segments[i + n].in_chunk + segments[i + n].n;
        const auto first = segments.begin() + static_cast<std::ptrdiff_t>(i);
        add_read({&tensor, c, first->in_chunk, to},
                 {first, first + static_cast<std::ptrdiff_t>(n)});
      }
    }
  }

  void add_read(const Slice& slice, std::vector<Segment> segments) {
    report_.read_bytes += slice.bytes();
    reads_.push_back({slice, std::move(segments)});
  }

  // Position in the tensor before which the chunk has no elements.
  static std::int64_t first_of(const Chunk& chunk, const Shape& shape) {
    return chunk.box ? first_element(*chunk.box, shape) : chunk.begin;
  }

  static void hand_over(const ChunkRead& chunk_read, const Slice& slice, const char* data,
                        std::vector<char>& converted) {
    const TensorRecord& record = *slice.tensor->record;
    const std::int64_t width = slice.tensor->record->width();
    auto segment =
        std::upper_bound(chunk_read.segments.begin(), chunk_read.segments.end(), slice.from,
                         [](std::int64_t at, const Segment& s) { return at < s.in_chunk + s.n; });
    for (; segment != chunk_read.segments.end() && segment->in_chunk < slice.to; ++segment) {
      const ReadPart& part = *segment->part;
      const std::int64_t from = std::max(segment->in_chunk, slice.from);
      const std::int64_t n = std::min(segment->in_chunk + segment->n, slice.to) - from;
      const std::int64_t element = segment->in_tensor + from - segment->in_chunk;
      const char* const values = data + (from - slice.from) * width;
      const auto part_width = static_cast<std::int64_t>(dtype_size(part.dtype));
      if (part.data) {
        convert_stored(record, element, values, part.dtype,
                       static_cast<char*>(part.data) + (element - part.begin) * part_width, n);
      } else if (part.dtype == record.dtype && !record.addend) {
        part.sink(element, values, n);
      } else {
        converted.resize(static_cast<std::size_t>(n * part_width));
        convert_stored(record, element, values, part.dtype, converted.data(), n);
        part.sink(element, converted.data(), n);
      }
    }
  }

  const ReadOptions& options_;
  std::deque<PumpTensor> tensors_;
  std::vector<ChunkRead> reads_;
  ReadReport report_;
};

}  // namespace

ReadReport read_parts(std::span<const ReadPart> parts, const ReadOptions& options) {
  return Read(parts, options).run();
}

void TensorSource::read(const std::string& name, std::int64_t begin, std::int64_t end, void* out,
                        DType dtype) const {
  const ReadPart part{this, name, begin, end, dtype, out};
  ReadOptions options;
  options.direct_io = false;
  read_verified(std::span(&part, 1), options);
}

void TensorSource::read_verified(std::span<const ReadPart> parts, ReadOptions& options,
                                 const std::function<bool(std::size_t chunk)>& verifies) const {
  options.is_verified = [&](const std::string& tensor, std::size_t chunk) {
    if (verifies && !verifies(chunk)) return true;
    const std::lock_guard lock(verified_mutex_);
    return verified_.contains({tensor, chunk});
  };
  options.set_verified = [&](const std::string& tensor, std::size_t chunk) {
    if (verifies && !verifies(chunk)) return;
    const std::lock_guard lock(verified_mutex_);
    verified_.emplace(tensor, chunk);
  };
  read_parts(parts, options);
}

void TensorSource::read_box(const std::string& name, const Box& box, void* out, DType dtype,
                            const BoxOptions& how) const {
  const auto record = this->record(name);
  const Shape& shape = record->shape;
  require(is_inside(box, shape), "the box at {} of shape {} is outside tensor {} of shape {}",
          box.offsets, box.shape, name, shape);
  // A chunk whose checksum covers no more than wanted elements.
  const auto is_wanted = [&](std::size_t number) {
    const Chunk& chunk = record->chunks[number];
    const ChunkStorage* const storage = chunk.storage.get();
    if (storage &&
        storage->checked_end - storage->checked_begin > chunk.byte_end - chunk.byte_begin)
      return false;
    if (!chunk.box) {
      const std::int64_t first = first_element(box, shape);
      return is_one_run(box, shape) && first <= chunk.begin &&
             chunk.end <= first + numel(box.shape);
    }
    for (int i = 0; i < shape.size(); ++i) {
      const std::int64_t begin = chunk.box->offsets[i], end = begin + chunk.box->shape[i];
      if (begin < box.offsets[i] || end > box.offsets[i] + box.shape[i]) return false;
    }
    return true;
  };
  ReadOptions options;
  options.direct_io = false;
  options.threads = how.threads;
  const auto read = [&](std::span<const ReadPart> parts) {
    if (how.verify_partial)
      read_verified(parts, options);
    else
      read_verified(parts, options, is_wanted);
  };
  // The box is a chunk of its own: its runs are the parts to read.
  Chunk wanted;
  wanted.box = box;
  wanted.end = numel(box.shape);
  const auto width = static_cast<std::int64_t>(dtype_size(dtype));
  std::vector<ReadPart> parts;
  for_each_run(wanted, shape, 0, numel(shape), [&](const ChunkRun& run) {
    parts.push_back({this, name, run.in_tensor, run.in_tensor + run.n, dtype,
                     static_cast<char*>(out) + run.in_chunk * width});
    if (std::ssize(parts) < kRowsAtOnce) return;
    read(parts);
    parts.clear();
  });
  // Also an empty box: its dtypes must convert.
  if (parts.empty()) parts.push_back({this, name, 0, 0, dtype, out});
  read(parts);
}

}  // namespace tessera::io
