#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "io/base/direct_file.h"
#include "io/pump/chunk_sums.h"
#include "io/pump/source_files.h"
#include "io/pump/tensor_source.h"

namespace tessera::io {

// The pump moves ranges of tensors from a source of chunks to a sink. It reads neighbours in a file
// at once, checksums every range while it is in the processor's cache, converts it, and hands it
// over. Each chunk is compared with its checksum as soon as all of it was read. Sinks: memory
// (read_parts.h), files (write_files.h), or whatever a caller does with a slice.

/// A tensor that is read once, in ranges that threads take in any order.
class PumpTensor {
 public:
  /// @throws as TensorSource::record
  PumpTensor(const TensorSource& from, std::string tensor)
      : source(from), name(std::move(tensor)), record(from.record(name)) {}

  const TensorSource& source;
  const std::string name;
  const std::shared_ptr<const TensorRecord> record;
  /// Called for a chunk whose checksum is wrong, by the thread that read the last of it; empty:
  /// fail() is.
  std::function<void(std::size_t chunk)> on_wrong{};

  /// Adds the checksum of elements [from, to) of a chunk, counted in its box.
  void add_sum(std::size_t chunk, std::int64_t from, std::int64_t to, std::uint64_t crc);
  /// Reads all bytes that a chunk's checksum covers, unless that was done before. For chunks whose
  /// checksum covers other bytes than their elements.
  void check_storage(std::size_t chunk, const DirectFile& file, const AlignedBuffer& scratch);
  /// Whether no chunk was read in part only. After all threads are done with it.
  bool is_complete() const { return sums_.empty(); }
  /// Leaves a chunk unverified, for a caller that verified it before.
  void skip_sum(std::size_t chunk) { skipped_.insert(chunk); }
  bool has_sum(std::size_t chunk) const {
    return record->chunks[chunk].checksum != Checksum::None && !skipped_.contains(chunk);
  }
  /// @throws CorruptCheckpoint naming file, tensor, elements and bytes
  [[noreturn]] void fail(std::size_t chunk) const;

 private:
  std::mutex mutex_;
  std::unordered_map<std::size_t, RangeSum> sums_;  // of chunks that are read in part
  std::set<std::size_t> checked_;                   // chunks whose storage was checked
  std::set<std::size_t> skipped_;                   // unchanged while threads read
};

/// Elements [from, to) of a chunk, counted inside its box.
struct Slice {
  PumpTensor* tensor;
  std::size_t chunk;
  std::int64_t from, to;

  const Chunk& place() const { return tensor->record->chunks[chunk]; }
  std::int64_t bytes() const { return (to - from) * tensor->record->width(); }
  /// Byte of the file where the slice begins.
  std::int64_t offset() const {
    return place().byte_begin + (from - place().begin) * tensor->record->width();
  }
};

/// Whether `next` begins in the file where `slice` ends.
bool are_neighbours(const Slice& slice, const Slice& next);

/// Slices that make up elements [begin, end) of a tensor, in order of chunks.
/// @throws InternalError if chunks do not cover the range
std::vector<Slice> slices_of(PumpTensor& tensor, std::int64_t begin, std::int64_t end);

struct PumpOptions {
  int threads = 1;
  std::int64_t block = std::int64_t{2} << 20;  ///< bytes of a read; a thread holds about as much
  bool direct_io = true;
};

class Pump {
 public:
  /// One thread's buffers.
  class Lane {
   public:
    /// Receives elements of a slice, at most 512 KiB, as stored.
    using Sink = std::function<void(const Slice& part, const char* data)>;
    /// Reads slices in their order. @throws IoError, CorruptCheckpoint
    void read(std::span<const Slice> slices, const Sink& sink);
    /// Reads elements [bounds.front(), bounds.back()) of a tensor to `out`, converted.
    /// @param crcs  receives the CRC-64 of each range between bounds, as in `out`; may be null
    void gather(PumpTensor& tensor, std::span<const std::int64_t> bounds, DType dtype, char* out,
                std::vector<std::uint64_t>* crcs = nullptr);

   private:
    friend class Pump;
    explicit Lane(Pump& pump);
    // Reads neighbours in a file; to `target` where it is not null.
    void pass(std::span<const Slice> slices, char* target, const Sink* sink,
              std::vector<std::uint64_t>& sums);
    Pump& pump_;
    AlignedBuffer scratch_;
  };

  explicit Pump(const PumpOptions& options) : options_(options), files_(options.direct_io) {}

  /// Calls body(i, lane) for i of [0, n) on all threads; see parallel_for_each.
  void run(std::size_t n, const std::function<void(std::size_t i, Lane& lane)>& body);

 private:
  const PumpOptions options_;
  SourceFiles files_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lane>> idle_;  // guarded by mutex_
};

}  // namespace tessera::io
