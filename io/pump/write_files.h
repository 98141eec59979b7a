#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "io/pump/tensor_source.h"

namespace tessera::io {

/// Elements of a tensor at a place of an output file.
struct OutputPart {
  const TensorSource* source = nullptr;  ///< outlives the writing
  std::string source_name;               ///< of the tensor
  std::int64_t begin = 0, end = 0;       ///< elements, row-major
  DType dtype = DType::F32;              ///< as written
  std::int64_t offset = 0;               ///< byte of the file, a multiple of the dtype's size
  std::int64_t sum_elements = 0;         ///< elements that a checksum covers; 0: no checksums
  std::vector<std::uint64_t> sums{};     ///< CRC-64 of each run of sum_elements; set by write_files
};

/// A file to write: a preamble, then parts.
struct OutputFile {
  std::string name;
  std::string preamble;
  std::int64_t size = 0;
  std::vector<OutputPart> parts;  ///< in order of bytes, without gaps
};

struct WriteOptions {
  std::int64_t memory = std::int64_t{256} << 20;  ///< bytes of all buffers together
  int jobs = 1;                                   ///< threads
  bool direct_io = true;  ///< past the page cache where the file system can do that
  /// Called from one thread at a time after each block; false stops.
  std::function<bool(std::int64_t bytes)> wrote{};
  /// Called from one thread at a time for each file that is complete and synced, with the CRC-64 of
  /// all its bytes.
  std::function<void(std::size_t file, std::uint64_t crc64)> finished{};
};

/// Least memory of a thread.
inline constexpr std::int64_t kLeastJobMemory = std::int64_t{128} << 10;

/// Writes files into a directory and syncs them, blocks of at most 4 MiB at a time: each is
/// gathered from the chunks that make it up, which are verified on the way, converted, and written.
/// Uses fewer threads than asked for where memory gives them less than kLeastJobMemory. Replaces
/// files of the same names.
/// @param chosen  indices into `files` of those to write, ascending
/// @return false if `wrote` stopped it; files that are not finished are then incomplete
/// @throws IoError, CorruptCheckpoint naming file, tensor and elements, and what the sources throw
bool write_files(const fs::path& dir, std::vector<OutputFile>& files,
                 const std::vector<std::size_t>& chosen, const WriteOptions& options);

/// CRC-64 of a file, with memory, jobs and direct_io of the options.
/// @throws IoError, CorruptCheckpoint if it is no regular file
std::uint64_t sum_file(const fs::path& path, const WriteOptions& options);

}  // namespace tessera::io
