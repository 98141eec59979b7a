#include "io/pump/pump.h"

#include <sys/resource.h>

#include <algorithm>
#include <tuple>

#include "core/base/error.h"
#include "core/base/thread_pool.h"
#include "io/base/convert.h"
#include "io/base/crc.h"
#include "io/base/parallel.h"
#include "io/base/placed.h"
#include "io/pump/box.h"
#include "io/pump/strided.h"

namespace tessera::io {
namespace {

// Bytes checksummed at once; they are still in the CPU cache when converted or copied.
constexpr std::int64_t kStep = std::int64_t{512} << 10;

// An eighth of the limit, because each file takes two descriptors, and outputs need some too.
std::size_t max_open_files() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 16;
  return std::clamp<std::size_t>(static_cast<std::size_t>(limit.rlim_cur) / 8, 1, 256);
}

ZstdRange zstd_range(const Chunk& chunk) { return chunk.zstd ? chunk.zstd->range : ZstdRange(); }

/// Bytes [begin, end) of a chunk's file, or of what its zstd range decodes to.
class ChunkBytes {
 public:
  ChunkBytes(std::shared_ptr<const DirectFile> file, const Chunk& chunk, std::int64_t begin,
             std::int64_t end)
      : file_(std::move(file)) {
    if (!chunk.zstd) return;
    lease_.emplace(*chunk.zstd->pool, std::shared_ptr<const File>(file_, &file_->file()),
                   chunk.zstd->range, begin, end);
  }
  // As DirectFile::read.
  const char* read(std::int64_t offset, std::size_t bytes, const AlignedBuffer& scratch,
                   char* preferred) {
    if (!lease_) return file_->read(offset, bytes, scratch, preferred);
    char* const out = preferred ? preferred : scratch.data();
    (*lease_)->read_at(offset, out, bytes);
    return out;
  }
  // Through the page cache.
  void read(std::int64_t offset, char* out, std::size_t bytes) {
    if (lease_)
      (*lease_)->read_at(offset, out, bytes);
    else
      file_->file().read(offset, out, bytes);
  }

 private:
  const std::shared_ptr<const DirectFile> file_;
  std::optional<ZstdPool::Lease> lease_;
};

}  // namespace

Pump::Pump(const PumpOptions& options) : options_(options), max_open_(max_open_files()) {}

void PumpTensor::add_sum(std::size_t c, std::int64_t from, std::int64_t to, std::uint64_t crc) {
  const Chunk& chunk = record->chunks[c];
  const std::int64_t width = record->width();
  std::optional<std::uint64_t> sum;
  if (from == chunk.begin && to == chunk.end) {
    sum = crc;
  } else {
    const std::lock_guard lock(mutex_);
    const auto at = sums_.try_emplace(c, chunk.checksum, (chunk.end - chunk.begin) * width).first;
    sum = at->second.add(from, (to - from) * width, crc);
    if (sum) sums_.erase(at);
  }
  if (!sum || *sum == chunk.crc64) return;
  if (!on_wrong) fail(c);
  on_wrong(c);
}

void PumpTensor::check_storage(std::size_t c, const std::shared_ptr<const DirectFile>& file,
                               const AlignedBuffer& scratch) {
  const Chunk& chunk = record->chunks[c];
  StorageCheck& check = *chunk.storage->check;
  const std::lock_guard lock(check.mutex);
  if (check.verified) return;
  const auto most = static_cast<std::int64_t>(scratch.size() - 2 * kDirectAlignment);
  const std::int64_t begin = chunk.storage->checked_begin, end = chunk.storage->checked_end;
  ChunkBytes source_bytes(file, chunk, begin, end);
  std::uint64_t crc = 0;
  for (std::int64_t at = begin; at < end;) {
    const std::int64_t n = std::min(most, end - at);
    const auto bytes = static_cast<std::size_t>(n);
    crc = checksum_of(chunk.checksum, source_bytes.read(at, bytes, scratch, nullptr), bytes, crc);
    at += n;
  }
  if (crc != chunk.crc64) fail(c);
  check.verified = true;
}

void PumpTensor::fail(std::size_t c) const {
  const Chunk& chunk = record->chunks[c];
  const std::string box =
      chunk.box ? fmt::format(" of the box at {} of shape {}", chunk.box->offsets, chunk.box->shape)
                : "";
  const std::string file = (source.path() / chunk.file).string(), title = source.title(name);
  const auto [first, last] = chunk.file_bytes();
  throw Placed(
      CorruptCheckpoint("{}: tensor {}, elements {} to {}{} (bytes {} to {}): the checksum is "
                        "wrong: the data was damaged after the save",
                        file, title, chunk.begin, chunk.end, box, first, last),
      {file, title});
}

bool are_neighbours(const Slice& slice, const Slice& next) {
  const Chunk &a = slice.place(), &b = next.place();
  return !a.storage && !b.storage && &slice.tensor->source == &next.tensor->source &&
         a.file == b.file && zstd_range(a) == zstd_range(b) &&
         slice.offset() + slice.bytes() == next.offset();
}

std::vector<Slice> slices_of(PumpTensor& tensor, std::int64_t begin, std::int64_t end) {
  const Shape& shape = tensor.record->shape;
  const std::vector<Chunk>& chunks = tensor.record->chunks;
  std::vector<Slice> slices;
  std::int64_t covered = 0;
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    const Chunk& chunk = chunks[c];
    if (!touches(chunk, shape, begin, end)) continue;
    const std::int64_t from = std::max(chunk.begin, elements_before(chunk, shape, begin));
    const std::int64_t to = std::min(chunk.end, elements_before(chunk, shape, end));
    if (from >= to) continue;
    slices.push_back({&tensor, c, from, to});
    covered += to - from;
  }
  require<InternalError>(covered == end - begin, "{}: the chunks of {} do not cover it",
                         tensor.source.path().string(), tensor.name);
  return slices;
}

std::vector<std::vector<SlicePiece>> cut_batches(std::span<const Slice> slices, std::int64_t most) {
  std::vector<SlicePiece> pieces;
  for (std::size_t i = 0; i < slices.size(); ++i) {
    const std::int64_t step = most / slices[i].tensor->record->width();
    for (Slice slice = slices[i]; slice.from < slices[i].to; slice.from = slice.to) {
      slice.to = std::min(slice.from + step, slices[i].to);
      pieces.push_back({slice, i});
    }
  }
  std::ranges::sort(pieces, {}, [](const SlicePiece& piece) {
    const Chunk& chunk = piece.slice.place();
    return std::tuple(std::string_view(chunk.file), zstd_range(chunk), piece.slice.offset());
  });
  std::vector<std::vector<SlicePiece>> batches;
  std::int64_t sum = 0;
  for (const SlicePiece& piece : pieces) {
    if (batches.empty() || !are_neighbours(batches.back().back().slice, piece.slice) ||
        sum + piece.slice.bytes() > most) {
      batches.emplace_back();
      sum = 0;
    }
    batches.back().push_back(piece);
    sum += piece.slice.bytes();
  }
  return batches;
}

void convert_stored(const TensorRecord& record, std::int64_t begin, const char* stored, DType dtype,
                    char* out, std::int64_t n) {
  if (!record.addend) {
    convert_elements(record.dtype, stored, dtype, out, n);
    return;
  }
  constexpr std::int64_t kBlock = 4096;
  const auto out_width = static_cast<std::int64_t>(dtype_size(dtype));
  std::vector<float> values(static_cast<std::size_t>(std::min(n, kBlock)));
  for (std::int64_t at = 0; at < n; at += kBlock) {
    const std::int64_t count = std::min(n - at, kBlock);
    convert_elements(record.dtype, stored + at * record.width(), DType::F32, values.data(), count);
    record.addend->add(record.addend_begin + begin + at, count, values.data());
    convert_elements(DType::F32, values.data(), dtype, out + at * out_width, count);
  }
}

Pump::Lane::Lane(Pump& pump)
    : pump_(pump), scratch_(static_cast<std::size_t>(pump.options_.block) + 2 * kDirectAlignment) {}

void Pump::Lane::read(
    std::span<const SlicePiece> pieces,
    const std::function<void(const SlicePiece&, const Slice& part, const char* data)>& sink) {
  std::vector<Slice> slices;
  for (const SlicePiece& piece : pieces) slices.push_back(piece.slice);
  std::size_t at = 0;
  const Sink find_piece = [&](const Slice& part, const char* data) {
    // pass() calls the sink in the order of the pieces.
    while (slices[at].tensor != part.tensor || slices[at].chunk != part.chunk ||
           slices[at].to <= part.from) {
      ++at;
    }
    sink(pieces[at], part, data);
  };
  std::vector<std::uint64_t> sums;
  for (std::size_t i = 0, n; i < slices.size(); i += n) {
    n = 1;
    while (i + n < slices.size() && are_neighbours(slices[i + n - 1], slices[i + n])) ++n;
    pass(std::span(slices).subspan(i, n), nullptr, &find_piece, sums);
  }
}

void Pump::Lane::gather(PumpTensor& tensor, std::span<const std::int64_t> bounds, DType dtype,
                        char* out, std::vector<std::uint64_t>* crcs) {
  const TensorRecord& record = *tensor.record;
  const std::int64_t first = bounds.front(), width = record.width(),
                     out_width = static_cast<std::int64_t>(dtype_size(dtype));
  std::vector<Slice> slices;
  std::vector<std::size_t> ends;  // ends[i]: end in `slices` of range i
  for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
    const std::vector<Slice> range = slices_of(tensor, bounds[i], bounds[i + 1]);
    slices.insert(slices.end(), range.begin(), range.end());
    ends.push_back(slices.size());
  }
  const auto is_plain = [&](const Slice& slice) {
    return record.dtype == dtype && !record.addend && !slice.place().box && !slice.place().storage;
  };
  const Sink convert = [&](const Slice& part, const char* data) {
    Chunk piece = part.place();
    piece.begin = part.from;
    piece.end = part.to;
    for_each_run(piece, record.shape, first, bounds.back(), [&](const ChunkRun& run) {
      convert_stored(record, run.in_tensor, data + (run.in_chunk - part.from) * width, dtype,
                     out + (run.in_tensor - first) * out_width, run.n);
    });
  };
  std::vector<std::uint64_t> sums;
  for (std::size_t i = 0, n; i < slices.size(); i += n) {
    n = 1;
    const bool plain = is_plain(slices[i]);
    while (i + n < slices.size() && are_neighbours(slices[i + n - 1], slices[i + n]) &&
           plain == is_plain(slices[i + n]) &&
           (!plain || slices[i + n - 1].to == slices[i + n].from)) {
      ++n;
    }
    char* const target = plain ? out + (slices[i].from - first) * out_width : nullptr;
    pass(std::span(slices).subspan(i, n), target, plain ? nullptr : &convert, sums);
  }
  if (!crcs) return;
  for (std::size_t i = 0, s = 0; i < ends.size(); s = ends[i++]) {
    std::uint64_t crc = 0;
    const bool known =
        std::all_of(slices.begin() + static_cast<std::ptrdiff_t>(s),
                    slices.begin() + static_cast<std::ptrdiff_t>(ends[i]), [&](const Slice& slice) {
                      return is_plain(slice) && slice.place().checksum == Checksum::Crc64;
                    });
    if (known) {
      for (; s < ends[i]; ++s) {
        crc = combine_checksums(Checksum::Crc64, crc, sums[s], slices[s].bytes());
      }
    } else {
      crc = crc64(out + (bounds[i] - first) * out_width,
                  static_cast<std::size_t>((bounds[i + 1] - bounds[i]) * out_width));
    }
    crcs->push_back(crc);
  }
}

char* Pump::Lane::output() {
  if (!output_) output_.emplace(static_cast<std::size_t>(pump_.options_.block));
  return output_->data();
}

void Pump::Lane::pass(std::span<const Slice> slices, char* target, const Sink* sink,
                      std::vector<std::uint64_t>& sums) {
  const Slice& head = slices.front();
  const auto file = pump_.file(head.tensor->source, head.place().file);
  const ChunkStorage* const storage = head.place().storage.get();
  if (storage && head.tensor->has_sum(head.chunk)) {
    head.tensor->check_storage(head.chunk, file, scratch_);
  }
  struct Step {
    std::size_t slice;
    std::int64_t from, to;
  };
  const std::size_t first_sum = sums.size();
  sums.resize(first_sum + slices.size());
  std::vector<Step> steps;
  std::int64_t at = head.offset(), bytes = 0;  // range in the file of `steps`
  const bool is_strided = storage && storage->strides;
  ChunkBytes source(
      file, head.place(), at,
      is_strided ? storage->checked_end : slices.back().offset() + slices.back().bytes());
  const auto flush = [&] {
    if (steps.empty()) return;
    const char* data = scratch_.data();
    if (is_strided) {
      const std::int64_t begin = head.place().begin;
      read_strided([&](std::int64_t from, char* out, std::size_t n) { source.read(from, out, n); },
                   {head.place().byte_begin, head.tensor->record->width(), storage->shape,
                    *storage->strides},
                   steps.front().from - begin, steps.back().to - begin, scratch_.data());
    } else {
      // Aligned as in the file, so that the operating system copies whole words.
      char* const destination =
          target ? target : scratch_.data() + at % static_cast<std::int64_t>(kDirectAlignment);
      data = source.read(at, static_cast<std::size_t>(bytes), scratch_, destination);
      at += bytes;
    }
    for (const Step& step : steps) {
      const Slice part{slices[step.slice].tensor, slices[step.slice].chunk, step.from, step.to};
      const auto n = static_cast<std::size_t>(part.bytes());
      const Chunk& chunk = part.place();
      std::uint64_t& sum = sums[first_sum + step.slice];
      if (!chunk.storage && part.tensor->has_sum(part.chunk)) {
        sum = checksum_of(chunk.checksum, data, n, sum);
      }
      if (sink) {
        (*sink)(part, data);
      } else if (data != target) {
        std::copy_n(data, n, target);
      }
      data += n;
      if (target) target += n;
    }
    steps.clear();
    bytes = 0;
  };
  for (std::size_t s = 0; s < slices.size(); ++s) {
    const std::int64_t width = slices[s].tensor->record->width();
    const std::int64_t step = std::min(kStep, pump_.options_.block) / width;
    for (std::int64_t from = slices[s].from, to; from < slices[s].to; from = to) {
      to = std::min(slices[s].to, from + step);
      if (bytes + (to - from) * width > pump_.options_.block) flush();
      steps.push_back({s, from, to});
      bytes += (to - from) * width;
    }
  }
  flush();
  for (std::size_t s = 0; s < slices.size(); ++s) {
    if (slices[s].place().storage || !slices[s].tensor->has_sum(slices[s].chunk)) continue;
    slices[s].tensor->add_sum(slices[s].chunk, slices[s].from, slices[s].to, sums[first_sum + s]);
  }
}

std::shared_ptr<const DirectFile> Pump::file(const TensorSource& source, const std::string& name) {
  const std::lock_guard lock(files_mutex_);
  const std::pair key(&source, name);
  const auto found = files_.find(key);
  if (found != files_.end()) return found->second;
  if (files_.size() >= max_open_) files_.clear();  // files in use stay open
  return files_[key] =
             std::make_shared<const DirectFile>(source.open_file(name), options_.direct_io);
}

void Pump::run(std::size_t n, const std::function<void(std::size_t, Lane&)>& body) {
  parallel_for_each(n, options_.threads, [&](std::size_t i) {
    std::unique_ptr<Lane> lane;
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        lane = std::move(idle_.back());
        idle_.pop_back();
      }
    }
    if (!lane) lane.reset(new Lane(*this));
    body(i, *lane);
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(lane));
  });
}

}  // namespace tessera::io
