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
      for (const ReadPart* part : parts) {
        if (!touches(chunk, record.shape, part->begin, part->end)) continue;
        for_each_run(chunk, record.shape, part->begin, part->end, [&](const ChunkRun& run) {
          segments.push_back({run.in_chunk, run.n, run.in_tensor, part});
          report_.wanted_bytes += run.n * record.width();
        });
      }
      if (segments.empty()) continue;
      std::ranges::sort(segments, {}, &Segment::in_chunk);
      Slice slice{&tensor, c, chunk.begin, chunk.end};
      const bool verified = options_.is_verified && options_.is_verified(tensor.name, c);
      if (verified || chunk.storage || chunk.checksum == Checksum::None) {
        slice.from = segments.front().in_chunk;
        slice.to = segments.back().in_chunk + segments.back().n;
      }
      // A partial read cannot be verified, because the checksum covers the whole chunk.
      if (verified) tensor.skip_sum(c);
      report_.read_bytes += slice.bytes();
      reads_.push_back({slice, std::move(segments)});
    }
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
  options.is_verified = [&](const std::string& tensor, std::size_t chunk) {
    const std::lock_guard lock(verified_mutex_);
    return verified_.contains({tensor, chunk});
  };
  options.set_verified = [&](const std::string& tensor, std::size_t chunk) {
    const std::lock_guard lock(verified_mutex_);
    verified_.emplace(tensor, chunk);
  };
  read_parts(std::span(&part, 1), options);
}

}  // namespace tessera::io
