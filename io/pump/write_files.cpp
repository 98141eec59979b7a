#include "io/pump/write_files.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "core/base/error.h"
#include "core/base/thread_pool.h"
#include "io/base/crc.h"
#include "io/base/parallel.h"
#include "io/pump/arrange.h"
#include "io/pump/pump.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kMaxBlock = std::int64_t{4} << 20;
constexpr std::int64_t kMinBlock = kLeastJobMemory / 2;

/// Division of the work: number of threads, and size of a block.
struct Grain {
  int jobs;
  std::int64_t block;  ///< bytes of output per unit of work
};

/// @param buffers  of a block's size that a thread needs
Grain grain_of(const WriteOptions& options, int buffers = 2) {
  const auto most = static_cast<int>(
      std::clamp<std::int64_t>(options.memory / (buffers * kMinBlock), 1, 1 << 16));
  const int jobs = std::clamp(options.jobs, 1, most);
  const std::int64_t block = std::clamp(options.memory / jobs / buffers, kMinBlock, kMaxBlock);
  return {jobs, block - block % kMinBlock};
}

bool is_plain(const OutputPart& part) {
  return part.encoding == Encoding::Plain && part.stored == Encoding::Plain && !part.swap;
}

// One block of output and one of input and, for parts that are not plain, one to rearrange in.
int buffers_for(const std::vector<OutputFile>& files, const std::vector<std::size_t>& chosen) {
  const bool plain = std::ranges::all_of(
      chosen, [&](std::size_t file) { return std::ranges::all_of(files[file].parts, is_plain); });
  return plain ? 2 : 3;
}

bool has_infinite_f16(const char* values, std::int64_t n) {
  bool found = false;
  for (std::int64_t i = 0; i < n; ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, values + 2 * i, sizeof(bits));
    found |= (bits & 0x7fffU) == 0x7c00U;
  }
  return found;
}

/// A tensor that output parts share, because a chunk may begin in one part and end in another.
/// `tensor` is kept only from their first block to their last, because records may be large.
struct SharedTensor {
  std::size_t parts_left = 0;
  std::shared_ptr<PumpTensor> tensor{};
};

struct PartState {
  OutputPart* part = nullptr;
  std::int64_t bytes = 0;
  std::int64_t left = 0;                       // elements not yet written
  std::vector<RangeSum> unfinished{};          // runs of sum_elements without a final checksum
  std::optional<RangeSum> unfinished_crc32{};  // of the part, if the file has it
  std::uint32_t crc32 = 0;                     // once all is written
};

struct FileState {
  const OutputFile* file = nullptr;
  std::vector<PartState> parts{};  // non-empty parts
  bool has_units = false;          // of several bytes, so that blocks are not aligned
  std::int64_t blocks_left = 0;
  std::shared_ptr<DirectFile> out{};  // open until the last block is written
  std::optional<RangeSum> sum{};
};

struct Block {
  std::size_t file;
  std::int64_t begin, end;  // in bytes
};

/// Change of a file's CRC-64 if 4 of its bytes, which were zeros, become `value`.
/// @param after  number of bytes that follow them
std::uint64_t crc64_change(std::uint32_t value, std::int64_t after) {
  constexpr std::uint32_t kZero = 0;
  return crc64_combine(crc64(&value, sizeof(value)) ^ crc64(&kZero, sizeof(kZero)), 0,
                       static_cast<std::uint64_t>(after));
}

struct Stopped {};

class Writer {
 public:
  Writer(const fs::path& dir, std::vector<OutputFile>& files,
         const std::vector<std::size_t>& chosen, const WriteOptions& options)
      : dir_(dir),
        options_(options),
        grain_(grain_of(options, buffers_for(files, chosen))),
        pump_({.threads = grain_.jobs, .block = grain_.block, .direct_io = options.direct_io}),
        states_(files.size()) {
    for (const std::size_t f : chosen) {
      OutputFile& file = files[f];
      FileState& state = states_[f];
      state.file = &file;
      state.sum.emplace(Checksum::Crc64, file.size);
      for (OutputPart& part : file.parts) {
        const std::int64_t n = part.end - part.begin;
        if (n == 0) continue;
        PartState& added = state.parts.emplace_back(PartState{&part});
        added.bytes = part.bytes();
        state.has_units = state.has_units || part.encoding != Encoding::Plain;
        added.left = n;
        if (!part.crc32_at.empty()) added.unfinished_crc32.emplace(Checksum::Crc32, added.bytes);
        part.sums.clear();
        ++parts_left_;
        ++tensors_[{part.source, part.source_name}].parts_left;
      }
      for (std::int64_t begin = 0; begin < file.size; begin = blocks_.back().end) {
        blocks_.push_back({f, begin, block_end(state, begin)});
        ++state.blocks_left;
      }
    }
  }

  bool run() {
    try {
      pump_.run(blocks_.size(), [&](std::size_t i, Pump::Lane& lane) { make(blocks_[i], lane); });
    } catch (const Stopped&) {
      return false;
    }
    require<InternalError>(parts_left_ == 0, "{} parts were not written completely", parts_left_);
    return true;
  }

 private:
  /// The elements of one part that lie in one block.
  struct Share {
    PartState* state;
    std::shared_ptr<PumpTensor> tensor;
    std::vector<std::int64_t> bounds;  // elements of the tensor, split at each sum_elements
    std::vector<std::uint64_t> sums;
    std::uint32_t crc32 = 0;  // if the file has that of the part
  };

  static auto part_at(FileState& file, std::int64_t byte) {
    return std::partition_point(file.parts.begin(), file.parts.end(), [&](const PartState& state) {
      return state.part->offset + state.bytes <= byte;
    });
  }

  // End of the block from `begin` on, between two units of an encoding.
  std::int64_t block_end(FileState& file, std::int64_t begin) const {
    const std::int64_t end = std::min(begin + grain_.block, file.file->size);
    const auto at = part_at(file, end);
    if (at == file.parts.end() || at->part->offset >= end) return end;
    return end - (end - at->part->offset) % at->part->unit().bytes;
  }

  void make(const Block& block, Pump::Lane& lane) {
    char* const buffer = lane.output();
    FileState& file = states_[block.file];
    const std::shared_ptr<DirectFile> out = open(file);
    const std::string& preamble = file.file->preamble;
    char* filled = buffer;
    if (block.begin < static_cast<std::int64_t>(preamble.size())) {
      filled += preamble.copy(buffer, static_cast<std::size_t>(block.end - block.begin),
                              static_cast<std::size_t>(block.begin));
    }
    std::vector<Share> shares = shares_of(file, block);
    for (Share& share : shares) {
      const OutputPart& part = *share.state->part;
      const EncodingUnit unit = part.unit();
      char* const place = buffer + (part.offset - block.begin) +
                          (share.bounds.front() - part.begin) / unit.elements * unit.bytes;
      std::fill(filled, place, '\0');
      const std::int64_t size =
          (share.bounds.back() - share.bounds.front()) / unit.elements * unit.bytes;
      filled = place + size;
      if (is_plain(part)) {
        lane.gather(*share.tensor, share.bounds, part.dtype, place,
                    part.sum_elements > 0 ? &share.sums : nullptr);
      } else {
        rearrange(share, lane, place);
      }
      require(part.dtype != DType::F16 || share.tensor->record->dtype == DType::F16 ||
                  !has_infinite_f16(place, share.bounds.back() - share.bounds.front()),
              "{}: tensor {} has values beyond 65504, the largest of f16; write it as bf16 or f32 "
              "(--dtype)",
              part.source->path().string(), part.source->title(part.source_name));
      if (!part.crc32_at.empty()) share.crc32 = crc32(place, static_cast<std::size_t>(size));
    }
    std::fill(filled, buffer + (block.end - block.begin), '\0');
    put_literals(*file.file, block, buffer);
    const auto bytes = static_cast<std::size_t>(block.end - block.begin);
    const std::uint64_t crc = crc64(buffer, bytes);
    out->write(block.begin, buffer, bytes);
    finish(block, shares, crc);
  }

  static void put_literals(const OutputFile& file, const Block& block, char* buffer) {
    auto at = std::ranges::partition_point(file.literals, [&](const Literal& literal) {
      return literal.offset + std::ssize(literal.bytes) <= block.begin;
    });
    for (; at != file.literals.end() && at->offset < block.end; ++at) {
      const std::int64_t begin = std::max(block.begin, at->offset);
      const std::int64_t end = std::min(block.end, at->offset + std::ssize(at->bytes));
      at->bytes.copy(buffer + (begin - block.begin), static_cast<std::size_t>(end - begin),
                     static_cast<std::size_t>(begin - at->offset));
    }
  }

  // Reads a part's elements in pieces that fit into a block, and swaps and encodes them.
  void rearrange(const Share& share, Pump::Lane& lane, char* place) {
    const OutputPart& part = *share.state->part;
    const EncodingUnit unit = part.unit();
    const bool encodes = part.encoding != Encoding::Plain;
    const std::int64_t most =
        encodes ? grain_.block / 2 / part.width() : share.bounds.back() - share.bounds.front();
    std::vector<char> staged(static_cast<std::size_t>(encodes ? most * part.width() : 0));
    for (std::int64_t first = share.bounds.front(), last; first < share.bounds.back();
         first = last) {
      last = std::min(first + most, share.bounds.back());
      char* const out = encodes ? staged.data() : place;
      gather_arranged(lane, *share.tensor, part.swap, part.stored, first, last, part.dtype, out,
                      grain_.block);
      if (!encodes) return;
      require(
          encode_q8_0(reinterpret_cast<const float*>(staged.data()), last - first, place),
          "{}: tensor {} has values that are not finite, or too large for scales of q8_0; write "
          "it as bf16 or f32 (--dtype)",
          part.source->path().string(), part.source->title(part.source_name));
      place += (last - first) / unit.elements * unit.bytes;
    }
  }

  std::vector<Share> shares_of(FileState& file, const Block& block) {
    auto at = part_at(file, block.begin);
    std::vector<Share> shares;
    for (; at != file.parts.end() && at->part->offset < block.end; ++at) {
      // No unit is split: see block_end().
      const OutputPart& part = *at->part;
      const auto element = [&](std::int64_t byte) {
        return part.begin + (byte - part.offset) / part.unit().bytes * part.unit().elements;
      };
      const std::int64_t first = element(std::max(block.begin, part.offset));
      const std::int64_t last = element(std::min(block.end, part.offset + at->bytes));
      Share& share = shares.emplace_back(Share{&*at, take_tensor(*at), {first}, {}});
      if (part.sum_elements > 0) {
        for (std::int64_t next =
                 first + part.sum_elements - (first - part.begin) % part.sum_elements;
             next < last; next += part.sum_elements) {
          share.bounds.push_back(next);
        }
      }
      share.bounds.push_back(last);
    }
    return shares;
  }

  std::shared_ptr<PumpTensor> take_tensor(PartState& state) {
    const std::lock_guard lock(mutex_);
    OutputPart& part = *state.part;
    auto& tensor = tensors_.at({part.source, part.source_name}).tensor;
    if (!tensor) tensor = std::make_shared<PumpTensor>(*part.source, part.source_name);
    if (part.sum_elements > 0 && part.sums.empty()) {
      for (std::int64_t at = part.begin; at < part.end; at += part.sum_elements) {
        state.unfinished.emplace_back(Checksum::Crc64,
                                      std::min(part.sum_elements, part.end - at) * part.width());
      }
      part.sums.resize(state.unfinished.size());
    }
    return tensor;
  }

  void finish(const Block& block, const std::vector<Share>& shares, std::uint64_t crc) {
    FileState& file = states_[block.file];
    std::shared_ptr<DirectFile> complete;
    std::optional<std::uint64_t> sum;
    {
      const std::lock_guard lock(mutex_);
      for (const Share& share : shares) book(share);
      sum = file.sum->add(block.begin, block.end - block.begin, crc);
      if (--file.blocks_left == 0) complete = std::move(file.out);
    }
    if (complete) {
      *sum ^= put_checksums(file, *complete);
      complete->sync();
      const std::lock_guard lock(finish_mutex_);
      if (options_.finished) options_.finished(block.file, *sum);
    }
    const std::lock_guard lock(finish_mutex_);
    if (!stopped_ && options_.wrote) stopped_ = !options_.wrote(block.end - block.begin);
    if (stopped_) throw Stopped{};
  }

  // Writes the CRC-32 of each part of a file. @return the change of the file's CRC-64
  static std::uint64_t put_checksums(const FileState& state, DirectFile& out) {
    std::uint64_t change = 0;
    for (const PartState& part : state.parts) {
      for (const std::int64_t at : part.part->crc32_at) {
        out.patch(at, &part.crc32, sizeof(part.crc32));
        change ^=
            crc64_change(part.crc32, state.file->size - at - std::int64_t{sizeof(part.crc32)});
      }
    }
    return change;
  }

  // The caller holds mutex_.
  void book(const Share& share) {
    PartState& state = *share.state;
    OutputPart& part = *state.part;
    for (std::size_t i = 0; i < share.sums.size(); ++i) {
      const auto run = static_cast<std::size_t>((share.bounds[i] - part.begin) / part.sum_elements);
      const std::int64_t bytes = (share.bounds[i + 1] - share.bounds[i]) * part.width();
      const auto sum = state.unfinished[run].add(share.bounds[i], bytes, share.sums[i]);
      if (sum) part.sums[run] = *sum;
    }
    if (state.unfinished_crc32) {
      const EncodingUnit unit = part.unit();
      const auto bytes_to = [&](std::int64_t element) {
        return (element - part.begin) / unit.elements * unit.bytes;
      };
      const std::int64_t begin = bytes_to(share.bounds.front());
      const auto sum =
          state.unfinished_crc32->add(begin, bytes_to(share.bounds.back()) - begin, share.crc32);
      if (sum) state.crc32 = static_cast<std::uint32_t>(*sum);
    }
    state.left -= share.bounds.back() - share.bounds.front();
    if (state.left > 0) return;
    --parts_left_;
    state.unfinished = {};
    state.unfinished_crc32.reset();
    const auto shared = tensors_.find({part.source, part.source_name});
    if (--shared->second.parts_left > 0) return;
    require<InternalError>(shared->second.tensor->is_complete(), "{} was not read completely",
                           part.source_name);
    tensors_.erase(shared);
  }

  std::shared_ptr<DirectFile> open(FileState& state) {
    const std::lock_guard lock(mutex_);
    if (state.out) return state.out;
    const fs::path path = dir_ / state.file->name;
    std::error_code error;
    fs::remove(path, error);
    return state.out = std::make_shared<DirectFile>(create_sized_file(path, state.file->size),
                                                    options_.direct_io && !state.has_units);
  }

  const fs::path& dir_;
  const WriteOptions& options_;
  const Grain grain_;
  Pump pump_;
  std::vector<Block> blocks_;

  std::mutex mutex_;  // guards the next three members
  std::vector<FileState> states_;
  std::map<std::pair<const TensorSource*, std::string>, SharedTensor> tensors_;
  std::size_t parts_left_ = 0;

  std::mutex finish_mutex_;  // serializes the caller's callbacks
  bool stopped_ = false;     // guarded by finish_mutex_
};

}  // namespace

bool write_files(const fs::path& dir, std::vector<OutputFile>& files,
                 const std::vector<std::size_t>& chosen, const WriteOptions& options) {
  return Writer(dir, files, chosen, options).run();
}

std::uint64_t sum_file(const fs::path& path, const WriteOptions& options) {
  const Grain grain = grain_of(options);
  const DirectFile file(File::open(path, Links::Refuse), options.direct_io);
  const std::int64_t size = file.file().size();
  RangeSum unfinished(Checksum::Crc64, size);
  std::uint64_t result = 0;
  std::mutex mutex;  // guards `unfinished` and `result`
  parallel_for_each(static_cast<std::size_t>((size + grain.block - 1) / grain.block), grain.jobs,
                    [&](std::size_t i) {
                      const std::int64_t begin = static_cast<std::int64_t>(i) * grain.block;
                      const std::int64_t n = std::min(grain.block, size - begin);
                      const auto bytes = static_cast<std::size_t>(n);
                      const AlignedBuffer buffer(bytes + 2 * kDirectAlignment);
                      const std::uint64_t crc =
                          crc64(file.read(begin, bytes, buffer, nullptr), bytes);
                      const std::lock_guard lock(mutex);
                      if (const auto sum = unfinished.add(begin, n, crc)) result = *sum;
                    });
  return result;
}

}  // namespace tessera::io
