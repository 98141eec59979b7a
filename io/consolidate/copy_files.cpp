#include "io/consolidate/copy_files.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>

#include "core/base/error.h"
#include "io/base/convert.h"
#include "io/base/crc64.h"
#include "io/base/direct_file.h"
#include "io/base/parallel.h"
#include "io/checkpoint/box.h"
#include "io/consolidate/source_files.h"
#include "io/zip/crc32.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kMaxBlock = std::int64_t{4} << 20;
constexpr std::int64_t kMinBlock = std::int64_t{64} << 10;
constexpr std::size_t kLeastSystemCopy = std::size_t{64} << 10;  // bytes; less is not worth a call

/// What is known of a tensor while it is copied.
struct TensorProgress {
  std::optional<TensorLayout> layout;
  struct Range {
    std::int64_t begin = 0, bytes = 0;
    std::uint64_t crc = 0;
  };
  struct ChunkState {
    std::int64_t left = 0;  ///< elements that are not read yet
    std::vector<Range> ranges;
  };
  std::vector<ChunkState> chunks;  ///< if they have checksums; guarded by Copier::mutex_
  std::int64_t left = 0;           ///< elements that are not written yet; guarded by it too
};

/// A tensor of an output file.
struct TensorState {
  const ExportTensor* tensor = nullptr;
  std::int64_t begin = 0;  ///< byte of the output file
  /// From its first block to its last: a layout takes more memory than all else. Guarded by
  /// Copier::mutex_.
  std::shared_ptr<TensorProgress> progress;
};

/// What a block has of a tensor: elements [first, last).
struct Part {
  TensorState* state;
  std::shared_ptr<TensorProgress> progress;
  std::int64_t first, last;
};

/// Elements of a chunk, as it counts them.
struct Slice {
  std::size_t chunk;
  std::int64_t from, to;
};

struct FileState {
  const ExportFile* file = nullptr;
  std::vector<TensorState> tensors;  ///< those with elements, in order of bytes
  std::int64_t blocks_left = 0;
  std::shared_ptr<DirectFile> out;  ///< from its first block to its last
};

struct Task {
  std::size_t file;
  std::int64_t block;
  const BlockRecord* found;  ///< what an earlier process recorded; null: nothing
};

/// Bytes of an output file.
struct FileRange {
  std::int64_t begin, end;
};

struct Buffers {
  AlignedBuffer block, scratch;
  explicit Buffers(std::int64_t bytes)
      : block(static_cast<std::size_t>(bytes)),
        scratch(static_cast<std::size_t>(bytes) + 2 * kDirectAlignment) {}
};

/// A block that is being made.
struct Making {
  DirectFile& out;
  std::int64_t begin;  ///< byte of the output file
  Buffers& buffers;
  std::vector<FileRange> copied{};  ///< by the system: written already, in order
};

/// Thrown out of the threads when the caller says so.
struct Stopped {};

class Copier {
 public:
  Copier(Attempt& attempt, const std::vector<ExportFile>& files, const CopyOptions& options,
         const std::function<bool(std::int64_t, bool)>& wrote)
      : attempt_(attempt),
        options_(options),
        grain_(copy_grain(options)),
        wrote_(wrote),
        sources_(options.direct_io),
        by_system_(options.by != CopyBy::Program) {
    for (const ExportFile& file : files) add(file);
    std::map<std::pair<std::size_t, std::int64_t>, const BlockRecord*> found;
    for (const BlockRecord& record : attempt.found()) found[{record.file, record.block}] = &record;
    for (std::size_t f = 0; f < files_.size(); ++f) {
      for (std::int64_t b = 0; b < files_[f].blocks_left; ++b) {
        const auto known = found.find({f, b});
        tasks_.push_back({f, b, known == found.end() ? nullptr : known->second});
      }
    }
  }

  CopyResult run() {
    remove_strangers();
    try {
      parallel_for_each(tasks_.size(), grain_.jobs, [&](std::size_t i) { work(tasks_[i]); });
    } catch (const Stopped&) {
      flush();
      return {false, system_copied_};
    } catch (const IoError&) {
      try {
        flush();
      } catch (const IoError&) {
        // What was recorded before stays.
      }
      throw;
    }
    flush();
    if (tensors_left_ != 0) throw InternalError("{} tensors were not read whole", tensors_left_);
    return {true, system_copied_};
  }

 private:
  void add(const ExportFile& file) {
    FileState state;
    state.file = &file;
    state.blocks_left = (file.plan.file_size + grain_.block - 1) / grain_.block;
    for (std::size_t i = 0; i < file.tensors.size(); ++i) {
      const ExportTensor& tensor = *file.tensors[i];
      if (tensor.bytes() == 0) continue;
      TensorState& added = state.tensors.emplace_back();
      added.tensor = &tensor;
      added.begin = file.begins[i];
      ++tensors_left_;
    }
    files_.push_back(std::move(state));
  }

  std::int64_t block_bytes(const Task& task) const {
    const std::int64_t begin = task.block * grain_.block;
    return std::min(grain_.block, files_[task.file].file->plan.file_size - begin);
  }

  /// What of the tensors a block holds.
  std::vector<Part> take_parts(const Task& task) {
    const std::int64_t begin = task.block * grain_.block, end = begin + block_bytes(task);
    auto& tensors = files_[task.file].tensors;
    auto at = std::partition_point(tensors.begin(), tensors.end(), [&](const TensorState& state) {
      return state.begin + state.tensor->bytes() <= begin;
    });
    std::vector<Part> parts;
    for (; at != tensors.end() && at->begin < end; ++at) {
      // Tensors begin at multiples of their element's size, as blocks do: none is cut.
      const auto width = static_cast<std::int64_t>(dtype_size(at->tensor->written));
      const std::int64_t last = std::min(end, at->begin + at->tensor->bytes());
      parts.push_back({&*at, take_progress(*at), (std::max(begin, at->begin) - at->begin) / width,
                       (last - at->begin) / width});
    }
    return parts;
  }

  std::shared_ptr<TensorProgress> take_progress(TensorState& state) {
    const std::lock_guard lock(mutex_);
    if (state.progress) return state.progress;
    auto progress = std::make_shared<TensorProgress>();
    progress->layout = state.tensor->source->layout(state.tensor->source_name);
    progress->left = numel(state.tensor->shape);
    if (progress->layout && progress->layout->has_checksums) {
      for (const Chunk& chunk : progress->layout->chunks) {
        progress->chunks.push_back({chunk.end - chunk.begin, {}});
      }
    }
    return state.progress = std::move(progress);
  }

  /// Calls f(chunk's number, first, last + 1) for what of the chunks, counted inside their boxes,
  /// the part is.
  template <typename F>
  static void for_each_range(const Part& part, F&& f) {
    const TensorLayout& layout = *part.progress->layout;
    for (std::size_t c = 0; c < layout.chunks.size(); ++c) {
      const Chunk& chunk = layout.chunks[c];
      const Shape& shape = part.state->tensor->shape;
      if (!touches(chunk, shape, part.first, part.last)) continue;
      const std::int64_t first = std::max(chunk.begin, elements_before(chunk, shape, part.first));
      const std::int64_t last = std::min(chunk.end, elements_before(chunk, shape, part.last));
      if (first < last) f(c, first, last);
    }
  }

  /// Calls f(part, chunk's number, first, last + 1) for those that have checksums.
  template <typename F>
  static void for_each_checked_range(const std::vector<Part>& parts, F&& f) {
    for (const Part& part : parts) {
      if (part.progress->chunks.empty()) continue;
      for_each_range(
          part, [&](std::size_t c, std::int64_t from, std::int64_t to) { f(part, c, from, to); });
    }
  }

  void work(const Task& task) {
    std::unique_ptr<Buffers> buffers = take_buffers();
    FileState& file = files_[task.file];
    const std::shared_ptr<DirectFile> out = open_output(file);
    const std::int64_t begin = task.block * grain_.block, bytes = block_bytes(task);
    const std::vector<Part> parts = take_parts(task);
    const bool reused = task.found && is_as_recorded(task, parts, *out, *buffers);
    BlockRecord record{task.file, task.block, 0, {}};
    if (reused) {
      record = *task.found;
    } else {
      Making making{*out, begin, *buffers};
      fill(task, parts, making, record.sources);
      record.crc64 = crc64(buffers->block.data(), static_cast<std::size_t>(bytes));
      write(making, bytes);
    }
    check_chunks(parts, record.sources);
    give_buffers(std::move(buffers));
    finish(task, std::move(record), reused, out);
  }

  bool is_as_recorded(const Task& task, const std::vector<Part>& parts, const DirectFile& out,
                      const Buffers& buffers) {
    std::size_t ranges = 0;
    for_each_checked_range(parts,
                           [&](const Part&, std::size_t, std::int64_t, std::int64_t) { ++ranges; });
    if (task.found->sources.size() != ranges) return false;
    const auto bytes = static_cast<std::size_t>(block_bytes(task));
    const char* data =
        out.read(task.block * grain_.block, bytes, buffers.scratch, buffers.block.data());
    return crc64(data, bytes) == task.found->crc64;
  }

  /// Writes of a block what the system did not copy.
  static void write(const Making& making, std::int64_t bytes) {
    const char* const block = making.buffers.block.data();
    if (making.copied.empty())
      return making.out.write(making.begin, block, static_cast<std::size_t>(bytes));
    std::int64_t at = making.begin;
    const auto write_to = [&](std::int64_t end) {
      if (at < end)
        making.out.write_buffered(at, block + (at - making.begin),
                                  static_cast<std::size_t>(end - at));
    };
    for (const FileRange& range : making.copied) {
      write_to(range.begin);
      at = range.end;
    }
    write_to(making.begin + bytes);
  }

  /// Makes a block of an output file. @param crcs  receives the checksum of each range of a chunk
  void fill(const Task& task, const std::vector<Part>& parts, Making& making,
            std::vector<std::uint64_t>& crcs) {
    const std::int64_t begin = making.begin;
    const std::string& preamble = files_[task.file].file->plan.preamble;
    char* const block = making.buffers.block.data();
    if (begin < static_cast<std::int64_t>(preamble.size())) {
      preamble.copy(block, static_cast<std::size_t>(grain_.block), static_cast<std::size_t>(begin));
    }
    for (const Part& part : parts) {
      const ExportTensor& tensor = *part.state->tensor;
      const auto width = static_cast<std::int64_t>(dtype_size(tensor.written));
      char* const place = block + (part.state->begin + part.first * width - begin);
      if (!part.progress->layout) {
        tensor.source->read(tensor.source_name, part.first, part.last, place, tensor.written);
        continue;
      }
      std::int64_t gathered = 0;
      std::vector<Slice> slices;
      for_each_range(part, [&](std::size_t c, std::int64_t from, std::int64_t to) {
        slices.push_back({c, from, to});
        gathered += to - from;
      });
      const std::span<const Slice> all = slices;
      for (std::size_t i = 0, n; i < all.size(); i += n) {
        n = 1;
        while (i + n < all.size() && joins(part, all[i + n - 1], all[i + n])) ++n;
        gather(part, all.subspan(i, n), place, making, crcs);
      }
      if (gathered != part.last - part.first) {
        throw InternalError("{}: the chunks of {} do not cover it", tensor.source->path().string(),
                            tensor.source_name);
      }
    }
  }

  /// Whether slices of two chunks are neighbours in their file as well as in the tensor.
  static bool joins(const Part& part, const Slice& before, const Slice& slice) {
    const std::vector<Chunk>& chunks = part.progress->layout->chunks;
    const Chunk &a = chunks[before.chunk], &b = chunks[slice.chunk];
    const auto width = static_cast<std::int64_t>(dtype_size(part.state->tensor->stored));
    return !a.box && !b.box && before.to == slice.from && a.file == b.file &&
           a.byte_begin + (before.to - a.begin) * width ==
               b.byte_begin + (slice.from - b.begin) * width;
  }

  /// Reads neighbours to their places. @param place  of the part's first element
  /// @param crcs  receives the checksum of each
  void gather(const Part& part, std::span<const Slice> slices, char* place, Making& making,
              std::vector<std::uint64_t>& crcs) {
    const TensorLayout& layout = *part.progress->layout;
    const Chunk& chunk = layout.chunks[slices.front().chunk];
    const ExportTensor& tensor = *part.state->tensor;
    std::int64_t from = slices.front().from;
    const std::int64_t to = slices.back().to;
    const auto source_width = static_cast<std::int64_t>(dtype_size(tensor.stored));
    const auto width = static_cast<std::int64_t>(dtype_size(tensor.written));
    const auto file = sources_.get(*tensor.source, chunk.file);
    const bool plain = !chunk.box && tensor.stored == tensor.written;
    const std::int64_t per_piece = grain_.block / source_width;
    std::vector<std::uint64_t> sums(slices.size());
    for (Chunk piece = chunk; from < to; from = piece.end) {
      piece.begin = from;
      piece.end = std::min(to, from + per_piece);
      const auto bytes = static_cast<std::size_t>((piece.end - from) * source_width);
      char* const target = plain ? place + (from - part.first) * width : nullptr;
      const std::int64_t at = chunk.byte_begin + (from - chunk.begin) * source_width;
      const AlignedBuffer& scratch = making.buffers.scratch;
      const char* const data =
          target != nullptr && layout.has_checksums && copy(*file, at, making, target, bytes)
              ? making.out.read(byte_of(making, target), bytes, scratch, target)
              : file->read(at, bytes, scratch, target);
      for (std::size_t i = 0; layout.has_checksums && i < slices.size(); ++i) {
        const std::int64_t low = std::max(slices[i].from, from);
        const std::int64_t high = std::min(slices[i].to, piece.end);
        if (low >= high) continue;
        sums[i] = checksum(layout, data + (low - from) * source_width,
                           static_cast<std::size_t>((high - low) * source_width), sums[i]);
      }
      if (data == target) continue;
      for_each_run(piece, tensor.shape, part.first, part.last, [&](const ChunkRun& run) {
        convert_elements(tensor.stored, data + (run.in_chunk - from) * source_width, tensor.written,
                         place + (run.in_tensor - part.first) * width, run.n);
      });
    }
    if (layout.has_checksums) crcs.insert(crcs.end(), sums.begin(), sums.end());
  }

  /// Byte of the output file for a place in the block.
  static std::int64_t byte_of(const Making& making, const char* place) {
    return making.begin + (place - making.buffers.block.data());
  }

  /// Lets the system copy what belongs at `place`. @return false: the program has to
  bool copy(const DirectFile& source, std::int64_t from, Making& making, const char* place,
            std::size_t bytes) {
    if (bytes < kLeastSystemCopy || !by_system_.load(std::memory_order_relaxed)) return false;
    const std::int64_t to = byte_of(making, place);
    if (!making.out.copy_from(source.file(), from, to, bytes)) {
      by_system_.store(false, std::memory_order_relaxed);
      return false;
    }
    making.copied.push_back({to, to + static_cast<std::int64_t>(bytes)});
    system_copied_ += static_cast<std::int64_t>(bytes);
    // Not the server did it, then, and going past the page cache is faster.
    if (options_.by == CopyBy::Auto && making.out.is_cached(to, bytes))
      by_system_.store(false, std::memory_order_relaxed);
    return true;
  }

  /// Books the checksums of a block's ranges, and checks each chunk that is complete with them.
  void check_chunks(const std::vector<Part>& parts, const std::vector<std::uint64_t>& crcs) {
    const std::lock_guard lock(mutex_);
    std::size_t next = 0;
    for_each_checked_range(
        parts, [&](const Part& part, std::size_t c, std::int64_t from, std::int64_t to) {
          const auto width = static_cast<std::int64_t>(dtype_size(part.state->tensor->stored));
          TensorProgress::ChunkState& known = part.progress->chunks[c];
          known.ranges.push_back({from, (to - from) * width, crcs[next++]});
          known.left -= to - from;
          if (known.left == 0) check_chunk(part, c);
        });
    for (const Part& part : parts) {
      part.progress->left -= part.last - part.first;
      if (part.progress->left > 0) continue;
      for (const TensorProgress::ChunkState& chunk : part.progress->chunks) {
        if (chunk.left != 0) {
          throw InternalError("{} was not read whole", part.state->tensor->name);
        }
      }
      part.state->progress = nullptr;
      --tensors_left_;
    }
  }

  static std::uint64_t checksum(const TensorLayout& layout, const char* data, std::size_t bytes,
                                std::uint64_t crc) {
    return layout.is_crc32 ? crc32(data, bytes, static_cast<std::uint32_t>(crc))
                           : crc64(data, bytes, crc);
  }
  static std::uint64_t combine(const TensorLayout& layout, std::uint64_t a, std::uint64_t b,
                               std::int64_t bytes_b) {
    const auto n = static_cast<std::uint64_t>(bytes_b);
    return layout.is_crc32
               ? crc32_combine(static_cast<std::uint32_t>(a), static_cast<std::uint32_t>(b), n)
               : crc64_combine(a, b, n);
  }

  void check_chunk(const Part& part, std::size_t c) const {
    const ExportTensor& tensor = *part.state->tensor;
    const TensorLayout& layout = *part.progress->layout;
    const Chunk& chunk = layout.chunks[c];
    TensorProgress::ChunkState& known = part.progress->chunks[c];
    std::sort(known.ranges.begin(), known.ranges.end(),
              [](const auto& a, const auto& b) { return a.begin < b.begin; });
    std::uint64_t crc = 0;
    for (const TensorProgress::Range& range : known.ranges) {
      crc = combine(layout, crc, range.crc, static_cast<std::uint64_t>(range.bytes));
    }
    known.ranges = {};
    require<CorruptCheckpoint>(
        crc == chunk.crc64,
        "{}: tensor {}, elements {} to {} (bytes {} to {}): the checksum is wrong, the data was "
        "damaged after it was saved{}",
        (tensor.source->path() / chunk.file).string(), tensor.source_name, chunk.begin, chunk.end,
        chunk.byte_begin, chunk.byte_end,
        options_.by != CopyBy::Program
            ? ", or when the system copied it (--copy program does without that)"
            : "");
  }

  void finish(const Task& task, BlockRecord record, bool reused,
              const std::shared_ptr<DirectFile>& out) {
    FileState& file = files_[task.file];
    bool full = false, complete = false;
    {
      const std::lock_guard lock(mutex_);
      if (!reused) {
        unrecorded_bytes_ += block_bytes(task);
        unrecorded_.push_back({std::move(record), out});
      }
      complete = --file.blocks_left == 0;
      full = unrecorded_bytes_ >= options_.bytes_per_record;
    }
    if (complete) {
      {
        const std::lock_guard flushing(flush_mutex_);
        sync(*out);
      }
      const std::lock_guard lock(mutex_);
      file.out = nullptr;
      for (Unrecorded& written : unrecorded_) {
        if (written.record.file == task.file) written.out = nullptr;
      }
    }
    if (full) flush();
    const std::lock_guard lock(mutex_);
    if (!stopped_ && wrote_ && !wrote_(block_bytes(task), reused)) stopped_ = true;
    if (stopped_) throw Stopped{};
  }

  /// Syncs what was written and then records it.
  void flush() {
    const std::lock_guard flushing(flush_mutex_);
    std::vector<Unrecorded> batch;
    {
      const std::lock_guard lock(mutex_);
      batch.swap(unrecorded_);
      unrecorded_bytes_ = 0;
    }
    std::set<std::shared_ptr<DirectFile>> outs;
    std::vector<BlockRecord> records;
    for (Unrecorded& written : batch) {
      if (written.out) outs.insert(std::move(written.out));
      records.push_back(std::move(written.record));
    }
    for (const auto& out : outs) sync(*out);
    // A failure is told once: another file's, or this one's when it was complete, ends recording.
    require<IoError>(!sync_failed_, "cannot sync what was written to {}", attempt_.dir().string());
    if (!records.empty()) attempt_.record(records);
  }

  /// flush_mutex_ is held.
  void sync(DirectFile& out) {
    try {
      out.sync();
    } catch (...) {
      sync_failed_ = true;
      throw;
    }
  }

  std::shared_ptr<DirectFile> open_output(FileState& state) {
    const std::lock_guard lock(mutex_);
    if (state.out) return state.out;
    const fs::path path = attempt_.dir() / state.file->name;
    const std::int64_t size = state.file->plan.file_size;
    std::error_code error;
    File file;
    if (fs::exists(fs::symlink_status(path, error))) {
      file = File::open_for_update(path);
      if (file.size() != size) {
        file = File();
        fs::remove(path, error);
      }
    }
    if (file.descriptor() < 0) file = create_sized_file(path, size);
    state.out = std::make_shared<DirectFile>(std::move(file), options_.direct_io);
    return state.out;
  }

  // A taken-up directory may hold what is written last, and would not be written this time.
  void remove_strangers() const {
    std::set<std::string> names;
    for (const FileState& file : files_) names.insert(file.file->name);
    std::vector<fs::path> strangers;
    for (const auto& item : fs::directory_iterator(attempt_.dir())) {
      if (!names.contains(item.path().filename().string())) strangers.push_back(item.path());
    }
    for (const fs::path& path : strangers) fs::remove_all(path);
  }

  std::unique_ptr<Buffers> take_buffers() {
    {
      const std::lock_guard lock(mutex_);
      if (!buffers_.empty()) {
        std::unique_ptr<Buffers> taken = std::move(buffers_.back());
        buffers_.pop_back();
        return taken;
      }
    }
    return std::make_unique<Buffers>(grain_.block);
  }
  void give_buffers(std::unique_ptr<Buffers> buffers) {
    const std::lock_guard lock(mutex_);
    buffers_.push_back(std::move(buffers));
  }

  /// A block that is written, but perhaps not synced.
  struct Unrecorded {
    BlockRecord record;
    std::shared_ptr<DirectFile> out;  ///< to be synced; null: it was
  };

  Attempt& attempt_;
  const CopyOptions& options_;
  const CopyGrain grain_;
  const std::function<bool(std::int64_t, bool)>& wrote_;
  SourceFiles sources_;
  std::atomic<bool> by_system_;  // until it cannot
  std::atomic<std::int64_t> system_copied_{0};
  std::vector<FileState> files_;
  std::vector<Task> tasks_;

  std::mutex mutex_;  // guards what follows, and of files_: progress, blocks_left, out
  std::vector<std::unique_ptr<Buffers>> buffers_;
  std::vector<Unrecorded> unrecorded_;
  std::int64_t unrecorded_bytes_ = 0;
  bool stopped_ = false;
  std::size_t tensors_left_ = 0;  // that are not written whole

  std::mutex flush_mutex_;    // held while syncing and recording; taken before mutex_
  bool sync_failed_ = false;  // guarded by flush_mutex_
};

}  // namespace

CopyGrain copy_grain(const CopyOptions& options) {
  // Each thread has a block and a buffer for what it is made from.
  const auto most =
      static_cast<int>(std::clamp<std::int64_t>(options.memory / (2 * kMinBlock), 1, 1 << 16));
  CopyGrain grain;
  grain.jobs = std::clamp(options.jobs, 1, most);
  grain.block = std::clamp(options.memory / grain.jobs / 2, kMinBlock, kMaxBlock);
  grain.block -= grain.block % kMinBlock;
  return grain;
}

CopyResult copy_files(Attempt& attempt, const std::vector<ExportFile>& files,
                      const CopyOptions& options,
                      const std::function<bool(std::int64_t bytes, bool reused)>& wrote) {
  return Copier(attempt, files, options, wrote).run();
}

}  // namespace tessera::io
