#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "io/base/direct_file.h"
#include "io/pump/chunk_sums.h"
#include "io/pump/tensor_source.h"

namespace tessera::io {

// The pump moves ranges of tensors from a source of chunks to memory (read_parts.h), to files
// (write_files.h), or to a callback. It merges contiguous reads, checksums data in the CPU cache,
// and converts it. A chunk is verified once all of it has been read.

/// A tensor that several threads read, each element once, in any order.
class PumpTensor {
 public:
  /// @throws as TensorSource::record
  PumpTensor(const TensorSource& from, std::string tensor)
      : source(from), name(std::move(tensor)), record(from.record(name)) {}

  const TensorSource& source;
  const std::string name;
  const std::shared_ptr<const TensorRecord> record;
  /// Called for a chunk with a wrong checksum by the thread that completes it. If empty: fail().
  std::function<void(std::size_t chunk)> on_wrong{};

  /// Adds the checksum of elements [from, to) of a chunk, relative to its box.
  void add_sum(std::size_t chunk, std::int64_t from, std::int64_t to, std::uint64_t crc);
  /// Reads and verifies all bytes covered by a chunk's checksum, once. Needed for chunks with
  /// `storage`, because their checksum is not over the elements as they are read.
  void check_storage(std::size_t chunk, const std::shared_ptr<const DirectFile>& file,
                     const AlignedBuffer& scratch);
  /// Whether each chunk was read completely or not at all. Call after all reads.
  bool is_complete() const { return sums_.empty(); }
  /// Skips verification of a chunk that was verified before.
  void skip_sum(std::size_t chunk) { skipped_.insert(chunk); }
  bool has_sum(std::size_t chunk) const {
    return record->chunks[chunk].checksum != Checksum::None && !skipped_.contains(chunk);
  }
  /// @throws CorruptCheckpoint naming file, tensor, elements and bytes
  [[noreturn]] void fail(std::size_t chunk) const;

 private:
  std::mutex mutex_;
  std::unordered_map<std::size_t, RangeSum> sums_;  // of chunks read in part so far
  std::set<std::size_t> skipped_;                   // constant while threads read
};

/// Elements [from, to) of a chunk, relative to its box.
struct Slice {
  PumpTensor* tensor;
  std::size_t chunk;
  std::int64_t from, to;

  const Chunk& place() const { return tensor->record->chunks[chunk]; }
  std::int64_t bytes() const { return (to - from) * tensor->record->width(); }
  /// Position of the first byte in the file, or in what its zstd range decodes to.
  std::int64_t offset() const {
    return place().byte_begin + (from - place().begin) * tensor->record->width();
  }
};

/// Converts stored elements [begin, begin + n) of a tensor to `dtype`, after adding its addend.
/// @throws Unsupported if the dtypes do not convert
void convert_stored(const TensorRecord& record, std::int64_t begin, const char* stored, DType dtype,
                    char* out, std::int64_t n);

/// Whether `next` begins in the file where `slice` ends.
bool are_neighbours(const Slice& slice, const Slice& next);

/// Slices that make up elements [begin, end) of a tensor, in the order of its chunks.
/// @throws InternalError if chunks do not cover the range
std::vector<Slice> slices_of(PumpTensor& tensor, std::int64_t begin, std::int64_t end);

/// A part of one slice in a list of slices.
struct SlicePiece {
  Slice slice;
  std::size_t of;  ///< index of the whole slice in the list
};

/// Cuts slices into pieces of at most `most` bytes, sorts the pieces by file and offset, and groups
/// adjacent ones into batches of at most `most` bytes, so that each batch is read sequentially.
std::vector<std::vector<SlicePiece>> cut_batches(std::span<const Slice> slices, std::int64_t most);

struct PumpOptions {
  int threads = 1;
  std::int64_t block = std::int64_t{2} << 20;  ///< bytes per read; about a thread's memory
  bool direct_io = true;
};

class Pump {
 public:
  /// Reads on one thread, which owns the buffers.
  class Lane {
   public:
    /// Reads pieces in the given order.
    /// @param sink  called with each part of a piece, at most 512 KiB of unconverted elements
    /// @throws IoError, CorruptCheckpoint
    void read(
        std::span<const SlicePiece> pieces,
        const std::function<void(const SlicePiece&, const Slice& part, const char* data)>& sink);
    /// Reads elements [bounds.front(), bounds.back()) of a tensor and converts them into `out`.
    /// @param crcs  receives the CRC-64 in `out` of each range between bounds; may be null
    void gather(PumpTensor& tensor, std::span<const std::int64_t> bounds, DType dtype, char* out,
                std::vector<std::uint64_t>* crcs = nullptr);
    /// Buffer for one block of output, aligned for direct I/O. Allocated by the first call.
    char* output();

   private:
    friend class Pump;
    using Sink = std::function<void(const Slice& part, const char* data)>;
    explicit Lane(Pump& pump);
    // Reads slices contiguous in one file into `target` or to `sink`; appends checksums to `sums`.
    void pass(std::span<const Slice> slices, char* target, const Sink* sink,
              std::vector<std::uint64_t>& sums);
    Pump& pump_;
    AlignedBuffer scratch_;
    std::optional<AlignedBuffer> output_;
  };

  explicit Pump(const PumpOptions& options);

  /// Calls body(i, lane) for each i in [0, n) on all threads; see parallel_for_each.
  void run(std::size_t n, const std::function<void(std::size_t i, Lane& lane)>& body);

 private:
  // Returns an open file from a bounded cache. @throws as TensorSource::open_file
  std::shared_ptr<const DirectFile> file(const TensorSource& source, const std::string& name);

  const PumpOptions options_;
  const std::size_t max_open_;  // files
  std::mutex files_mutex_;
  std::map<std::pair<const TensorSource*, std::string>, std::shared_ptr<const DirectFile>>
      files_;  // guarded by files_mutex_
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lane>> idle_;  // guarded by mutex_
};

}  // namespace tessera::io
